"""Products of sparse tensors: what autocast does not cast diverges, and no graph has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.catalogue import select
from amp_fuzz.oracle.judge import Verdict
from amp_fuzz.patching import patched
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.corrupted import Corrupted
from tests.helpers import call, case, x

PRODUCT = case([x("x0", 3, 8), x("x1", 8, 8)], call("sparse.mm", "x0", "x1"), backward="none")


def judged(backend: Backend) -> Verdict:
    """Return what is said of the product on a backend."""
    with quiet():
        return judge_of(backend, shipped(), "none").judge(PRODUCT)


@contextmanager
def uncast() -> Iterator[None]:
    """Leave sparse products as they are under autocast."""
    with patched(torch.sparse, "mm", torch.autocast("cpu", enabled=False)(torch.sparse.mm)):
        yield


def test_a_sparse_product_that_is_not_cast_diverges() -> None:
    assert judged(EagerBackend("cpu")).outcome == "agreed"
    found = judged(Corrupted(patches=uncast)).divergence
    assert found is not None
    assert (found.kind, found.expected, found.observed) == ("dtype", "bfloat16", "float32")


def test_a_compiler_is_given_no_sparse_tensor() -> None:
    compiled = backends()["compile[aot_eager]"]
    assert not any(
        compiled.supports(op.name, form) for op in select(["sparse"]) for form in op.forms
    )
    assert compiled.supports("grouped_mm", "function")
