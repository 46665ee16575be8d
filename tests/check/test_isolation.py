"""What `amp_fuzz.check` runs may crash torch, a case that it cuts out too: the caller lives."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fuzz
from amp_fuzz.backends import backends
from amp_fuzz.backends.base import Facts
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.cases.case import Plan
from amp_fuzz.findings.supervision.processes import unforkable
from amp_fuzz.interfaces.check import arguments, fork, locate
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.fork import Apart, Died
from amp_fuzz.interfaces.check.judging import judged
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.records.store import load_finding
from tests.check.faults import BrokenUnderAutocast
from tests.check.test_models import Broken, kernels

pytestmark = pytest.mark.skipif(bool(unforkable()), reason="needs forks")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.thorough
def test_a_cut_out_case_that_crashes_torch_is_told_and_the_caller_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr(locate, "_verdict", dies)
    wrong = BrokenUnderAutocast(patches=kernels({"aten.tanh.default": lambda op, x: op(x) * 2}))
    result = amp_fuzz.check(torch.tanh, torch.randn(3), backends=wrong)
    (run,) = result.runs
    assert run.status == "diverged"
    assert run.divergence is not None
    assert any("died of SIGSEGV" in note for note in run.divergence.notes), run.divergence.notes


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def test_a_crash_under_a_backend_is_a_divergence_with_its_line() -> None:
    def dies(op: Any, x: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    wrong = Broken(patches=kernels({"aten.relu.default": dies}))
    result = amp_fuzz.check(relu, torch.randn(3), backends=[wrong, "fake-cuda"])
    crashed, other = result.runs
    assert (crashed.status, crashed.detail, other.status) == ("diverged", "crash", "agreed")
    found = crashed.divergence
    assert found is not None
    assert (found.kind, found.expected) == ("crash", "an answer")
    assert found.observed == "the process died of SIGSEGV"
    assert found.where.startswith("test_isolation.py:")
    assert (result.verdict, result.ok) == ("diverges", False)


@pytest.mark.parametrize("name", ["amp_fuzz", "torch"])
def test_a_line_of_a_folder_with_our_name_or_torch_s_is_the_user_s(name: str) -> None:
    kernel, mine = Path(torch.__path__[0]) / "nn/functional.py", f"/home/me/{name}/model.py"
    log = io.StringIO(f'  File "{kernel}", line 3 in relu\n  File "{mine}", line 7 in forward\n')
    assert fork._innermost(log) == "model.py:7"


def test_the_op_that_crashes_is_named_with_a_case_that_does_it() -> None:
    def dies(op: Any, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.GELU())
    wrong = Broken(patches=kernels({"aten.tanh.default": dies}))
    (found,) = amp_fuzz.check(model, torch.randn(3, 4), backends=wrong).divergences
    assert (found.module, found.module_type, found.op) == ("1", "Tanh", "tanh")
    assert any("for a debugger" in note for note in found.notes)
    assert found.path is not None
    record = load_finding(found.path)
    assert (record.kind, record.case) == ("crash", found.case)
    assert [command.split()[1] for command in found.commands] == ["minimize", "repro"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_crash_under_the_reference_too_cannot_be_judged(number: signal.Signals) -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), number)
        return x

    result = amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu")
    (run,) = result.runs
    assert (run.status, result.verdict) == ("raised", "unjudged")
    assert run.detail.startswith(f"the process died of {number.name}")
    assert run.detail.endswith("under the reference too")
    assert "it kills its process under the reference too" in result.advice


def test_a_fork_is_this_process_or_it_is_not() -> None:
    called = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        called.append(os.getpid())
        return torch.relu(x)

    assert amp_fuzz.check(noted, torch.randn(3), backends="eager-cpu")
    assert not called
    assert amp_fuzz.check(noted, torch.randn(3), backends="eager-cpu", isolate=False)
    assert {*called} == {os.getpid()}


@dataclass(frozen=True)
class Importing(EagerBackend):
    """Eager on the CPU, as if its library imported a module at the first call."""

    def facts(self) -> Facts:
        return Facts(imports=("imported_at_the_first_call",))


def test_what_a_backend_imports_is_imported_once_for_all_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "imported_at_the_first_call"
    (tmp_path / f"{name}.py").write_text("import os\nprocess = os.getpid()\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert amp_fuzz.check(torch.relu, torch.randn(3), backends=Importing("cpu"), isolate=False)
        assert name not in sys.modules
        assert amp_fuzz.check(torch.relu, torch.randn(3), backends=Importing("cpu"))
        assert sys.modules[name].process == os.getpid()
    finally:
        sys.modules.pop(name, None)


@pytest.mark.thorough
def test_a_fork_imports_no_compiler_again() -> None:
    rungs = [backend for backend in backends().values() if backend.name in COMPILED]
    call, _ = arguments.caller_of(None, rungs)
    for rung in rungs:
        (new,) = call(_imported, rung)
        assert not [name for name in new if name.startswith(("torch._inductor.lowering", "sympy."))]
        assert len(new) < 60, new


COMPILED = ("compile[eager]", "compile[aot_eager]", "export")


def _imported(backend: Any) -> Iterator[list[str]]:
    """Yield the modules that a call imports in this process."""
    before = set(sys.modules)
    subject = Subject.of(torch.nn.Linear(2, 2), [torch.randn(2, 2)])
    judged(Checked(subject, backend), Plan())
    yield sorted(set(sys.modules) - before)


def test_where_no_fork_is_safe_it_must_not_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "unforkable", lambda: "threads are about")
    with pytest.raises(amp_fuzz.CheckError, match=r"^isolate=True: threads are about$"):
        amp_fuzz.check(torch.relu, torch.randn(3), backends="eager-cpu", isolate=True)
    result = amp_fuzz.check(torch.relu, torch.randn(3), backends="eager-cpu")
    assert result.ok
    assert "It was called in this process" in str(result)
    assert "threads are about" in result.remarks[0]


def _callers() -> set[str]:
    frame, names = sys._getframe(), set()
    while frame.f_back is not None:
        frame = frame.f_back
        names.add(frame.f_code.co_name)
    return names


@pytest.mark.thorough
def test_results_from_before_a_search_dies_are_kept() -> None:
    def dies(op: Any, x: torch.Tensor) -> torch.Tensor:
        if "locate" in _callers():
            os.kill(os.getpid(), signal.SIGSEGV)
        return op(x) * 2

    wrong = BrokenUnderAutocast(patches=kernels({"aten.tanh.default": dies}))
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    (found,) = amp_fuzz.check(model, torch.randn(3, 4), backends=wrong).divergences
    assert (found.kind, found.where) == ("bitwise", "output")
    assert "their cause: the process died of SIGSEGV" in found.notes[-1]


def test_a_death_without_autocast_is_no_divergence() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled("cpu"):
            os.abort()
        raise ValueError("autocast is on")

    result = amp_fuzz.check(raises, torch.randn(3), backends="eager-cpu")
    (run,) = result.runs
    assert (run.status, result.verdict) == ("raised", "unjudged")
    assert run.detail.startswith("ValueError: autocast is on")
    assert "without autocast" in run.detail
    assert run.detail.endswith("the process died of SIGABRT")


@pytest.mark.thorough
def test_a_crash_where_the_reference_raises_says_so() -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        if "_on_reference" not in _callers():
            os.abort()
        raise ValueError("no")

    (found,) = amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu").divergences
    assert (found.expected, found.observed) == ("ValueError: no", "the process died of SIGABRT")


def test_a_death_that_does_not_come_again_is_no_divergence(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def once(x: torch.Tensor) -> torch.Tensor:
        if not flag.exists():
            flag.touch()
            os.abort()
        return torch.relu(x)

    result = amp_fuzz.check(once, torch.randn(3), backends="eager-cpu")
    assert result.ok
    assert result.runs[0].detail.endswith("the process died of SIGABRT")


@pytest.mark.thorough
def test_a_verdict_at_the_second_try_is_kept_though_a_search_dies(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def dies(op: Any, x: torch.Tensor) -> torch.Tensor:
        if "locate" in _callers() or not flag.exists():
            flag.touch()
            os.abort()
        return op(x) * 2

    wrong = BrokenUnderAutocast(patches=kernels({"aten.tanh.default": dies}))
    (run,) = amp_fuzz.check(torch.tanh, torch.randn(3), backends=wrong).runs
    assert run.status == "diverged"
    assert run.detail.endswith("the process died of SIGABRT")
    assert run.divergence is not None
    assert run.divergence.kind == "bitwise"


def test_a_death_of_neither_side_cannot_be_judged() -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        if "judged" in _callers():
            os.abort()
        return torch.relu(x)

    result = amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu")
    assert result.verdict == "unjudged"
    assert "but neither on the backend alone nor under the reference" in result.runs[0].detail


def test_casts_of_its_own_that_a_death_hides_are_not_passed_over() -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        if "own_casts" in _callers():
            os.abort()
        return torch.relu(x)

    result = amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu")
    assert result.ok
    assert "Some of its own casts are unknown" in str(result)


@pytest.mark.thorough
def test_a_fork_that_waits_for_a_thread_of_ours_is_no_divergence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork, "_IDLE", 1.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def asks(x: torch.Tensor) -> torch.Tensor:
            pool.submit(int).result()
            return torch.relu(x)

        result = amp_fuzz.check(asks, torch.randn(3), backends=["eager-cpu", "fake-cuda"])
        assert {run.status for run in result.runs} == {"nothing"}
        assert "used no CPU time" in result.runs[0].detail
        assert "was not called" in result.runs[1].detail
        assert result.advice.startswith("Pass isolate=False")
        assert amp_fuzz.check(asks, torch.randn(3), backends="eager-cpu", isolate=False)


@pytest.mark.thorough
def test_a_fork_that_computes_for_long_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_IDLE", 0.5)

    def busy() -> Iterator[int]:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            pass
        yield 1

    assert list(Apart()(busy)) == [1]


def _checks() -> str:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    wrong = BrokenUnderAutocast(patches=kernels({"aten.tanh.default": lambda op, x: op(x) * 2}))
    return str(amp_fuzz.check(model, torch.randn(3, 4), backends=["eager-cpu", wrong], store=None))


@pytest.mark.thorough
@pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="torch 2.7 has no torch.library.get_kernel"
)
def test_a_daemonic_process_calls_it_in_itself() -> None:
    with get_context("fork").Pool(1) as pool:
        said = pool.apply_async(_checks).get(timeout=300)  # a pool replaces a worker that ends
    assert "a daemonic process cannot start another" in " ".join(said.split())
    assert "op        tanh" in said


def test_a_fork_is_the_first_to_go_when_memory_runs_out() -> None:
    def told() -> Iterator[str]:
        yield Path("/proc/self/oom_score_adj").read_text().strip()

    assert list(Apart()(told)) == ["1000"]


def test_a_signal_that_the_process_handles_is_handled() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *about: None)

    def raises(x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGUSR1)
        return torch.relu(x)

    try:
        assert amp_fuzz.check(raises, torch.randn(3), backends="eager-cpu")
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_sys_exit_ends_the_check(error: type[BaseException]) -> None:
    def ends(x: torch.Tensor) -> None:
        raise error("now")

    for isolate in (True, False):
        with pytest.raises(error, match=r"^now$"):
            amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu", isolate=isolate)


def test_output_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def says() -> Iterator[None]:
        sys.stdout.write("said\n")
        yield None

    list(Apart()(says))
    assert capfd.readouterr().out == "said\n"


def test_output_reaches_a_stream_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what a fork prints that raises or dies then."""

    def says(how: str) -> Iterator[None]:
        sys.stdout.write(f"said {how}\r\n")
        sys.stderr.write(f"warned {how}\n")
        yield None
        if how == "raises":
            raise KeyError(how)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)

    list(Apart()(says, "ends"))
    with pytest.raises(KeyError):
        list(Apart()(says, "raises"))
    with pytest.raises(Died):
        list(Apart()(says, "dies"))
    printed = capsys.readouterr()
    assert printed.out == "said ends\r\nsaid raises\r\nsaid dies\r\n"
    assert printed.err == "warned ends\nwarned raises\nwarned dies\n"


