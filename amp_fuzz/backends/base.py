"""The protocols of backends.

A backend is one real implementation that can run a case. Backends are found through the entry-point
group ``amp_fuzz.backends``: each entry is a function that returns a list of them.

A `Backend` can be run and judged. The other protocols are optional. With their methods, a backend
is also called by ``amp_fuzz.check`` (`Calls`), has scripts that import only torch (`Repros`), adds
facts to issues (`Described`), explains more (`Bisects`, `Explains`, `Watches`), and may have
kernels that vary from call to call (`Varies`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from amp_fuzz.backends.determinism import EXACT, Kernels
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, Plan, Precision
from amp_fuzz.cases.program import FP8, TensorSpec, regions, show_context, statements
from amp_fuzz.catalogue import CATALOGUE, Op

__all__ = [
    "Alone",
    "Availability",
    "Backend",
    "BackendError",
    "Bisects",
    "Call",
    "Calls",
    "Described",
    "Explains",
    "Facts",
    "Mixes",
    "Precise",
    "Quantises",
    "Repros",
    "Shortens",
    "Varies",
    "Watches",
    "documentation",
    "facts_of",
    "kernels_of",
    "misplaced",
    "mixes",
    "recipes_of",
    "shadows_of",
    "supports",
    "unsupported",
]


class BackendError(ValueError):
    """A backend is unknown or cannot be used here. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used here: ``ready``, ``missing`` or ``broken``, and why.

    `detail` is a version when ready, the command that installs it when missing, the error when
    broken.
    """

    status: Literal["ready", "missing", "broken"]
    detail: str


class Backend(Protocol):
    """One real implementation of autocast.

    name: as in ``--backends``. device: the device type whose policy table it implements. trains:
    whether it can run backward passes. values: whether results have values (fake devices have only
    dtypes and shapes). exact: whether it runs the reference's kernels, so results are equal bit for
    bit; otherwise `oracle.rounding` decides whether rounding explains a difference. repeats:
    whether two calls of a program in one case run the same code, so their results are equal bit for
    bit; a compiler that gets both calls at once may fuse them differently.
    """

    @property
    def name(self) -> str:
        """The name."""

    @property
    def device(self) -> str:
        """The device type."""

    @property
    def trains(self) -> bool:
        """Whether backward passes run."""

    @property
    def values(self) -> bool:
        """Whether results have values."""

    @property
    def exact(self) -> bool:
        """Whether it runs the reference's kernels."""

    @property
    def repeats(self) -> bool:
        """Whether two calls of a program run the same code."""

    def availability(self) -> Availability:
        """Return whether it can be used here."""

    def supports(self, op: str, form: str) -> bool:
        """Return whether the implementation can express a call of a catalogue op in that form."""

    def fit(self, case: Case) -> Case:
        """Return the case without what the implementation documents as unsupported."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases and return one observation each; a backend may pack them together."""

    def ladder(self) -> Sequence[Backend]:
        """Return the backends that do less than this one, the least first; usually none.

        The stage of a divergence is the first of these that diverges too.
        """

    def reference(self) -> ReferenceRuntime:
        """Return the reference, on the same tensors and kernels as in `run`."""


# -- optional protocols ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a backend, for issues and for the cost of a search.

    area: the area in the title of an issue; by default ``amp`` and the device. made: how a program
    gets there, "compiled with `torch.compile`". promise: a Markdown sentence with the documented
    promise about results; "" if that is autocast's own. seen: a sentence on how a divergence was
    observed. compiles: whether each program is compiled, which takes seconds. reenters: whether
    what was compiled in one call serves a later call, under another autocast too. cached: whether
    torch's caches are filled under another state first. saves: whether a program can be saved and
    loaded. partial: a function that may raise for a callable regardless of autocast; such an error
    is no finding of a check. library: the one that it needs besides torch. installs: what pip must
    install for scripts that run it with amp-fuzz. scripts: whether a script without amp-fuzz can
    show a case. imports: the modules that its library imports at the first call, where that takes
    seconds. implements: the facts about each of its cases by which promises of torch's documents
    are about it (`amp_fuzz.records.facts`); none if torch promises nothing about it.
    """

    area: str = ""
    made: str = ""
    promise: str = ""
    seen: str = ""
    compiles: bool = False
    reenters: bool = False
    cached: bool = False
    saves: bool = False
    partial: str = ""
    library: str = ""
    installs: str = ""
    scripts: bool = True
    imports: tuple[str, ...] = ()
    implements: tuple[str, ...] = ("backend=torch",)


@runtime_checkable
class Described(Protocol):
    """A backend with other facts than the defaults of `Facts`."""

    def facts(self) -> Facts:
        """Return the facts."""


def facts_of(backend: object) -> Facts:
    """Return the facts of a backend, by default the default ones."""
    return backend.facts() if isinstance(backend, Described) else Facts()


@runtime_checkable
class Shortens(Protocol):
    """Writes a script as the users of this backend would, where its pieces do more."""

    def short(self, code: str) -> str:
        """Return the source of a script, shortened as far as this backend is concerned."""


@runtime_checkable
class Repros(Protocol):
    """Pieces of source for scripts that show a case on a backend without amp-fuzz.

    `amp_fuzz.backends.reproducing.TorchRepros` has them for a program that runs unchanged under
    ``torch.autocast``. Scripts of a backend without this protocol judge the case with amp-fuzz.
    """

    def setup(self, names: Set[str]) -> list[str]:
        """Return the first lines, beginning with the device's name. names: the names in use."""

    def configuration(self, case: Case) -> str:
        """Return assignments that configure torch for a case, or ""."""

    def source(self, case: Case) -> str:
        """Return the program of a case, and its conversion to what the backend runs."""

    def driver(self, text: str, case: Case) -> str:
        """Return the source of a case's driver as the backend runs it."""

    def placed(self, text: str, spec: TensorSpec) -> str:
        """Return the source of an input on the device. text: the source of its CPU values."""

    def cleanup(self) -> list[str]:
        """Return lines that remove what a run leaves behind."""


