"""Connect the CPU tensors of a plan with a program that runs on JAX.

A repro contains these functions word for word: they use only torch, jax, numpy, torchax and each
other. torchax must have been imported
(`amp_fuzz.backends.torchax.compat.load`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy
import torch
import torchax
import torchax.interop

__all__ = ["Autocast", "TorchAutocast", "on_jax", "on_torchax", "recomputed"]


class Autocast:
    """``torchax.amp.autocast`` as `torch.autocast` is: an object, to enter or decorate with.

    torchax has no ``enabled=``: its dtype None is off. It has no weight cache either.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):  # type: ignore[no-untyped-def]
        self.given = {} if dtype is None else {"dtype": dtype}
        self.given = self.given if enabled else {"dtype": None}
        self.entered = []

    def __enter__(self):  # type: ignore[no-untyped-def]
        self.entered.append(torchax.amp.autocast("jax", **self.given))
        self.entered[-1].__enter__()
        return self

    def __exit__(self, *error):  # type: ignore[no-untyped-def]
        self.entered.pop().__exit__(*error)

    def __call__(self, function):  # type: ignore[no-untyped-def]
        def decorated(*args, **kwargs):  # type: ignore[no-untyped-def]
            with self:
                return function(*args, **kwargs)

        return decorated


class TorchAutocast(torch.autocast):
    """``torch.autocast("jax")``, which torchax takes part in by its device module alone."""

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):  # type: ignore[no-untyped-def]
        super().__init__("jax", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def array_of(x: torch.Tensor) -> Any:
    """Return a copy on JAX, bit for bit. Not `t2j_copy`, which compiles one for each new shape."""
    narrow = jax.numpy.bfloat16.dtype
    bits = x.detach().clone(memory_format=torch.contiguous_format)
    is_narrow = bits.dtype == torch.bfloat16
    return jax.device_put(
        bits.view(torch.int16).numpy().view(narrow) if is_narrow else bits.numpy()
    )


def tensor_of(array: Any) -> torch.Tensor:
    """Return a copy on the CPU, bit for bit. Not `j2t_copy`, which compiles one of bfloat16."""
    plain = numpy.array(array)
    is_narrow = plain.dtype == jax.numpy.bfloat16.dtype
    bits = torch.from_numpy(plain.view(numpy.int16) if is_narrow else plain)
    return bits.view(torch.bfloat16) if is_narrow else bits


def on_jax(program: Any, jitted: bool = False) -> Any:
    """Return a program as a function of CPU tensors that runs on JAX and is differentiated there.

    Forward it is `torchax.interop.jax_view` of the program, jitted by `jax.jit` if asked to; the
    backward pass is what `jax.vjp` makes of that, for the inputs that require grad. torch's
    gradient of a complex input is the conjugate of JAX's.

    Each call starts from the same random key. A function that JAX traces (a checkpoint) leaves a
    tracer as torchax's key, and every later draw would raise.
    """
    viewed = torchax.interop.jax_view(program)
    viewed = jax.jit(viewed) if jitted else viewed
    env = torchax.default_env()

    def function(*given: Any) -> Any:
        with env.override_property(prng=env.prng_key):
            return viewed(*given)

    class OnJax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
            given = [array_of(x) for x in inputs]
            ctx.trained = [i for i, needs in enumerate(ctx.needs_input_grad) if needs]

            def apart(*weights):  # type: ignore[no-untyped-def]
                """Return the outputs that have gradients, and all: the others have none."""
                whole = list(given)
                for i, weight in zip(ctx.trained, weights, strict=True):
                    whole[i] = weight
                outputs, inexact = function(*whole), jax.numpy.inexact
                return [o for o in outputs if jax.numpy.issubdtype(o.dtype, inexact)], outputs

            if ctx.trained:
                _, ctx.vjp, outputs = jax.vjp(apart, *(given[i] for i in ctx.trained), has_aux=True)
            else:
                outputs = function(*given)
            found = tuple(tensor_of(o) for o in outputs)
            ctx.smooth = [o.is_floating_point() or o.is_complex() for o in found]
            ctx.mark_non_differentiable(
                *(o for o, smooth in zip(found, ctx.smooth, strict=True) if not smooth)
            )
            return found

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
            starts = [c for c, smooth in zip(cotangents, ctx.smooth, strict=True) if smooth]
            starts = [array_of(c.resolve_conj().conj().resolve_conj()) for c in starts]
            grads = [None] * len(ctx.needs_input_grad)
            for i, grad in zip(ctx.trained, ctx.vjp(starts), strict=True):
                grads[i] = tensor_of(grad).conj().resolve_conj()
            return tuple(grads)

    return OnJax.apply


def on_torchax(program: Any) -> Any:
    """Return a program as a function of CPU tensors that runs on torchax's, op by op.

    The inputs that require grad do so there, and the backward pass is torch's own autograd on what
    the program made there, under whatever surrounds it.
    """
    env = torchax.default_env()

    class OnTorchax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, grads, *inputs):  # type: ignore[no-untyped-def]
            ctx.leaves = [env.j2t_iso(array_of(x)) for x in inputs]
            for leaf, needs in zip(ctx.leaves, ctx.needs_input_grad[1:], strict=True):
                leaf.requires_grad_(needs)
            with env, torch.set_grad_enabled(grads):
                ctx.outputs = program(*ctx.leaves)
            found = [tensor_of(o.jax()) for o in ctx.outputs]
            trained = [o.requires_grad for o in ctx.outputs]
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(
                *(o for o, trains in zip(found, trained, strict=True) if not trains)
            )
            return tuple(found)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
            given = [i for i, c in enumerate(cotangents) if c is not None]
            ends = [ctx.outputs[i] for i in given]
            starts = env.j2t_iso([array_of(cotangents[i].resolve_conj()) for i in given])
            with env:
                torch.autograd.backward(ends, starts, retain_graph=True)
            grads = [None if x.grad is None else tensor_of(x.grad.jax()) for x in ctx.leaves]
            for leaf in ctx.leaves:
                leaf.grad = None
            return None, *grads

    apply: Any = OnTorchax.apply
    return lambda *inputs: apply(torch.is_grad_enabled(), *inputs)


def recomputed(function, *args, use_reentrant=True):  # type: ignore[no-untyped-def]
    """Call a function as `jax.checkpoint` has it, torchax's own kind of checkpoint."""
    return torchax.interop.gradient_checkpoint(function)(*args)
