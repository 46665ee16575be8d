"""The private parts of torch that the reference stands on: that they exist and what they do.

If torch changes one of them, a test here fails with its name, and not some comparison elsewhere.
"""

from __future__ import annotations

import ast
import gc
import inspect
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from amp_fuzz.reference import dispatch, kernels, queries

KEY = "AutocastIPU"
Calls = list[tuple[str, Any]]


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    assert not dispatch.is_on()
    yield
    dispatch.switch(on=False)


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Define an op, ``amp_fuzz_test::twice``, with a kernel on the reference's key and on CPU."""
    seen: Calls = []
    library = torch.library.Library("amp_fuzz_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")

    def on_key(keyset: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append((KEY, keyset))
        return torch.ops.amp_fuzz_test.twice.default.redispatch(dispatch.after(keyset), x)

    def on_cpu(x: torch.Tensor) -> torch.Tensor:
        seen.append(("CPU", None))
        return x * 2

    library.impl("twice", on_key, KEY, with_keyset=True)
    library.impl("twice", on_cpu, "CPU")
    yield seen
    library._destroy()


def twice(calls: Calls) -> list[str]:
    """Call the op, and return the keys whose kernels it went through."""
    calls.clear()
    assert torch.equal(torch.ops.amp_fuzz_test.twice(torch.ones(2)), torch.full((2,), 2.0))
    return [key for key, _ in calls]


def run_alone(program: str) -> str:
    """Run a program in a fresh process, where no test has touched the dispatcher."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- the names


def private_names(module: ModuleType) -> set[str]:
    """Return the private names of torch in a module's source, as ``_C.name`` or ``name``."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch._C":
            names.add(node.attr)
    return names


def test_every_private_name_in_use_is_known_here() -> None:
    assert private_names(dispatch) == {
        "DispatchKey",
        "DispatchKeySet",
        "_AutoDispatchBelowAutograd",
        "_ExcludeDispatchKeyGuard",
        "_dispatch_keyset_full_after",
        "_dispatch_tls_is_dispatch_key_excluded",
        "_dispatch_tls_is_dispatch_key_included",
        "_dispatch_tls_set_dispatch_key_excluded",
        "_dispatch_tls_set_dispatch_key_included",
        "_functorch",
        "_get_obj_in_tls",
        "_is_key_in_tls",
        "_stash_obj_in_tls",
    }


@pytest.mark.parametrize("name", sorted(private_names(dispatch)))
def test_every_private_name_in_use_exists(name: str) -> None:
    assert hasattr(torch._C, name)


@pytest.mark.parametrize("name", queries._NAMES)
def test_every_query_that_is_wrapped_exists(name: str) -> None:
    assert callable(getattr(torch, name))


def test_the_private_query_that_is_wrapped_exists() -> None:
    assert getattr(torch._C, queries._ANY)() is False


def test_the_depth_of_transforms_is_told() -> None:
    depths = [dispatch.transform_depth()]

    def loss(x: torch.Tensor) -> torch.Tensor:
        depths.append(dispatch.transform_depth())
        return x.sum()

    torch.func.vmap(torch.func.grad(loss))(torch.ones(2, 3))
    assert depths == [0, 2]


# --- the key


@pytest.mark.thorough
def test_the_key_may_be_switched_on_before_anything_has_a_kernel_on_it() -> None:
    """A quirk does that, in a program without autocast: no op may raise for want of a kernel."""
    assert (
        run_alone(
            """
        import torch
        from amp_fuzz.reference import intercepting
        from amp_fuzz.upstream import quirks

        with quirks(["torchax-composites"]), intercepting():
            print(torch.ones(2).neg().abs().tolist())
        """
        )
        == "[1.0, 1.0]"
    )


def test_torch_has_no_kernel_on_the_key() -> None:
    program = f"""
        import torch
        names = torch._C._dispatch_get_all_op_names()
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        assert sum(has(name, "AutocastCPU") for name in names) > 100
        print([name for name in names if has(name, "{KEY}")])
    """
    assert run_alone(program) == "[]"


@pytest.mark.thorough
def test_the_key_is_off_in_a_fresh_process_and_in_a_fresh_thread() -> None:
    program = f"""
        import torch
        print(torch._C._dispatch_tls_is_dispatch_key_included("{KEY}"),
              torch._C._dispatch_tls_is_dispatch_key_excluded("{KEY}"))
    """
    assert run_alone(program) == "False True"
    dispatch.switch(on=True)
    found = []
    thread = threading.Thread(target=lambda: found.append(dispatch.is_on()))
    thread.start()
    thread.join()
    assert found == [False]
    assert dispatch.is_on()


def test_switching_off_leaves_what_a_fresh_thread_has() -> None:
    dispatch.switch(on=True)
    dispatch.switch(on=False)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)


