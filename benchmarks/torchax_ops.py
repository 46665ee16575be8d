"""Which ops and forms the installed torchax lacks, and what `backends/torchax.toml` says of them.

    python benchmarks/torchax_ops.py            # all: some ten minutes
    python benchmarks/torchax_ops.py 'conv*'
    python benchmarks/torchax_ops.py --backward

Each form of each op is called once, in float32 and without autocast, with the first of twelve draws
that the CPU runs. It lacks a form that raises OperatorNotFound or refuses ``out=``. With
``--backward`` all that can have a gradient has one, with the first three draws, and it is torch's
own backward pass that lacks what raises so.
"""

from __future__ import annotations

import random
import sys
from itertools import islice
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, Torchax, TorchaxBackend, lacking
from amp_fuzz.cases.case import Case, Plan, inferring
from amp_fuzz.cases.program import Program
from amp_fuzz.catalogue import Op, select
from amp_fuzz.strategies.builder import Palette, ProgramBuilder
from benchmarks.common import arguments

DRAWS = 12
SIZES = 3  # the derivative of max without dimensions is another one
SMOOTH = ("float32", "float64", "complex64", "complex128")


def drawn(op: Op, form: str, seed: int, *, backward: bool) -> Case:
    rng = random.Random(f"{op.name}/{form}/{seed}")
    builder = ProgramBuilder(rng.randbytes, {}, Palette(floats=("float32",)))
    statement = builder.statement(op, form)
    smooth = "weight" if backward else "input"
    inputs = tuple(
        msgspec.structs.replace(spec, role=smooth)
        if spec.role != "buffer" and spec.dtype in SMOOTH
        else spec
        for spec in builder.inputs
    )
    outputs = tuple(name for name in statement.outputs if name != "_")
    case = Case(Program(inputs, (statement,), outputs), Plan(contexts=()), seed)
    return case if backward else inferring(case)


def lacks(seen: Observation) -> bool:
    if seen.raised is None:
        return False
    refused = "unexpected keyword argument" in seen.raised.message and "out=" in seen.raised.text
    return seen.raised.kind == "OperatorNotFound" or refused


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("ops", nargs="*", default=["*"])
    parser.add_argument("--backward", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [op for op in select(given.ops) if not op.devices or "cpu" in op.devices]
    mode = Mode(autograd=given.backward)
    side, reference = Torchax(mode), TorchaxBackend(mode, Apart("")).reference()
    listed, differ = lacking(backward=given.backward), 0
    forward = lacking() if given.backward else {}
    with quiet():
        for op in chosen:
            for form in op.forms:
                if op.name in forward or f"{op.name}:{form}" in forward:
                    continue
                cases = [drawn(op, form, seed, backward=given.backward) for seed in range(DRAWS)]
                runs = (c for c in cases if reference.run(c).raised is None)
                few = list(islice(runs, SIZES if given.backward else 1))
                if not few and given.backward:
                    continue
                found = any(lacks(side.observe(case)) for case in few or cases[:1])
                said = op.name in listed or f"{op.name}:{form}" in listed
                differ += found != said
                if found != said:
                    print(f"{op.name}:{form}", "is lacking" if found else "is listed, and runs")
    print(f"{differ} differences in {len(chosen)} ops")


if __name__ == "__main__":
    main()