class Awkward(Exception):
    """Takes other arguments than it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


class Prefixed(Exception):
    """Makes another message of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


def _raising(error: BaseException) -> Iterator[None]:
    yield None
    raise error


def test_an_error_in_a_fork_comes_with_its_traceback() -> None:
    with pytest.raises(KeyError) as told:
        list(Apart()(_raising, KeyError("a")))
    assert "in _raising" in str(told.value.__cause__)


def _local() -> BaseException:
    class Local(BaseException):
        pass

    return Local("of a function")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "error",
    [
        Awkward(1, 2),
        Prefixed("file"),
        _local(),
        OSError(2, "No such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        pytest.skip.Exception("needs a GPU"),
        pytest.fail.Exception("too far off"),
        pytest.xfail.Exception("known"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_from_a_fork_as_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as told:
        list(Apart()(_raising, error))
    assert type(told.value) is type(error)
    assert (str(told.value), told.value.args) == (str(error), error.args)
    assert told.value.__dict__ == error.__dict__


def _raising_what_has_no_pickle(how: str) -> Iterator[None]:
    yield None
    error = _local() if how == "class" else KeyError("a lock")
    if how == "state":
        error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize(
    ("how", "said"), [("class", "Local: of a function"), ("state", "KeyError: 'a lock'")]
)
def test_an_error_without_a_pickle_says_its_type_and_message(how: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"{said} .raised in a fork") as told:
        list(Apart()(_raising_what_has_no_pickle, how))
    assert "in _raising_what_has_no_pickle" in str(told.value.__cause__)


@pytest.mark.thorough
def test_a_check_leaves_no_descriptor_open_when_its_fork_dies() -> None:
    def ends(x: torch.Tensor) -> None:
        os.abort()

    amp_fuzz.check(torch.relu, torch.randn(3), backends="eager-cpu")
    gc.collect()
    before = len([*Path("/proc/self/fd").iterdir()])
    gc.disable()
    try:
        amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu")
        assert len([*Path("/proc/self/fd").iterdir()]) == before
    finally:
        gc.enable()