def test_the_key_comes_before_autograd_and_every_backend() -> None:
    """A cast made in a kernel is differentiated: that is how gradients reach the weight."""
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, KEY))
    for later in ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "CPU", "CUDA"):
        assert after.has(getattr(torch._C.DispatchKey, later))
    for earlier in (KEY, "FuncTorchBatched", "PythonTLSSnapshot"):
        assert not after.has(getattr(torch._C.DispatchKey, earlier))


# --- kernels


def test_a_kernel_is_called_only_while_the_key_is_on(calls: Calls) -> None:
    assert twice(calls) == ["CPU"]
    dispatch.switch(on=True)
    assert dispatch.is_on()
    assert twice(calls) == [KEY, "CPU"]
    dispatch.switch(on=False)
    assert not dispatch.is_on()
    assert twice(calls) == ["CPU"]


def test_excluding_wins_over_including_and_ends_with_the_block(calls: Calls) -> None:
    dispatch.switch(on=True)
    with dispatch.exclude():
        assert twice(calls) == ["CPU"]
        with dispatch.exclude():
            assert twice(calls) == ["CPU"]
        assert twice(calls) == ["CPU"]
    assert twice(calls) == [KEY, "CPU"]
    with pytest.raises(ZeroDivisionError), dispatch.exclude():
        raise ZeroDivisionError
    assert twice(calls) == [KEY, "CPU"]


def test_a_kernel_gets_the_keys_of_its_dispatch_and_can_go_on_after_its_own(calls: Calls) -> None:
    dispatch.switch(on=True)
    twice(calls)
    keyset = calls[0][1]
    assert isinstance(keyset, torch._C.DispatchKeySet)
    keys = torch._C.DispatchKey
    assert [keyset.has(key) for key in (getattr(keys, KEY), keys.CPU)] == [True, True]
    after = dispatch.after(keyset)
    assert [after.has(key) for key in (getattr(keys, KEY), keys.CPU)] == [False, True]


def test_the_first_key_comes_before_function_transforms_and_is_left_again() -> None:
    library = torch.library.Library("aten", "IMPL")
    batched = []

    def kernel(keyset: Any, x: torch.Tensor) -> torch.Tensor:
        batched.append(torch._C._functorch.is_batchedtensor(x))
        after = dispatch.after(keyset, dispatch.FIRST)
        return torch.ops.aten.lgamma.default.redispatch(after, x)

    library.impl("lgamma", kernel, dispatch.FIRST, with_keyset=True)
    try:
        with dispatch.first():
            y = torch.func.vmap(torch.lgamma)(torch.ones(2, 3))
        assert batched[0]
        assert torch.equal(y, torch.zeros(2, 3))
        batched.clear()
        torch.lgamma(torch.ones(2))
        assert batched == []
    finally:
        library._destroy()


