"""Which policy a call has, and what each policy does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from amp_fuzz.policies.tables import Policy, Rule
from amp_fuzz.reference import cache, dispatch
from amp_fuzz.reference.calls import Call, Cast, KernelCall, Supposed, Treatment
from amp_fuzz.reference.casts import cast_eligible, device_of, eligible

__all__ = ["asked", "asked_device", "of_table", "treated"]

# In which order the arguments of one op are cast. Autocast's wrapper casts them inside one C++
# call, whose order of evaluation the language leaves open: GCC goes from the last to the first,
# Clang from the first to the last. It shows in the last bit of a gradient that is summed from
# several casts of one tensor, since autograd runs later nodes first.
_LAST_FIRST = "GCC" in torch.__config__.show()


def asked(call: Call) -> list[str]:
    """Return the enabled devices that have a tensor among the arguments of a call, in order.

    A device whose kernel is under way is not among them.
    """
    given = {device_of(t) for t in call.tensors}.difference(call.state.semantics.excluded())
    return [device for device in call.state.devices() if device in given]


def asked_device(call: Call) -> str | None:
    """Return the first enabled device which has a tensor among the arguments of a call, or None."""
    return next(iter(asked(call)), None)


def of_table(call: Call) -> Treatment | None:
    """Return the device whose autocast handles a call, and what its policy table has for the op.

    A call with tensors of two devices is first the accelerator's. If its table has nothing for the
    op, or once its kernel has made its casts, the call is the CPU's: each casts its own tensors.
    """
    state = call.state
    for device in asked(call):
        rule = state.tables[device].rules.get(call.name)
        if call.name in state.supposed and (rule is not None or "::" in call.name):
            rule = _supposed(call.name, rule, state.supposed[call.name])
            return None if rule is None else Treatment(device, rule)
        if rule is not None:
            return Treatment(device, rule)
    return None


def _supposed(name: str, rule: Rule | None, what: Supposed) -> Rule | None:
    """Return the rule of an op under another policy; an op of the user's may have had none."""
    rule = rule or Rule(name, Policy.PROMOTE, ">=0", "supposed")
    if isinstance(what, torch.dtype):
        text = str(what).removeprefix("torch.")
        return replace(rule, policy=Policy.CAST_INPUTS, cast_inputs=text)
    return None if what is None else replace(rule, policy=what)


def treated(call: Call, found: Treatment | None) -> Any:
    """Make a call as its policy says, with autocast of that device off inside."""
    if found is None:
        return call.onward(call)
    off = {found.device, *call.state.semantics.excluded()}
    others = set(call.state.devices()) - off
    # The key is that of all devices: without it, nothing inside comes to a kernel.
    with dispatch.excluding(found.device) if others else dispatch.exclude():
        return _POLICIES[found.rule.policy](_Caster(call, found))


