"""A run in an object store: each record is read once, whoever dies, and whenever."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from amp_fuzz.records import parts
from amp_fuzz.records.objects import Objects
from amp_fuzz.records.parts import Index, Shipper, Superseded, files_of
from amp_fuzz.records.remote import RemoteStore
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store, StoreError
from tests.helpers import one_line
from tests.objects import Bucket
from tests.unit.test_store import RUN

pytestmark = pytest.mark.thorough

RUN_AT = f"runs/{RUN.id}"


class Machine:
    """A machine on which a process runs the run."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.bucket, self.root = bucket, folder
        self.store = Store(folder)
        self.begin()

    def begin(self) -> None:
        self.store.create()
        here = self.store.run_path(RUN.id)
        objects = Objects(self.bucket.url)
        self.shipper = Shipper(objects, RUN_AT, here, self.root / "mark")
        self.shipper.begin()
        self.store.begin(RUN)

    def judge(self, *numbers: int, label: str = "main") -> None:
        writer = self.store.writer(RUN.id, label)
        for number in numbers:
            writer.write(CaseRecord(f"{number:016x}", "eager-cpu", "all", "agreed", (), (), {}))
        writer.close()


def judged(bucket: Bucket) -> list[int]:
    """Return the cases that a reader finds."""
    store = RemoteStore(bucket.url)
    return [int(r.id, 16) for r in store.records(RUN.id) if isinstance(r, CaseRecord)]


def test_what_is_added_is_sent_in_parts_that_hold_each_line_once(
    bucket: Bucket, tmp_path: Path
) -> None:
    one = Machine(bucket, tmp_path)
    one.judge(1, 2)
    one.shipper.ship()
    one.shipper.ship()
    one.judge(3)
    one.judge(4, label="0")
    one.shipper.ship(ended=True)
    assert judged(bucket) == [4, 1, 2, 3]
    assert [re.sub(r"\d{4}-\w{8}", "MARK", name) for name in bucket.names(".jsonl")] == [
        f"{RUN_AT}/records-0.MARK.000000000000.jsonl",
        f"{RUN_AT}/records-main.MARK.000000000000.jsonl",
        f"{RUN_AT}/records-main.MARK.{2 * len(line(1)):012d}.jsonl",
    ]
    assert all(bucket.puts[name] == 1 for name in bucket.names(".jsonl"))


def line(number: int) -> bytes:
    record = CaseRecord(f"{number:016x}", "eager-cpu", "all", "agreed", (), (), {})
    return msgspec.json.encode(record) + b"\n"


def test_a_line_that_is_not_whole_yet_is_sent_when_it_is(bucket: Bucket, tmp_path: Path) -> None:
    one = Machine(bucket, tmp_path)
    path = one.store.run_path(RUN.id) / "records-main.jsonl"
    path.write_bytes(line(1) + line(2)[:30])
    one.shipper.ship()
    assert judged(bucket) == [1]
    path.write_bytes(line(1) + line(2))
    one.shipper.ship()
    assert judged(bucket) == [1, 2]


