"""Who names the culprit: `amp_fuzz.precision` beside other tools, on ten planted harms.

    PYTHON benchmarks/precision_others.py [--cases=Variance,...] [--tools=...]

PYTHON is an interpreter with torch, transformers (`make models`) and mindstudio-probe; a tool that
is not installed is left out. Each model has three layers, of which the middle one, ``harmed``, is
of tests/precision/kinds.py. All run on the CPU under its autocast, forward and backward. A tool
names the *line*, if the first three places that it shows hold the harmful one; the *module*, if
they hold ``harmed``; a *symptom*, if it shows something else; or *nothing*. Of tools that compare
two runs and leave the threshold to the reader, it is the first output with fewer digits than
`precision` asks for. benchmarks/precision_others.json has what each tool shows first.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from amp_fuzz.interfaces.precision import precision
from amp_fuzz.interfaces.precision.result import digits_in
from benchmarks.common import Row, arguments, machine, read, write
from tests.precision.kinds import KINDS, Kind, harmful_lines

FILE = Path(__file__).with_suffix(".json")
CASES = (
    *("Variance", "Logits", "Rotary", "Epsilon", "Recurrence"),
    *("Average", "TimeStep", "Cancelling", "NormByHand", "Routing"),
)


class Model(nn.Module):
    """A harmful layer between two others."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.harmed, self.last = nn.Linear(16, 16), kind.module(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.harmed(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def run(model: nn.Module, x: Tensor, kind: Kind, *, low: bool = True) -> None:
    """Run forward and backward."""
    with torch.autocast("cpu", dtype=getattr(torch, kind.dtype), enabled=low):
        made = model(x)
    made.float().square().mean().backward()


def few(value: Tensor, exact: Tensor, kind: Kind) -> bool:
    """Return whether a value has fewer digits than `precision` asks for."""
    value, exact = value.detach().double(), exact.detach().double()
    off, size = (value - exact).norm(), exact.norm()
    asked = digits_in(getattr(torch, kind.dtype)) / 2
    return not float(off) <= 10**-asked * float(size)


# -- tools: each returns what it shows, the first first -------------------------------------------


def ours(kind: Kind, x: Tensor) -> list[str]:
    found = precision(Model(kind), x, autocast=getattr(torch, kind.dtype))
    return [place.text for place in found.culprits]


def debug_underflow_overflow(kind: Kind, x: Tensor) -> list[str]:
    from transformers.debug_utils import DebugUnderflowOverflow

    model, said = Model(kind), io.StringIO()
    DebugUnderflowOverflow(model)
    with contextlib.redirect_stdout(said), contextlib.suppress(ValueError):
        run(model, x, kind)
    frames = re.findall(r"^ {18}(.+)$", said.getvalue(), re.MULTILINE)
    return frames[-1:]