class _Caster:
    """Casts the arguments of one call, makes it, and logs it."""

    __slots__ = ("call", "casts", "device", "low", "rule", "state")

    def __init__(self, call: Call, found: Treatment) -> None:
        self.call, self.state = call, call.state
        self.device, self.rule = found
        self.low = self.state.dtype(self.device)
        if self.state.flips is not None:
            self.low = self.state.flips.low(self.low)
        self.casts: list[Cast] = []

    def log(self, *, sets_dtype: bool = False) -> None:
        if (log := self.state.log) is not None:
            dtypes = tuple([tensor.dtype for tensor in self.call.tensors])
            device, rule, made = self.device, self.rule, tuple(self.casts)
            log.append(KernelCall(device, rule.overload, rule.policy, dtypes, made, sets_dtype))

    def run(self, to: torch.dtype) -> Any:
        """Cast every eligible tensor to `to` and call the op."""
        args, kwargs = self.call.args, self.call.kwargs
        given = [*args, *kwargs.values()][:: -1 if _LAST_FIRST else 1]
        made = [self._argument(value, to) for value in given]
        if _LAST_FIRST:
            made.reverse()
            self.casts.reverse()
        self.log()
        n = len(args)
        return self.call.function(*made[:n], **dict(zip(kwargs, made[n:], strict=True)))

    def _argument(self, arg: Any, to: torch.dtype) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._cast(arg, to)
        if isinstance(arg, (list, tuple)):
            return [self._cast(a, to) if isinstance(a, torch.Tensor) else a for a in arg]
        return arg

    def _cast(self, tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        meaning, flips = self.state.semantics, self.state.flips
        if tensor.dtype is to or not meaning.eligible(tensor, self.device):
            return tensor
        if flips is not None and flips.leaves_out(tensor.dtype, to):
            return tensor
        cached = self.state.cache_enabled and meaning.caches(tensor, to, self.low)
        cached = cached and (flips is None or flips.caches())
        self.casts.append(Cast(id(tensor), tensor.dtype, to, cached))
        return cache.cast_of(tensor, to, self.state) if cached else tensor.to(to)


def _lower(c: _Caster) -> Any:
    return c.run(c.low)


def _fp32(c: _Caster) -> Any:
    return c.run(torch.float32)


def _promote(c: _Caster) -> Any:
    meaning = c.state.semantics
    return c.run(meaning.promoted(meaning.promoting(c.call), c.device, c.low))


def _set_dtype(c: _Caster) -> Any:
    """``softmax(x)`` runs as ``softmax(x, dtype=float32)``, unless the caller gave a dtype."""
    args, kwargs = list(c.call.args), c.call.kwargs
    first = args[0]
    sets = isinstance(first, torch.Tensor) and eligible(first, c.device)
    c.log(sets_dtype=sets)
    for i, parameter in enumerate(c.call.overload._schema.arguments if sets else ()):
        if parameter.name != "dtype":
            continue
        if i < len(args):
            args[i] = torch.float32 if args[i] is None else args[i]
        elif kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
    return c.call.function(*args, **kwargs)


def _append_dtype(c: _Caster) -> Any:
    """``norm(x, p)`` runs as the overload of ``norm`` that takes a dtype."""
    args, kwargs = c.call.args, c.call.kwargs
    first = args[0]
    dtype = torch.float32 if eligible(first, c.device) else first.dtype
    c.log(sets_dtype=True)
    target = dispatch.overload_of(cast(str, c.rule.redispatch))
    if target is None:
        raise RuntimeError(f"{c.rule.overload} has no overload {c.rule.redispatch}")
    parameters = c.call.overload._schema.arguments
    defaults = {p.name: p.default_value for p in parameters}
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs, "dtype": dtype}
    wanted = target._schema.arguments
    positional = [given[p.name] for p in wanted if not p.kwarg_only]
    keywords = {p.name: given[p.name] for p in wanted if p.kwarg_only}
    return target(*positional, **keywords)


def _cast_inputs(c: _Caster) -> Any:
    """Cast the inputs of a custom op with `register_autocast`; its body runs without autocast."""
    to = getattr(torch, cast(str, c.rule.cast_inputs))
    c.casts += [
        Cast(id(t), t.dtype, to)
        for t in c.call.tensors
        if t.dtype is not to and eligible(t, c.device)
    ]
    c.log()
    return c.call.function(
        *(cast_eligible(a, c.device, to) for a in c.call.args),
        **{k: cast_eligible(a, c.device, to) for k, a in c.call.kwargs.items()},
    )


def _banned(c: _Caster) -> Any:
    c.log()
    raise RuntimeError(
        f"aten::{c.rule.overload} is unsafe to autocast: combine it with the sigmoid before it, as "
        "in torch.nn.functional.binary_cross_entropy_with_logits"
    )


_POLICIES: dict[Policy, Callable[[_Caster], Any]] = {
    Policy.LOWER_PRECISION_FP: _lower,
    Policy.FP32: _fp32,
    Policy.FP32_SET_OPT_DTYPE: _set_dtype,
    Policy.FP32_APPEND_DTYPE: _append_dtype,
    Policy.PROMOTE: _promote,
    Policy.BANNED: _banned,
    Policy.CAST_INPUTS: _cast_inputs,
}
