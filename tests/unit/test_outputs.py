"""What a command is told to write is written, and nothing else about the file changes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_fuzz.records import outputs
from amp_fuzz.records.outputs import StoreError, write_whole

NULL = (1, 3)  # the numbers of /dev/null on Linux
FULL = (1, 7)  # of /dev/full, which takes nothing
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and gives files away")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def device(path: Path, numbers: tuple[int, int]) -> Path:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
        path.open("rb").close()
    except OSError as error:  # a container without the capability, or a mount without devices
        pytest.skip(f"no device here: {error}")
    return path


@root
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    path = device(tmp_path / "null", NULL)
    write_whole(path, b"new")
    assert path.is_char_device()
    assert names(tmp_path) == ["null"]


@root
def test_a_device_that_takes_nothing_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = device(tmp_path / "full", FULL)
    with pytest.raises(StoreError, match=r"full: cannot write \(No space left on device\)$"):
        write_whole(path, b"new")
    assert path.is_char_device()


def test_a_fifo_is_written_to_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    data = b"new" * 100_000  # more than a pipe holds
    write_whole(path, data)
    reader.join()
    assert read == [data]
    assert path.is_fifo()


@pytest.mark.parametrize("there", [True, False])
def test_a_symlink_is_followed(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, first, second = tmp_path / "folder/target", tmp_path / "first", tmp_path / "second"
    if there:
        target.write_bytes(b"old")
    first.symlink_to("folder/target")
    second.symlink_to("first")
    write_whole(second, b"new")
    assert target.read_bytes() == b"new"
    assert first.is_symlink()
    assert second.is_symlink()


def test_a_symlink_to_itself_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "loop"
    path.symlink_to("loop")
    with pytest.raises(StoreError, match=r"loop: cannot write \("):
        write_whole(path, b"new")
    assert path.is_symlink()


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot write \(Is a directory\)"):
        write_whole(tmp_path, b"new")


def test_the_mode_is_kept_and_a_new_file_has_the_usual_one(tmp_path: Path) -> None:
    old, new, usual = tmp_path / "old", tmp_path / "new", tmp_path / "usual"
    old.write_bytes(b"old")
    old.chmod(0o751)
    usual.touch()
    write_whole(old, b"new")
    write_whole(new, b"new")
    assert old.read_bytes() == new.read_bytes() == b"new"
    assert stat.S_IMODE(old.stat().st_mode) == 0o751
    assert new.stat().st_mode == usual.stat().st_mode


@root
def test_the_owner_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_bytes(b"old")
    os.chown(path, 1234, 5678)
    write_whole(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid, path.read_bytes()) == (1234, 5678, b"new")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that a process without root's rights can reach."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    path.chmod(0o777)
    shutil.rmtree(path)


def without_rights(path: Path, data: bytes) -> str:
    """Write a file in a process without root's rights, and return the error or ""."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            write_whole(path, data)
        except StoreError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as said:
        return said.read().decode()


def test_a_file_in_a_read_only_folder_is_written_in_place(folder: Path) -> None:
    path = folder / "old"
    path.write_bytes(b"old, and longer than the new one")
    path.chmod(0o666)
    folder.chmod(0o555)
    assert without_rights(path, b"new") == ""
    assert path.read_bytes() == b"new"


def test_a_new_file_in_a_read_only_folder_is_an_error(folder: Path) -> None:
    folder.chmod(0o555)
    said = without_rights(folder / "new", b"new")
    assert said == f"{folder}/new: cannot write (Permission denied)"
    assert names(folder) == []


def test_a_file_that_is_read_only_is_not_replaced(folder: Path) -> None:
    path = folder / "old"
    path.write_bytes(b"old")
    path.chmod(0o444)
    said = without_rights(path, b"new")
    assert said == f"{path}: cannot write (Permission denied)"
    assert path.read_bytes() == b"old"
    assert names(folder) == ["old"]


@root
def test_a_file_of_somebody_else_keeps_its_owner(folder: Path) -> None:
    path = folder / "theirs"
    path.write_bytes(b"old")
    path.chmod(0o666)
    assert without_rights(path, b"new") == ""
    assert (path.stat().st_uid, path.read_bytes()) == (0, b"new")


@pytest.mark.parametrize("mounted", [False, True])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: bool
) -> None:
    """`mounted`: nothing may be renamed over the file, so that it is written in place."""
    path = tmp_path / "old"
    path.write_bytes(b"old")
    write, write_bytes = outputs._write, Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write_bytes(path, data[:1])
        if data == b"new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)
        return len(data)

    def busy(path: Path, data: bytes) -> int:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "write_bytes", busy if mounted else full)
    monkeypatch.setattr(outputs, "_write", full)
    with pytest.raises(StoreError, match=r"cannot write \(No space left on device\)$"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["old"]
