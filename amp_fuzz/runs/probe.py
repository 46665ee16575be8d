"""Print, as JSON, the autocast kernels of the torch that runs this, and what each of them casts.

`amp_fuzz.runs.policies` runs this text in other interpreters, so it imports torch alone. It calls
each kernel of each autocast key and looks at what arrives at the key below, autograd. There it
stops: nothing is computed, so any shapes and any numbers do, and no accelerator is needed.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla", "privateuseone")
LOW, HIGH = torch.bfloat16, torch.float32
CASTS = (torch.ops.aten.to.dtype,)  # what autocast calls


class Reached(Exception):
    """A call arrived below autocast."""


class Shell(torch.Tensor):
    """A tensor of any device, without values."""

    @staticmethod
    def __new__(cls, device: Any, dtype: torch.dtype) -> "Shell":
        made: Shell
        made = torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=dtype, device=device)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in CASTS:
            return cls(args[0].device, args[1])
        raise Reached(func, args, kwargs or {})


def key_of(device: str) -> str:
    """Return the name that a device has in dispatch keys."""
    return "PrivateUse1" if device == "privateuseone" else device.upper()


def known(key: str) -> bool:
    """Return whether this torch has a dispatch key."""
    try:
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", key)
    except RuntimeError:
        return False
    return True


def listed(key: str) -> list[str]:
    """Return the overloads that have a kernel for a key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if has(name, key))


def overload(name: str) -> Any:
    """Return an op of the dispatcher's name."""
    op, _, which = name[len("aten::") :].partition(".")
    return getattr(getattr(torch.ops.aten, op), which or "default")


def value(kind: object, device: str, tensor: Callable[[], Shell]) -> Any:
    """Return an argument of a schema's type."""
    text = str(kind)
    if text == "List[Optional[Tensor]]":  # of indices
        return [Shell(device, torch.int64)]
    if "Tensor" in text:
        return [tensor(), tensor()] if text.startswith("List") else tensor()
    plain: dict[str, Any] = {
        "float": 1.0,
        "bool": False,
        "str": "dimname::a",
    }  # names of dimensions are strings
    if text.startswith("List"):
        return [plain.get(text[5:-1], 1)] * 2
    return plain.get(text, 1)


def arguments(
    schema: Any, device: str, dtypes: list[torch.dtype]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of a call: its tensors take turns at dtypes, the rest is as it has to be."""
    count = iter(range(1000))

    def tensor() -> Shell:
        return Shell(device, dtypes[next(count) % len(dtypes)])

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for one in schema.arguments:
        kind = one.type
        text = str(kind)
        optional = text.startswith("Optional")
        if optional:
            kind, text = kind.getElementType(), str(kind.getElementType())
        if "Tensor" not in text and (optional or one.has_default_value()):
            if one.kwarg_only:
                continue
            given = one.default_value if one.has_default_value() else None
        else:
            given = value(kind, device, tensor)
        if one.kwarg_only:
            kwargs[one.name] = given
        else:
            args.append(given)
    return args, kwargs


def tensors(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of some arguments."""
    for item in items:
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors(item)


def seen(op: Any, device: str, dtypes: list[torch.dtype]) -> tuple[Any, Any, Any, Any] | str:
    """Call an op under autocast; return the op that is reached, its dtypes, and its dtype=."""
    args, kwargs = arguments(op._schema, device, dtypes)
    given = [t.dtype for t in tensors([*args, *kwargs.values()])]
    try:
        op(*args, **kwargs)
    except Reached as reached:
        to, args, kwargs = reached.args
        named = {a.name: v for a, v in zip(to._schema.arguments, args, strict=False)}
        named.update(kwargs)
        asked = named.get("dtype")
        casts = [t.dtype for t in tensors([*args, *kwargs.values()])]
        return to, given, casts, asked
    except RuntimeError as error:
        if "unsafe to autocast" in str(error):
            return "banned"
        return "error: " + str(error).split("\n")[0]
    return "error: it never arrived below autocast"


def policy(op: Any, device: str) -> str:
    """Return the policy of an op, as aten/src/ATen/autocast_mode.h names it, or "?" and why."""
    runs = {}
    for name, dtypes in {"high": [HIGH], "low": [LOW], "mixed": [LOW, HIGH]}.items():
        found = seen(op, device, dtypes)
        if isinstance(found, str):
            return found if found == "banned" else "? " + found
        runs[name] = found
    to, given, casts, asked = runs["low"]
    if to is not op and to._schema.name == op._schema.name and asked == HIGH:
        return "fp32_append_dtype"
    if to is not op:
        return "? it calls " + str(to)
    if casts == given and asked == HIGH:
        return "fp32_set_opt_dtype"
    after = {name: set(casts) for name, (_, _, casts, _) in runs.items()}
    if after == {"high": {LOW}, "low": {LOW}, "mixed": {LOW}}:
        return "lower_precision_fp"
    if after == {"high": {HIGH}, "low": {HIGH}, "mixed": {HIGH}}:
        return "fp32"
    if all(casts == given for _, given, casts, _ in runs.values()) and len(given) > 1:
        return "none"
    if after["high"] == {HIGH} and after["low"] == {LOW} and after["mixed"] == {HIGH}:
        return "promote"
    return "? it casts in a way of its own"


def main() -> None:
    """Print what this torch has."""
    warnings.simplefilter("ignore")
    found = {}
    for device in DEVICES:
        key = "Autocast" + key_of(device)
        names = [n for n in (listed(key) if known(key) else []) if n.startswith("aten::")]
        if not names:
            continue
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, LOW)
        torch.set_autocast_cache_enabled(False)
        torch._C._dispatch_tls_set_dispatch_key_included(key, True)
        with torch._C._AutoDispatchBelowAutograd():
            found[device] = {n[len("aten::") :]: policy(overload(n), device) for n in names}
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        torch.set_autocast_enabled(device, False)
    sys.stdout.write(json.dumps({"torch": torch.__version__, "devices": found}) + "\n")


if __name__ == "__main__":
    main()