def detect_anomaly(kind: Kind, x: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                run(Model(kind), x, kind)
        except RuntimeError as error:
            text = "".join(str(w.message) for w in said)
            lines = re.findall(r'File "([^"]+)", line (\d+), in (?:made|forward)', text)
            own = [
                f"{Path(file).name}:{line}" for file, line in lines if "site-packages" not in file
            ]
            return own[-1:] or [str(error)]
    return []


def numeric_suite(kind: Kind, x: Tensor) -> list[str]:
    import torch.ao.ns._numeric_suite as suite

    pair, shown = [Model(kind), Model(kind)], {kind.module, nn.Linear, nn.LayerNorm}
    suite.prepare_model_outputs(pair[0], pair[1], allow_list=shown)
    run(pair[0], x, kind, low=False)
    run(pair[1], x, kind)
    found = suite.get_matching_activations(pair[0], pair[1])
    return [
        name.removesuffix(".stats")
        for name, both in found.items()
        if few(both["quantized"][0], both["float"][0], kind)
    ]


def activations(kind: Kind, x: Tensor) -> list[str]:
    """Compare the outputs of submodules, in the order in which they end, by hooks."""
    seen: list[dict[str, Tensor]] = []
    for low in (False, True):
        model, kept = Model(kind), dict[str, Tensor]()
        for name, module in model.named_modules():

            def note(_: nn.Module, __: object, made: Tensor, name: str = name) -> None:
                kept[name] = made.detach()  # noqa: B023

            module.register_forward_hook(note)
        run(model, x, kind, low=low)
        seen.append(kept)
    exact, ran = seen
    return [name or "the model" for name, value in ran.items() if few(value, exact[name], kind)]


def msprobe(kind: Kind, x: Tensor) -> list[str]:
    """Dump tensors of modules and functions in two runs, and compare the dumps."""
    import pandas as pd
    from msprobe.msprobe import main as command
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(task="tensor", dump_path=f"{FOLDER.name}/dumps", level="mix")
    for low in (False, True):  # there is one debugger in a process: it counts steps on
        model = Model(kind)
        debugger.start(model=model)
        run(model, x, kind, low=low)
        debugger.stop()
        debugger.step()
    folders = sorted(Path(FOLDER.name, "dumps").iterdir(), key=lambda f: int(f.name[4:]))
    high, low_run = map(str, folders[-2:])
    before, out = sys.argv, f"{FOLDER.name}/{folders[-1].name}"
    sys.argv = ["msprobe", "compare", "-tp", low_run, "-gp", high, "-o", out]
    try:
        with contextlib.suppress(SystemExit):
            command()
    finally:
        sys.argv = before
    (file,) = Path(out).rglob("*.csv")
    table = pd.read_csv(file)
    asked = digits_in(getattr(torch, kind.dtype)) / 2
    shown, places = [], dict[str, str]()
    for _, row in table.iterrows():
        name, _, end = str(row["NPU Name"]).partition(".forward.")
        frames = re.findall(r"File (\S+\.py), line (\d+)", str(row["NPU_Stack_Info"]))
        own = [f"{Path(f).name}:{n}" for f, n in frames if "site-packages" not in f]
        places.setdefault(name, "".join(own[:1]))
        off, size = (pd.to_numeric(row[c], errors="coerce") for c in ("EucDist", "Bench l2norm"))
        if end.startswith("output") and not off <= 10**-asked * size:
            shown.append(f"{name} {places[name]}")
    return shown


FOLDER = tempfile.TemporaryDirectory()
TOOLS: dict[str, Callable[[Kind, Tensor], list[str]]] = {
    "amp_fuzz.precision": ours,
    "DebugUnderflowOverflow": debug_underflow_overflow,
    "autograd.detect_anomaly": detect_anomaly,
    "ao.ns numeric suite": numeric_suite,
    "hooks on activations": activations,
    "msProbe": msprobe,
}


def rating(kind: Kind, shown: Sequence[str]) -> str:
    """Return what a tool named among the first three places."""
    first = " ".join(shown[:3])
    if any(f"kinds.py:{line}" in first for line in harmful_lines(kind.module)):
        return "line"
    if re.search(r"\bharmed\b(?!\.(?:linear|norm))", first):
        return "module"
    return "symptom" if first else "nothing"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--output", type=Path, default=FILE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: Row = {"cases": {}, "named": {}} | read(given.output)
    result |= {"torch": torch.__version__, "machine": machine()}
    for tool in given.tools.split(","):
        counts = dict.fromkeys(("line", "module", "symptom", "nothing"), 0)
        for case in given.cases.split(","):
            kind = KINDS[case]
            torch.manual_seed(1)
            try:
                shown = TOOLS[tool](kind, torch.randn(2, 8, 16))
            except ImportError as error:
                print(tool, "is not installed:", error)
                break
            rated = rating(kind, shown)
            counts[rated] += 1
            print(f"{tool:24} {case:12} {rated:8} {shown[:3]}", flush=True)
            result["cases"].setdefault(case, {})[tool] = {"named": rated, "shown": shown[:3]}
            write(given.output, result)
        else:
            result["named"][tool] = counts
        write(given.output, result)
    for tool, counts in result["named"].items():
        print(tool, counts)


if __name__ == "__main__":
    main()
