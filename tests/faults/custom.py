"""Faults of custom functions and custom ops: one line of one of them is another.

The reference runs the honest function, and torch the faulty one. A fault is found if a program of
custom functions and ops diverges, and that with the honest function agrees.
"""

from __future__ import annotations

import inspect
import json
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from amp_fuzz.backends import backends, custom_functions
from amp_fuzz.backends.harness import Runtime, quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import select
from amp_fuzz.findings.minimize.target import Shrunk, Target, asker, shrink
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.fault import patched

__all__ = ["CUSTOM", "CustomFault", "Found", "hunt", "hunted"]


@dataclass(frozen=True, slots=True)
class CustomFault:
    """A fault of one function or op of the catalogue.

    what: one line, what it does under it. op: the entry. line, wrong: the source that is replaced,
    and by what. backend: where it shows.
    """

    what: str
    op: str
    line: str
    wrong: str
    backend: str = "eager-cpu"

    def corrupt(self) -> AbstractContextManager[None]:
        """Return the context in which torch, and not the reference, gets the faulty function."""
        name = f"make_{self.op}"
        source = textwrap.dedent(inspect.getsource(getattr(custom_functions, name)))
        assert source.count(self.line) == 1, f"{self.line!r} is not one line of {name}"
        names = dict(vars(custom_functions))
        exec(source.replace(self.line, self.wrong), names)
        honest = Runtime.names

        def faulty(runtime: Runtime) -> dict[str, Any]:
            made = honest(runtime)
            return (
                made | {name: names[name]} if runtime.custom_fwd is torch.amp.custom_fwd else made
            )

        return patched(Runtime, names=faulty)


_BWD = "        @custom_bwd(device_type=device)\n"

CUSTOM: dict[str, CustomFault] = {
    "freed-early": CustomFault(
        "the arguments of backward are freed in the forward",
        "freed_function",
        "ctx.objects = LinearArgs(None, None, None, gain)",
        "ctx.objects = None",
    ),
    "freed-after": CustomFault(
        "what backward needs is freed after the first pass",
        "linear_function",
        "args = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.gain)",
        "args, ctx.gain = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.gain), None",
    ),
    "alias-returned": CustomFault(
        "a custom op computes in its input and returns it",
        "exp_op",
        "return torch.exp(x)",
        "return x.detach().exp_()",
    ),
    "bwd-missing": CustomFault(
        "backward misses the autocast state of its forward",
        "linear_function",
        _BWD,
        "",
    ),
    "bwd-missing-matmul": CustomFault(
        "backward of a matrix product misses the autocast state of its forward",
        "matmul_function",
        _BWD,
        "",
    ),
    "fwd-missing": CustomFault(
        "inputs are not cast, and autocast stays on",
        "once_function",
        "        @custom_fwd(device_type=device, cast_inputs=torch.float32)\n",
        "        @custom_fwd(device_type=device)\n",
    ),
    "state-leaked": CustomFault(
        "autocast is off after the call",
        "affine_function",
        "y = x * args.scale + args.shift",
        'torch.set_autocast_enabled("cpu", False); y = x * args.scale + args.shift',
    ),
    "state-missed-op": CustomFault(
        "the backward of a custom op runs under the autocast around it",
        "linear_op",
        "with autocast(device, enabled=False):",
        "if True:",
    ),
    "needs-wrong-index": CustomFault(
        "needs_input_grad is read for another input",
        "mul_function",
        "(g * y).to(x.dtype) if ctx.needs_input_grad[0] else None",
        "(g * y).to(x.dtype) if ctx.needs_input_grad[1] else None",
    ),
    "needs-wrong-saved": CustomFault(
        "what is saved follows the wrong inputs",
        "linear_function",
        "saved_of_linear(args, ctx.needs_input_grad)",
        "saved_of_linear(args, ctx.needs_input_grad[1::-1])",
    ),
    "double-cut": CustomFault(
        "the gradient is a constant for a second derivative",
        "mul_function",
        "x, y = ctx.saved_tensors\n",
        "x, y = (t.detach() for t in ctx.saved_tensors)\n",
    ),
    "double-allowed": CustomFault(
        "a second derivative is not refused",
        "once_function",
        "        @once_differentiable\n",
        "",
    ),
    "saved-input": CustomFault(
        "the input is saved for the output",
        "exp_function",
        "ctx.save_for_backward(y)",
        "ctx.save_for_backward(x)",
    ),
    "saved-not-view": CustomFault(
        "a saved tensor is not the view that backward expects",
        "matmul_function",
        "ctx.save_for_backward(x.t(), w.t())",
        "ctx.save_for_backward(x, w.t())",
    ),
    "differentiable-kept": CustomFault(
        "the gradient goes to other places than the values came from",
        "sort_function",
        "torch.zeros_like(g).scatter(-1, indices, g)",
        "g.gather(-1, indices)",
    ),
    "alias-backward": CustomFault(
        "a function that gives its input has no backward of its own",
        "same_function",
        "return g * 0.5",
        "return g",
    ),
    "view-backward": CustomFault(
        "the gradient of a view keeps the output's strides and shape",
        "view_function",
        "return g.transpose(0, 1)",
        "return g",
    ),
    "output-copied": CustomFault(
        "an argument that is no tensor is ignored",
        "affine_function",
        "return -y if args.negate else y",
        "return y",
    ),
    "op-argument": CustomFault(
        "backward of a custom op forgets an argument that is no tensor",
        "affine_op",
        "return (-(g * scale) if negate else g * scale), None, None, None",
        "return g * scale, None, None, None",
    ),
    "op-not-cast": CustomFault(
        "a custom op has no autocast rule",
        "linear_op",
        "    op.register_autocast(device, torch.bfloat16)\n",
        "",
    ),
    "op-cast-wrong": CustomFault(
        "a custom op has the autocast rule of another dtype",
        "exp_op",
        "op.register_autocast(device, torch.float32)",
        "op.register_autocast(device, torch.float16)",
    ),
    "fake-dtype": CustomFault(
        "the fake kernel of a custom op has another dtype",
        "mul_op",
        "op.register_fake(body)",
        "op.register_fake(lambda x, y: body(x, y).double())",
        "fake-cuda",
    ),
    "fake-shape": CustomFault(
        "the fake kernel of a custom op has another shape",
        "linear_op",
        "op.register_fake(body)",
        "op.register_fake(lambda *args: body(*args).unsqueeze(0))",
        "compile[aot_eager]",
    ),
}


