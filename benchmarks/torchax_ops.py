"""Which ops and forms the installed torchax lacks, and what `backends/torchax.toml` says of them.

    python benchmarks/torchax_ops.py            # all: some ten minutes
    python benchmarks/torchax_ops.py 'conv*'

Each form of each op is called once, in float32 and without autocast, with the first of twelve draws
that the CPU runs. It lacks a form that raises OperatorNotFound or refuses ``out=``.
"""

from __future__ import annotations

import argparse
import random

import msgspec
import torch

from amp_fuzz.backends.apart import Apart
from amp_fuzz.backends.torchax import Mode, Torchax, TorchaxBackend, lacking
from amp_fuzz.backends.torchbackend import inferring
from amp_fuzz.case import Case, Plan
from amp_fuzz.catalogue import Op, select
from amp_fuzz.harness import Observation
from amp_fuzz.judge import quiet
from amp_fuzz.program import Program
from amp_fuzz.strategies.builder import Palette, ProgramBuilder

DRAWS = 12


def drawn(op: Op, form: str, seed: int) -> Case:
    rng = random.Random(f"{op.name}/{form}/{seed}")
    builder = ProgramBuilder(rng.randbytes, {}, Palette(floats=("float32",)))
    statement = builder.statement(op, form)
    inputs = tuple(
        msgspec.structs.replace(spec, role="input") if spec.requires_grad else spec
        for spec in builder.inputs
    )
    outputs = tuple(name for name in statement.outputs if name != "_")
    return inferring(Case(Program(inputs, (statement,), outputs), Plan(contexts=()), seed))


def lacks(seen: Observation) -> bool:
    if seen.raised is None:
        return False
    refused = "unexpected keyword argument" in seen.raised.message and "out=" in seen.raised.text
    return seen.raised.kind == "OperatorNotFound" or refused


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ops", nargs="*", default=["*"])
    torch.set_num_threads(1)
    chosen = [op for op in select(parser.parse_args().ops) if not op.devices or "cpu" in op.devices]
    side, reference = Torchax(Mode()), TorchaxBackend(Mode(), Apart("")).reference()
    listed, differ = lacking(), 0
    with quiet():
        for op in chosen:
            for form in op.forms:
                cases = [drawn(op, form, seed) for seed in range(DRAWS)]
                runs = (c for c in cases if reference.run(c).raised is None)
                found = lacks(side.observe(next(runs, cases[0])))
                said = op.name in listed or f"{op.name}:{form}" in listed
                differ += found != said
                if found != said:
                    print(f"{op.name}:{form}", "is lacking" if found else "is listed, and runs")
    print(f"{differ} differences in {len(chosen)} ops")


if __name__ == "__main__":
    main()
