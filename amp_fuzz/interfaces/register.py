"""The user's own ops: how they are called, drawn and cast.

A registered op is drawn into programs like torch's own, runs under the reference with its policy,
and is called in the same way in repros.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch

from amp_fuzz import catalogue
from amp_fuzz.cases.program import FLOAT_DTYPES
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.catalogue.core import Build, op
from amp_fuzz.policies.tables import DEVICES, Policy, Rule
from amp_fuzz.reference.dispatch import overload_of
from amp_fuzz.reference.kernels import declare_op
from amp_fuzz.strategies.drawing import forget_tables

__all__ = ["RegistrationError", "register_op"]

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_POLICIES = tuple(
    p.value for p in Policy if p not in (Policy.FP32_APPEND_DTYPE, Policy.CAST_INPUTS)
)

Autocast = str | torch.dtype


class RegistrationError(ValueError):
    """An op that cannot be registered. The message says what to write instead."""


def register_op(
    name: str,
    *,
    function: str | None = None,
    method: str | None = None,
    inplace: str | None = None,
    out: str | None = None,
    overload: str | None = None,
    imports: str | tuple[str, ...] | None = None,
    autocast: Autocast | Mapping[str, Autocast] | None = None,
    mixed: Literal["promotes", "raises"] = "promotes",
    floats: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64"),
    devices: tuple[str, ...] | None = None,
    view: bool = False,
    unpacks: bool = False,
) -> Callable[[Build], Build]:
    """Register your own op. The decorated function draws its calls.

    The function takes an `amp_fuzz.catalogue.Builder`, asks it for tensors (shapes, dtypes, value
    domains) and other arguments, and returns an `amp_fuzz.catalogue.Call`, which has the shapes of
    the results. docs/guide/your-op.md has an example.

    Args:
        name: ``"mylib.foo"``: its name in case files and ``--ops``.
        function: the callable's dotted path, by default ``torch.ops.mylib.foo``. method, inplace,
            out: its other forms, as in the catalogue.
        overload: its name at the dispatcher, by default ``mylib::foo``.
        imports: the modules that make it callable, by default the first part of the name. The
            harness and repros import them.
        autocast: what autocast does with its inputs: a dtype, if it has
            ``torch.library.register_autocast(..., dtype)``; the name of a policy
            (``"lower_precision_fp"``, ``"fp32"``, ``"promote"``, ...), if it has a kernel for an
            autocast key; a mapping from device types to these. None: nothing, so its body runs
            under the surrounding autocast.
        mixed: whether floating inputs of several dtypes promote or raise. floats: the floating
            dtypes that it accepts. devices: the device types where it runs, by default all. view:
            whether its output may share memory with its first argument. unpacks: whether it
            returns a sequence even for one tensor.

    Raises:
        RegistrationError: a name that is taken or invalid, an unknown policy, a module that cannot
            be imported or does not define the op.
    """
    if not _NAME.fullmatch(name):
        raise RegistrationError(f"name={name!r}: write a namespace and a name, as in 'mylib.foo'")
    if name in CATALOGUE:
        raise RegistrationError(f"name={name!r} is already in the catalogue: choose another")
    space, _, own = name.partition(".")
    modules = (imports,) if isinstance(imports, str) else imports
    modules = (space,) if modules is None else modules
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RegistrationError(
                f"imports={module!r} cannot be imported ({error}): give the modules that define "
                f"{name}, or imports=() if importing torch is enough"
            ) from error
    qualified = overload or f"{space}::{own}"
    if overload_of(qualified) is None and (function is None or autocast is not None):
        raise RegistrationError(
            f"the dispatcher has no op {qualified}: import what defines it first, or give its name "
            "with overload="
        )
    rules = _rules(qualified, autocast, devices)
    register = op(
        name,
        qualified,
        function=function or f"torch.ops.{space}.{own}",
        method=method,
        inplace=inplace,
        out=out,
        mixed=mixed,
        floats=floats,
        devices=devices,
        view=view,
        unpacks=unpacks,
        imports=modules,
        family=space,
    )

    def decorate(build: Build) -> Build:
        register(build)
        catalogue.adopt()
        if overload_of(qualified) is not None:
            declare_op(qualified, rules)
        forget_tables()
        return build

    return decorate


def _rules(
    overload: str,
    autocast: Autocast | Mapping[str, Autocast] | None,
    devices: tuple[str, ...] | None,
) -> Mapping[str, Rule]:
    if autocast is None:
        return MappingProxyType({})
    if not isinstance(autocast, Mapping):
        autocast = dict.fromkeys(devices or DEVICES, autocast)
    rules = {}
    for device, what in autocast.items():
        if device not in DEVICES:
            raise RegistrationError(
                f"autocast has device {device!r}, which has no table: use {', '.join(DEVICES)}"
            )
        text = str(what).removeprefix("torch.")
        if isinstance(what, torch.dtype) and text in FLOAT_DTYPES:
            rules[device] = Rule(
                overload, Policy.CAST_INPUTS, ">=2.7", "amp_fuzz.register_op", cast_inputs=text
            )
        elif text in _POLICIES and isinstance(what, str):
            rules[device] = Rule(overload, Policy(text), ">=2.7", "amp_fuzz.register_op")
        else:
            raise RegistrationError(
                f"autocast={what!r} for {device}: use a floating torch dtype, or one of "
                f"{', '.join(_POLICIES)}"
            )
    return rules
