"""Ops of the user's own: drawn, cast by the reference, minimised, printed; in every process."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import amp_fuzz
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.program import Autocast
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.interfaces.cli import main
from amp_fuzz.interfaces.register import RegistrationError
from amp_fuzz.records.store import Store
from tests.forks import forked
from tests.helpers import leading

_LIBRARY = """
import torch

@torch.library.custom_op("usual::scaled_add", mutates_args=())
def scaled_add(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return a + scale * b

scaled_add.register_fake(lambda a, b, scale: torch.empty_like(a + b))
scaled_add.register_autograd(
    lambda ctx, grad: (grad.clone(), grad * ctx.scale, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
)
torch.library.register_autocast("usual::scaled_add", "cpu", torch.float32)

@torch.library.custom_op("usual::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w

project.register_fake(lambda x, w: torch.empty_like(x @ w))

def double(x):
    return torch.add(x, x)
"""

_PLUGIN = """
import amp_fuzz
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.program import Autocast
import torch
from amp_fuzz.catalogue import Call, out

@amp_fuzz.register_op("usual.scaled_add", autocast={autocast}, devices=("cpu",))
def _(g):
    a = g.tensor(rank=(1, 3))
    return Call((a, g.tensor(a.shape), g.scalar()), out(a.shape))

@amp_fuzz.register_op("usual.project", devices=("cpu",), mixed="raises")
def _(g):
    n, k, m = g.dim(), g.dim(), g.dim()
    return Call((g.tensor((n, k), grad=False), g.tensor((k, m), grad=False)), out((n, m)))

@amp_fuzz.register_op("usual.double", function="usual.double", overload="aten::add.Tensor")
def _(g):
    x = g.tensor()
    return Call((x,), out(x.shape, dtype=x.dtype))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project with a library of ops, and a module that registers them honestly."""
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual/__init__.py").write_text(_LIBRARY)
    (tmp_path / "usual/amp_ops.py").write_text(_PLUGIN.format(autocast='{"cpu": torch.float32}'))
    return tmp_path


def run(folder: Path, *words: str, expect: int | Sequence[int] = 0) -> str:
    """Run a command in a fork of a process that has imported no plugin; return what it prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("AMP_FUZZ_")}
    with tempfile.TemporaryDirectory() as files:
        done = forked(main, words, folder=folder, environment=env, files=Path(files))
    text = done.out + done.err
    assert done.code == expect, text
    return text


PLUGIN = "--plugins=usual.amp_ops"
SMALL = ("run", "--backends=eager-cpu", "--workers=2", "--seed=3")


@pytest.mark.thorough
def test_a_run_draws_them_in_every_worker(project: Path) -> None:
    (project / "amp-fuzz.toml").write_text('plugins = ["usual.amp_ops"]\n')
    text = run(project, *SMALL, "--ops=usual,relu", "--cases=300")
    # The draws may meet a known finding of torch's own; then the words are the second.
    assert "Nothing diverged: 300 cases" in text or "Nothing new: of 300 cases" in text
    assert "--plugins=usual.amp_ops" in text.rpartition("again:")[2]
    store = Store(project / ".amp-fuzz")
    (name,) = store.runs()
    ops = {op for record in store.records(name) for op in getattr(record, "ops", ())}
    assert {"usual.scaled_add", "usual.project", "usual.double"} <= ops
    kernels = {
        (kernel.overload, kernel.policy)
        for record in store.records(name)
        for kernel in getattr(record, "kernels", ())
    }
    assert ("usual::scaled_add", "cast_inputs") in kernels
    assert "usual.double" in run(project, "list", "ops", "--ops=usual")


@pytest.mark.slow
def test_a_policy_that_torch_does_not_keep_is_found_and_becomes_a_script(project: Path) -> None:
    (project / "usual/amp_ops.py").write_text(_PLUGIN.format(autocast='"lower_precision_fp"'))
    run(project, *SMALL, PLUGIN, "--ops=usual.scaled_add", "--cases=60", expect=1)
    (found, *_) = (Store(project / ".amp-fuzz").finding(f) for f in _findings(project))
    assert (found.op, found.policy, found.kind) == (
        "usual.scaled_add",
        "lower_precision_fp",
        "dtype",
    )
    # What stands in another process must know the op, and who does not is told what to do.
    assert "DIVERGES: dtype" in run(project, "replay", found.id, PLUGIN, expect=1)
    assert "1 statement" in run(project, "minimize", found.id, PLUGIN)
    lost = run(project, "replay", found.id, expect=2)
    assert "$.body[0].op='usual.scaled_add' is not in the catalogue: if it is your own op" in lost
    assert (
        "name the module that registers it, as in --plugins=usual (docs/guide/your-op.md)" in lost
    )
    (project / "repro.py").write_text(run(project, "repro", found.id, PLUGIN))
    script = (project / "repro.py").read_text()
    assert "\nimport usual\n" in script
    assert "amp_fuzz" not in script.partition("import torch")[2]
    done = subprocess.run(
        [sys.executable, "repro.py"], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("autocast", "behaves"),
    leading(
        [
            ("None", "fp32, not none"),
            ('"lower_precision_fp"', "fp32, not lower_precision_fp"),
            ('{"cpu": torch.bfloat16}', "fp32, not cast_inputs"),
        ]
    ),
)
def test_an_op_that_declares_another_policy_than_it_has_is_one_finding(
    project: Path, autocast: str, behaves: str
) -> None:
    """The float16 and vmap cases come first: their policy is not to be seen in them alone."""
    (project / "usual/amp_ops.py").write_text(_PLUGIN.format(autocast=autocast))
    (project / "cases").mkdir()
    calls = call("usual.scaled_add", "x0", "x1", 0.5)
    for number, (dtype, plan) in enumerate(
        [
            ("float16", {"backward": "none", "transform": "vmap"}),
            ("float16", {"calls": 2}),
            ("bfloat16", {"backward": "none"}),
            ("bfloat16", {"entry": "decorator", "steps": 2}),
        ]
    ):
        inputs = [x("x0", 2, dtype="bfloat16"), x("x1", 2, dtype="bfloat16")]
        made = case(inputs, calls, contexts=(Autocast(dtype=dtype),), **plan)  # type: ignore[arg-type]
        (project / f"cases/{number}.json").write_bytes(made.json())
    words = ("--backends=eager-cpu", "--ops=relu", "--cases=1", "--isolate=never", "--seed=3")
    text = run(project, "run", *words, PLUGIN, "--corpus=cases", "--minimize=2", expect=1)
    assert "1 new finding: of 5 cases" in text
    assert "4 diverged in an unknown way" in text
    titles = re.findall(r"^ +1\. (.*): 4\s+cases", text, re.MULTILINE | re.DOTALL)
    assert [" ".join(title.split()) for title in titles] == [
        f"usual::scaled_add behaves as if its policy were {behaves} on eager-cpu"
    ]


def _findings(folder: Path) -> list[str]:
    return Store(folder / ".amp-fuzz").findings()


def test_a_plugin_that_cannot_be_imported_is_an_error_of_one_line(project: Path) -> None:
    text = run(project, *SMALL, "--plugins=usual.nothing", expect=2)
    assert "--plugins: 'usual.nothing' cannot be imported: ModuleNotFoundError" in text
    assert "Traceback" not in text


def _draw(g: object) -> object:
    raise AssertionError("nothing draws it")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("scaled_add", {}, "write a namespace and a name, as in 'mylib.foo'"),
        ("max.dim", {}, "is already in the catalogue"),
        ("nolib.foo", {}, "imports='nolib' cannot be imported"),
        ("nolib.foo", {"imports": ()}, "the dispatcher has no op nolib::foo"),
        ("math.foo", {"overload": "aten::mm", "autocast": "fp16"}, "use a floating torch dtype"),
        (
            "math.foo",
            {"overload": "aten::mm", "autocast": {"tpu": "fp32"}},
            "'tpu', which has no table",
        ),
    ],
)
def test_an_invalid_registration_says_why(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(RegistrationError, match=r".") as caught:
        amp_fuzz.register_op(name, **options)(_draw)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert name == "max.dim" or name not in CATALOGUE
