"""Decide whether two implementations raise the same error in different words."""

from __future__ import annotations

import re

from amp_fuzz.backends.harness import Observation

__all__ = ["alike", "complaints", "raised", "refuses"]


def raised(seen: Observation) -> tuple[str, str]:
    """Return the kind and the message of the error that ended a case, without its line."""
    return ("", "") if seen.raised is None else (seen.raised.kind, seen.raised.message)


def refuses(seen: Observation) -> bool:
    """Return whether the error is the one that autocast raises for a banned op."""
    return seen.raised is not None and "unsafe to autocast" in seen.raised.message


def alike(one: Observation, other: Observation) -> bool:
    """Return whether two errors have the same complaint, whatever wraps them."""
    return not complaints(one).isdisjoint(complaints(other))


def complaints(seen: Observation) -> set[str]:
    """Return the complaints of an error, without its wrapper, which quotes ``SomeError: `` inside.

    A fake kernel is Python: its message begins with the name of its own op and has Python dtypes.
    Its ``linalg.inv_ex: ... Got torch.float16`` is the kernel's ``linalg.inv: ... Got Half``. An
    error's hint depends on anomaly detection, which AOTAutograd turns on.
    """
    return {_plain(text) for text in _texts(seen)}


_DTYPES = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"}
_NAMES = "|".join([*_DTYPES, *_DTYPES.values()])
_SPELLED = re.compile(rf"\b(?:torch\.|c10::|CPU)?({_NAMES})(?:Tensor|Type)?\b")
# The CPU's convolutions say this; the fake one does not.
_ASIDE = " or input should be a MKLDNN tensor and weight is a dense tensor"
# Kernels and fake kernels reject products of two dtypes in these words.
_REFUSED = re.compile(
    r"(expected m1 and m2 to|mat1 and mat2 must|addmv input tensors must) have the same dtype, but"
    r" got|expected scalar type \S+ but found "
)
_PLAIN = {"float": "float32", "double": "float64"}


def _plain(text: str) -> str:
    text = re.sub(r"^[\w.:]+: ", "", text).partition(" Hint: ")[0].removesuffix(_ASIDE)
    text = re.sub(r"\b0x[0-9a-f]+", "0x", text)  # an address
    text = re.sub(r"\bline \d+\b", "line", text)  # of source that is made for the program
    text = re.sub(r"<class '[\w.]+'>(, <class '[\w.]+'>)+", "classes", text)  # of what was saved
    text = _SPELLED.sub(lambda m: _DTYPES.get(m[1], m[1]), text)
    if _REFUSED.match(text):
        named = re.findall(r"\b(?:float|double|b?float\d+)\b", text)
        return " and ".join(sorted({_PLAIN.get(name, name) for name in named}))
    return text


def _texts(seen: Observation) -> set[str]:
    if seen.raised is None:
        return set()
    lines = [line.strip() for line in seen.raised.message.splitlines()]
    inner = {m[1] for line in lines if (m := re.fullmatch(r"(?:\w*Error: )+(.+)", line))}
    # Dynamo quotes the error of a fake kernel: got RuntimeError('...')
    quoted = (re.search(r"\bgot \w*Error\((['\"])(.+)\1\)", line) for line in lines)
    inner |= {m[2] for m in quoted if m}
    if seen.raised.kind == "TracingCheckError":  # it shows how graphs differ, or quotes an error
        after = lines.index("Exception:") + 1 if "Exception:" in lines else 1
        inner = inner or set(lines[after : after + 1])
    return inner or set(lines[:1])