@dataclass(frozen=True, slots=True)
class Found:
    """The first case that shows a fault. cases: how many were drawn. small: it, minimised."""

    verdict: Verdict
    cases: int
    small: Case


@contextmanager
def _corrupted(fault: CustomFault) -> Iterator[None]:
    with fault.corrupt(), quiet():
        yield


def hunted(fault: CustomFault, *, cases: int = 400, seconds: float = 60) -> Found | None:
    """Draw cases until one shows a fault, and minimise it. None: no case does."""
    backend = backends()[fault.backend]
    judge = judge_of(backend, shipped(), "none")
    ops, focus = (usable(select([name]), backend.device) for name in ("custom", fault.op))
    for number in range(cases):
        source = Random(number).randbytes
        trains = backend.trains
        case = draw_case(source, backend.device, trains=trains, ops=ops, focus=focus)
        case = backend.fit(case)
        with _corrupted(fault):
            verdict = judge.judge(case)
        if verdict.outcome != "diverged":
            continue
        with quiet():
            honest = judge.judge(case)
        if honest.outcome in ("diverged", "known"):
            continue
        target = Target.of(verdict)
        with _corrupted(fault):
            ask = asker(judge, target)
            *_, last = shrink(case, target, ask, backend.reference(), seconds=seconds)
        assert isinstance(last, Shrunk)
        return Found(verdict, number + 1, last.case)
    return None


def hunt(names: Sequence[str], path: Path, said: Callable[[str], None] = print) -> None:
    """Hunt faults, all by default, and append a line for each to a file, unless it has one."""
    done = (
        [json.loads(line)["name"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
    for name in names or CUSTOM:
        if name in done:
            continue
        start = time.process_time()
        found, fault = hunted(CUSTOM[name]), CUSTOM[name]
        line: dict[str, Any] = {
            "name": name,
            "what": fault.what,
            "backend": fault.backend,
            "found": found is not None,
        }
        if found is not None:
            assert found.verdict.divergence is not None
            line |= {
                "cases": found.cases,
                "kind": found.verdict.divergence.kind,
                "statements": len(list(statements(found.small.program.body))),
                "minimised": str(found.small.program),
            }
        line["cpu seconds"] = round(time.process_time() - start, 1)
        said(f"{name}: {line}")
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
