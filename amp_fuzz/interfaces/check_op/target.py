"""What `check_op` checks: an op in one of the forms in which torch takes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils import _pytree as pytree

from amp_fuzz.backends.base import Calls
from amp_fuzz.interfaces.check.custom_ops import definition_of
from amp_fuzz.interfaces.check.subject import CheckError, Subject
from amp_fuzz.interfaces.check.trees import mapped
from amp_fuzz.policies.tables import DEVICES, declared

__all__ = ["Form", "Target"]

Form: TypeAlias = Literal["custom op", "operator", "autograd.Function", "module", "callable"]


@dataclass(frozen=True, slots=True)
class Target:
    """An op with its inputs.

    form: how it is made. op: what was given. subject: what is called. in_dims: for `torch.vmap`, as
    the caller gave them; None: the first dimension of each tensor.
    """

    form: Form
    op: Any
    name: str
    subject: Subject
    in_dims: Any = None

    @classmethod
    def of(
        cls, op: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, seed: int, dims: Any
    ) -> Target:
        """Return the target. Raises `CheckError` for what cannot be checked."""
        form, op, name, function = _read(op)
        _check_declared(form, op)
        subject = Subject.of(function, inputs, kwargs, seed)
        return cls(form, op, name or subject.name, subject, dims)

    @property
    def dispatched(self) -> bool:
        """Whether the dispatcher knows it, so it has a schema."""
        return self.form in ("custom op", "operator")

    @property
    def maps(self) -> bool:
        """Whether it declares that `torch.vmap` can map it."""
        if self.in_dims is not None:
            return True
        if self.form == "autograd.Function":
            own = self.op.vmap is not torch.autograd.Function.vmap
            return bool(self.op.generate_vmap_rule) or own
        definition = definition_of(self.op) if self.dispatched else None
        return getattr(definition, "_vmap_fn", None) is not None

    def trained(self) -> Target | None:
        """Return it with floating inputs that require grad, or None if a tensor of it does."""
        subject, made = self.subject, []
        if any(t.requires_grad for t in (*subject.inputs().values(), *subject.state().values())):
            return None

        def trained(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not (
                leaf.is_floating_point() or leaf.is_complex()
            ):
                return leaf
            made.append(leaf.detach().clone().requires_grad_())
            return made[-1]

        args, kwargs = mapped(trained, (subject.args, dict(subject.kwargs)))
        subject = Subject.of(subject.function, args, kwargs, subject.seed)
        return replace(self, subject=subject) if made else None

    def owns(self, func: Any) -> bool:
        """Return whether a call of the dispatcher is one of this op."""
        packet = getattr(self.op, "_opoverload", self.op)
        return func is packet or getattr(func, "overloadpacket", None) is packet

    def subject_for(self, backend: Any) -> Subject:
        """Return the subject for a backend: as a module, for one that differentiates only modules.

        That is `torch.export`. A function that holds tensors stays as it is: they are constants of
        its export. So does an autograd.Function, whose own backward is not in the exported program.
        """
        subject = self.subject
        differentiates = not (isinstance(backend, Calls) and backend.infers(subject.function))
        if differentiates or self.form == "autograd.Function" or subject.state():
            return subject
        return Subject.of(Op(subject.function), subject.args, subject.kwargs, subject.seed)


class Op(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _read(op: Any) -> tuple[Form, Any, str, Callable[..., Any]]:
    """Return an op's form, itself, its name ("" for that of its callable), and what to call."""
    owner = getattr(op, "__self__", None)
    if getattr(op, "__name__", "") == "apply" and _is_function(owner):
        op = owner
    if _is_function(op):
        if op is torch.autograd.Function:
            raise CheckError("torch.autograd.Function is the base class: pass a class of your own")
        return "autograd.Function", op, op.__qualname__, op.apply
    if isinstance(op, torch.autograd.Function):
        raise CheckError(f"{type(op).__qualname__}() is an instance: pass the class itself")
    if isinstance(op, CustomOpDef):
        return "custom op", op, op._qualname, op
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        form: Form = "operator" if definition_of(op) is None else "custom op"
        return form, op, str(op), op
    form = "module" if isinstance(op, torch.nn.Module) else "callable"
    return form, op, "", op


def _check_declared(form: Form, op: Any) -> None:
    """Raise `CheckError` for an op whose autocast kernel the reference knows nothing of."""
    if form != "operator":
        return
    overload = op if isinstance(op, torch._ops.OpOverload) else getattr(op, op.overloads()[0])
    name = str(overload.name())
    if name.startswith(("aten::", "prims::")) or any(declared(d, name) for d in DEVICES):
        return
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"):
        raise CheckError(
            f"{name} has an autocast kernel, and only {name} knows what it casts: declare it with "
            f"amp_fuzz.register_op({name.replace('::', '.')!r}, autocast=...)"
        )


def _is_function(op: Any) -> bool:
    return isinstance(op, type) and issubclass(op, torch.autograd.Function)


def tensor_dims(args: Any) -> Any:
    """Return the default ``in_dims`` for arguments: 0 for a tensor, None for anything else."""
    return pytree.tree_map(lambda leaf: 0 if isinstance(leaf, torch.Tensor) else None, args)