Call: TypeAlias = Callable[[Runtime, Callable[..., Any] | None], Observation]
"""Calls the checked callable under a runtime, through another function if one is given."""


@runtime_checkable
class Calls(Protocol):
    """How ``amp_fuzz.check`` calls a callable on a backend, instead of a case's program.

    `amp_fuzz.backends.torch_base.TorchBackend` implements it for a callable that is called
    unchanged.
    """

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return why a callable that holds these modules cannot be called here, or ""."""

    def infers(self, function: Callable[..., Any]) -> bool:
        """Return whether a callable has no backward pass here."""

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Call a callable under a plan, and return the observation."""


@runtime_checkable
class Watches(Protocol):
    """A backend whose autocast can be observed."""

    def watching(self, watched: Callable[[Any], Any]) -> Backend:
        """Return the backend with another autocast, built from its own."""


@runtime_checkable
class Precise(Protocol):
    """A backend whose products of float32 have a precision to choose.

    precisions: what a case's plan may have, each as often as it is drawn.
    """

    @property
    def precisions(self) -> Sequence[Precision]:
        """The precisions."""


@runtime_checkable
class Quantises(Protocol):
    """A backend whose linear layers quantise, in FP8 regions."""

    @property
    def recipes(self) -> Sequence[FP8]:
        """The regions that a program may have, each as often as it is drawn."""

    @property
    def caches(self) -> bool:
        """Whether a layer can keep its quantised weight, by ``is_first_microbatch``."""


@runtime_checkable
class Configurable(Protocol):
    """A backend whose numbers depend on settings of torch: see `amp_fuzz.cases.settings`."""

    @property
    def settings(self) -> Sequence[str]:
        """The settings that a case's plan may have; mostly none."""


@runtime_checkable
class Mixes(Protocol):
    """A backend of a device whose programs may have CPU tensors beside the device's."""

    @property
    def mixes(self) -> bool:
        """Whether they may; on the CPU, and where a program is compiled, they may not."""


@runtime_checkable
class Alone(Protocol):
    """A backend whose device may be taken by one process only."""

    def alone(self) -> bool:
        """Return whether a run must have one worker."""


@runtime_checkable
class Bisects(Protocol):
    """A backend that can find its guilty part."""

    def blame(self, agrees: Callable[[], bool]) -> str:
        """Return the part without which a case agrees, or "". agrees: runs the case again."""


@runtime_checkable
class Explains(Protocol):
    """A backend that adds casts itself."""

    def explicit(self, case: Case) -> str:
        """Return the casts that it adds to a case's program, as comments, or ""."""


@runtime_checkable
class Varies(Protocol):
    """A backend of a device with kernels that are documented as nondeterministic."""

    def kernels(self) -> Kernels:
        """Return these kernels."""

    def shadows(self) -> ReferenceRuntime:
        """Return the reference on CPU tensors, which shadows can follow."""


def kernels_of(backend: object) -> Kernels:
    """Return the kernels of a backend that are documented as nondeterministic; mostly none."""
    return backend.kernels() if isinstance(backend, Varies) else EXACT


def shadows_of(backend: Backend) -> ReferenceRuntime:
    """Return the reference that shadows follow on a backend."""
    return backend.shadows() if isinstance(backend, Varies) else backend.reference()


def mixes(backend: object) -> bool:
    """Return whether a backend takes CPU tensors beside those of its device; mostly not."""
    return isinstance(backend, Mixes) and backend.mixes


def misplaced(case: Case, backend: Backend) -> bool:
    """Return whether a case has CPU tensors that a backend does not take beside its device's."""
    return case.program.mixed and backend.device != "cpu" and not mixes(backend)


def documentation(page: str) -> str:
    """Return the address of a page of the installed torch's documentation."""
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return f"https://docs.pytorch.org/docs/{version}/{page}"


# -- which there are ------------------------------------------------------------------------------


def recipes_of(backend: object) -> Sequence[FP8]:
    """Return the FP8 regions that a backend has; mostly none."""
    return backend.recipes if isinstance(backend, Quantises) else ()


def caches(backend: object) -> bool:
    """Return whether FP8 layers of a backend can keep their quantised weights; mostly not."""
    return isinstance(backend, Quantises) and backend.caches


def supports(backend: Backend, op: Op, form: str) -> bool:
    """Return whether a backend can express a call: of an FP8 layer, only with recipes."""
    return (not op.fp8 or bool(recipes_of(backend))) and backend.supports(op.name, form)


def unsupported(case: Case, backend: Backend) -> str:
    """Return the first call or FP8 region that a backend cannot express, or ""."""
    for call in statements(case.program.body):
        op = CATALOGUE.get(call.op)
        fp8 = op is not None and op.fp8  # it is None for a callable of the user's
        if (fp8 and not recipes_of(backend)) or not backend.supports(call.op, call.form):
            return f"{call.op} as {call.form}"
        if fp8 and "is_first_microbatch" in dict(call.kwargs) and not caches(backend):
            return f"{call.op} with is_first_microbatch"
    known = {context.recipe for context in recipes_of(backend)}
    for context in regions(case.program.body):
        if isinstance(context, FP8) and context.recipe not in known:
            return show_context(context)
    return ""
