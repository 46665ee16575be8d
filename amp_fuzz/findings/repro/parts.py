"""The parts of a script that shows a case: inputs as literals, the program, its driver."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from amp_fuzz.backends import Backend
from amp_fuzz.backends.base import Repros
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.source import driver_source
from amp_fuzz.cases import inputs
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import TensorSpec
from amp_fuzz.oracle import Divergence
from amp_fuzz.records.schema import DivergenceRecord

__all__ = ["PAD", "Found", "ReproError", "Script", "head", "literal", "wrapped"]

Found: TypeAlias = Divergence | DivergenceRecord

_WIDTH = 100
PAD = "    "


class ReproError(ValueError):
    """A finding that its case does not show under the reference. The message says what to do."""


def head(case: Case, backend: Backend, finding: Found) -> str:
    """Return the comment on top of a script."""
    version = importlib.metadata.version("amp-fuzz")
    lines = [
        f"found by amp-fuzz {version}, case {case.id} on {backend.name}",
        f"{finding.kind}: {finding.where}" if finding.where else finding.kind,
        f"expected: {finding.expected}",
        f"observed: {finding.observed}",
    ]
    wrapped = (part for line in lines for part in textwrap.wrap(line, _WIDTH - 2))
    return "\n".join(f"# {line}" for line in wrapped)


@dataclass(frozen=True)
class Script:
    """The input of a script, and the parts that several kinds share. repros: the backend's."""

    case: Case
    backend: Backend
    finding: Found
    repros: Repros

    @property
    def expected(self) -> Observation:
        """What the reference observes."""
        return self._run[0]

    @cached_property
    def _run(self) -> tuple[Observation, bool]:
        """What the reference observes, and whether it drew random numbers of the CPU."""
        unused = torch.Generator().manual_seed(self.case.seed)
        torch.default_generator.set_state(unused.get_state())
        seen = self.backend.reference().run(self.case)
        return seen, not torch.equal(torch.default_generator.get_state(), unused.get_state())

    def value(self, label: str) -> torch.Tensor | None:
        """Return what the reference observes at a label."""
        expected = self.expected
        if label not in expected.values:
            raise ReproError(
                f"case {self.case.id}: the reference observes nothing at {label!r}, so this is no "
                "finding of the case: replay it to see what diverges now"
            )
        return expected.values[label]

    def draws(self) -> bool:
        """Return whether the reference draws random numbers of the CPU's generator, or may."""
        return self.backend.device != "cpu" or self._run[1]

    # -- inputs ---------------------------------------------------------------------------------

    def inputs(self) -> str:
        """Return assignments of the inputs, with literals for their values."""
        lines = [self._input(spec) for spec in self.case.program.inputs]
        if self.backend.values and self.draws():
            lines.append(f"torch.default_generator.manual_seed({self.case.seed})")
        return "\n".join(lines)

    def fresh_inputs(self) -> str:
        """Return a function that returns fresh inputs."""
        names = ", ".join(spec.name for spec in self.case.program.inputs)
        body = textwrap.indent(f"{self.inputs()}\nreturn [{names}]", PAD)
        return f"def inputs():\n{body}"

    def _input(self, spec: TensorSpec) -> str:
        text = self._values(spec) if self.backend.values else self._empty(spec)
        if spec.requires_grad:
            text += ".requires_grad_()"
        return wrapped(f"{spec.name} = {text}")

    def _empty(self, spec: TensorSpec) -> str:
        place = f'"{spec.device}"' if spec.device else "device"
        dtype = f"dtype=torch.{spec.dtype}, device={place}"
        if spec.layout in ("contiguous", "offset"):
            return f"torch.empty({spec.shape}, {dtype})"
        return f"torch.empty_strided({spec.shape}, {inputs.strides(spec)}, {dtype})"

    def _values(self, spec: TensorSpec) -> str:
        tensor = inputs.tensor(spec, self.case.seed)
        text = literal(tensor)
        if spec.layout in ("transposed", "strided"):
            dtype = f"dtype=torch.{spec.dtype}"
            text = f"torch.empty_strided({spec.shape}, {tensor.stride()}, {dtype}).copy_({text})"
        elif spec.layout == "offset":
            start = tensor.storage_offset()
            flat = torch.cat([tensor.new_zeros(start), tensor.reshape(-1)])
            text = f"{literal(flat)}[{start}:].view({spec.shape})"
        return text if spec.device else self.repros.placed(text, spec)

    # -- program and driver ---------------------------------------------------------------------

    def source(self, *labels: str) -> list[str]:
        """Return the program and its driver, which returns the values at the labels.

        The driver ends after the last label: nothing later can matter.
        """
        driver = self.repros.driver(driver_source(self.case), self.case)
        return [self.program(), _observing(driver, labels)]

    def plain(self, target: str, *labels: str) -> list[str]:
        """Return the program, and lines that run it once and bind the values at the labels.

        No driver is defined, nor a program that is only called: their bodies stand in the lines.
        """
        program, driver = self.source(*labels)
        if self.case.plan.thread == "whole":
            call = self.call()
            return [program, driver, f"{target} = {call}" if labels else call]
        body = _body(driver, target)
        return [_in_place(program, body)] if _is_plain(program, body) else [program, body]

    def program(self) -> str:
        """Return the program, with its explicit form above it as a comment."""
        program = self.repros.source(self.case).rstrip()
        explicit = self.finding.explicit if isinstance(self.finding, DivergenceRecord) else ""
        if explicit:
            note = f"The program with autocast's casts written out:\n{explicit}"
            lines = (line.removeprefix("# ") for line in note.splitlines())
            program = "".join(f"# {line}\n" for line in lines) + program
        return program

    def call(self, arguments: str | None = None) -> str:
        """Return the call of the driver."""
        if arguments is None:
            arguments = ", ".join(spec.name for spec in self.case.program.inputs)
        if self.case.plan.thread == "whole":
            return f"in_thread(drive, {arguments})"
        return f"drive({arguments})"