def test_a_long_file_is_sent_in_several_parts(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_LARGEST", 3 * len(line(1)) + 5)
    one = Machine(bucket, tmp_path)
    one.judge(*range(10))
    one.shipper.ship()
    assert judged(bucket) == [*range(10)]
    assert len(bucket.names(".jsonl")) == 3


def test_an_interrupted_process_goes_on_where_it_was_on_the_same_machine(
    bucket: Bucket, tmp_path: Path
) -> None:
    one = Machine(bucket, tmp_path)
    one.judge(1, 2)
    one.shipper.ship()
    one.judge(3)  # and is killed before it sends this
    one.begin()
    assert [r.id for r in one.store.records(RUN.id) if isinstance(r, CaseRecord)] != []
    one.judge(4)
    one.shipper.ship()
    assert judged(bucket) == [1, 2, 3, 4]
    assert len(bucket.names("json")) == 2  # the head and one index


def test_of_what_an_interrupted_process_sent_the_last_part_alone_is_sent_again(
    bucket: Bucket, tmp_path: Path
) -> None:
    one = Machine(bucket, tmp_path)
    one.judge(1)
    one.shipper.ship()
    one.judge(2)
    one.shipper.ship()
    one.begin()
    one.judge(3)
    one.shipper.ship()
    assert judged(bucket) == [1, 2, 3]
    assert [bucket.puts[name] for name in bucket.names(".jsonl")] == [1, 2]


def test_a_part_that_was_cut_short_is_sent_again(bucket: Bucket, tmp_path: Path) -> None:
    """On a file system that is no object store, a kill leaves half a file."""
    one = Machine(bucket, tmp_path)
    one.judge(1, 2, 3)
    one.shipper.ship()
    (part,) = bucket.names(".jsonl")
    bucket.files[part] = bucket.files[part][0][:100], 0.0
    one.begin()
    one.judge(4)
    one.shipper.ship()
    assert judged(bucket) == [1, 2, 3, 4]


def test_another_machine_has_what_was_sent_and_judges_the_rest(
    bucket: Bucket, tmp_path: Path
) -> None:
    one = Machine(bucket, tmp_path / "one")
    one.judge(1, 2)
    one.shipper.ship()
    one.judge(3)  # which nobody sends
    two = Machine(bucket, tmp_path / "two")
    found = [int(r.id, 16) for r in two.store.records(RUN.id) if isinstance(r, CaseRecord)]
    assert found == [1, 2]
    two.judge(3, 4)
    two.shipper.ship()
    assert judged(bucket) == [1, 2, 3, 4]
    one.begin()  # the first machine again: what it had and did not send was judged meanwhile
    one.judge(5)
    one.shipper.ship()
    assert judged(bucket) == [1, 2, 3, 4, 5]


def test_a_process_that_was_given_up_for_dead_stops_and_nobody_reads_what_it_sends(
    bucket: Bucket, tmp_path: Path
) -> None:
    one = Machine(bucket, tmp_path / "one")
    one.judge(1)
    one.shipper.ship()
    one.judge(2)
    two = Machine(bucket, tmp_path / "two")
    two.judge(2)
    two.shipper.ship()
    one.shipper._lines(one.store.run_path(RUN.id) / "records-main.jsonl")  # it looked just before
    assert judged(bucket) == [1, 2]
    with pytest.raises(Superseded, match="another process continues it") as caught:
        one.shipper.ship()
    assert one_line(caught.value)
    assert judged(bucket) == [1, 2]


def test_of_two_that_take_a_run_over_at_once_one_has_it(bucket: Bucket, tmp_path: Path) -> None:
    first = Machine(bucket, tmp_path / "first")
    first.judge(1)
    first.shipper.ship()
    two = Machine(bucket, tmp_path / "two")
    (index,) = (name for name in bucket.names() if "index-0002" in name)
    late = index[: -len("00000000.json")] + "ffffffff.json"
    two.judge(2)
    two.shipper.ship()
    content = msgspec.json.encode(Index((), time.time()))
    bucket.files[late] = content, time.time()  # it had listed before `two` wrote its index
    assert judged(bucket) == []
    with pytest.raises(Superseded):
        two.shipper.ship()


def test_a_run_is_running_while_its_process_says_so(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Machine(bucket, tmp_path)
    store = RemoteStore(bucket.url)
    assert store.is_running(RUN.id)
    began = time.time()

    def after(seconds: float) -> None:
        monkeypatch.setattr(parts.time, "time", lambda: began + seconds)

    after(100)
    one.shipper.ship()  # says it again
    after(350)
    assert store.is_running(RUN.id)
    after(450)
    assert not store.is_running(RUN.id)
    monkeypatch.undo()
    one.shipper.ship()
    assert store.is_running(RUN.id)
    one.shipper.ship(ended=True)
    assert not store.is_running(RUN.id)


def test_a_failed_write_is_sent_again_by_the_next(bucket: Bucket, tmp_path: Path) -> None:
    one = Machine(bucket, tmp_path)
    one.judge(1)
    bucket.fails = lambda name: "no space" if "records-" in name else ""
    with pytest.raises(StoreError, match=r"records-main.+: cannot write \(OSError: no space\)"):
        one.shipper.ship()
    bucket.fails = lambda name: ""
    one.judge(2)
    one.shipper.ship()
    assert judged(bucket) == [1, 2]


def test_a_copy_of_a_run_is_not_continued(bucket: Bucket, tmp_path: Path) -> None:
    bucket.files[f"{RUN_AT}/records-main.jsonl"] = line(1), 0.0
    with pytest.raises(StoreError, match="a copy of a run: no sweep can continue it there"):
        Machine(bucket, tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "the index of the run is damaged"),
        (b'{"files":[],"at":0,"format":99}', "written by a newer amp-fuzz"),
        (b'{"files":["records-a.jsonl"],"at":0}', "records-a.jsonl, which it lists, is missing"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(bucket: Bucket, content: bytes, said: str) -> None:
    name = f"{RUN_AT}/index-0001-00000000.json"
    bucket.files[name] = content, 0.0
    with pytest.raises(StoreError, match=said) as caught:
        files_of(Objects(bucket.url), RUN_AT)
    assert str(caught.value).startswith(f"{bucket.url}/{name}: ")
    assert one_line(caught.value)


def test_a_run_that_passes_on_while_it_is_listed_is_listed_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Machine(bucket, tmp_path / "one")
    one.judge(1)
    one.shipper.ship(ended=True)
    objects = Objects(bucket.url)
    read, two = objects.read, []

    def late(name: str) -> bytes:
        if not two:
            two.append(Machine(bucket, tmp_path / "two"))
            two[0].judge(2)
            two[0].shipper.ship()
            del bucket.files[name]
        return read(name)

    monkeypatch.setattr(objects, "read", late)
    assert len(files_of(objects, RUN_AT).parts) == 1
    assert judged(bucket) == [1, 2]


def test_the_head_is_sent_when_it_changes(bucket: Bucket, tmp_path: Path) -> None:
    one = Machine(bucket, tmp_path)
    one.shipper.ship()
    one.shipper.ship()
    assert bucket.puts[f"{RUN_AT}/run.json"] == 1
    one.store.begin(replace(RUN, seed=99))
    one.shipper.ship()
    assert RemoteStore(bucket.url).run(RUN.id).seed == 99
