"""Which part of a compiler is to blame: torch's own ``CompilerBisector``, asked in process.

The ladder of backends says at which rung a divergence comes in. Within the last two rungs torch can
say more: it switches passes, decompositions and lowerings off, one kind after another, and then
bisects the applications of the kind that matters (``torch._inductor.compiler_bisector``, the one
place that touches it).
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout

__all__ = ["BISECTED", "blame"]

# In the bisector's order; the rungs that have parts of which it knows.
_RUNGS = (
    "eager",
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "inductor",
)
BISECTED = ("aot_eager_decomp_partition", "inductor")


def blame(rung: str, agrees: Callable[[], bool]) -> str:
    """Return the part of a rung without which a case agrees, as ``lowerings: avg_pool3d``, or "".

    rung: one of `BISECTED`. agrees: compiles and runs the case by ``torch.compile``, whose backend
    the bisector replaces, and returns whether it agrees. It is called some 10 to 25 times.
    """
    from torch._inductor.compiler_bisector import CompilerBisector

    def good() -> bool:
        now = CompilerBisector.get_backend()
        if now is None or _RUNGS.index(now) < _RUNGS.index(rung):
            return True  # the ladder has been there
        return agrees()

    # Its own folder, which it removes: not the one of a bisection that the user may have begun.
    CompilerBisector.in_process_cache = tempfile.mkdtemp(prefix="amp-fuzz-bisect-")
    with redirect_stdout(io.StringIO()):  # it narrates
        result = CompilerBisector.do_bisect(good)
    if result is None or result.subsystem is None:
        return ""
    part = re.sub(rf"^{rung}_", "", result.subsystem)
    about = result.debug_info or ""
    if part == "lowerings":  # it says the name of a node: the second tanh of a graph is tanh_1
        about = re.sub(r"_\d+$", "", about)
    return f"{part}: {about}" if about and about != result.subsystem else part
