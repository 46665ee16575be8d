"""Helpers of generated source: plain torch, so a repro can contain them word for word.

The harness uses these functions directly, and repros print them with `inspect.getsource`. They use
only torch, the standard library, and each other.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = [
    "Interrupted",
    "as_custom_op",
    "as_function",
    "as_function_apart",
    "autocast_dtype",
    "copy_halves",
    "cotangent",
    "decided",
    "exported",
    "forward_ad",
    "freeze",
    "frozen",
    "half_by_product",
    "halved",
    "holding",
    "in_thread",
    "module_of",
    "nudge",
    "optimised",
    "recast",
    "recompute",
    "reloaded",
    "renewed",
    "saving_products",
    "set_data",
    "sums",
    "total",
    "traced",
    "trains",
    "twice",
    "undecorated",
    "with_hook",
    "with_post_hook",
]


class Interrupted(Exception):
    """Raised inside a context on purpose."""


def trains(outputs):  # type: ignore[no-untyped-def]
    """Return the outputs that a backward pass can start from."""
    return [o for o in outputs if o.requires_grad]


def cotangent(output):  # type: ignore[no-untyped-def]
    """Return small values, exact in every dtype, to start a backward pass from."""
    steps = torch.arange(output.numel(), device=output.device) % 4
    return (steps.to(output.dtype) - 1.5).reshape(output.shape)


def nudge(weights):  # type: ignore[no-untyped-def]
    """Change each weight in place, so a stale copy shows."""
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def halved(x):  # type: ignore[no-untyped-def]
    """Return other values of the same kind: half of each. Integers stay."""
    return x * 0.5 if x.is_floating_point() or x.is_complex() else x


def copy_halves(weights):  # type: ignore[no-untyped-def]
    """Copy half of each weight into it, unseen by its version counter."""
    for weight in weights:
        weight.data.copy_(halved(weight.detach()))  # type: ignore[no-untyped-call]


def set_data(weights):  # type: ignore[no-untyped-def]
    """Give each weight other memory, with half of its values."""
    for weight in weights:
        weight.data = halved(weight.detach())  # type: ignore[no-untyped-call]


def recast(weights):  # type: ignore[no-untyped-def]
    """Give each weight half of its values in another dtype, as Module.to does."""
    for weight in weights:
        half = halved(weight.detach())  # type: ignore[no-untyped-call]
        other = torch.bfloat16 if half.dtype is torch.float32 else torch.float32
        weight.data = half if half.is_complex() else half.to(other)


def renewed(weight):  # type: ignore[no-untyped-def]
    """Return a new leaf with half of a weight's values."""
    half = halved(weight.detach())  # type: ignore[no-untyped-call]
    return half.requires_grad_()


def freeze(weights):  # type: ignore[no-untyped-def]
    """Halve the weights in place; every other one requires grad no more, or again."""
    nudge(weights)  # type: ignore[no-untyped-call]
    for weight in weights[::2]:
        weight.requires_grad_(not weight.requires_grad)


def half_by_product(grad):  # type: ignore[no-untyped-def]
    """Return half of a gradient, rounded as a product is where autocast is on."""
    if grad is None:  # as compiled functions give it to hooks, for weights without a gradient
        return None
    half = grad.new_full((1, 1), 0.5)
    return torch.mm(grad.reshape(-1, 1), half).reshape(grad.shape).to(grad.dtype)


def with_hook(weight):  # type: ignore[no-untyped-def]
    """Let a hook halve each gradient of a weight. Return a list that gets the whole one."""
    seen = [None]

    def hook(grad):  # type: ignore[no-untyped-def]
        seen[0] = None if grad is None else grad.detach().clone()
        return half_by_product(grad)  # type: ignore[no-untyped-call]

    weight.register_hook(hook)
    return seen


def with_post_hook(weight):  # type: ignore[no-untyped-def]
    """Let a hook halve the gradient of a weight once it is accumulated, as `with_hook` does."""
    seen = [None]

    def hook(weight):  # type: ignore[no-untyped-def]
        seen[0] = None if weight.grad is None else weight.grad.detach().clone()
        weight.grad = half_by_product(weight.grad)  # type: ignore[no-untyped-call]

    weight.register_post_accumulate_grad_hook(hook)
    return seen


def uncompiled(function, *args):  # type: ignore[no-untyped-def]
    """Call a function. Compilers leave it to eager."""
    return function(*args)


def decided(x):  # type: ignore[no-untyped-def]
    """Return a condition of a branch that depends on data."""
    return x.isfinite().all()


@contextmanager
def autocast_dtype(device, dtype):  # type: ignore[no-untyped-def]
    """Let contexts that name no dtype take this one."""
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device, before)


