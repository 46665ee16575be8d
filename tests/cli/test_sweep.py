"""``amp-fuzz sweep`` on a Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.records.remote import RemoteStore
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store
from tests import deadly
from tests.cli.conftest import PROGRAM, run_in
from tests.deadly import judged
from tests.objects import Bucket, install

# Before Ray is imported: the nodes listen on the loopback interface only, and nothing is reported.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray has clusters on Linux"),
]

OTHERS = sorted((Path(__file__).parents[2] / ".venvs").glob("torch-*/bin/python"))
PLACED = """
import os, sys
from pathlib import Path
if "--ready" not in sys.argv:
    said = [word for word in sys.argv if word.startswith("--backends=")]
    with Path("placed.txt").open("a") as file:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or "no"
        file.write(" ".join([os.environ["NODE"], gpus, *said]) + "\\n")
"""
QUICK = 'options = { cases = 6, ops = ["abs"], minimize = 0, aimed = 0, plugins = ["mine"] }\n'


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster: a head without CPUs, and nodes that say they have a GPU and TPUs."""
    from ray.cluster_utils import Cluster

    shared: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    made = Cluster(True, head_node_args={"num_cpus": 0, "env_vars": {"NODE": "head"}, **shared})
    made.add_node(wait=False, num_cpus=1, env_vars={"NODE": "cpu"}, **shared)
    made.add_node(wait=False, num_cpus=1, num_gpus=1, env_vars={"NODE": "gpu"}, **shared)
    made.add_node(num_cpus=1, resources={"TPU": 4}, env_vars={"NODE": "tpu"}, **shared)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def write(folder: Path, text: str) -> None:
    (folder / "mine.py").write_text(PLACED)
    (folder / "sweep.toml").write_text(QUICK + text)


def test_the_matrix_lands_where_it_must_on_two_torches(
    cluster: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    others = OTHERS[:2]
    names = ", ".join(f'"{number}"' for number, _ in enumerate(others)) or '"here"'
    paths = "".join(f'{number} = "{path}"\n' for number, path in enumerate(others))
    write(
        tmp_path,
        f"""
        seeds = [5]
        [environments]
        {paths}
        [[matrix]]
        backends = ["eager-cpu"]
        environments = [{names}]
        needs = {{ TPU = 4 }}
        [[matrix]]
        backends = ["fake-cuda"]
        environments = [{names.partition(",")[0]}]
        needs = {{ num_gpus = 1 }}
        [[matrix]]
        backends = ["fake-x*"]
        needs = {{ XPU = 1 }}
        """,
    )
    done = run_in(tmp_path, environment, "sweep", "sweep.toml", f"--address={cluster.address}")
    assert (done.code, done.err) == (0, ""), done
    assert "skipped: fake-x* needs 1 num_cpus, 1 XPU, and no node has that" in done.out
    placed = (tmp_path / "placed.txt").read_text().splitlines()
    count = max(len(others), 1)
    assert sorted(placed) == [
        "gpu 0 --backends=fake-cuda",
        *["tpu no --backends=eager-cpu"] * count,
    ]
    store = Store(tmp_path / ".amp-fuzz")
    assert len(store.runs()) == count + 1
    torches = {store.run(run).versions["torch"].partition("+")[0] for run in store.runs()}
    assert torches >= {path.parents[1].name.split("-")[1] for path in others}
    for run in store.runs():
        cases = [r.id for r in store.records(run) if isinstance(r, CaseRecord)]
        assert len(cases) == len(set(cases)) == 6
    assert len(torches) == 2 or not others[1:], "two torches in one sweep"


@pytest.mark.parametrize(
    ("entry", "code", "said"),
    [
        (
            'backends = ["eager-cuda"]\nneeds = { num_gpus = 2 }',
            4,
            "eager-cuda needs 1 num_cpus, 2 num_gpus, and no node has that (",
        ),
        (
            'backends = ["privateuse1[nonsense]"]',
            2,
            "environment here: ",
        ),
    ],
)
def test_a_backend_that_cannot_run_is_said_before_anything_runs(
    cluster: Any, environment: dict[str, str], tmp_path: Path, entry: str, code: int, said: str
) -> None:
    write(tmp_path, f'[[matrix]]\nbackends = ["eager-cpu"]\n[[matrix]]\n{entry}\n')
    done = run_in(tmp_path, environment, "sweep", "sweep.toml", f"--address={cluster.address}")
    assert done.code == code
    assert said in done.error
    assert Store(tmp_path / ".amp-fuzz").runs() == []


LISTENING = """
import os, psutil, signal
signal.signal(signal.SIGTERM, lambda *_: print("told"))
from amp_fuzz.runs.sweep.cluster import connected
with connected(None):
    own = psutil.Process()
    found = [c for p in [own, *own.children(recursive=True)] for c in p.net_connections("inet")]
    places = {c.laddr.ip.removeprefix("::ffff:") for c in found if c.status == "LISTEN"}
    print(sorted(places), os.environ["RAY_USAGE_STATS_ENABLED"])
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_ray_of_its_own_listens_on_the_loopback_interface_and_takes_no_signal(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENING],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == "['127.0.0.1'] 0\ntold\n", done


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:9"])
def test_a_cluster_that_is_not_there_is_said(command: Any, tmp_path: Path, address: str) -> None:
    write(tmp_path, '[[matrix]]\nbackends = ["eager-cpu"]')
    done = command("sweep", "sweep.toml", f"--address={address}")
    assert done.code == 2
    assert done.error.startswith(f"amp-fuzz: no Ray cluster at {address}: ")


def test_without_ray_one_line_says_what_to_do(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, '[[matrix]]\nbackends = ["eager-cpu"]')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = command("sweep", "sweep.toml")
    assert done.code == 2
    assert done.error == (
        "amp-fuzz: sweep needs Ray: pip install 'amp-fuzz[sweep]'; amp-fuzz run covers one machine "
        "without it, with a worker for each CPU"
    )


def test_a_dry_run_prints_the_plan_and_starts_nothing(command: Any, tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        seeds = 3
        seconds = 90
        [[matrix]]
        backends = ["eager-cpu", "fake-*"]
        vary = { relations = ["one", "all"] }
        needs = { num_gpus = 1 }
        """,
    )
    done = command("sweep", "sweep.toml", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1].split() == [
        *("here", "eager-cpu", "3", "6", "1", "num_cpus,", "1", "num_gpus", "--cases=6"),
        *("--ops=abs", "--minimize=0", "--aimed=0", "--plugins=mine", "--relations=one"),
        "--workers=1",
    ]
    assert done.out.splitlines()[-1] == "12 shards, 72 cases, at most 1 min 30 s, in .amp-fuzz"
    assert not (tmp_path / ".amp-fuzz").exists()