def test_a_redispatch_goes_on_through_autograd() -> None:
    library = torch.library.Library("aten", "IMPL")

    def passes_on(keyset: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.digamma.default.redispatch(dispatch.after(keyset), x)

    library.impl("digamma", passes_on, KEY, with_keyset=True)
    try:
        dispatch.switch(on=True)
        x = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(torch.digamma(x).sum(), x)
        assert torch.equal(gradient, torch.polygamma(1, x))
    finally:
        dispatch.switch(on=False)
        library._destroy()


@pytest.mark.thorough
def test_registering_takes_one_op_and_lets_all_others_fall_through() -> None:
    program = """
        import torch
        from amp_fuzz.reference import dispatch

        seen = []

        def kernel(keyset, *args, **kwargs):
            seen.append(type(keyset).__name__)
            with dispatch.exclude():
                return torch.ops.aten.mm.default(*args, **kwargs)

        dispatch.register("mm", kernel)
        x = torch.ones(2, 2, requires_grad=True)
        dispatch.switch(on=True)
        y = torch.relu(torch.matmul(x, x)) + torch.bmm(x[None], x[None])[0]
        y.sum().backward()
        dispatch.switch(on=False)
        torch.mm(x, x)
        print(seen, y.tolist(), x.grad.tolist())
    """
    # One product forward; the backward pass runs under the key too, and makes two.
    assert run_alone(program) == (
        "['DispatchKeySet', 'DispatchKeySet', 'DispatchKeySet'] "
        "[[4.0, 4.0], [4.0, 4.0]] [[8.0, 8.0], [8.0, 8.0]]"
    )


def test_the_key_works_whatever_the_device_of_the_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatch.switch(on=True)
    with FakeTensorMode():
        for device in ("cpu", "cuda", "xpu", "mps", "mtia", "maia"):
            x = torch.ones(2, device=device)
            assert torch.relu(x).device.type == device


# --- what a thread keeps


class _Kept:
    """An object that a weak reference can watch."""


def test_a_stashed_object_lives_until_its_thread_ends() -> None:
    """Older torch does not count the reference that it takes over: the object died at once."""
    seen: list[weakref.ref[_Kept]] = []

    def keep() -> None:
        assert dispatch.stashed("amp_fuzz_test") is None
        value = _Kept()
        seen.append(weakref.ref(value))
        before = sys.getrefcount(value)
        dispatch.stash("amp_fuzz_test", value)
        assert sys.getrefcount(value) == before + 1
        del value
        gc.collect()
        assert dispatch.stashed("amp_fuzz_test") is seen[0]()
        seen.append(weakref.ref(dispatch.stashed("amp_fuzz_test")))

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    assert len(seen) == 2  # nothing in the thread failed
    assert dispatch.stashed("amp_fuzz_test") is None


def test_a_reference_that_torch_does_not_count_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch before 2.13: it stashes, and counts nothing."""
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", lambda name, value: None)
    value = _Kept()
    before = sys.getrefcount(value)
    dispatch.stash("amp_fuzz_test", value)
    assert sys.getrefcount(value) == before + 1


# --- overloads


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("mm", "aten::mm(Tensor self, Tensor mat2) -> Tensor"),
        ("sum.dim_IntList", "aten::sum.dim_IntList(Tensor self, int[1]? dim"),
    ],
)
def test_overloads_are_found_by_their_names(name: str, schema: str) -> None:
    assert str(dispatch.overload_of(name)._schema).startswith(schema)


@pytest.mark.parametrize("name", ["no_such_op", "mm.no_such_overload"])
def test_an_overload_that_torch_lacks_is_none(name: str) -> None:
    assert dispatch.overload_of(name) is None


def test_what_a_schema_tells_of_an_argument() -> None:
    """`dtype=` is found by name, and an optional tensor by its type."""
    arguments = dispatch.overload_of("softmax.int")._schema.arguments
    assert [(a.name, a.default_value, a.kwarg_only) for a in arguments][-1] == (
        "dtype",
        None,
        False,
    )
    bias = dispatch.overload_of("bilinear")._schema.arguments[-1]
    assert bias.type == torch.OptionalType.ofTensor()


def test_a_view_is_told_from_what_owns_its_memory() -> None:
    x = torch.ones(2)
    assert [t._is_view() for t in (x, x.clone(), x[:1], x.view(2))] == [False, False, True, True]


def test_only_ops_of_the_device_get_kernels_that_autocast_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[tuple[str, str]] = []
    monkeypatch.setattr(kernels, "_keys", [dispatch.OWN])
    monkeypatch.setattr(kernels, "_registered", set())
    monkeypatch.setattr(dispatch, "register", lambda name, kernel, key: placed.append((name, key)))
    kernels.register_ahead()
    assert ("softmax.int", dispatch.FIRST) in placed
    assert {key for _, key in placed} == {dispatch.FIRST}