def in_thread(function: Any, *args: Any) -> Any:
    """Call a function in a new thread and return, or raise, what it returns or raises."""
    box: list[Any] = []

    def call():  # type: ignore[no-untyped-def]
        torch.get_num_threads()  # MKL learns it when asked: a first FFT would round differently
        try:
            box.append((function(*args), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result


def twice(x):  # type: ignore[no-untyped-def]
    """Return two copies of a tensor along a new first dimension, by no op that autocast casts."""
    return x.expand(2, *x.shape).clone(memory_format=torch.contiguous_format)


def total(outputs):  # type: ignore[no-untyped-def]
    """Return a loss whose gradients are those of a backward pass from the cotangents."""
    starts: list[Any] = trains(outputs)  # type: ignore[no-untyped-call]
    terms = [(o * cotangent(o)).sum() for o in starts]  # type: ignore[no-untyped-call]
    return sum([t.real if t.is_complex() else t for t in terms], torch.zeros(()))


def sums(outputs):  # type: ignore[no-untyped-def]
    """Return a sum of each output that can be differentiated, with the weights of a cotangent."""
    terms = [o.real if o.is_complex() else o for o in outputs]
    terms = [(o * cotangent(o)).sum() for o in terms if o.is_floating_point()]  # type: ignore[no-untyped-call]
    return torch.stack([t.double() for t in terms]) if terms else torch.zeros(1)


def forward_ad(function, primals, tangents):  # type: ignore[no-untyped-def]
    """Return a function's outputs and their tangents, as torch.func.jvp does, by dual tensors."""
    with torch.autograd.forward_ad.dual_level():
        pairs = zip(primals, tangents, strict=True)
        outputs = function(*(torch.autograd.forward_ad.make_dual(p, t) for p, t in pairs))
        duals = [torch.autograd.forward_ad.unpack_dual(o) for o in outputs]
        return [d.primal for d in duals], [d.tangent for d in duals]


def recompute(program: Any, inputs: Any, trained: Any, cotangents: Any) -> Any:
    """Run a program and return the gradients of its trained inputs."""
    leaves = [x.detach().requires_grad_(t) for x, t in zip(inputs, trained, strict=True)]
    with torch.enable_grad():
        outputs = program(*leaves)
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if pairs and any(trained):
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    return tuple(x.grad for x in leaves)


def saving_products():  # type: ignore[no-untyped-def]
    """Return the contexts of a checkpoint that saves the results of products."""
    ops = torch.ops.aten
    saved = [ops.mm.default, ops.addmm.default, ops.bmm.default, ops.baddbmm.default]
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(saved)


def undecorated(**options):  # type: ignore[no-untyped-def]
    """Return a decorator that changes nothing, in the place of custom_fwd and custom_bwd."""
    return lambda function: function


def as_function(program, device, custom_fwd, custom_bwd, cast=None):  # type: ignore[no-untyped-def]
    """Return a program as an autograd.Function whose backward recomputes it."""
    options = {} if cast is None else {"cast_inputs": cast}

    class Recompute(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, **options)
        def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
            ctx.inputs = inputs
            return tuple(program(*inputs))

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
            return recompute(program, ctx.inputs, ctx.needs_input_grad, cotangents)

    return Recompute.apply


def optimised(make: Any, buffers: Any, calls: int) -> Any:
    """Compile with `make` at the first inputs; call it `calls` times for each call that counts.

    TorchScript profiles, then optimises, and only then runs the optimised graph, separately for
    each grad mode and autocast state. buffers: numbers of the inputs that are written in place.
    """
    made: list[Any] = []
    seen: dict[Any, int] = {}

    def copies(inputs: Any) -> list[torch.Tensor]:
        return [x.clone() if i in buffers else x for i, x in enumerate(inputs)]

    def call(*inputs: torch.Tensor) -> Any:
        random = torch.get_rng_state()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        state = *modes, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        # No backward pass follows here, and a checkpoint around the call would count what is saved.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
            if not made:
                made.append(make(copies(inputs)))
            while seen.setdefault(state, 0) < calls - 1:
                seen[state] += 1
                made[0](*copies(inputs))
        torch.set_rng_state(random)
        return made[0](*inputs)

    return call


def reloaded(library: Any, program: Any) -> Any:
    """Save a program by torch.jit or torch.export, and return what that loads."""
    buffer = BytesIO()
    library.save(program, buffer)
    buffer.seek(0)
    return library.load(buffer)


def frozen(program: Any, inputs: Any, weights: Any, saved: bool = False) -> Any:
    """Return a scripted program as a frozen module whose weights, by number, are its parameters."""
    module = torch.nn.Module()
    module.program = program
    for i in weights:
        weight = torch.nn.Parameter(inputs[i].detach(), requires_grad=False)
        module.register_parameter(f"w{i}", weight)
    module = torch.jit.script(module.eval())
    others = [i for i in range(len(inputs)) if i not in weights]
    given = "".join(f", x{i}" for i in others)
    passed = ", ".join(f"self.w{i}" if i in weights else f"x{i}" for i in range(len(inputs)))
    module.define(f"def forward(self{given}):\n    return self.program({passed})\n")
    module = torch.jit.freeze(module)
    if saved:
        module = reloaded(torch.jit, module)
    return lambda *inputs: module(*(inputs[i] for i in others))


def module_of(program: Any, weights: Any, count: int) -> Any:
    """Return a program as a module that holds some of its inputs, by number."""

    class Module(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            rest = iter(given)
            values = (getattr(self, f"w{i}") if i in weights else next(rest) for i in range(count))
            return program(*values)

    module = Module()
    for i, weight in weights.items():
        module.register_parameter(f"w{i}", weight)
    return module


def traced(program: Any, inputs: Any, weights: Any) -> Any:
    """Return the checked trace of a module whose weights, by number, are its parameters."""
    others = [i for i in range(len(inputs)) if i not in weights]
    for i in weights:
        inputs[i]._is_param = True  # the leaf itself, whose gradient is observed
    module = module_of(program, {i: inputs[i] for i in weights}, len(inputs))
    trace = torch.jit.trace(module, tuple(inputs[i] for i in others))
    return lambda *inputs: trace(*(inputs[i] for i in others))


def holding(program: Any, weights: Any, compiled: Any) -> Any:
    """Return a program compiled as a module that holds its weights, by number, and only infers."""
    made: list[Any] = []

    def call(*inputs: torch.Tensor) -> Any:
        with torch.no_grad():  # while compiling, this decides whether a weight is a constant
            if not made:
                held = {i: torch.nn.Parameter(inputs[i].detach(), False) for i in weights}
                made.append(compiled(module_of(program, held, len(inputs))))
            return made[0](*(x for i, x in enumerate(inputs) if i not in weights))

    return call


def as_function_apart(program, device, custom_fwd, custom_bwd):  # type: ignore[no-untyped-def]
    """Return a program as an autograd.Function whose forward gets no ctx."""

    class Apart(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(*inputs):  # type: ignore[no-untyped-def]
            return tuple(program(*inputs))

        @staticmethod
        def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
            ctx.inputs = inputs

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
            return recompute(program, ctx.inputs, ctx.needs_input_grad, cotangents)

    return Apart.apply


def as_custom_op(program: Any, device: Any, custom_op: Any, cast: Any = None) -> Any:
    """Return a program as a custom op that takes a tensor, an optional one and a list of the rest.

    Its backward recomputes the program. cast: the dtype that autocast casts its inputs to.
    """

    def body(
        first: torch.Tensor, second: torch.Tensor | None, rest: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        inputs = [x for x in (first, second, *rest) if x is not None]
        return [x.clone() for x in program(*inputs)]  # for outputs must not alias inputs

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        first, second, rest = inputs
        ctx.save_for_backward(*(x for x in (first, second, *rest) if x is not None))

    def backward(ctx: Any, cotangents: Any) -> Any:
        first, second, rest = ctx.needs_input_grad
        inputs = ctx.saved_tensors
        trained = (first, second, *rest)[: len(inputs)]
        grads = recompute(program, inputs, trained, cotangents)
        return grads[0], grads[1] if len(grads) > 1 else None, list(grads[2:])

    # A later op of the same name replaces it.
    op = custom_op("amp_fuzz::program", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    if cast is not None:
        op.register_autocast(device, cast)

    def call(first: Any, *others: Any) -> Any:
        second = others[0] if others else None
        return tuple(op(first, second, list(others[1:])))

    return call


def exported(
    program: Any, inputs: Any, decomposed: bool, strict: bool = False, saved: bool = False
) -> Any:
    """Return a program exported by `torch.export`, for inputs of these shapes and dtypes.

    Decomposed, its casts are in the graph and its regions are not: it runs with autocast off.
    saved: it is what is loaded from where it was saved.
    """

    class Module(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return program(*given)

    found = torch.export.export(Module(), tuple(inputs), strict=strict)
    if decomposed:
        found = found.run_decompositions()
    module = (reloaded(torch.export, found) if saved else found).module()
    return torch.autocast("cpu", enabled=False)(module) if decomposed else module