def test_a_missing_file_is_a_mistake_of_one_line(command: Any, tmp_path: Path) -> None:
    done = command("sweep", "none.toml")
    assert (done.code, done.error) == (
        2,
        "amp-fuzz: none.toml: cannot be read (No such file or directory)",
    )


def test_a_shard_that_fails_costs_no_other(
    cluster: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    shutil.copy(deadly.__file__, tmp_path / "mine.py")
    (tmp_path / "faults.txt").write_text("1 SIGSEGV")  # in each case, whichever are drawn
    text = '[[matrix]]\nbackends = ["failing-cpu", "eager-cpu"]\n'
    (tmp_path / "sweep.toml").write_text(QUICK + text)
    done = run_in(tmp_path, environment, "sweep", "sweep.toml", f"--address={cluster.address}")
    assert done.code == 3
    (failing, eager) = Store(tmp_path / ".amp-fuzz").runs()
    log = tmp_path / f".amp-fuzz/sweeps/{eager[:-5]}/0000.log"
    assert f"shard {failing} (here failing-cpu): an internal error: see {log}\n" in done.out
    assert "RuntimeError: the backend itself is wrong" in log.read_text()
    assert "new: crash on here eager-cpu: an answer became the worker died of SIGSEGV" in done.out
    again = f"amp-fuzz sweep sweep.toml --address={cluster.address}"
    assert f"1 shard did not end; continue: {again}\n" in done.err
    ids, died = judged(tmp_path / ".amp-fuzz", eager)
    assert (len(ids), {*ids.values()}) == (6, {1})
    assert died.keys() == ids.keys()


# -- an object store ------------------------------------------------------------------------------

AWAY = """
store = "{url}"
seeds = [1, 2]
[options]
cases = 400
seconds = 900
ops = ["abs", "mm"]
aimed = 0
minimize = 0
relations = "none"
[[matrix]]
backends = ["eager-cpu"]
"""


def test_a_killed_sweep_at_a_url_goes_on_and_each_case_is_there_once(
    bucket: Bucket, environment: dict[str, str], tmp_path: Path
) -> None:
    from benchmarks.sweep import drawn_ids

    (tmp_path / "site").mkdir()
    variables = environment | install(tmp_path / "site")
    (tmp_path / "sweep.toml").write_text(AWAY.format(url=f"{bucket.url}/"))
    process = subprocess.Popen(
        [*PROGRAM, "sweep", "sweep.toml"],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while (reached := recorded(bucket)) < 60:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert reached < 800
    done = run_in(tmp_path, variables, "sweep", "sweep.toml")
    assert (done.code, done.err) == (0, ""), done
    assert re.search(r"continues: \d shards? ended, \d+ cases on record", done.out), done.out
    assert f"records in {bucket.url}/runs/" in done.out
    assert "800 cases, 0 new groups of findings" in done.out
    store = RemoteStore(bucket.url)
    assert len(store.runs()) == 2
    for seed, run in enumerate(store.runs(), start=1):
        ids, _ = judged(bucket.url, run)
        assert ids == Counter(drawn_ids(seed, 400, ("abs", "mm")))
        assert not store.is_running(run)
    assert [*(tmp_path / "site/cache/amp-fuzz/sweeps").iterdir()] == []
    assert {name.split("/")[0] for name in bucket.names()} <= {"findings", "runs", "sweeps"}
    assert len(bucket.names(".log")) == 2


def recorded(bucket: Bucket) -> int:
    """Return how many cases have reached the store."""
    return sum(
        content.count(b'{"type":"case"') for n, (content, _) in list(bucket.files.items())
        if "/records-" in n
    )  # fmt: skip


@pytest.mark.parametrize(
    ("store", "code", "said"),
    [
        ("nosuch://bucket", 2, "amp-fuzz: nosuch://bucket: cannot be read (ValueError: "),
        ("{url}x", 2, "amp-fuzz: {url}x: cannot be read (FileNotFoundError: there is no such "),
    ],
)
def test_a_store_that_is_not_there_is_said_before_anything_runs(
    command: Any, bucket: Bucket, tmp_path: Path, store: str, code: int, said: str
) -> None:
    (tmp_path / "sweep.toml").write_text(AWAY.format(url=store.format(url=bucket.url)))
    done = command("sweep", "sweep.toml")
    assert (done.code, done.out) == (code, "")
    assert done.error.startswith(said.format(url=bucket.url))