def _observing(driver: str, labels: tuple[str, ...]) -> str:
    """Return a driver that returns only the values at these labels."""
    lines: list[str] = []
    for line in driver.splitlines():
        label, value = _observed(line)
        pad = line[: len(line) - len(line.lstrip())]
        if label is None:
            lines.append(line)
        elif (label,) == labels[-1:]:
            lines.append(f"{pad}return {', '.join([*('first' for _ in labels[1:]), value])}")
            break
        elif label in labels:
            # Copy a value, since a later step may write it; a gradient is replaced, or None.
            copy = "" if label.endswith(".grad") else ".detach().clone()"
            lines.append(f"{pad}first = {value}{copy}")
    text = "\n".join(lines)
    for name in ("scaler", "optimizer", "weights"):  # unused before the label
        if len(re.findall(rf"\b{name}\b", text)) == 1:
            text = re.sub(rf"\n *{name} = .*", "", text)
    return text


def _observed(line: str) -> tuple[str | None, str]:
    """Return the label and the value of a line of a driver that observes one."""
    match = re.fullmatch(r' *observe\("([^"]*)", (.*)\)', line)
    return (None, "") if match is None else (match[1], match[2])


# -- code that runs once ------------------------------------------------------------------------


def _body(driver: str, target: str) -> str:
    """Return the body of a driver, which binds what it returns at its end."""
    (function,) = ast.parse(driver).body
    assert isinstance(function, ast.FunctionDef)
    text = textwrap.dedent("\n".join(driver.splitlines()[function.body[0].lineno - 1 :]))
    return re.sub(r"^( *)return (.*)\Z", rf"\1{target} = \2", text.rstrip(), flags=re.MULTILINE)


_PROGRAM = re.compile(r"((?:#.*\n)*)def program\((.*)\):\n((?: {4}.*\n)*) {4}return (.*?),?")


def _is_plain(program: str, body: str) -> bool:
    """Return whether a program is a function alone, called once with the inputs as they are."""
    match = _PROGRAM.fullmatch(program)
    called = re.findall(r"\bprogram\b.*", body)
    return match is not None and called == [f"program({match[2]})"]


def _in_place(program: str, body: str) -> str:
    """Return the body of a driver with the program's in place of the call."""
    match = _PROGRAM.fullmatch(program)
    assert match is not None
    comment, _, lines, outputs = match.groups()
    names = outputs.split(", ")
    text = re.sub(r"\boutputs\[(\d+)\]", lambda m: names[int(m[1])], body)
    bound = [f"outputs = {outputs},"] if len(re.findall(r"\boutputs\b", text)) > 1 else []
    inside = "\n".join([*textwrap.dedent(lines).splitlines(), *bound])
    call = re.compile(r"^( *)outputs = program\(.*\)$", re.MULTILINE)
    return comment + call.sub(lambda m: textwrap.indent(inside, m[1]), text)


# -- literals -------------------------------------------------------------------------------------


def literal(tensor: torch.Tensor) -> str:
    """Return a contiguous tensor of these values as source, exact in every bit but a NaN's."""
    shape, dtype = tuple(tensor.shape), f"dtype={tensor.dtype}"
    texts = _numbers(tensor)
    if not texts:
        return f"torch.zeros({shape}, {dtype})"
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"torch.full({shape}, {texts[0]}, {dtype})"
    return f"torch.tensor({_nested(texts, shape)}, {dtype})"


def _nested(texts: list[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return texts[0]
    step = len(texts) // shape[0]
    rows = (texts[i : i + step] for i in range(0, len(texts), step))
    return f"[{', '.join(_nested(row, shape[1:]) for row in rows)}]"


def _numbers(tensor: torch.Tensor) -> list[str]:
    flat = tensor.detach().cpu().reshape(-1)
    if flat.is_complex():
        pair = (_numbers(torch.view_as_real(flat.resolve_conj())[:, i]) for i in (0, 1))
        return [f"complex({real}, {imaginary})" for real, imaginary in zip(*pair, strict=True)]
    if not flat.is_floating_point():
        return [repr(v) for v in flat.tolist()]
    exact: list[float] = flat.tolist()
    found = [repr(v) for v in exact]
    if flat.dtype is torch.float64:
        return found
    # The fewest digits that torch rounds to the same value: three or four for bfloat16, where the
    # exact decimal has up to dozens.
    for digits in range(9, 0, -1):
        shorter = [float(f"{v:.{digits}g}") for v in exact]
        rounded = torch.tensor(shorter, dtype=flat.dtype).tolist()
        for i, (candidate, back) in enumerate(zip(shorter, rounded, strict=True)):
            if repr(back) == repr(exact[i]):
                found[i] = repr(candidate)
    return found


def wrapped(line: str) -> str:
    """Break a long line between the items of its lists."""
    return textwrap.fill(
        line, _WIDTH, subsequent_indent=PAD, break_long_words=False, break_on_hyphens=False
    )
