"""Find the guilty part of a compiler with torch's own ``CompilerBisector``, in this process.

The ladder of backends shows the rung of a divergence. Within the last two rungs torch can find
more: it switches off passes, decompositions and lowerings, one kind after another, and then bisects
the applications of the kind that matters (``torch._inductor.compiler_bisector``, used only here).
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout

__all__ = ["BISECTED", "blame"]

# The rungs with parts that the bisector knows, in its order.
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

    rung: one of `BISECTED`. agrees: compiles and runs the case with ``torch.compile``, whose
    backend the bisector replaces, and returns whether it agrees. It is called 10 to 25 times.
    """
    from torch._inductor.compiler_bisector import CompilerBisector

    def good() -> bool:
        now = CompilerBisector.get_backend()
        if now is None or _RUNGS.index(now) < _RUNGS.index(rung):
            return True  # the ladder has checked this
        return agrees()

    # A separate folder, since it removes it: not that of the user's own bisection.
    CompilerBisector.in_process_cache = tempfile.mkdtemp(prefix="amp-fuzz-bisect-")
    with redirect_stdout(io.StringIO()):  # it prints its steps
        result = CompilerBisector.do_bisect(good)
    if result is None or result.subsystem is None:
        return ""
    part = re.sub(rf"^{rung}_", "", result.subsystem)
    about = result.debug_info or ""
    if part == "lowerings":  # it names a node: the second tanh of a graph is tanh_1
        about = re.sub(r"_\d+$", "", about)
    return f"{part}: {about}" if about and about != result.subsystem else part
