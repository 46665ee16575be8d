# Owner(s): ["module: amp (automated mixed precision)"]
"""Bugs of autocast, and of compilers under autocast, that amp-fuzz found on torch 2.13.0+cpu.

Written by `amp-fuzz known tests`. A test is expected to fail while its bug is there: an unexpected
success is a bug that is gone, and a skipped test cannot tell.
"""

import contextlib
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import zip_longest
from math import inf, nan
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.config
import torch._inductor.lowering
from torch import autocast, cond
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.amp import custom_bwd, custom_fwd
from torch.func import grad, vmap
from torch.library import custom_op
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.checkpoint import checkpoint


def still_there(test):
    """Expect a test to fail, in a process of its own: some bugs leave theirs broken.

    Another error than a failed assertion cannot tell.
    """

    def told(self, pipe):
        try:
            test(self)
            pipe.send(("", ""))
        except unittest.SkipTest as skipped:
            pipe.send(("skipped", str(skipped)))
        except AssertionError as failed:
            pipe.send(("failed", str(failed)))
        except Exception as error:
            pipe.send(("skipped", f"cannot tell: {type(error).__name__}: {error}"))

    @functools.wraps(test)
    def run(self):
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=told, args=(self, theirs))
        child.start()
        theirs.close()
        ended, text = "skipped", "cannot tell: it hangs"
        try:
            if ours.poll(600):
                ended, text = ours.recv()
        except EOFError:
            text = "cannot tell: its process died"
        child.kill()
        if ended == "skipped":
            self.skipTest(text)
        self.assertEqual(ended, "", text)

    return unittest.expectedFailure(run)


def run_script(text, *arguments):
    """Run a script in a new Python; return its exit code, None if it hangs, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "script.py")
        with open(path, "w") as file:
            file.write(text)
        command = [sys.executable, path, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return None, "it hangs"
    return done.returncode, done.stdout + done.stderr


SCRIPT_OF_CUSTOM_OP_BODY_OFF = r'''
# found by amp-fuzz 0.1.0, case ff758777f8c59a23 on fake-cuda
# dtype: v0
# expected: bfloat16
# observed: float32
import ctypes
import logging
import sys
from pathlib import Path
from typing import Any

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(130 if t is KeyboardInterrupt else 125)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import custom_op

device = "cuda"

# Without cuda, torch has no guard for its tensors, or one that raises: lend it that of the meta
# device, which does nothing (c10/core/impl/DeviceGuardImplInterface.h).
c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
guards = (ctypes.c_void_p * 20).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
if torch.accelerator.current_accelerator(check_available=True) is None or not guards[1]:
    guards[1] = guards[14]

# Every tensor from here on has a dtype and a shape but no values.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True
FakeTensorMode().__enter__()


class autocast:
    """``torch.autocast`` for a missing device, with the setters that it uses itself.

    Like `torch.autocast`, it disables itself for a dtype that the device does not support; cuda
    accepts any.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.device = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        halves = (torch.float16, torch.bfloat16)
        self.enabled = enabled and (device_type == "cuda" or self.dtype in halves)
        self.cache = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.saved = []

    def set(self, enabled: bool, dtype: torch.dtype, cache: bool, included: bool) -> None:
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if self.device == "maia":
            # Fake maia tensors lack the autocast key that other devices' tensors carry (seen
            # on torch 2.13), so it is put on every dispatch of this thread instead.
            torch._C._dispatch_tls_set_dispatch_key_included("AutocastMAIA", included)

    def __enter__(self):
        d = self.device
        before = (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
        # In the body of a custom op autocast is off, but the key is still included: two states.
        included = d == "maia" and torch._C._dispatch_tls_is_dispatch_key_included("AutocastMAIA")
        self.saved.append((*before, torch.is_autocast_cache_enabled(), included))
        self.set(self.enabled, self.dtype, self.cache, self.enabled)
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *error):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set(*self.saved.pop())

    def __call__(self, function):
        def decorated(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return decorated


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


def recompute(program: Any, inputs: Any, trained: Any, cotangents: Any) -> Any:
    """Run a program and return the gradients of its trained inputs."""
    leaves = [x.detach().requires_grad_(t) for x, t in zip(inputs, trained, strict=True)]
    with torch.enable_grad():
        outputs = program(*leaves)
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if pairs and any(trained):
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    return tuple(x.grad for x in leaves)


x0 = torch.empty((2, 2), dtype=torch.float32, device=device)
w1 = torch.empty((2, 2), dtype=torch.float32, device=device).requires_grad_()


def program(x0, w1):
    v0 = torch.mm(x0, w1)
    return v0,


with autocast(device, dtype=torch.bfloat16):
    entered = as_custom_op(program, device, custom_op)
    outputs = entered(x0, w1)
    value = outputs[0]

expected, observed = torch.bfloat16, value.dtype
print("torch", torch.__version__, "expected:", expected, "observed:", observed)
sys.exit(observed != expected)
'''


def cotangent(output):
    """Return small values, exact in every dtype, to start a backward pass from."""
    steps = torch.arange(output.numel(), device=output.device) % 4
    return (steps.to(output.dtype) - 1.5).reshape(output.shape)


def trains(outputs):
    """Return the outputs that a backward pass can start from."""
    return [o for o in outputs if o.requires_grad]


def make_matmul_function(custom_fwd, custom_bwd, device):
    """Return a matrix product that saves views of its inputs."""

    class Matmul(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, x, w):
            ctx.save_for_backward(x.t(), w.t())
            return x @ w

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):
            xt, wt = ctx.saved_tensors
            return g @ wt.to(g.dtype), xt.to(g.dtype) @ g

    return Matmul.apply


def in_thread(function: Any, *args: Any) -> Any:
    """Call a function in a new thread and return, or raise, what it returns or raises."""
    box: list[Any] = []

    def call():
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


@dataclass
class LinearArgs:
    """The arguments of a linear layer's forward."""

    x: Any
    w: Any
    b: Any
    gain: float

    def forward(self) -> Any:
        """Return the output."""
        y = torch.nn.functional.linear(self.x, self.w, self.b)
        return y * self.gain


@dataclass
class LinearGrads:
    """The arguments of a linear layer's backward. needs: which gradients are needed."""

    g: Any
    x: Any
    w: Any
    needs: Any
    gain: float

    def backward(self) -> Any:
        """Return the gradients of input, weight and bias."""
        g = self.g * self.gain
        dx = None if self.w is None else g @ self.w.to(g.dtype)
        dw = None if self.x is None else g.t() @ self.x.to(g.dtype)
        return dx, dw, g.sum(0) if self.needs[2] else None


def make_linear_op(custom_op: Any, autocast: Any, device: Any) -> Any:
    """Return a linear layer as a custom op, whose inputs autocast casts to bfloat16."""

    def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, gain: float) -> torch.Tensor:
        y: torch.Tensor = LinearArgs(x, w, b, gain).forward()
        return y

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        args = LinearArgs(*inputs)
        ctx.save_for_backward(*saved_of_linear(args, ctx.needs_input_grad))
        ctx.gain = args.gain

    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        with autocast(device, enabled=False):
            args = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.gain)
            return (*args.backward(), None)

    op = custom_op("amp_fuzz::linear_op", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_autocast(device, torch.bfloat16)
    return op


def saved_of_linear(args: Any, needs: Any) -> Any:
    """Return the tensors that a linear layer saves: each for the other's gradient."""
    return args.x if needs[1] else None, args.w if needs[0] else None


def torch_state(device: str) -> dict[str, object]:
    """Return this thread's state by name: autocast's, the grad modes, the dispatcher's.

    A failed compilation can leave dispatch keys and modes behind in a thread. Only private names of
    torch can read them.
    """
    # The only way to read the nesting depth is to step in and out.
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    return {
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "its dtype on cpu": torch.get_autocast_dtype("cpu"),
        f"autocast on {device}": torch.is_autocast_enabled(device),
        f"its dtype on {device}": torch.get_autocast_dtype(device),
        "weight cache": torch.is_autocast_cache_enabled(),
        "nesting": nesting,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys": str(torch._C._dispatch_tls_local_include_set()),
    }


def carried(x: Any) -> Any:
    """Return a copy with the strides of a product, as a loop must carry. It is no weight."""
    return x.clone(memory_format=torch.contiguous_format)


def make_scan_mm(scan: Any, autocast: Any, device: Any) -> Any:
    """Return the last of the products of square matrices, and the double of each."""
    product = product_in(autocast, device)

    def scan_mm(x: Any, ys: Any, island: bool, dtype: Any = None) -> Any:
        def step(x: Any, y: Any) -> Any:
            made = product(x, y, island, dtype).to(x.dtype)
            return made, made * 2

        return scan(step, carried(x), ys)

    return scan_mm


def product_in(autocast: Any, device: Any) -> Any:
    """Return a product, which may be an island: in a region without autocast.

    dtype: what its operands are cast to. The explicit program gives it.
    """

    def product(x: Any, y: Any, island: bool, dtype: Any) -> Any:
        if dtype is not None:
            x, y = x.to(dtype), y.to(dtype)
        if not island:
            return torch.mm(x, y)
        with autocast(device, enabled=False):
            return torch.mm(x, y)

    return product


def make_while_mm(while_loop: Any, autocast: Any, device: Any) -> Any:
    """Return a square matrix to the power of four."""
    product = product_in(autocast, device)

    def while_mm(x: Any, island: bool, dtype: Any = None) -> Any:
        def again(i: Any, x: Any) -> Any:
            return i + 1, product(x, x, island, dtype).to(x.dtype)

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 2, again, (start, carried(x)))[1]

    return while_mm


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


def make_cond_mm(cond: Any, autocast: Any, device: Any) -> Any:
    """Return a product in both branches of `torch.cond`."""
    product = product_in(autocast, device)

    def cond_mm(x: Any, y: Any, island: bool, dtype: Any = None) -> Any:
        def body(x: Any, y: Any) -> Any:
            return product(x, y, island, dtype)

        return cond(x.sum() > 0, lambda x, y: body(x, y), lambda x, y: body(x, y), (x, y))

    return cond_mm


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


def recompute(program: Any, inputs: Any, trained: Any, cotangents: Any) -> Any:
    """Run a program and return the gradients of its trained inputs."""
    leaves = [x.detach().requires_grad_(t) for x, t in zip(inputs, trained, strict=True)]
    with torch.enable_grad():
        outputs = program(*leaves)
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if pairs and any(trained):
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    return tuple(x.grad for x in leaves)


def contents(value):
    if not isinstance(value, torch.Tensor):
        return [value]
    return [value.dtype, list(value.shape), *value.flatten().tolist()]


def differs(expected, observed):
    """Print where two results differ in a bit; NaN equals NaN."""
    pairs = list(zip_longest(contents(expected), contents(observed)))
    wrong = [(a, b) for a, b in pairs if repr(a) != repr(b)]
    for a, b in wrong[:4]:
        print(f"expected {a}, observed {b}")
    print(len(wrong), "differences")
    return bool(wrong)


@contextmanager
def autocast_dtype(device, dtype):
    """Let contexts that name no dtype take this one."""
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device, before)


def saving_products():
    """Return the contexts of a checkpoint that saves the results of products."""
    ops = torch.ops.aten
    saved = [ops.mm.default, ops.addmm.default, ops.bmm.default, ops.baddbmm.default]
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(saved)


def nudge(weights):
    """Change each weight in place, so a stale copy shows."""
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def as_function(program, device, custom_fwd, custom_bwd, cast=None):
    """Return a program as an autograd.Function whose backward recomputes it."""
    options = {} if cast is None else {"cast_inputs": cast}

    class Recompute(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, **options)
        def forward(ctx, *inputs):
            ctx.inputs = inputs
            return tuple(program(*inputs))

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, *cotangents):
            return recompute(program, ctx.inputs, ctx.needs_input_grad, cotangents)

    return Recompute.apply


def as_function_apart(program, device, custom_fwd, custom_bwd):
    """Return a program as an autograd.Function whose forward gets no ctx."""

    class Apart(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(*inputs):
            return tuple(program(*inputs))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.inputs = inputs

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, *cotangents):
            return recompute(program, ctx.inputs, ctx.needs_input_grad, cotangents)

    return Apart.apply


SCRIPT_OF_REGISTER_AUTOCAST_KEY = r'''
# found by amp-fuzz 0.1.0, case 6343b31e8e2f3e06 on fake-maia
# raise: entered = as_custom_op(program, device, custom_op, torch.float32)
# expected: no error
# observed: AttributeError: type object 'torch._C.DispatchKey' has no attribute 'AutocastMAIA'
import ctypes
import logging
import sys
from pathlib import Path
from typing import Any

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(130 if t is KeyboardInterrupt else 125)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import custom_op

device = "maia"

# Without maia, torch has no guard for its tensors, or one that raises: lend it that of the meta
# device, which does nothing (c10/core/impl/DeviceGuardImplInterface.h).
c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
guards = (ctypes.c_void_p * 20).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
if torch.accelerator.current_accelerator(check_available=True) is None or not guards[8]:
    guards[8] = guards[14]

# Every tensor from here on has a dtype and a shape but no values.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True
FakeTensorMode().__enter__()


class autocast:
    """``torch.autocast`` for a missing device, with the setters that it uses itself.

    Like `torch.autocast`, it disables itself for a dtype that the device does not support; cuda
    accepts any.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.device = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        halves = (torch.float16, torch.bfloat16)
        self.enabled = enabled and (device_type == "cuda" or self.dtype in halves)
        self.cache = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.saved = []

    def set(self, enabled: bool, dtype: torch.dtype, cache: bool, included: bool) -> None:
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if self.device == "maia":
            # Fake maia tensors lack the autocast key that other devices' tensors carry (seen
            # on torch 2.13), so it is put on every dispatch of this thread instead.
            torch._C._dispatch_tls_set_dispatch_key_included("AutocastMAIA", included)

    def __enter__(self):
        d = self.device
        before = (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
        # In the body of a custom op autocast is off, but the key is still included: two states.
        included = d == "maia" and torch._C._dispatch_tls_is_dispatch_key_included("AutocastMAIA")
        self.saved.append((*before, torch.is_autocast_cache_enabled(), included))
        self.set(self.enabled, self.dtype, self.cache, self.enabled)
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *error):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set(*self.saved.pop())

    def __call__(self, function):
        def decorated(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return decorated


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


def recompute(program: Any, inputs: Any, trained: Any, cotangents: Any) -> Any:
    """Run a program and return the gradients of its trained inputs."""
    leaves = [x.detach().requires_grad_(t) for x, t in zip(inputs, trained, strict=True)]
    with torch.enable_grad():
        outputs = program(*leaves)
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if pairs and any(trained):
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    return tuple(x.grad for x in leaves)


x0 = torch.empty((2, 2), dtype=torch.float32, device=device)
w1 = torch.empty((2, 2), dtype=torch.float32, device=device).requires_grad_()


def program(x0, w1):
    v0 = torch.mm(x0, w1)
    return v0,


observed = "no error"
try:
    with autocast(device, dtype=torch.bfloat16):
        entered = as_custom_op(program, device, custom_op, torch.float32)
        outputs = entered(x0, w1)
except Exception as error:
    observed = " ".join(f"{type(error).__name__}: {error}".split())
print("torch", torch.__version__, "expected:", "no error", "observed:", observed[:300])
right = observed == "no error"
wrong = observed.startswith("AttributeError:") and "has no attribute" in observed
sys.exit(0 if right else 1 if wrong else 125)
'''

SCRIPT_OF_PROMOTE_SKIPS_OPTIONAL = r'''
# found by amp-fuzz 0.1.0, case 5bdfba6c9f96b560 on fake-cuda
# dtype: v0
# expected: float32
# observed: bfloat16
import ctypes
import logging
import sys
from pathlib import Path

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(130 if t is KeyboardInterrupt else 125)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

device = "cuda"

# Without cuda, torch has no guard for its tensors, or one that raises: lend it that of the meta
# device, which does nothing (c10/core/impl/DeviceGuardImplInterface.h).
c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
guards = (ctypes.c_void_p * 20).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
if torch.accelerator.current_accelerator(check_available=True) is None or not guards[1]:
    guards[1] = guards[14]

# Every tensor from here on has a dtype and a shape but no values.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True
FakeTensorMode().__enter__()


class autocast:
    """``torch.autocast`` for a missing device, with the setters that it uses itself.

    Like `torch.autocast`, it disables itself for a dtype that the device does not support; cuda
    accepts any.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.device = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        halves = (torch.float16, torch.bfloat16)
        self.enabled = enabled and (device_type == "cuda" or self.dtype in halves)
        self.cache = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.saved = []

    def set(self, enabled: bool, dtype: torch.dtype, cache: bool, included: bool) -> None:
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if self.device == "maia":
            # Fake maia tensors lack the autocast key that other devices' tensors carry (seen
            # on torch 2.13), so it is put on every dispatch of this thread instead.
            torch._C._dispatch_tls_set_dispatch_key_included("AutocastMAIA", included)

    def __enter__(self):
        d = self.device
        before = (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
        # In the body of a custom op autocast is off, but the key is still included: two states.
        included = d == "maia" and torch._C._dispatch_tls_is_dispatch_key_included("AutocastMAIA")
        self.saved.append((*before, torch.is_autocast_cache_enabled(), included))
        self.set(self.enabled, self.dtype, self.cache, self.enabled)
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *error):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set(*self.saved.pop())

    def __call__(self, function):
        def decorated(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return decorated


x0 = torch.empty((3, 2), dtype=torch.bfloat16, device=device)
x1 = torch.empty((3, 2), dtype=torch.bfloat16, device=device)
x2 = torch.empty((4, 2, 2), dtype=torch.bfloat16, device=device)
x3 = torch.empty((4,), dtype=torch.float32, device=device)

with autocast(device, dtype=torch.bfloat16):
    v0 = torch.nn.functional.bilinear(x0, x1, x2, x3)
    value = v0

expected, observed = torch.float32, value.dtype
print("torch", torch.__version__, "expected:", expected, "observed:", observed)
sys.exit(observed != expected)
'''

SCRIPT_OF_ANY_QUERY_MISSES_DEVICES = r'''
# found by amp-fuzz 0.1.0, case a628da518134ebc6 on fake-mps
# raise: v0, v1 = torch.func.functional_call(torch.nn.GRU(6, 5, 1, bias=False, batch_first=False,
# bidirectional=False, device='meta'), dict(zip(['weight_ih_l0', 'weight_hh_l0'], [x1, x2])), (x0,
# None))
# expected: no error
# observed: ValueError: RNN input dtype (torch.bfloat16) does not match weight dtype
# (torch.float32). Convert input: input.to(torch.float32), or convert model:
# model.to(torch.bfloat16)
import ctypes
import logging
import sys
from pathlib import Path

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(130 if t is KeyboardInterrupt else 125)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

device = "mps"

# Without mps, torch has no guard for its tensors, or one that raises: lend it that of the meta
# device, which does nothing (c10/core/impl/DeviceGuardImplInterface.h).
c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
guards = (ctypes.c_void_p * 20).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
if torch.accelerator.current_accelerator(check_available=True) is None or not guards[13]:
    guards[13] = guards[14]

# Every tensor from here on has a dtype and a shape but no values.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True
FakeTensorMode().__enter__()


class autocast:
    """``torch.autocast`` for a missing device, with the setters that it uses itself.

    Like `torch.autocast`, it disables itself for a dtype that the device does not support; cuda
    accepts any.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.device = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        halves = (torch.float16, torch.bfloat16)
        self.enabled = enabled and (device_type == "cuda" or self.dtype in halves)
        self.cache = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.saved = []

    def set(self, enabled: bool, dtype: torch.dtype, cache: bool, included: bool) -> None:
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if self.device == "maia":
            # Fake maia tensors lack the autocast key that other devices' tensors carry (seen
            # on torch 2.13), so it is put on every dispatch of this thread instead.
            torch._C._dispatch_tls_set_dispatch_key_included("AutocastMAIA", included)

    def __enter__(self):
        d = self.device
        before = (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
        # In the body of a custom op autocast is off, but the key is still included: two states.
        included = d == "maia" and torch._C._dispatch_tls_is_dispatch_key_included("AutocastMAIA")
        self.saved.append((*before, torch.is_autocast_cache_enabled(), included))
        self.set(self.enabled, self.dtype, self.cache, self.enabled)
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *error):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set(*self.saved.pop())

    def __call__(self, function):
        def decorated(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return decorated


x0 = torch.empty((3, 1, 6), dtype=torch.bfloat16, device=device)
x1 = torch.empty((15, 6), dtype=torch.float32, device=device)
x2 = torch.empty((15, 5), dtype=torch.float32, device=device)

observed = "no error"
try:
    with autocast(device, dtype=torch.bfloat16):
        v0, v1 = torch.func.functional_call(torch.nn.GRU(6, 5, 1, bias=False, batch_first=False, bidirectional=False, device='meta'), dict(zip(['weight_ih_l0', 'weight_hh_l0'], [x1, x2])), (x0, None))
except Exception as error:
    observed = " ".join(f"{type(error).__name__}: {error}".split())
print("torch", torch.__version__, "expected:", "no error", "observed:", observed[:300])
right = observed == "no error"
wrong = observed.startswith("ValueError:") and ") does not match weight dtype (torch" in observed
sys.exit(0 if right else 1 if wrong else 125)
'''


def twice(x):
    """Return two copies of a tensor along a new first dimension, by no op that autocast casts."""
    return x.expand(2, *x.shape).clone(memory_format=torch.contiguous_format)


def total(outputs):
    """Return a loss whose gradients are those of a backward pass from the cotangents."""
    starts: list[Any] = trains(outputs)
    terms = [(o * cotangent(o)).sum() for o in starts]
    return sum([t.real if t.is_complex() else t for t in terms], torch.zeros(()))


def make_same_function():
    """Return a function that gives its input itself, and scales its gradient."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 0.5

    return Same.apply


def make_exp_function(custom_fwd, custom_bwd, device):
    """Return an exponential in float32, whose backward uses its output."""

    class Exp(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx, x):
            y = torch.exp(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return g * y

    return Exp.apply


def make_freed_function(custom_fwd, custom_bwd, device):
    """Return a linear layer that frees its backward's arguments after it: a second pass raises."""

    class Freed(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, x, w, b, gain):
            args = LinearArgs(x, w, b, gain)
            y = args.forward()
            ctx.save_for_backward(*saved_of_linear(args, ctx.needs_input_grad))
            ctx.objects = LinearArgs(None, None, None, gain)
            return y

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            args = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.objects.gain)
            ctx.objects = None
            return (*args.backward(), None)

    return Freed.apply


def make_straight_function():
    """Return a rounding whose gradient is that of the identity."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, g):
            return g

    return Straight.apply


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


class Interrupted(Exception):
    """Raised inside a context on purpose."""


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


def freeze(weights):
    """Halve the weights in place; every other one requires grad no more, or again."""
    nudge(weights)
    for weight in weights[::2]:
        weight.requires_grad_(not weight.requires_grad)


class TestAutocastFindings(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def tearDown(self):
        torch._dynamo.reset()
        super().tearDown()

    # a custom op without register_autocast runs in other dtypes when it is compiled, exported or
    # fake
    # https://github.com/pytorch/pytorch/pull/145588
    # found by amp-fuzz 0.1.0, case ff758777f8c59a23 on fake-cuda
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_custom_op_body_off(self):
        code, printed = run_script(SCRIPT_OF_CUSTOM_OP_BODY_OFF)
        if code not in (0, 1):
            self.skipTest(f"cannot tell: {printed[-300:]}")
        self.assertEqual(code, 0, printed)

    # the backward pass of a compiled program is traced under the autocast around its forward
    # https://github.com/pytorch/pytorch/issues/157104
    # found by amp-fuzz 0.1.0, case 5393b6699b17c394 on compile[aot_eager+default]
    # grad-value: w1.grad
    # expected: 27.599427 +- 1.7e-05 at [6, 0], float32
    # observed: 27.5: excess 5.97e+03, bias 1.45e+03
    @still_there
    def test_compile_backward_autocast(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[1.1851971, 1.5376309, 1.2216635, -1.8701181, -1.8289721, 0.313661, 1.9587735,
            -0.91192836], [-1.5208728, -0.18691915, -1.9626862, -1.6890543, -0.7860685, 1.3353621,
            -0.20217074, -1.4315093], [-0.26780677, -1.737498, 0.24274103, -1.6989111, 1.2569779, 1.156581,
            0.5908881, 1.9790655], [0.77054435, 1.403664, 1.6619316, 0.082929626, -1.4168339, 0.47953847,
            1.7691847, 1.0100838], [-0.101413056, 1.4556832, -1.3764776, 0.47076625, 0.1699184, -1.178991,
            1.8608463, -1.1013055], [-1.793239, 0.31330454, -0.89769536, -1.0647784, 1.6652932, -1.797782,
            0.66740096, -0.9858384], [-1.3185334, -1.1700157, 0.8918756, 0.77043283, 1.9546854, -1.0819838,
            -1.2253444, -0.14850569], [-1.5854418, 1.3184412, -0.4679906, 1.2190605, -1.3726186, -0.7136427,
            -1.4964118, 1.9010026]], dtype=torch.float32)
        w1 = torch.tensor([[-1.2681462, 0.17016618, 1.3343678, 0.8870187, -0.61701274, -0.20665102,
            0.5222557, -0.12865563], [0.59122974, 0.45355043, 0.993441, 0.19422896, 0.89045507, -0.9370057,
            -0.99871004, 0.28409636], [0.4172262, 0.45113683, 1.0293071, 0.27306467, -0.79537356,
            -0.7263008, 0.11062067, -0.27591932], [-1.0703957, 1.3450236, -0.4942727, -0.21918795,
            0.17294261, 0.24773416, 0.23387171, 0.25789708], [0.9666401, 1.8271866, -1.3114704, -1.3137013,
            0.32661888, 0.26195446, -0.22637762, 0.7622488], [1.1370384, 0.7267794, 0.3608965, 1.118607,
            0.636972, 0.3743995, 1.3156805, 0.38804552], [1.884397, -0.24721585, -0.66842085, 1.5423042,
            1.0311252, -0.27460954, -0.31235406, -0.47498396], [1.5948066, -1.2822993, 0.18853249,
            1.1466005, 0.9282479, -0.7419305, -0.21105129, 0.20455451]],
            dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[-41.63175606315886, -0.4307748132444136, 0.4097528888730704,
            16.66992934729292, 2.332910054369812, -5.769156326424355, 20.19701733612432,
            22.388327264657573], [21.94216252851941, -1.2048530613940525, 1.2181713321133625,
            -6.1277984399682985, -5.911297273453497, 2.177235511448976, -11.317890545376473,
            -9.75064334221807], [4.760042777488521, 3.5801455785234717, -3.583262116968317,
            -8.46067889620771, 11.277884329466954, 2.7887208295238404, -0.6497642468944351,
            -7.612916025521741], [-16.369825020158714, 5.516632364269469, -5.533787685520513,
            -4.0007247334762095, 19.508335209990815, 1.1601496654693353, 10.613967024068256,
            0.6658772188848738], [-14.169532037258843, -3.684931636431502, 3.6833084661064484,
            12.242149193109656, -10.77487890597128, -4.097125225512319, 5.211146731405944,
            12.68368506976654], [1.208641854420315, 4.720722020220985, -4.7274724377466475,
            -9.22421405222575, 15.326276730615973, 3.006497219071883, 1.6264794816935932,
            -7.3879609652959095], [27.59942702457067, -2.1900267670551914, 2.207833383804606,
            -6.455516798125371, -9.640834439700132, 2.331848204436705, -14.552964928832,
            -11.299284587243106], [4.069312780735114, 0.45334650519348996, -0.45193463260656186,
            -2.3928288282084793, 1.1165618437461937, 0.811882402473096, -1.7808851011687241,
            -2.776887352920941]], dtype=torch.float64)
        unit = torch.tensor([[2.6225903489528425e-05, 1.0151334786085227e-05, 7.73253456677824e-06,
            1.771630120247022e-05, 2.350114445587342e-05, 8.86669157944975e-06, 1.6677454121363773e-05,
            1.8893837013670553e-05], [1.5039700586243315e-05, 8.798100169282355e-06, 5.293505152886175e-06,
            1.3383287911785442e-05, 2.51182529884877e-05, 7.398083141060318e-06, 9.489930162033528e-06,
            1.2083355750616514e-05], [1.429422913846837e-05, 6.773258992102645e-06, 6.752624803837629e-06,
            1.560213876085583e-05, 1.8039290352755024e-05, 5.52487030381464e-06, 8.335475285760642e-06,
            1.1630419673736156e-05], [1.999259762628969e-05, 7.518611756360157e-06, 8.405944910976322e-06,
            1.5693718981282504e-05, 2.4724036907096624e-05, 7.331417329776381e-06, 1.2802913289106038e-05,
            1.4432086584002273e-05], [1.2687273598317048e-05, 4.5475565837792144e-06, 5.420919219220709e-06,
            9.823884904907582e-06, 1.6826449324651533e-05, 5.1494578517273795e-06, 7.1943924864487896e-06,
            8.531939663539306e-06], [9.893457501315872e-06, 4.593445457811654e-06, 5.59629723974141e-06,
            9.400587769847941e-06, 1.6480957447432296e-05, 3.3565955392865315e-06, 7.0728171162810634e-06,
            7.341044893445094e-06], [1.6663719920968345e-05, 8.035312115210284e-06, 6.567239849520593e-06,
            1.0197568140895106e-05, 2.3317959065192498e-05, 7.480078728434758e-06, 1.4848810607942082e-05,
            1.0174155440501126e-05], [8.855034928401841e-06, 4.28361065209995e-06, 5.075490510028299e-06,
            6.244152865348982e-06, 1.6965420665577426e-05, 3.3911434488112493e-06, 7.1467340250687865e-06,
            7.680401651742211e-06]], dtype=torch.float64)

        def program(x0, w1):
            with autocast("cpu", enabled=False):
                v0 = torch.mm(x0, w1)
                v1 = torch.mm(v0, w1)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compiled backward pass under autocast casts what custom_bwd, a disabled region or a
    # checkpoint does without
    # https://github.com/pytorch/pytorch/pull/97864
    # found by amp-fuzz 0.1.0, case 2449305be48ff6e9 on compile[aot_eager]
    # grad-value: w1.grad
    # expected: 2.47673014 +- 1e-06 at [1, 1], float32
    # observed: 2.46875: excess 7.72e+03, bias 3.36e+03
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast=[{'device_type': 'cpu', 'enabled': True, 'dtype': torch.bfloat16}])
    def test_compile_backward_again(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.44727704, -0.95477086, 0.2493355], [-0.26604477, -0.6285093, 0.89842063],
            [0.35543743, 0.7043872, -1.6274692]], dtype=torch.float32)
        w1 = torch.tensor([[-2.132658, -0.60271996, -0.27374876], [1.9069382, -0.81150657, 0.049462613],
            [-1.5865164, 1.794889, -0.9755352]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[0.44956712424755096, 1.155861809849739, -0.6237722784280777],
            [0.8415859639644623, 2.476730138063431, -1.219711571931839], [0.15989311039447784,
            -3.9135024696588516, 2.1166612058877945]], dtype=torch.float64)
        unit = torch.tensor([[3.6111956630557884e-07, 4.5577189311529764e-07, 2.9991080319202723e-07],
            [7.712912720725384e-07, 1.034317326897849e-06, 7.652756826015406e-07], [6.700543390414371e-07,
            1.7608817119985076e-06, 1.4139343322838727e-06]], dtype=torch.float64)

        matmul_function = make_matmul_function(custom_fwd, custom_bwd, "cpu")

        def program(x0, w1):
            v0 = matmul_function(x0, w1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, w1)
        with autocast("cpu", dtype=torch.bfloat16):
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compiled backward pass under autocast casts what custom_bwd, a disabled region or a
    # checkpoint does without
    # https://github.com/pytorch/pytorch/pull/97864
    # found by amp-fuzz 0.1.0, case 597e373d97c5c8d7 on compile[aot_eager]
    # grad-value: w1.grad
    # expected: 2.47673014 +- 1e-06 at [1, 1], float32
    # observed: 2.46875: excess 7.72e+03, bias 3.7e+03
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast=[{'device_type': 'cpu', 'enabled': True, 'dtype': torch.bfloat16}])
    def test_compile_backward_again_2(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.44727704, -0.95477086, 0.2493355], [-0.26604477, -0.6285093, 0.89842063],
            [0.35543743, 0.7043872, -1.6274692]], dtype=torch.float32)
        w1 = torch.tensor([[-2.132658, -0.60271996, -0.27374876], [1.9069382, -0.81150657, 0.049462613],
            [-1.5865164, 1.794889, -0.9755352]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[0.44956712424755096, 0.8415859639644623, 0.15989311039447784],
            [1.155861809849739, 2.476730138063431, -3.9135024696588516], [-0.6237722784280777,
            -1.219711571931839, 2.1166612058877945]], dtype=torch.float64)
        unit = torch.tensor([[3.6111956641660115e-07, 7.715321937995512e-07, 8.388056963737345e-07],
            [4.283263344007082e-07, 1.0343173273419382e-06, 2.1873442528352882e-06], [2.978638298234415e-07,
            6.690741203296824e-07, 1.4139343327279619e-06]], dtype=torch.float64)

        linear_op = make_linear_op(custom_op, autocast, "cpu")

        def program(x0, w1):
            v0 = linear_op(x0, w1, None, 1.0)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = in_thread(program, x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compiled backward pass under autocast casts what custom_bwd, a disabled region or a
    # checkpoint does without
    # https://github.com/pytorch/pytorch/pull/97864
    # found by amp-fuzz 0.1.0, case e06df2f633f1e3ac on compile[aot_eager]
    # grad-value: w2.grad
    # expected: 0.0154651259 +- 1.2e-07 at [1, 2], float32
    # observed: 0.0146484375: excess 6.88e+03, bias 1.74e+03
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast=[{'device_type': 'cpu', 'enabled': True, 'dtype': torch.bfloat16}])
    def test_compile_backward_again_3(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.44727704, -0.95477086, 0.2493355], [-0.26604477, -0.6285093, 0.89842063],
            [0.35543743, 0.7043872, -1.6274692]], dtype=torch.float32)
        x1 = torch.tensor([[0.42893228, -1.6525598, 1.5326428], [-0.12669253, -1.5458571, -0.3076352],
            [-0.8068915, -0.2500577, 0.20421368]], dtype=torch.float32)
        w2 = torch.tensor([[-0.34081256, -0.0012987005, 1.8624237], [0.048158262, 0.24118975, 0.831192],
            [-1.3561103, 0.7139602, -0.5144442]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[0.40811387149431555, -1.0763715328762693, -0.1704385595389768],
            [-1.1391235897739773, -1.7798750984861655, 0.01546512587097304], [0.6882045198386737,
            -1.9039534636467792, 0.006430687077273234]], dtype=torch.float64)
        unit = torch.tensor([[3.446598493704882e-07, 9.710252831258837e-07, 2.3030530800767854e-07],
            [9.48642257250517e-07, 1.2662319558843069e-06, 1.1864595599173567e-07], [5.169397287128409e-07,
            1.5093935835023947e-06, 5.5594271457238e-07]], dtype=torch.float64)

        def program(x0, x1, w2):
            def block0(x0, x1, w2):
                v0 = torch.mm(x0, x1)
                v1 = torch.mul(v0, w2)
                return v0, v1
            v0, v1 = checkpoint(block0, x0, x1, w2, use_reentrant=False)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, x1, w2)
        with autocast("cpu", dtype=torch.bfloat16):
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            observed = w2.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compiled backward pass under autocast casts what custom_bwd, a disabled region or a
    # checkpoint does without
    # https://github.com/pytorch/pytorch/pull/97864
    # found by amp-fuzz 0.1.0, case 6398eca98478ff0a on compile[aot_eager]
    # grad-value: w2.grad
    # expected: 0.0154651259 +- 1.2e-07 at [1, 2], float32
    # observed: 0.0146484375: excess 6.96e+03, bias 1.75e+03
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast=[{'device_type': 'cpu', 'enabled': True, 'dtype': torch.bfloat16}])
    def test_compile_backward_again_4(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.44727704, -0.95477086, 0.2493355], [-0.26604477, -0.6285093, 0.89842063],
            [0.35543743, 0.7043872, -1.6274692]], dtype=torch.float32)
        x1 = torch.tensor([[0.42893228, -1.6525598, 1.5326428], [-0.12669253, -1.5458571, -0.3076352],
            [-0.8068915, -0.2500577, 0.20421368]], dtype=torch.float32)
        w2 = torch.tensor([[-0.34081256, -0.0012987005, 1.8624237], [0.048158262, 0.24118975, 0.831192],
            [-1.3561103, 0.7139602, -0.5144442]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[0.40811387149431555, -1.0763715328762693, -0.1704385595389768],
            [-1.1391235897739773, -1.7798750984861655, 0.01546512587097304], [0.6882045198386737,
            -1.9039534636467792, 0.006430687077273234]], dtype=torch.float64)
        unit = torch.tensor([[3.0418307038637724e-07, 7.825133570567156e-07, 2.2360382605498072e-07],
            [9.965542247550495e-07, 1.390495061467418e-06, 1.1739216090141603e-07], [4.7264078397816335e-07,
            1.4370224479735688e-06, 6.241740620341704e-07]], dtype=torch.float64)

        def program(x0, x1, w2):
            def block0(x0, x1, w2):
                v0 = torch.mm(x0, x1)
                v1 = torch.mul(v0, w2)
                return v0, v1
            v0, v1 = checkpoint(block0, x0, x1, w2, use_reentrant=True)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, x1, w2)
        with autocast("cpu", dtype=torch.bfloat16):
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            observed = w2.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compiled program that raises in an autocast region leaves autocast on
    # https://github.com/pytorch/pytorch/issues/195488
    # found by amp-fuzz 0.1.0, case 9c8b04195ed5f035 on compile[aot_eager]
    # state: after an error
    # expected: state as before
    # observed: autocast on cpu: False became True; nesting: 0 became 1
    @still_there
    def test_compile_context_leak(self):
        device = "cpu"

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)

        def program(x0):
            with autocast(device, dtype=torch.bfloat16):
                with torch.inference_mode():
                    v0 = x0.unsqueeze(-1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        def drive(x0):
            with autocast(device, dtype=torch.bfloat16):
                outputs = program(x0)

        expected = torch_state(device)
        try:
            drive(x0)
        except Exception as error:
            if torch_state(device) == expected:
                raise
            print("raised:  ", error)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # a checkpoint that is not reentrant, around a compiled program with an autocast region, leaves
    # the nesting depth
    # https://github.com/pytorch/pytorch/issues/195488
    # found by amp-fuzz 0.1.0, case 655315fc83759596 on compile[eager]
    # state: after the case
    # expected: state as before
    # observed: nesting: 0 became 1
    @still_there
    def test_compile_context_stopped(self):
        device = "cpu"

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            with autocast(device, dtype=torch.bfloat16):
                v0 = torch.mm(x0, w1)
            return v0,

        program = torch.compile(program, backend="eager", dynamic=False)

        def drive(x0, w1):
            outputs = checkpoint(program, x0, w1, use_reentrant=False)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)

        expected = torch_state(device)
        drive(x0, w1)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # a program that dynamo gives up on in an autocast region, and runs in eager, leaves the nesting
    # depth
    # https://github.com/pytorch/pytorch/issues/195488
    # found by amp-fuzz 0.1.0, case 2937d0bc192ff9d4 on compile[aot_eager_decomp_partition]
    # state: after the case
    # expected: state as before
    # observed: nesting: 0 became 2
    @still_there
    def test_compile_context_fallback(self):
        device = "cpu"

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor(0, dtype=torch.int64)

        def program(x0, x1):
            with autocast(device, dtype=torch.bfloat16):
                v0 = torch.take(x0, x1)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        def drive(x0, x1):
            outputs = program(x0, x1)

        expected = torch_state(device)
        drive(x0, x1)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # an autocast region in the body of a scan, a loop, map or cond is lost
    # found by amp-fuzz 0.1.0, case 6a9b54c822c665e1 on compile[eager]
    # dtype: v0
    # expected: float32
    # observed: bfloat16
    @still_there
    def test_compile_body_island(self):
        w0 = torch.tensor([[0.1532019, 0.00019496407, -0.032149363], [1.1963278, 0.51371646, -1.3298689],
            [-1.30363, -2.0377574, -1.2477838]], dtype=torch.float32).requires_grad_()
        w1 = torch.tensor([[[-0.9310681, -1.1027855, 0.11677559], [-0.50213194, -1.1646541, 2.508136],
            [0.5849071, 1.0721718, 0.015260549]], [[-0.6752167, -0.9467801, -1.5618992], [0.57896614,
            -1.015667, 0.029427344], [0.1088433, 1.3222897, -0.16725585]], [[-0.93526465, 1.3859788,
            -0.63004917], [0.3131023, 2.200543, 0.11037694], [0.30754128, 1.1877594, -0.30488837]]],
            dtype=torch.float32).requires_grad_()

        scan_mm = make_scan_mm(scan, autocast, "cpu")

        def program(w0, w1):
            v0, v1 = scan_mm(w0, w1, True)
            return v0, v1

        program = torch.compile(program, backend="eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(w0, w1)
            value = outputs[0]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # an autocast region in the body of a scan, a loop, map or cond is lost
    # found by amp-fuzz 0.1.0, case 732109f625e642b9 on compile[aot_eager]
    # raise: outputs = program(w0)
    # expected: no error
    # observed: BackendCompilerFailed: backend='aot_eager' raised: UncapturedHigherOrderOpError:
    # Expected carried_inputs and body_output to have same metadata but found:
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_body_island_2(self):
        w0 = torch.tensor([[0.1532019, 0.00019496407, -0.032149363], [1.1963278, 0.51371646, -1.3298689],
            [-1.30363, -2.0377574, -1.2477838]], dtype=torch.float32).requires_grad_()

        while_mm = make_while_mm(while_loop, autocast, "cpu")

        def program(w0):
            v0 = while_mm(w0, True)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(w0)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("BackendCompilerFailed:") and "raised: UncapturedHigherOrderOpError:" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an autocast region in the body of a scan, a loop, map or cond is lost
    # found by amp-fuzz 0.1.0, case 6a9b54c822c665e1 on export
    # dtype: v0
    # expected: float32
    # observed: bfloat16
    @still_there
    def test_compile_body_island_3(self):
        w0 = torch.tensor([[0.1532019, 0.00019496407, -0.032149363], [1.1963278, 0.51371646, -1.3298689],
            [-1.30363, -2.0377574, -1.2477838]], dtype=torch.float32).requires_grad_()
        w1 = torch.tensor([[[-0.9310681, -1.1027855, 0.11677559], [-0.50213194, -1.1646541, 2.508136],
            [0.5849071, 1.0721718, 0.015260549]], [[-0.6752167, -0.9467801, -1.5618992], [0.57896614,
            -1.015667, 0.029427344], [0.1088433, 1.3222897, -0.16725585]], [[-0.93526465, 1.3859788,
            -0.63004917], [0.3131023, 2.200543, 0.11037694], [0.30754128, 1.1877594, -0.30488837]]],
            dtype=torch.float32).requires_grad_()

        scan_mm = make_scan_mm(scan, autocast, "cpu")

        def program(w0, w1):
            v0, v1 = scan_mm(w0, w1, True)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(w0, w1)
            value = outputs[0]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # an autocast region in the body of a scan, a loop, map or cond is lost
    # found by amp-fuzz 0.1.0, case 3543d0cfc5017d25 on export[decomposed]
    # raise: outputs = program(w0)
    # expected: no error
    # observed: UncapturedHigherOrderOpError: Expected carried_inputs and body_output to have same
    # metadata but found:
    @still_there
    def test_compile_body_island_4(self):
        w0 = torch.tensor([[0.1532019, 0.00019496407, -0.032149363], [1.1963278, 0.51371646, -1.3298689],
            [-1.30363, -2.0377574, -1.2477838]], dtype=torch.float32).requires_grad_()

        while_mm = make_while_mm(while_loop, autocast, "cpu")

        def program(w0):
            v0 = while_mm(w0, True)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(w0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("UncapturedHigherOrderOpError:") and "Expected carried_inputs and body_output" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the gradient of an island in the body of an exported cond, map or loop is computed under the
    # forward's autocast
    # https://github.com/pytorch/pytorch/issues/157104
    # found by amp-fuzz 0.1.0, case 60e0e37db6d2237b on export
    # grad-value: w1.grad
    # expected: 0.45301964 +- 2.1e-07 at [0, 0], float32
    # observed: 0.451171875: excess 8.6e+03, bias 2.26e+03
    @still_there
    def test_export_body_gradient(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[0.0016112087, -0.35228622, 0.9826507], [-0.3036243, -1.3431978, -0.6199277]],
            dtype=torch.float32)
        w1 = torch.tensor([[-0.4668333, -0.728902, -0.43308514, -1.4872673], [1.5088124, -1.1996653,
            0.2025545, -0.32473874], [0.5598304, 0.010644429, 0.39184555, 0.3092268]],
            dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[0.45301964023383334, 0.15100654674461111, -0.15100654674461111,
            -0.45301964023383334], [2.5432260632514954, 0.8477420210838318, -0.8477420210838318,
            -2.5432260632514954], [-0.5440844893455505, -0.18136149644851685, 0.18136149644851685,
            0.5440844893455505]], dtype=torch.float64)
        unit = torch.tensor([[2.1485406985835565e-07, 7.582719093943147e-08, 7.171990950780027e-08,
            2.1779356106435555e-07], [1.1796459564727968e-06, 4.1896069424840476e-07,
            3.7650079665052516e-07, 1.0379688681894095e-06], [1.002552494577813e-06, 2.8271714547223326e-07,
            2.6185810453327463e-07, 9.042347864918199e-07]], dtype=torch.float64)

        cond_mm = make_cond_mm(cond, autocast, "cpu")

        def program(x0, w1):
            v0 = cond_mm(x0, w1, True)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # the gradient of an island in the body of an exported cond, map or loop is computed under the
    # forward's autocast
    # https://github.com/pytorch/pytorch/issues/157104
    # found by amp-fuzz 0.1.0, case 732109f625e642b9 on export
    # grad-value: w0.grad
    # expected: 16.858432 +- 2.3e-05 at [0, 2], float32
    # observed: 16.71875: excess 5.97e+03, bias 2.5e+03
    @still_there
    def test_export_body_gradient_2(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor([[0.1532019, 0.00019496407, -0.032149363], [1.1963278, 0.51371646, -1.3298689],
            [-1.30363, -2.0377574, -1.2477838]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[2.2545934040774105, -23.60566134256013, 16.858431988684508],
            [-3.6049537165454537, -3.6750458720269243, 31.030696656109868], [-10.42276925878355,
            17.72705536860896, 17.97857599314555]], dtype=torch.float64)
        unit = torch.tensor([[9.219905024453048e-06, 2.2699168770994695e-05, 2.338052651003675e-05],
            [7.812244238793958e-06, 2.5809097517477058e-05, 2.4758503028827877e-05], [9.928433489295584e-06,
            1.9145112069776047e-05, 2.7065476223986514e-05]], dtype=torch.float64)

        while_mm = make_while_mm(while_loop, autocast, "cpu")

        def program(w0):
            v0 = while_mm(w0, True)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(w0)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w0.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # an exported program with cond, map, a loop or a scan that raises in an autocast region leaves
    # autocast on
    # https://github.com/pytorch/pytorch/issues/195488
    # found by amp-fuzz 0.1.0, case 52cde3c23caea46b on export
    # state: after an error
    # expected: state as before
    # observed: autocast on cpu: False became True; weight cache: True became False; nesting: 0 became 1
    @still_there
    def test_export_body_leak(self):
        device = "cpu"

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        x1 = torch.tensor([[0.07556, -0.5474], [-0.487, 0.9775]], dtype=torch.float16)

        cond_mm = make_cond_mm(cond, autocast, device)

        def program(x0, x1):
            with autocast(device, dtype=torch.bfloat16):
                v0 = cond_mm(x0, x1, True)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        def drive(x0, x1):
            outputs = program(x0, x1)

        expected = torch_state(device)
        try:
            drive(x0, x1)
        except Exception as error:
            if type(error).__name__ != 'RuntimeError' and torch_state(device) == expected:
                raise
            print("raised:  ", error)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # while_loop raises for a 16-bit carry that needs gradients and is not of the autocast dtype
    # https://github.com/pytorch/pytorch/issues/132715
    # found by amp-fuzz 0.1.0, case c92f36307f8b65c2 on compile[eager]
    # raise: def program(w0):
    # expected: no error
    # observed: RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize
    @still_there
    def test_compile_loop_foreign_half(self):
        w0 = torch.tensor([[0.1532, 0.0001949, -0.03214], [1.196, 0.5137, -1.33], [-1.304, -2.037, -1.248]],
            dtype=torch.float16).requires_grad_()

        while_mm = make_while_mm(while_loop, autocast, "cpu")

        def program(w0):
            v0 = while_mm(w0, False)
            return v0,

        program = torch.compile(program, backend="eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(w0)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Unexpected floating ScalarType in" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # ops with an out= are cast in a compiled program if they are composite, and take an out= of any
    # dtype
    # found by amp-fuzz 0.1.0, case d3461d693e5a9e81 on compile[aot_eager]
    # value: v0
    # expected: -1.10789881 +- 5.4e-07 at [1, 2], float32
    # observed: -1.1015625: excess 1.17e+04, bias 1.68e+03
    @still_there
    def test_compile_out(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.6553032, 0.68948215, 0.1444306, -1.0804404], [0.46223265, 0.4516248,
            0.21279067, -0.641437], [-0.7819872, -0.37237027, -0.37810844, 0.12534198], [-0.76426387,
            0.059487678, -0.19895719, -0.090892896]], dtype=torch.float32)
        x1 = torch.tensor([[0.8747282, 0.63919336, 0.14559308, -2.4185128], [0.35299346, -0.3638147,
            -0.6706715, 0.18925707], [0.20428184, -0.4185586, -0.83982116, 1.3047159], [0.7746302,
            -1.7927482, 1.08132, -0.51745665]], dtype=torch.float32)
        b2 = torch.tensor([[1.7306892, -0.46482453, 0.4165636, -1.4243672], [-0.87457174, 0.33413666,
            0.19368783, 2.211329], [-0.08659971, -0.37344426, 0.15186714, 0.6827952], [-0.67652017,
            1.2561965, 0.19320433, -1.4983805]], dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[-1.1372666895712196, 1.2067957440694563, -1.8474213859030852,
            2.462870473777536], [0.1103413470948027, 1.1920179493363285, -1.1078988121976305,
            -0.4228951996314576], [-0.7956175240802148, -0.43081330754125347, 0.5889644844255368,
            1.2625892113254467], [-0.7585761202272223, -0.2639315600012848, -0.08236407251807476,
            1.64709095809655]], dtype=torch.float64)
        unit = torch.tensor([[6.388273180243733e-07, 1.0156916993815698e-06, 7.184858492934702e-07,
            1.0733810690716014e-06], [2.704529309278775e-07, 6.234548516981869e-07, 5.433420963938683e-07,
            6.008118313978809e-07], [4.393610116566612e-07, 3.0231526235951036e-07, 2.5133749402707603e-07,
            1.248596453269985e-06], [2.9940217543964594e-07, 2.561629918544331e-07, 1.0761504373500019e-07,
            1.0960697277373752e-06]], dtype=torch.float64)

        def program(x0, x1, b2):
            v0 = torch.matmul(x0, x1, out=b2)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, x1, b2.clone())
            observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compilation that fails in an inference_mode region breaks the thread that collects its
    # garbage
    # found by amp-fuzz 0.1.0, case 55c809aa7fa9f3c7 on compile[aot_eager]
    # state: after an error
    # expected: state as before
    # observed: dispatch keys: DispatchKeySet(BackendSelect, ADInplaceOrView) became
    # DispatchKeySet(BackendSelect, Python, ADInplaceOrView, PythonTLSSnapshot, PythonDispatcher)
    @still_there
    def test_compile_inference_guard(self):
        device = "cpu"

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)

        def program(x0):
            with torch.inference_mode():
                v0 = x0.unsqueeze(-1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        def drive(x0):
            outputs = program(x0)

        expected = torch_state(device)
        try:
            drive(x0)
        except Exception as error:
            if torch_state(device) == expected:
                raise
            print("raised:  ", error)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # a compilation that fails in an inference_mode region breaks the thread that collects its
    # garbage
    # found by amp-fuzz 0.1.0, case 22f9195159667aef on compile[aot_eager]
    # state: after an error
    # expected: state as before
    # observed: grad mode: True became False; inference mode: False became True; dispatch keys:
    # DispatchKeySet(BackendSelect, ADInplaceOrView) became DispatchKeySet(BackendSelect, Python,
    # PythonTLSSnapshot, PythonDispatcher)
    @still_there
    def test_compile_inference_guard_2(self):
        device = "cpu"

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)

        def program(x0):
            with torch.inference_mode():
                with torch.inference_mode():
                    v0 = torch.nn.functional.binary_cross_entropy(x0, x0, weight=x0)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        def drive(x0):
            outputs = program(x0)

        expected = torch_state(device)
        try:
            drive(x0)
        except Exception as error:
            if type(error).__name__ != 'RuntimeError' and torch_state(device) == expected:
                raise
            print("raised:  ", error)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # in an inference_mode region of a compiled program a weight has the cast of another dtype
    # found by amp-fuzz 0.1.0, case 699f7818838367a3 on compile[eager]
    # raise: outputs = program(w0, x1)
    # expected: no error
    # observed: TorchRuntimeError: RuntimeError when making fake tensor call Explanation: Dynamo failed
    # to run FX node with fake tensors: call_function <built-in method bmm of type object at
    # 0x7ff5344cea40>(*(FakeTensor(..., size=(1, 2, 2), requires_grad=True), FakeTensor(..., size=(1, 2,
    # 2))), **{}): got RuntimeError('expected scala
    @still_there
    def test_compile_inference_cast(self):
        w0 = torch.tensor([[[0.20906784, -0.4466765], [-1.677639, -1.0397965]]],
            dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([[[0.07555825, -0.5473053], [-0.48715296, 0.97741425]]], dtype=torch.float32)

        def program(w0, x1):
            with torch.inference_mode():
                v0 = torch.bmm(w0, w0)
                with autocast("cpu", dtype=torch.float16):
                    v1 = torch.bmm(w0, x1)
            return v0, v1

        program = torch.compile(program, backend="eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(w0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("TorchRuntimeError:") and "RuntimeError when making fake tensor" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # torch.lstm under autocast has the wider dtype of its states when compiled, where its input
    # requires grad or a tensor is of float16
    # found by amp-fuzz 0.1.0, case 049475edc5f64a62 on compile[aot_eager]
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_lstm(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        x1 = torch.tensor([[[0.74850667, -1.9860647, -1.1406846, -1.1486168], [0.53727263, -0.7786497,
            0.881448, 0.33358085], [0.28174624, 0.26839635, -1.3283921, -0.39113885]], [[0.012492177,
            -0.9902927, 0.05225387, -0.64815646], [-0.6082516, 1.6208498, 0.17620045, 0.4283077],
            [1.1888669, -1.2454951, -0.534633, 0.5718146]]], dtype=torch.float32)
        x2 = torch.tensor([[[-0.2542, -0.3047], [0.543, -0.847], [-0.563, 2.78]]], dtype=torch.float16)
        x3 = torch.tensor([[[-0.5645, -1.405], [-0.4114, -0.875], [-0.802, 1.99]]], dtype=torch.float16)
        w4 = torch.tensor([[1.4849125, -0.31953067, 0.5014277, 0.10713024], [-0.70821077, -0.29562736,
            -0.25828063, 2.3210483], [0.5657141, 0.05519187, -1.2892134, 0.5146061], [-0.827337, -1.4008664,
            -0.46291417, -2.0676053], [0.7060991, 0.48939148, 0.32895324, -0.77966446], [-0.16339289,
            -0.85348463, -0.47626668, -0.4941246], [-0.32005456, 0.30482244, 0.34114924, 1.1631455],
            [1.2410657, 0.33821514, 0.8784822, 0.52284086]], dtype=torch.float32).requires_grad_()
        w5 = torch.tensor([[0.89996207, -0.9799043], [-0.7891021, -0.20113927], [-2.97324, 1.6832392],
            [0.42793015, 0.67012876], [2.2925205, -0.77265155], [0.75621295, 0.16130058], [0.3271764,
            -1.7502891], [1.0490024, -0.7330189]], dtype=torch.float32).requires_grad_()

        def program(x0, x1, x2, x3, w4, w5):
            v0, v1, v2 = torch.lstm(x1, [x2, x3], [w4, w5], False, 1, 0.0, False, False, False)
            return v0, v1, v2

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, x1, x2, x3, w4, w5)
            value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # gradients of a custom op are read beyond the memory of a cotangent, where its fake kernel has
    # another dtype than the op
    # found by amp-fuzz 0.1.0, case 3ec1d868692ed7b5 on compile[inductor]
    # nondeterminism: w1.grad
    # expected: 1.628304294836522e+37 at [0, 1], 4 of 36 differ, float32
    # observed: nan at [0, 1], 4 of 36 differ, float32
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    @torch._functorch.config.patch(enable_autograd_cache=False)
    @torch._inductor.config.patch(fx_graph_cache=False)
    def test_compile_custom_op_promise(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        device = "cpu"
        torch.set_num_threads(1)

        def outcome(drive):
            return drive(*inputs())

        def inputs():
            x0 = torch.tensor([[2.2841823, -1.0269926, 0.97803396, -1.1882458], [-0.38622415, 0.3376655,
                0.6051379, -0.76389784], [-0.85000575, -0.37099713, 0.5020718, -0.15603048], [-0.70284915,
                -1.085597, 1.4458165, -1.3340733], [0.1928488, -0.8110873, 0.26748937, 0.39178002], [1.6961545,
                1.7041879, 0.7155873, 0.25894386], [-0.7371764, 0.4149627, -0.012823433, -1.63779], [-0.7980876,
                0.41102615, -1.7931055, -0.37486616], [0.48967093, 0.41571802, -0.9475526, -0.541419],
                [0.7088832, 0.17737284, 0.79230446, -0.2730957], [0.4866566, 0.04328113, 0.15998292, 0.800925],
                [-0.23539567, -0.57171154, 0.087541915, -1.9495838], [-2.2257726, -0.74196106, 0.5633744,
                -1.5090774], [-0.5514534, 0.48694438, -1.6237266, -0.9751959], [-0.8137376, -0.6638196,
                -0.23214293, -1.6513081], [1.229544, 0.9143566, 0.09253709, 0.14904833], [-0.5280497,
                -0.29749182, -0.80350804, 0.9193547]], dtype=torch.float32)
            w1 = torch.tensor([[-1.3162022, -0.72526586, -1.390684, 0.80218685, 1.3956203, 0.2632745,
                0.86833745, 3.0219035, 0.2655967], [0.38052854, 0.45192474, -0.7180193, 1.1343194, -0.0477096,
                0.39769062, 1.8662906, 1.11635, -1.1602801], [-2.5693097, -0.056903828, -0.11360286, -0.4819958,
                0.45461732, 0.8840583, -1.171764, -0.5859652, 0.44258064], [-0.15582894, 0.54653835, 1.3032221,
                -0.68381995, -1.1863127, 2.2321386, 0.10586995, 0.7233287, 0.2643321]],
                dtype=torch.float32).requires_grad_()
            return [x0, w1]

        def program(x0, w1):
            with autocast(device, dtype=torch.bfloat16):
                v0 = torch.tensordot(x0, w1, dims=[[1], [0]])
            return v0,

        plain = program
        program = torch.compile(program, backend="inductor", dynamic=False)

        def drive(x0, w1):
            with autocast(device, dtype=torch.bfloat16):
                entered = torch.compile(as_custom_op(plain, device, custom_op, torch.float32), backend="inductor", dynamic=False)
                outputs = entered(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            return w1.grad

        results = [outcome(drive) for _ in range(20)]
        self.assertFalse(any(differs(results[0], result) for result in results[1:]))

    # a nested compiled region is entered under the autocast state of another of its calls
    # found by amp-fuzz 0.1.0, case 9b4df38919e9aaa8 on compile[aot_eager]
    # dtype: later0.v0
    # expected: float32
    # observed: bfloat16
    @still_there
    def test_compile_region_state(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        x1 = torch.tensor([[0.07555825, -0.5473053], [-0.48715296, 0.97741425]], dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.mm(x0, x1)
            return v0,

        entered = torch.compiler.nested_compile_region(program)
        def calls(x0, x1):
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = entered(x0, x1)
            with autocast("cpu", enabled=False):
                later0 = entered(x0, x1)
            return outputs, later0
        outputs, later0 = torch.compile(calls, backend="aot_eager", dynamic=False)(x0, x1)
        value = later0[0]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # a nested compiled region is entered under the autocast state of another of its calls
    # found by amp-fuzz 0.1.0, case 3ec5c029e31b88a0 on compile[aot_eager]
    # dtype: v0
    # expected: float16
    # observed: bfloat16
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_region_state_2(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            return v0,

        entered = torch.compiler.nested_compile_region(program)
        def calls(x0, w1):
            with autocast("cpu", dtype=torch.float16):
                outputs = entered(x0, w1)
            with autocast("cpu", dtype=torch.float16):
                later0 = entered(x0, w1)
            return outputs, later0
        outputs, later0 = torch.compile(calls, backend="aot_eager", dynamic=False)(x0, w1)
        value = outputs[0]

        expected, observed = torch.float16, value.dtype
        self.assertEqual(observed, expected)

    # a compiled autocast context that names no dtype keeps the default of its first call
    # https://github.com/pytorch/pytorch/pull/191110
    # found by amp-fuzz 0.1.0, case 67edb2c383b9751a on compile[aot_eager]
    # dtype: later0.v0
    # expected: float16
    # observed: bfloat16
    @still_there
    def test_compile_default_dtype(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        x1 = torch.tensor([[0.07555825, -0.5473053], [-0.48715296, 0.97741425]], dtype=torch.float32)

        def program(x0, x1):
            with autocast("cpu"):
                v0 = torch.mm(x0, x1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, x1)
        with autocast_dtype("cpu", torch.float16):
            later0 = program(x0, x1)
            value = later0[0]

        expected, observed = torch.float16, value.dtype
        self.assertEqual(observed, expected)

    # a compiled or selective checkpoint raises in the backward pass if a weight's cast is in
    # autocast's cache before it
    # https://github.com/pytorch/pytorch/issues/193338
    # found by amp-fuzz 0.1.0, case 2de39cf0ff6a2f70 on compile[eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: aten._to_copy.default invocation index 1 encountered during backward but
    # not found in storage. This can happen if the operations in the checkpointed region are
    # nondeterministic or depend on global state that changed between forward and backward.
    @still_there
    def test_checkpoint_cast(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            def block0(x0, w1):
                v1 = torch.mm(x0, w1)
                return v1,
            v1, = checkpoint(block0, x0, w1, use_reentrant=False)
            return v0, v1

        program = torch.compile(program, backend="eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "This can happen if the operations in" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a compiled or selective checkpoint raises in the backward pass if a weight's cast is in
    # autocast's cache before it
    # https://github.com/pytorch/pytorch/issues/193338
    # found by amp-fuzz 0.1.0, case 4240dfe061cfcac6 on eager-cpu
    # raise: v1 = torch.mm(x0, w1)
    # expected: no error
    # observed: RuntimeError: aten._to_copy.default invocation index 1 encountered during backward but
    # not found in storage. This can happen if the operations in the checkpointed region are
    # nondeterministic or depend on global state that changed between forward and backward.
    @still_there
    def test_checkpoint_cast_2(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                v0 = torch.mm(x0, w1)
                def block0(x0, w1):
                    v1 = torch.mm(x0, w1)
                    return v1,
                v1, = checkpoint(block0, x0, w1, use_reentrant=False, context_fn=saving_products)
                outputs = v0, v1,
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "This can happen if the operations in" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # what the kernel of an op calls is not cast in a compiled program, nor a composite op in
    # inference_mode
    # found by amp-fuzz 0.1.0, case ff0b8b26f89f2201 on compile[aot_eager]
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_compile_kernels(self):
        x0 = torch.tensor([[-0.6553032, 0.68948215, 0.1444306, -1.0804404], [0.46223265, 0.4516248,
            0.21279067, -0.641437], [-0.7819872, -0.37237027, -0.37810844, 0.12534198], [-0.76426387,
            0.059487678, -0.19895719, -0.090892896]], dtype=torch.float32)

        def program(x0):
            v0 = torch.linalg.pinv(x0)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0)
            value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # a weight's cast is kept between calls in one context in eager only: two steps see the new
    # weight
    # found by amp-fuzz 0.1.0, case 6d0381f96a92d118 on compile[aot_eager]
    # value: step1.v0
    # expected: -3.68699911 +- 0.046 at [1, 1], bfloat16
    # observed: -1.84375: excess 40.2, bias 20
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_weight_cache(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[0.05165853588248659, 1.6816278156163875], [-0.011797198791899888,
            -3.6869991141736733]], dtype=torch.float64)
        unit = torch.tensor([[0.005830501802002765, 0.024268897524846927], [0.013356449845972545,
            0.04580591647815174]], dtype=torch.float64)

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        weights = [w1]
        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            nudge(weights)
            w1.grad = None
            outputs = program(x0, w1)
            observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # l1_loss forgets its weight where modes of torch functions are on: in a compiled program, in an
    # export, on torchax
    # https://github.com/pytorch/pytorch/pull/193003
    # found by amp-fuzz 0.1.0, case 51ef9cc508158738 on compile[aot_eager]
    # value: v0
    # expected: 0.375482182 +- 7.1e-07 at [], float32
    # observed: 1.8359375: excess 2.07e+06, bias 1.07e+06
    @still_there
    def test_compile_functions(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([1.086, -0.9, 0.53], dtype=torch.bfloat16)
        x1 = torch.tensor([0.605, -1.875, 0.91], dtype=torch.bfloat16)
        x2 = torch.tensor([-0.21150042, -0.73080665, 3.1426768], dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor(0.37548218184383586, dtype=torch.float64)
        unit = torch.tensor(7.054609699082282e-07, dtype=torch.float64)

        def program(x0, x1, x2):
            v0 = torch.nn.functional.l1_loss(x0, x1, weight=x2, reduction='sum')
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, x1, x2)
            observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a composite op of an exported program loses its autocast region where the export is decomposed
    # https://github.com/pytorch/pytorch/issues/137274
    # found by amp-fuzz 0.1.0, case b7ba3f5ee274d148 on export[decomposed]
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_export_composites(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        x1 = torch.tensor([[0.07555825, -0.5473053], [-0.48715296, 0.97741425]], dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.einsum('ij,jk->ik', x0, x1)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, x1)
            value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # a composite op of an exported program loses its autocast region where the export is decomposed
    # https://github.com/pytorch/pytorch/issues/137274
    # found by amp-fuzz 0.1.0, case d712c70740741e1d on export[decomposed]
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_export_composites_2(self):
        x0 = torch.tensor([[[-1.2861441, -0.35868865], [0.79343295, 0.32142022]], [[0.061936565,
            -0.79167765], [-0.30206853, -1.187549]], [[-0.4135439, 0.94181997], [-0.32208398, -1.1537579]]],
            dtype=torch.float32)
        x1 = torch.tensor([[[2.2820387, -1.339682, 0.9310323], [-1.5145143, -2.4666195, 1.5498285]]],
            dtype=torch.float32)
        w2 = torch.tensor([[-1.4393677, 1.0642433], [1.4752986, 0.54857147], [0.46143758, -0.1213797]],
            dtype=torch.float32).requires_grad_()
        w3 = torch.tensor([[-0.4728699, -1.2388667, 1.3067056], [0.53399533, 0.2099328, 0.20106031],
            [-0.77788025, -0.35172284, -0.7747886]], dtype=torch.float32).requires_grad_()

        def program(x0, x1, w2, w3):
            with autocast("cpu", dtype=torch.bfloat16):
                v0, v1 = torch.rnn_tanh(x0, x1, [w2, w3], False, 1, 0.0, False, False, False)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        outputs = program(x0, x1, w2, w3)
        value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # a composite op of an exported program loses its autocast region where the export is decomposed
    # https://github.com/pytorch/pytorch/issues/137274
    # found by amp-fuzz 0.1.0, case 25e8fad836604284 on export[decomposed]
    # raise: outputs = program(x0, x1)
    # expected: no error
    # observed: AssertionError: Tensor dtype mismatch! Expected: torch.bfloat16, Got: torch.float32
    @still_there
    def test_export_composites_3(self):
        x0 = torch.tensor([[0.0016112087, -0.35228622, 0.9826507], [-0.3036243, -1.3431978, -0.6199277]],
            dtype=torch.float32)
        x1 = torch.tensor([[2.2820387, -1.339682], [0.9310323, -1.5145143], [-2.4666195, 1.5498285]],
            dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.einsum('ij,jk->ik', x0, x1)
            v1 = v0.float()
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("AssertionError:") and "Tensor dtype mismatch! Expected: torch" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a composite op of an exported program loses its autocast region where the export is decomposed
    # https://github.com/pytorch/pytorch/issues/137274
    # found by amp-fuzz 0.1.0, case 50663c02218f02ab on export[decomposed]
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_export_composites_4(self):
        x0 = torch.tensor([[0.0016112087, -0.35228622, 0.9826507], [-0.3036243, -1.3431978, -0.6199277]],
            dtype=torch.float32)
        x1 = torch.tensor([[2.2820387, -1.339682], [0.9310323, -1.5145143], [-2.4666195, 1.5498285]],
            dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.einsum('ij,jk->ik', x0, x1)
            v1 = v0.neg()
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, x1)
            value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # composite ops in an inference_mode and an autocast region raise while they are exported
    # found by amp-fuzz 0.1.0, case d838d578778d0baf on export
    # raise: v0 = torch.einsum('ij,j', x0, x1)
    # expected: no error
    # observed: RuntimeError: expected scalar type torch.bfloat16 but found torch.float32
    @still_there
    def test_export_inference_composites(self):
        x0 = torch.tensor([[-0.0281, -0.8]], dtype=torch.bfloat16)
        x1 = torch.tensor([-0.5216261, -0.05634346], dtype=torch.float32)

        def program(x0, x1):
            with torch.inference_mode():
                v0 = torch.einsum('ij,j', x0, x1)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "expected scalar type torch" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an exported program raises where it converts what an LSTM or a sparse product computed under
    # autocast
    # found by amp-fuzz 0.1.0, case e53a2a99e747ee88 on export
    # raise: outputs = program(x0)
    # expected: no error
    # observed: RuntimeError: Tensor dtype mismatch! Expected: Float, Got: c10::BFloat16
    @still_there
    def test_export_asserted_dtypes(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)

        def program(x0):
            v0 = torch.sparse.mm(x0.to_sparse(), x0)
            v1 = v0.float()
            return v1,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Tensor dtype mismatch! Expected: Float," in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a no_grad region inside an autocast region is forgotten when the program is exported
    # found by amp-fuzz 0.1.0, case ad1c822a6493011e on export
    # grad-value: w1.grad
    # expected: -1.15509146 +- 7.7e-07 at [1], float32
    # observed: -0.754636645: excess 5.2e+05, bias 2.57e+05
    @still_there
    def test_export_no_grad(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.524523586901154, -1.1550914575858002], dtype=torch.float64)
        unit = torch.tensor([4.0777246995306423e-07, 7.703786582299863e-07], dtype=torch.float64)

        def program(x0, w1):
            with autocast("cpu", dtype=torch.bfloat16):
                with torch.no_grad():
                    v0 = torch.mul(x0, w1)
            v1 = torch.exp(w1)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a no_grad region inside an autocast region is forgotten when the program is exported
    # found by amp-fuzz 0.1.0, case 74f03bf89c02b6a4 on export
    # grad-value: w1.grad
    # expected: -1.15509146 +- 7.6e-07 at [1], float32
    # observed: -0.754636645: excess 5.25e+05, bias 2.55e+05
    @still_there
    def test_export_no_grad_2(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.524523586901154, -1.1550914575858002], dtype=torch.float64)
        unit = torch.tensor([3.071698340645505e-07, 7.632988768022096e-07], dtype=torch.float64)

        def program(x0, w1):
            with torch.no_grad():
                v0 = torch.mul(x0, w1)
            v1 = torch.exp(w1)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        entered = as_function(program, "cpu", custom_fwd, custom_bwd)
        outputs = entered(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a no_grad region inside an autocast region is forgotten when the program is exported
    # found by amp-fuzz 0.1.0, case e313ac9b575796ba on export
    # grad-value: w1.grad
    # expected: -1.15509146 +- 7.6e-07 at [1], float32
    # observed: -0.754636645: excess 5.25e+05, bias 2.55e+05
    @still_there
    def test_export_no_grad_3(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.524523586901154, -1.1550914575858002], dtype=torch.float64)
        unit = torch.tensor([3.071698340645505e-07, 7.632988768022096e-07], dtype=torch.float64)

        def program(x0, w1):
            with torch.no_grad():
                v0 = torch.mul(x0, w1)
            v1 = torch.exp(w1)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        entered = as_function(program, "cpu", custom_fwd, custom_bwd, torch.float32)
        outputs = entered(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # an autocast region of an exported program casts a weight at each use, where eager has the cast
    # in its cache
    # found by amp-fuzz 0.1.0, case 39647690c23f7cc5 on export
    # value: step1.v0
    # expected: -0.724232032 +- 0.012 at [0], bfloat16
    # observed: -0.36328125: excess 29.7, bias 18.9
    @still_there
    def test_export_region_cache(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.9384063], dtype=torch.float32)
        w1 = torch.tensor([[0.7717681]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.7242320319328144], dtype=torch.float64)
        unit = torch.tensor([0.012135342806000815], dtype=torch.float64)

        def program(x0, w1):
            with autocast("cpu", dtype=torch.bfloat16):
                v0 = torch.nn.functional.linear(x0, w1)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        weights = [w1]
        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
            nudge(weights)
            w1.grad = None
            outputs = program(x0, w1)
            observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # an exported program with a no_grad region in an autocast region can be saved, but not loaded
    # found by amp-fuzz 0.1.0, case e6c48aded19bc493 on export
    # raise: outputs = program(x0)
    # expected: no error
    # observed: SpecViolationError: Node.meta wrap_with_autocast is missing val field.
    @still_there
    def test_export_saved_regions(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)

        def program(x0):
            with autocast("cpu", dtype=torch.bfloat16):
                with torch.no_grad():
                    v0 = torch.neg(x0)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False, saved=True), [], 1)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("SpecViolationError:") and "meta wrap_with_autocast is missing val" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a strict export traces autocast regions as if they were not there
    # found by amp-fuzz 0.1.0, case 8f0401ff85fdc428 on export[strict]
    # raise: outputs = program(x0, x1)
    # expected: no error
    # observed: RuntimeError: expected dtype torch.bfloat16 for `end`, but got dtype torch.float32
    @still_there
    def test_export_strict_regions(self):
        x0 = torch.tensor([[-0.9384063]], dtype=torch.float32)
        x1 = torch.tensor([[1.0458146]], dtype=torch.float32)

        def program(x0, x1):
            with autocast("cpu", enabled=False):
                v0 = torch.mm(x0, x0)
            v1 = torch.lerp(v0, x1, 0.5)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False, strict=True), [], 1)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "for `end`, but got dtype torch" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # autocast contexts of two dtypes, nested or in two threads: one gets the other's cast of a
    # weight
    # found by amp-fuzz 0.1.0, case d0510d7d90dc6da3 on eager-cpu
    # dtype: v1
    # expected: float16
    # observed: bfloat16
    @still_there
    def test_cache_ignores_dtype(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        with autocast("cpu", dtype=torch.bfloat16):
            v0 = torch.mm(w1, w1)
            with autocast("cpu", dtype=torch.float16):
                v1 = torch.mm(w1, w1)
            value = v1

        expected, observed = torch.float16, value.dtype
        self.assertEqual(observed, expected)

    # autocast contexts of two dtypes, nested or in two threads: one gets the other's cast of a
    # weight
    # found by amp-fuzz 0.1.0, case 4c1fadea5bcc7440 on eager-cpu
    # dtype: v1
    # expected: float16
    # observed: bfloat16
    @still_there
    def test_cache_ignores_dtype_2(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(w1, w1)
            with autocast("cpu", dtype=torch.float16):
                v1 = torch.mm(w1, w1)
            return v0, v1

        with autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                program(x0, w1)
            outputs = in_thread(program, x0, w1)
            value = outputs[1]

        expected, observed = torch.float16, value.dtype
        self.assertEqual(observed, expected)

    # a weight that is used in a custom op's body loses its gradient where it is used after it
    # found by amp-fuzz 0.1.0, case 8465edc122838b81 on eager-cpu
    # grad-missing: w1.grad
    # expected: float32[2, 2]
    # observed: None
    @still_there
    def test_custom_op_weight_cache(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            return v0,

        with autocast("cpu", dtype=torch.bfloat16):
            entered = as_custom_op(program, "cpu", custom_op)
            outputs = entered(x0, w1)
            outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w1.grad

        expected, observed = "a gradient", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # custom_bwd raises AttributeError in a function that has a setup_context
    # https://github.com/pytorch/pytorch/issues/132388
    # found by amp-fuzz 0.1.0, case 38e08facdab90db6 on eager-cpu
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: AttributeError: 'ApartBackward' object has no attribute '_fwd_used_autocast'
    @still_there
    def test_custom_fwd_setup_context(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            return v0,

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                entered = as_function_apart(program, "cpu", custom_fwd, custom_bwd)
                outputs = entered(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("AttributeError:") and "object has no attribute" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # register_autocast of a custom op raises AttributeError for mtia and maia
    # https://github.com/pytorch/pytorch/pull/183689
    # found by amp-fuzz 0.1.0, case 6343b31e8e2f3e06 on fake-maia
    # raise: entered = as_custom_op(program, device, custom_op, torch.float32)
    # expected: no error
    # observed: AttributeError: type object 'torch._C.DispatchKey' has no attribute 'AutocastMAIA'
    @still_there
    def test_register_autocast_key(self):
        code, printed = run_script(SCRIPT_OF_REGISTER_AUTOCAST_KEY)
        if code not in (0, 1):
            self.skipTest(f"cannot tell: {printed[-300:]}")
        self.assertEqual(code, 0, printed)

    # an op of the promote policy raises for a 16-bit input that is not of the autocast dtype, or if
    # that is float64
    # https://github.com/pytorch/pytorch/issues/132715
    # found by amp-fuzz 0.1.0, case 951269bc1318666d on eager-cpu
    # raise: v0 = torch.cat([x0], 0)
    # expected: no error
    # observed: RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize
    @still_there
    def test_promote_foreign_half(self):
        x0 = torch.tensor([0.0394, 1.426, -0.3577, -0.4668, -1.164], dtype=torch.float16)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                v0 = torch.cat([x0], 0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Unexpected floating ScalarType in" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # bilinear's bias is cast to what the other arguments decide, though it is wider
    # https://github.com/pytorch/pytorch/pull/191125
    # found by amp-fuzz 0.1.0, case 5bdfba6c9f96b560 on fake-cuda
    # dtype: v0
    # expected: float32
    # observed: bfloat16
    @still_there
    def test_promote_skips_optional(self):
        code, printed = run_script(SCRIPT_OF_PROMOTE_SKIPS_OPTIONAL)
        if code not in (0, 1):
            self.skipTest(f"cannot tell: {printed[-300:]}")
        self.assertEqual(code, 0, printed)

    # attention and transformer layers take their inference fast path under the CPU's autocast
    # https://github.com/pytorch/pytorch/issues/191796
    # found by amp-fuzz 0.1.0, case f87dd0f88cb76134 on eager-cpu
    # bitwise: v0
    # expected: -36.875 at [0, 1, 2], 8 of 40 differ, float16
    # observed: -36.84375 at [0, 1, 2], 8 of 40 differ, float16
    @still_there
    def test_query_asks_cuda(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        device = "cpu"
        torch.set_num_threads(1)

        x0 = torch.tensor([[[-3.0, 3.0, -2.0, 1.0], [3.0, 0.0, 1.0, -4.0], [4.0, 2.0, -2.0, 1.0], [1.0,
            -2.0, -2.0, -1.0], [2.0, 2.0, -1.0, 0.0]], [[0.0, 0.0, -2.0, 0.0], [4.0, 2.0, -3.0, -1.0], [0.0,
            4.0, 4.0, -2.0], [-2.0, 1.0, 3.0, -2.0], [4.0, -3.0, 2.0, 2.0]]], dtype=torch.float16)
        x1 = torch.tensor([[3.0, -3.0, -3.0, 1.0], [-1.0, 1.0, -3.0, -4.0], [-3.0, 1.0, -3.0, 2.0], [1.0,
            3.0, 0.0, -4.0], [-2.0, 2.0, 4.0, 2.0], [2.0, 4.0, 3.0, -3.0], [-1.0, 1.0, -2.0, -2.0], [1.0,
            -1.0, 4.0, 1.0], [4.0, 3.0, 0.0, 0.0], [1.0, 1.0, -2.0, 2.0], [2.0, -3.0, -4.0, 4.0], [-4.0,
            -3.0, 2.0, 2.0]], dtype=torch.float16)
        x2 = torch.tensor([-1.0, 0.0, 4.0, 1.0, -3.0, 0.0, 3.0, 4.0, -2.0, 1.0, -1.0, 1.0],
            dtype=torch.float16)
        x3 = torch.tensor([[-0.4836, 0.3345, -0.728, 0.0173], [-0.7407, 0.6353, -0.344, 1.469], [-2.178,
            -0.4387, -0.6235, 1.107], [0.8193, 0.2417, -1.07, -0.3113]], dtype=torch.float16)
        x4 = torch.tensor([0.818, -0.6836, 1.369, -1.105], dtype=torch.float16)
        x5 = torch.tensor([[2.81, 0.6416, -0.3745, 0.5693], [-0.4055, -1.168, 1.904, 0.4558], [1.621, 1.338,
            0.4512, 0.5474]], dtype=torch.float16)
        x6 = torch.tensor([4.0, 3.0, -4.0], dtype=torch.float16)
        x7 = torch.tensor([[-0.1284, 1.243, 0.6597], [-1.24, 0.6055, -0.1753], [0.9844, 0.1715, 1.067],
            [-1.668, 0.6826, 0.8384]], dtype=torch.float16)
        x8 = torch.tensor([-1.038, 0.1404, 0.877, 0.5576], dtype=torch.float16)
        x10 = torch.tensor([0.313, -0.3599, -0.9414, -0.0001955], dtype=torch.float16)
        x11 = torch.tensor([1.918, 2.365, -0.6494, 1.033], dtype=torch.float16)
        x12 = torch.tensor([-2.617, 1.09, -1.058, -0.577], dtype=torch.float16)
        x13 = torch.tensor([-1.916, -0.608, 0.4868, -1.023], dtype=torch.float16)

        # As torch 2.13.0+cpu computes it here; another CPU may round differently.
        expected = torch.tensor([[[4.35, -12.766, -44.38, 25.1], [10.664, -16.62, -36.88, 18.69], [11.93,
            -13.69, -44.9, 25.83], [8.984, -17.66, -44.22, 23.56], [9.86, -13.65, -43.44, 24.55]], [[10.59,
            -10.164, -36.2, 23.25], [14.875, -8.03, -37.12, 22.4], [7.344, -11.95, -32.6, 20.9], [3.344,
            -19.36, -37.88, 18.75], [13.016, -16.1, -33.84, 25.72]]], dtype=torch.float16)

        with autocast(device, dtype=torch.float16):
            v0 = torch.func.functional_call(torch.nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, activation='gelu', batch_first=True, norm_first=True, device='meta').train(False), dict(zip(['self_attn.in_proj_weight', 'self_attn.in_proj_bias', 'self_attn.out_proj.weight', 'self_attn.out_proj.bias', 'linear1.weight', 'linear1.bias', 'linear2.weight', 'linear2.bias', 'norm1.weight', 'norm1.bias', 'norm2.weight', 'norm2.bias'], [x1, x2, x3, x4, x5, x6, x7, x8, x10, x11, x12, x13])), (x0, None))
            observed = v0

        self.assertFalse(differs(expected, observed))

    # RNN, GRU and LSTM raise for inputs and weights of two dtypes under autocast on mps and maia
    # found by amp-fuzz 0.1.0, case a628da518134ebc6 on fake-mps
    # raise: v0, v1 = torch.func.functional_call(torch.nn.GRU(6, 5, 1, bias=False, batch_first=False,
    # bidirectional=False, device='meta'), dict(zip(['weight_ih_l0', 'weight_hh_l0'], [x1, x2])), (x0,
    # None))
    # expected: no error
    # observed: ValueError: RNN input dtype (torch.bfloat16) does not match weight dtype
    # (torch.float32). Convert input: input.to(torch.float32), or convert model:
    # model.to(torch.bfloat16)
    @still_there
    def test_any_query_misses_devices(self):
        code, printed = run_script(SCRIPT_OF_ANY_QUERY_MISSES_DEVICES)
        if code not in (0, 1):
            self.skipTest(f"cannot tell: {printed[-300:]}")
        self.assertEqual(code, 0, printed)

    # scaled_mm of float8 matrices multiplies in the autocast dtype, on the CPU
    # found by amp-fuzz 0.1.0, case b447e8656fe97ad9 on scaled_mm
    # bitwise: v0
    # expected: 0.875 at [0, 0], 127 of 256 differ, bfloat16
    # observed: 0.87109375 at [0, 0], 127 of 256 differ, bfloat16
    @still_there
    def test_scaled_mm_autocast(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        from torch.utils.checkpoint import checkpoint
        device = "cpu"
        torch.set_num_threads(1)

        def fp8_regions(linear: Any, checkpoint: Any) -> Any:
            """Return FP8 regions, a layer that quantises in them, and a checkpoint that restores them."""
            regions: list[Any] = []

            @contextlib.contextmanager
            def fp8(recipe: Any, enabled: bool = True, **options: Any) -> Any:
                regions.append({"recipe": recipe, **options} if enabled else None)
                try:
                    yield
                finally:
                    regions.pop()

            def fp8_linear(x: Any, weight: Any, bias: Any = None, layer: int = 0) -> Any:
                region = regions[-1] if regions else None
                if region is None:
                    return torch.nn.functional.linear(x, weight, bias)
                return linear(x, weight, bias, layer, **region)

            def restoring(function: Any, *args: Any, use_reentrant: bool) -> Any:
                inner = list(regions)

                def body(*args: Any) -> Any:
                    outer = list(regions)
                    regions[:] = inner
                    try:
                        return function(*args)
                    finally:
                        regions[:] = outer

                return checkpoint(body, *args, use_reentrant=use_reentrant)

            return fp8, fp8_linear, restoring

        def scaled_linear() -> Any:
            """Return a linear layer of torch's FP8 casts and products, as a recipe says."""
            from torch.nn.functional import ScalingType, scaled_mm

            def quantised(x: Any, dim: int, dtype: Any, rows: bool) -> Any:
                largest = torch.finfo(dtype).max
                amax = x.abs().amax(dim, keepdim=True) if rows else x.abs().max()
                scale = (largest / amax.double().clamp(min=1e-12)).float()
                if rows:
                    scale = scale.double().log2().floor().exp2().float()
                return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()

            def product(a: Any, b: Any, dtype: Any, rows: bool) -> Any:
                (left, one), (right, other) = a, b
                scaling = ScalingType.RowWise if rows else ScalingType.TensorWise
                left, right = left.contiguous(), right.t().contiguous().t()
                one, other = (s.clone(memory_format=torch.contiguous_format) for s in (one, other))
                return scaled_mm(left, right, one, scaling, other, scaling, output_dtype=dtype)

            class Linear(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, x: Any, weight: Any, dtype: Any, forward: Any, *how: Any) -> Any:
                    ctx.save_for_backward(x, weight)
                    ctx.how = forward, *how
                    _, rows = how
                    a = quantised(x.reshape(-1, x.shape[-1]), 1, forward, rows)
                    (b, scale) = quantised(weight, 1, forward, rows)
                    y = product(a, (b.t(), scale.t()), dtype, rows)
                    return y.reshape(*x.shape[:-1], weight.shape[0])

                @staticmethod
                def backward(ctx: Any, grad: Any) -> Any:
                    x, weight = ctx.saved_tensors
                    forward, backward, rows = ctx.how
                    flat, g = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
                    a, b = quantised(g, 1, backward, rows), quantised(weight, 0, forward, rows)
                    dx = product(a, b, grad.dtype, rows)
                    (a, scale), b = quantised(g, 0, backward, rows), quantised(flat, 0, forward, rows)
                    dw = product((a.t(), scale.t()), b, grad.dtype, rows)
                    return dx.reshape(x.shape), dw, None, None, None, None

            def linear(x: Any, weight: Any, bias: Any, layer: int, recipe: str, **options: Any) -> Any:
                device, form = x.device.type, options.get("format", "HYBRID")
                if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
                    x = x.to(torch.get_autocast_dtype(device))
                forward = torch.float8_e5m2 if form == "E5M2" else torch.float8_e4m3fn
                backward = torch.float8_e4m3fn if form == "E4M3" else torch.float8_e5m2
                apply: Any = Linear.apply
                y = apply(x, weight, x.dtype, forward, backward, recipe == "rowwise")
                return y if bias is None else y + bias.to(y.dtype)

            return linear

        fp8, fp8_linear, checkpoint = fp8_regions(scaled_linear(), checkpoint)

        x0 = torch.tensor([[1.2815964, 0.41323882, 0.7950969, 0.9552621, -0.97319376, 0.87617815,
            -0.52206224, 0.84093213, 0.16891438, 0.065815076, -0.081481725, -1.1710687, 0.5119885,
            1.5719893, -0.93978816, -0.12657112], [-0.590572, -3.2838333, -0.111365184, 1.5475428,
            1.1384319, -0.096039735, -0.14849567, 0.20304497, -1.2004429, -0.4396446, 1.120109, 1.2787616,
            -1.192241, -0.6926039, -0.6254015, 0.20211223], [0.71695673, 1.6077304, -0.6827761, 1.6824752,
            1.5017699, -1.7020465, 0.2200812, -0.8271506, 1.2562244, -0.34085476, 1.0869241, -1.0018157,
            -2.1685019, 0.23719385, -0.71560925, -1.4876152], [-1.4645591, -0.0018358014, 1.174967,
            0.6547726, 0.5257499, -0.013547263, 0.035278134, -0.21662039, -0.14352185, 0.11085126,
            -0.58472973, 1.2330366, -0.41385457, -1.7728915, -2.7149117, 1.9191511], [0.16654938,
            -1.2066659, -1.358053, -1.0710229, -0.61147916, -0.5892849, 1.1374904, 0.57221997, -0.74105006,
            1.3401852, 0.21775874, -0.53330654, -0.47834158, -1.5141762, 0.117135756, 0.97053695],
            [-0.3753472, -0.41076446, -1.9732318, 0.7119601, 0.15869275, -1.2278568, 0.62266207, 0.27804935,
            0.43295008, -0.7376182, 0.5152511, -0.06700718, 0.46679524, 0.16106, 1.3002672, -0.117234364],
            [-1.3979286, 1.2333405, 0.24646051, -0.49439183, -0.022112928, 0.56086093, -0.6659711,
            -1.1099024, 1.0787047, 1.2580304, 0.4969634, -1.3636212, 0.08447341, 0.07171478, -0.6190223,
            -0.0684928], [-0.45844433, 0.41485688, -1.4318984, 1.0038075, -0.09480626, -0.11628883,
            -1.234041, -0.030196287, -0.9670935, -1.4621667, -0.25021726, -0.62651503, -1.1165214,
            1.3919221, 0.071460836, 0.1059129], [0.88681513, -1.3307065, -0.4801235, -2.5968857, -0.5716089,
            -1.1847605, 0.123360656, 0.28073245, 1.3740102, -0.15951574, -0.2847285, -0.73299813,
            -0.38001534, -0.3860221, 0.67194694, 0.5422222], [-0.22946556, 0.13007466, 2.1999207,
            -1.1417282, 2.1250517, -0.15671448, 0.3478838, 2.492202, 0.29254335, 1.6569957, -2.0768785,
            -0.38472754, 2.2886412, 1.3285687, 1.5764773, -0.8009723], [-0.4762314, -0.48485252, -2.7333276,
            0.08781986, 0.50482494, 1.1616741, 0.39543328, -0.23009665, -0.34461755, -0.61612797,
            0.92619634, -0.9807261, -2.3495765, -1.2242807, 0.6312076, -1.64878], [1.2706707, 0.14325213,
            -0.20848323, 0.050006744, -0.5672584, -1.4928483, -3.378565, 1.6661234, 0.16803004, -1.8364702,
            1.5078275, 0.87704045, 0.05199609, -0.13464291, 0.9085228, 0.22179772], [-1.6206657,
            -0.16939884, -1.6038533, 0.2614241, -1.3812383, -0.0017047549, -1.3074279, 0.8494786,
            -1.7884215, -0.82444185, 0.76949996, 0.98184747, 1.7484273, 0.89415616, -0.9436501,
            -0.35765505], [0.0030262864, 0.8331725, 0.028708, 0.6652485, -1.6701671, 0.83922684,
            -0.25325355, -1.4140838, 0.08515038, -0.4848199, 2.451817, -2.6887288, -1.5756264, -1.0937963,
            -0.03111362, -1.1100278], [-0.85002476, 0.14372358, 0.36766875, -1.4701432, -0.32053235,
            -0.22003515, 0.8201651, -0.7142024, 0.2382494, -0.7337616, 0.956648, -1.4698467, -0.5186633,
            0.4991531, 0.9427997, 1.1290673], [-0.8807721, -0.11046616, -1.0305156, 1.0084908, -1.0982525,
            -0.42837182, 0.39939776, -0.26136205, -1.7796341, -0.47728992, 0.2801794, -0.22841848,
            -0.006279021, 0.22171435, -1.9392031, 1.2607491]], dtype=torch.float32)
        w1 = torch.tensor([[-1.7800494, -0.6631719, 1.1860842, 2.1318882, 1.2690299, -0.8806812, -1.1678288,
            1.5256999, 1.5763814, 1.4671041, -0.20945758, -0.4575476, -1.4020307, -0.79276156, -1.5646117,
            -0.32121402], [0.113198735, -1.686271, 1.9896336, 1.1544845, 0.291716, -1.352909, 0.35671246,
            2.0091686, -2.1418893, -0.1401171, -0.45767093, -1.2401857, 0.5284083, -0.17885017, 0.4790676,
            0.66334367], [-0.11831748, 0.3389594, -0.5532046, 0.33288884, -0.12681592, 0.86489767,
            -0.41509202, -1.3799084, 0.54082805, -1.0285565, 0.16573772, -0.8207156, -0.6528164, 0.48621848,
            1.0821486, -1.1235845], [1.0117309, -1.1773968, 0.35625753, -1.2580069, -0.33949807, -0.6821352,
            2.1776905, -0.41111046, 1.9008855, -1.0509759, -0.9498483, -0.30517197, 0.7515417, -0.21777077,
            -0.7426371, -0.79724395], [-0.46610093, -0.39360902, 1.6417286, -0.712144, -0.087843895,
            -0.41461042, -0.7507394, 0.10913144, 0.980456, 0.6369965, 1.513799, -0.1984195, 0.9493079,
            0.9080914, -1.6414101, -1.2575053], [-0.6331174, 1.7214168, 1.0604302, -0.6786547, 1.4532812,
            -0.6317562, -1.8446289, 0.0632135, -0.27273878, 0.15564072, -0.61893636, -1.1832085, -1.4959185,
            -1.4916219, -0.33492, 1.1453676], [0.9405643, 1.0903014, -2.1339326, 0.5505728, 1.3346277,
            0.7359264, 2.06001, 0.264314, 0.80808157, 0.510502, 0.917479, 0.19388954, -0.061385598,
            0.014762724, -0.84394217, 1.0238458], [0.41130242, -1.9502662, 0.7320909, 0.97612417,
            -0.25760975, 0.87187034, -1.983118, 0.18854026, 0.112294175, -0.7586457, 1.2980881, -0.55832547,
            0.9339249, -0.22031808, -0.09234477, 0.9510833], [-0.42486987, -1.0127093, 0.8861393,
            -2.1907454, 1.8539968, -0.39876476, 2.2166772, -1.896897, 0.552367, 0.7697344, -0.24412927,
            -0.93121046, 0.030912796, 0.31645206, 0.19535293, -0.2619214], [-1.596598, 0.5231817, 0.8334268,
            -0.5599478, 0.23654638, -0.7033248, 0.98196805, 0.5921914, 0.26513964, 1.9060687, 0.20127353,
            -1.1379628, -0.71605337, -0.096634954, -0.75886726, 0.31552553], [1.5150176, 2.0577564,
            -2.5564508, 0.83303714, -1.0093777, -0.23300432, -2.0482621, 0.23283249, 0.9025073, 1.6848031,
            -0.9687119, 2.257387, -0.26350498, -0.1619533, -1.0502583, -0.059320726], [2.6246023,
            -0.0076913084, -0.52234846, 0.071432956, 1.9444559, 0.5158817, 1.8509084, -1.0916151, 0.7779923,
            0.5508108, 3.0879364, 0.7645009, 1.3843373, 0.7227693, -0.40124643, -1.5762674], [-0.4602233,
            1.5643765, 0.27289492, 0.91668445, 0.8181764, -0.5238137, -0.44642177, 0.44343996, 1.1711209,
            0.13075495, -0.25625658, -1.2045925, -1.1531123, -0.92633533, 0.011350876, 1.4340954],
            [-0.40638968, -1.0729892, 0.34493873, -0.7957557, -1.5437746, 0.6503359, -1.7307247,
            0.011868024, -1.7304571, 0.46330607, 1.0054032, 0.48943245, 0.6603683, -0.43246493, -0.7879954,
            -0.9248577], [-1.4463654, 1.6083608, 0.5300546, -1.3702741, 0.16513368, 1.4338759, -0.7798522,
            -0.6631408, 0.9329655, -0.56182146, 0.877027, -1.7915294, 1.0282315, 1.7282687, 1.662325,
            0.5133239], [1.617534, -0.3939041, -0.2536596, 1.3881264, 1.0610262, -2.6987338, -1.1121356,
            0.16481005, -0.54001856, -1.570752, 0.21660489, 0.31592903, 0.8469663, 0.30660892, -0.5537415,
            0.89750546]], dtype=torch.float32).requires_grad_()

        # As torch 2.13.0+cpu computes it here; another CPU may round differently.
        expected = torch.tensor([[0.875, 2.61, 0.33, -0.396, 4.0, -2.25, -0.35, 4.06, -5.75, -0.934, 1.99,
            1.21, 0.093, 1.11, 2.7, 1.22], [8.44, 7.72, -2.45, -3.03, -0.758, -3.56, -1.336, 8.2, -1.58,
            -2.4, -5.62, 1.16, -3.7, 4.7, -12.3, 5.53], [8.56, -5.38, 5.12, -0.1016, 0.918, 4.88, 6.66,
            -5.06, 0.432, 2.08, 4.44, 8.7, 7.38, -8.7, -2.58, 6.03], [10.8, 1.914, -7.03, -1.52, 0.86, 7.88,
            0.727, 1.29, -0.805, 4.75, 1.0, -7.78, 5.22, 0.793, -7.84, 1.23], [-1.87, 2.95, -4.34, 1.44,
            -4.12, -0.233, 3.23, -1.66, 3.19, 4.1, -0.479, -2.1, -0.504, 1.48, -6.47, -2.52], [-2.11,
            -0.163, 1.96, 1.12, -4.0, -5.22, 3.67, -0.742, -1.23, -2.52, 0.153, 2.5, -0.2295, -4.0, -0.3,
            4.4], [4.28, -6.8, 2.56, -2.31, 5.2, 5.4, -0.068, -1.1, 3.62, 6.22, 0.283, -1.24, 4.34, 0.264,
            9.06, -6.9], [-0.67, -0.52, 4.53, -6.38, -4.28, 1.3, -0.58, 1.055, -7.03, -3.89, 2.92, -6.22,
            1.31, -0.314, 2.48, 4.47], [-4.7, -0.938, -0.95, 8.9, 0.139, 0.332, -1.586, -0.555, 6.78, 0.773,
            -2.55, -1.72, -0.605, -1.33, 0.248, -0.256], [4.06, 10.4, -5.22, 2.77, 4.1, 1.38, -4.4, -4.03,
            7.47, 5.56, -7.2, -0.754, -0.355, -4.3, 6.25, -2.45], [-0.22, -6.53, 7.44, -2.28, -6.47, -0.144,
            5.1, -2.36, -0.09, -1.4, -0.189, 2.05, 0.123, -0.232, -1.85, -6.12], [0.17, 2.17, -0.172, -6.25,
            1.79, 3.06, -5.75, 9.25, -14.6, -8.44, 7.47, -2.08, 1.02, 5.12, -0.156, 12.5], [-3.55, 0.797,
            -1.65, -6.62, 2.5, -6.3, -2.98, 4.03, -10.56, -4.06, 4.56, -3.75, -6.88, 10.4, 0.469, 3.14],
            [-0.389, -4.56, 8.4, -2.75, 1.92, 3.05, -0.797, 3.19, -1.94, 1.34, -4.44, 2.12, 3.34, 3.28, 5.7,
            -5.6], [-5.4, -0.445, 2.67, 1.984, -0.154, 2.22, -0.66, -0.69, 7.16, 3.31, -10.8, -1.85, 2.03,
            -2.48, 9.5, -3.55], [-0.504, 2.83, -2.64, -3.56, -1.836, -1.33, 2.12, 1.07, -4.78, 0.855, 1.234,
            -5.06, -0.74, 3.52, -4.56, 3.56]], dtype=torch.bfloat16)

        with autocast(device, dtype=torch.bfloat16):
            with fp8('tensorwise'):
                v0 = fp8_linear(x0, w1)
            observed = v0

        self.assertFalse(differs(expected, observed))

    # inside torch.func.vmap and grad, ops run in another dtype than autocast says, or raise
    # https://github.com/pytorch/pytorch/issues/192617
    # found by amp-fuzz 0.1.0, case eaceb1692ad3776f on eager-cpu
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_transform_before_autocast(self):
        x0 = torch.tensor([[-1.2861441, -0.35868865, 0.79343295, 0.32142022], [0.061936565, -0.79167765,
            -0.30206853, -1.187549], [-0.4135439, 0.94181997, -0.32208398, -1.1537579]],
            dtype=torch.float32)
        x1 = torch.tensor([[0.7659984, -0.48406416, 0.27199706, 0.550597], [0.43399373, -2.1110492,
            -0.6065807, -0.54380524]], dtype=torch.float32)
        x2 = torch.tensor([0.34405556, 1.1083654], dtype=torch.float32)

        def program(x0, x1, x2):
            v0 = torch.nn.functional.linear(x0, x1, x2)
            return v0,

        with autocast("cpu", dtype=torch.bfloat16):
            entered = vmap(program, in_dims=(0, 0, 0), randomness="same")
            outputs = entered(twice(x0), twice(x1), twice(x2))
            value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # torch.func.grad under autocast runs the backward ops under autocast too
    # https://github.com/pytorch/functorch/issues/305
    # found by amp-fuzz 0.1.0, case 878ed8e2d51b16b0 on eager-cpu
    # grad-bitwise: w1.grad
    # expected: 1.6920281648635864 at [0, 0], 4 of 4 differ, float32
    # observed: 1.6953125 at [0, 0], 4 of 4 differ, float32
    @still_there
    def test_func_grad_ambient_backward(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        # As torch 2.13.0+cpu computes it here; another CPU may round differently.
        expected = torch.tensor([[1.6920282, 2.4088092], [-2.061663, -3.0907538]], dtype=torch.float32)

        def program(x0, w1):
            with autocast("cpu", enabled=False):
                v0 = torch.mm(x0, w1)
            return v0,

        with autocast("cpu", dtype=torch.bfloat16):
            def loss(*inputs):
                outputs = program(*inputs)
                return total(outputs), outputs
            entered = grad(loss, argnums=(1,), has_aux=True)
            grads, outputs = entered(x0, w1)
            observed = grads[0]

        self.assertFalse(differs(expected, observed))

    # a weight that goes into a reentrant checkpoint, but into none of its used results, has no
    # gradient when compiled
    # found by amp-fuzz 0.1.0, case 6f99ed0544e024e2 on compile[eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: RuntimeError: none of output has requires_grad=True, this checkpoint() is not necessary
    # observed: no error
    @still_there
    def test_compile_checkpoint_zeros(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        w1 = torch.tensor(0.7717681, dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            def block0(x0, w1):
                v0 = torch.le(x0, w1)
                v1 = torch.add(x0, x0)
                return v0, v1
            v0, v1 = checkpoint(block0, x0, w1, use_reentrant=True)
            return v0, v1

        program = torch.compile(program, backend="eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "none of output has requires_grad=True," in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the rounding of a cast to 16 bits that the program writes is left out where Inductor fuses
    # https://github.com/pytorch/pytorch/issues/185337
    # found by amp-fuzz 0.1.0, case 406fefb600a30273 on compile[inductor]
    # precision: v1
    # expected: -0.666992188 +- 4e-08 at [0], float32
    # observed: -0.666818738: excess 4.36e+03, bias 2.75e+03
    @still_there
    def test_compile_written_casts(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.66681874, 0.7735588, 1.3836, -1.8026496], dtype=torch.float32)

        # The float64 result where each cast of the program rounds, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.6669921875, 0.7734375, 1.3837890625, -1.802734375], dtype=torch.float64)
        unit = torch.tensor([3.975583240389824e-08, 4.6100467443466187e-08, 8.248025551438332e-08,
            1.0745134204626083e-07], dtype=torch.float64)

        def program(x0):
            v0 = x0.half()
            v1 = v0.float()
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0)
        observed = outputs[1]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a checkpoint with a random op in it does not compile
    # https://github.com/pytorch/pytorch/pull/168082
    # found by amp-fuzz 0.1.0, case 382ae819ec0d9498 on compile[aot_eager]
    # raise: outputs = program(x0)
    # expected: no error
    # observed: BackendCompilerFailed: backend='aot_eager' raised: RuntimeError: Activation checkpoint
    # rematerialization in `forward-loss-backward` graph does not support RNG ops in recompute regions.
    # Please move RNG operations outside of recompute regions, or use joint graph mode (where
    # partitioner handles RNG).
    @still_there
    def test_compile_checkpoint_random(self):
        x0 = torch.tensor([-0.66681874, 0.7735588, 1.3836, -1.8026496], dtype=torch.float32)
        torch.default_generator.manual_seed(0)

        def program(x0):
            def block0(x0):
                v0 = torch.nn.functional.dropout(x0, p=0.5, training=True)
                return v0,
            v0, = checkpoint(block0, x0, use_reentrant=True)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("BackendCompilerFailed:") and "raised: RuntimeError: Activation" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an op with two results that a checkpoint makes again of what it was made of before does not
    # compile
    # found by amp-fuzz 0.1.0, case 770cbdcb5865fd5b on compile[aot_eager]
    # raise: outputs = program(x0, w1)
    # expected: no error
    # observed: BackendCompilerFailed: backend='aot_eager' raised: RuntimeError: AOT Autograd failed to
    # partition the joint forward-backward graph.
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_checkpoint_cse(self):
        x0 = torch.tensor([1.0867548, -0.8964968, 0.5331489], dtype=torch.float32)
        w1 = torch.tensor([0.7717681], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0, v1 = torch.topk(x0, 1)
            def block0(x0, w1):
                v2, v3 = torch.topk(x0, 1)
                v4 = torch.mul(v2, w1)
                return v2, v3, v4
            v2, v3, v4 = checkpoint(block0, x0, w1, use_reentrant=False)
            return v0, v1, v2, v3, v4

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("BackendCompilerFailed:") and "raised: RuntimeError: AOT Autograd" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a reentrant checkpoint of which only results without grad are used raises in its backward pass
    # found by amp-fuzz 0.1.0, case 07810ed541adfd36 on compile[eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: none of output has requires_grad=True, this checkpoint() is not necessary
    @still_there
    def test_compile_checkpoint_dead(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        w1 = torch.tensor(0.7717681, dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            def block0(w1, x0):
                v0 = torch.logaddexp(w1, w1)
                v1 = torch.add(x0, x0)
                return v0, v1
            v0, v1 = checkpoint(block0, w1, x0, use_reentrant=True)
            return v1,

        program = torch.compile(program, backend="eager", dynamic=False)

        observed = "no error"
        try:
            outputs = checkpoint(program, x0, w1, use_reentrant=True)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "none of output has requires_grad=True," in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # margin losses of one sample have one dimension in a compiled program, none in eager
    # https://github.com/pytorch/pytorch/issues/141017
    # found by amp-fuzz 0.1.0, case c78cd021b398fad6 on compile[aot_eager]
    # shape: v0
    # expected: []
    # observed: [1]
    @still_there
    def test_compile_zero_dim_loss(self):
        x0 = torch.tensor([1.0867548, -0.8964968, 0.5331489], dtype=torch.float32)
        x1 = torch.tensor(1, dtype=torch.int64)
        x2 = torch.tensor([[-0.25425023, -0.30474472, 0.543148], [-0.8472495, -0.5629573, 2.7788763]],
            dtype=torch.float32)

        def program(x0, x1, x2):
            v0 = torch.nn.functional.multi_margin_loss(x0, x1, reduction='none')
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, x1, x2)
            value = outputs[0]

        expected, observed = [], list(value.shape)
        self.assertEqual(observed, expected)

    # cat of two tensors and more and of one with the shape [0] forgets the dtype of that one
    # found by amp-fuzz 0.1.0, case 0b59a3245bcb0784 on compile[aot_eager_decomp_partition]
    # dtype: v0
    # expected: float64
    # observed: float32
    @still_there
    def test_compile_cat_empty(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        x1 = torch.zeros((0,), dtype=torch.float64)

        def program(x0, x1):
            v0 = torch.cat([x0, x0, x1], 0)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, x1)
        value = outputs[0]

        expected, observed = torch.float64, value.dtype
        self.assertEqual(observed, expected)

    # the standard deviation of numbers below 1e-19 is 0, of those beyond 1e19 infinite, when
    # compiled
    # https://github.com/pytorch/pytorch/issues/197089
    # found by amp-fuzz 0.1.0, case 1fb9a8a92b800a60 on compile[aot_eager_decomp_partition]
    # value: v0
    # expected: 5.57808895e-31 +- 2e-37 at [], float32
    # observed: 0: excess 2.77e+06, bias 1.55e+06
    @still_there
    def test_compile_std(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([7.888609e-31, 0.0], dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor(5.578088954947358e-31, dtype=torch.float64)
        unit = torch.tensor(2.0158154566125395e-37, dtype=torch.float64)

        def program(x0, x1):
            v0, v1 = torch.std_mean(x1)
            return v0, v1

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # the gradient of hardsigmoid in float64 has the digits of float32 in eager
    # found by amp-fuzz 0.1.0, case a227960b705a383f on compile[aot_eager_decomp_partition]
    # grad-value: w1.grad
    # expected: -0.250000007 +- 1.4e-16 at [], float64
    # observed: -0.25: excess 5.37e+07, bias 2.98e+07
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_hardsigmoid(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        w1 = torch.tensor(0.7717681206421041, dtype=torch.float64).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor(-0.2500000074505806, dtype=torch.float64)
        unit = torch.tensor(1.3877787890532518e-16, dtype=torch.float64)

        def program(x0, w1):
            v0 = torch.nn.functional.hardsigmoid(w1)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # addcdiv, addcdiv_ and addcmul_ with a value round each of their steps, in the dtype of these,
    # when compiled
    # found by amp-fuzz 0.1.0, case 4e4a0267ae16a943 on compile[eager]
    # value: v0
    # expected: 3.01737057 +- 1.8e-06 at [0], float32
    # observed: 3.01879096: excess 799, bias 466
    @still_there
    def test_compile_addcdiv(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        x1 = torch.tensor([-0.523, -0.0564], dtype=torch.bfloat16)
        x2 = torch.tensor([0.344, 1.11], dtype=torch.bfloat16)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([3.01737056909637, -0.6992369243796442], dtype=torch.float64)
        unit = torch.tensor([1.7775187385629918e-06, 2.668349032059785e-07], dtype=torch.float64)

        def program(x0, x1, x2):
            v0 = torch.addcdiv(x0, x1, x2, value=-2)
            return v0,

        program = torch.compile(program, backend="eager", dynamic=False)

        outputs = program(x0, x1, x2)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # torch.linalg.matrix_rank(x, out=b) does not write b in a compiled program
    # found by amp-fuzz 0.1.0, case 511173133b11816e on compile[aot_eager]
    # value: v1
    # expected: 3 +- 0 at [], int64
    # observed: -4: excess inf, bias 0
    @still_there
    def test_compile_matrix_rank(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.44727704, -0.95477086, 0.2493355], [-0.26604477, -0.6285093, 0.89842063],
            [0.35543743, 0.7043872, -1.6274692]], dtype=torch.float32)
        b1 = torch.tensor(-4, dtype=torch.int64)

        # As torch 2.13.0+cpu computes it here; another CPU may round differently.
        expected = torch.tensor(3, dtype=torch.int64)

        def program(x0, b1):
            with torch.inference_mode():
                v1 = torch.linalg.matrix_rank(x0, out=b1)
            return v1,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, b1.clone())
        observed = outputs[0]

        self.assertFalse(differs(expected, observed))

    # an autograd.Function that gives its input loses its backward if a compiled program returns
    # both
    # found by amp-fuzz 0.1.0, case e920b438e1afb5f9 on compile[aot_eager]
    # grad-value: w0.grad
    # expected: 1.84491938 +- 7e-07 at [1], float32
    # observed: 2.45989251: excess 8.77e+05, bias 5.41e+05
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_alias_backward(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([1.7623190134763718, 1.8449193835258484], dtype=torch.float64)
        unit = torch.tensor([9.42122308833504e-07, 7.010261022788455e-07], dtype=torch.float64)

        same_function = make_same_function()

        def program(w0):
            v0 = torch.mul(w0, w0)
            v1 = same_function(v0)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(w0)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w0.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # second derivatives through an autograd.Function are missing when dynamo alone compiles it
    # found by amp-fuzz 0.1.0, case f077cbf19702d5ab on compile[eager]
    # grad-missing: second.w0.grad
    # expected: float32[2]
    # observed: None
    @still_there
    def test_compile_function_double(self):
        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()

        exp_function = make_exp_function(custom_fwd, custom_bwd, "cpu")

        def program(w0):
            v0 = exp_function(w0)
            return v0,

        program = torch.compile(program, backend="eager", dynamic=False)

        weights = [w0]
        outputs = program(w0)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        grads = torch.autograd.grad(starts, weights, cotangents, create_graph=True, allow_unused=True) if starts else [None] * len(weights)
        seconds = trains([g for g in grads if g is not None])
        if seconds: torch.autograd.backward(seconds, [cotangent(g) for g in seconds])
        value = w0.grad

        expected, observed = "a gradient", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # a second backward pass of an autograd.Function that frees its state raises in eager, not when
    # compiled
    # found by amp-fuzz 0.1.0, case 1083b0cf72557dc8 on compile[aot_eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: AttributeError: 'NoneType' object has no attribute 'gain'
    # observed: no error
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    @torch._functorch.config.patch(donated_buffer=False)
    def test_compile_freed_state(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        freed_function = make_freed_function(custom_fwd, custom_bwd, "cpu")

        def program(x0, w1):
            v0 = freed_function(x0, w1, None, 1.0)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents, retain_graph=True)
            w1.grad = None
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("AttributeError:") and "object has no attribute" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # fractional_max_pool3d takes its random samples in the reverse order when Inductor compiles it
    # https://github.com/pytorch/pytorch/pull/183628
    # found by amp-fuzz 0.1.0, case ec989b6debb07a0b on compile[inductor]
    # value: v0
    # expected: 1.39774454 +- 4.6e-07 at [0, 2, 0, 1], float32
    # observed: 1.31159079: excess 1.86e+05, bias 3.02e+04
    @still_there
    def test_compile_fractional_pool(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[[[1.3674446, 1.1997138, 0.22695227, -0.54545194, -1.7962594], [-0.12393341,
            -0.99639875, -0.51635426, 0.18631998, -0.31940848], [0.22797695, 0.6587266, 1.0223174,
            0.99723464, -0.6466088]], [[-1.7483395, -0.385386, -1.3112695, -1.2638899, -2.0514398],
            [-0.23996021, 0.1598892, 0.7173695, -0.5571748, -0.0364485], [1.1550674, 2.324017, -0.077817716,
            -1.7450662, 0.94413036]], [[1.4457526, -0.8632723, 0.31051886, 0.99460167, -1.4478656],
            [-0.14793868, -0.5648646, 0.0993062, -0.71882564, -0.19570474], [0.11118122, -1.8205638,
            -0.07037686, -1.6694064, 0.7932147]], [[-0.6138235, 1.403157, 0.26813257, 0.5676757, 0.5097227],
            [-0.11534731, 0.60451156, 1.3178105, -0.23719425, -0.048274375], [-2.0431337, -0.3281586,
            -1.13673, 1.1505339, 0.8750079]], [[-1.5689073, -0.4668547, -0.75715035, 0.11206265,
            -0.81621873], [1.7875328, -0.23595369, 0.07955106, 1.3977445, 0.48976427], [-1.2225857,
            1.3115908, -1.7826651, 0.8913525, -0.37517932]]]], dtype=torch.float32)
        x1 = torch.tensor([[[0.775586, 0.49428773, 0.57904315]]], dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[[[0.6587265729904175, 1.0223174095153809, 0.9972346425056458]],
            [[0.11118122190237045, 0.09930620342493057, 0.7932146787643433]], [[1.7875328063964844,
            1.3977445363998413, 1.3977445363998413]]]], dtype=torch.float64)
        unit = torch.tensor([[[[2.2807301258698232e-07, 3.3748427319402197e-07, 3.407862249060756e-07]],
            [[3.547990842789339e-08, 3.3545540803481266e-08, 2.350967721609365e-07]],
            [[6.23461497539779e-07, 4.6425460653587436e-07, 4.7397301439211503e-07]]]], dtype=torch.float64)

        def program(x0, x1):
            v0, v1 = torch.nn.functional.fractional_max_pool3d_with_indices(x0, [1, 2, 2], [3, 1, 3], None, True, x1)
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # max pooling of a transposed input answers transposed indices, and its gradient goes elsewhere
    # https://github.com/pytorch/pytorch/issues/197434
    # found by amp-fuzz 0.1.0, case 55e7ae81a851fc9a on compile[inductor]
    # value: v1
    # expected: 1 +- 0 at [0, 0, 0], int64
    # observed: 2: excess inf, bias 0
    @still_there
    def test_compile_max_pool_indices(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.empty_strided((1, 2, 2), (1, 1, 2), dtype=torch.float32).copy_(torch.tensor([[[0.0, 1.0],
            [0.0, 0.0]]], dtype=torch.float32))

        # As torch 2.13.0+cpu computes it here; another CPU may round differently.
        expected = torch.tensor([[[1]]], dtype=torch.int64)

        def program(x0, x1):
            v0, v1 = torch.nn.functional.max_pool2d_with_indices(x1, kernel_size=2)
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[1]

        self.assertFalse(differs(expected, observed))

    # any of uint8 is bool when Inductor compiles it, and uint8 in eager
    # https://github.com/pytorch/pytorch/issues/198081
    # found by amp-fuzz 0.1.0, case 127a843efbe332c7 on compile[inductor]
    # dtype: v0
    # expected: uint8
    # observed: bool
    @still_there
    def test_compile_any_uint8(self):
        x0 = torch.tensor([1.0867548, -0.8964968, 0.5331489], dtype=torch.float32)
        x1 = torch.tensor([3, 0, 0], dtype=torch.uint8)

        def program(x0, x1):
            v0 = torch.any(x1)
            v1 = torch.any(x1, 0)
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0, x1)
        value = outputs[0]

        expected, observed = torch.uint8, value.dtype
        self.assertEqual(observed, expected)

    # erf of small float32 numbers has few digits, or none, when Inductor compiles it; so has gelu
    # of numbers near -3
    # https://github.com/pytorch/pytorch/issues/198183
    # found by amp-fuzz 0.1.0, case 42cd5b0c59e28032 on compile[inductor]
    # value: v0
    # expected: 1.46215281e-38 +- 4.7e-45 at [0], float32
    # observed: 0: excess 3.12e+06, bias 4.49e+06
    @still_there
    def test_compile_erf(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x1 = torch.tensor([1.2957992e-38, -2.6859e-40, 3.716591e-39, -8.99744e-39, 7.262322e-39,
            1.7270416e-38, 3.29625e-40, 1.5686337e-38, 1.5056092e-38, -1.3625544e-38, -2.1299043e-38,
            2.1085208e-38, 1.2332916e-38, -1.973928e-38, -1.4706882e-38, 6.623628e-39, -2.1283454e-38],
            dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([1.4621528074639417e-38, -3.0307099856715424e-40, 4.193723912766276e-39,
            -1.0152524264097005e-38, 8.194652597980833e-39, 1.948757810526199e-38, 3.719415712829968e-40,
            1.7700135649362027e-38, 1.6988980101480405e-38, -1.537477980347002e-38, -2.403339641719424e-38,
            2.3792109070897695e-38, 1.3916205558779762e-38, -2.2273392455378624e-38,
            -1.6594939734984885e-38, 7.473964019451223e-39, -2.4015805611760685e-38], dtype=torch.float64)
        unit = torch.tensor([4.6827129802156684e-45, 1.8278885872677656e-45, 3.0743298987597523e-45,
            4.4248423118859963e-45, 3.927515578021981e-45, 7.231331611259933e-45, 1.9575727843912417e-45,
            6.183860687567202e-45, 6.015788120644045e-45, 5.891771649085339e-45, 8.939659910303068e-45,
            8.115734388786347e-45, 4.864775025307429e-45, 7.521159337854004e-45, 5.5834618010019443e-45,
            3.040320154776712e-45, 8.455323109222026e-45], dtype=torch.float64)

        def program(x1):
            v0 = torch.erf(x1)
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # atanh of small numbers has few digits, or none, when Inductor compiles it
    # found by amp-fuzz 0.1.0, case 50f970f353e1034e on compile[inductor]
    # value: v0
    # expected: 1.29579919e-38 +- 7.7e-46 at [0], float32
    # observed: 0: excess 1.68e+07, bias 5.42e+07
    @still_there
    def test_compile_atanh(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x1 = torch.tensor([1.2957992e-38, -2.6859e-40, 3.716591e-39, -8.99744e-39, 7.262322e-39,
            1.7270416e-38, 3.29625e-40, 1.5686337e-38, 1.5056092e-38, -1.3625544e-38, -2.1299043e-38,
            2.1085208e-38, 1.2332916e-38, -1.973928e-38, -1.4706882e-38, 6.623628e-39, -2.1283454e-38],
            dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([1.2957991871008874e-38, -2.6858967925406634e-40, 3.7165910494085674e-39,
            -8.997440364155214e-39, 7.26232177706201e-39, 1.7270416428746818e-38, 3.2962463516619807e-40,
            1.5686336796630865e-38, 1.5056091601913064e-38, -1.3625543834742395e-38,
            -2.1299043014997379e-38, 2.108520767193834e-38, 1.2332916066325968e-38, -1.9739280115132854e-38,
            -1.4706882419409462e-38, 6.623628153902795e-39, -2.1283453569581765e-38], dtype=torch.float64)
        unit = torch.tensor([7.723565024738833e-46, 7.006492321624085e-46, 7.006492321624085e-46,
            7.006492321624085e-46, 7.006492321624085e-46, 1.0293970363585245e-45, 7.006492321624085e-46,
            9.349785325903216e-46, 8.974129916377702e-46, 8.121457001413342e-46, 1.2695218929646837e-45,
            1.2567763133012259e-45, 7.350990811780672e-46, 1.1765527793844255e-45, 8.765985023623384e-46,
            7.006492321624085e-46, 1.2685926896084407e-45], dtype=torch.float64)

        def program(x1):
            v0 = torch.atanh(x1)
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # expm1, elu, celu and selu of small numbers have few digits, or none, when Inductor compiles
    # them
    # found by amp-fuzz 0.1.0, case 840dde94eb51738d on compile[inductor]
    # value: v0
    # expected: -1.36255438e-38 +- 8.1e-46 at [9], float32
    # observed: 0: excess 1.68e+07, bias 1.95e+07
    @still_there
    def test_compile_expm1(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x1 = torch.tensor([1.2957992e-38, -2.6859e-40, 3.716591e-39, -8.99744e-39, 7.262322e-39,
            1.7270416e-38, 3.29625e-40, 1.5686337e-38, 1.5056092e-38, -1.3625544e-38, -2.1299043e-38,
            2.1085208e-38, 1.2332916e-38, -1.973928e-38, -1.4706882e-38, 6.623628e-39, -2.1283454e-38],
            dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([1.2957991871008874e-38, -2.6858967925406634e-40, 3.7165910494085674e-39,
            -8.997440364155214e-39, 7.26232177706201e-39, 1.7270416428746818e-38, 3.2962463516619807e-40,
            1.5686336796630865e-38, 1.5056091601913064e-38, -1.3625543834742395e-38,
            -2.1299043014997379e-38, 2.108520767193834e-38, 1.2332916066325968e-38, -1.9739280115132854e-38,
            -1.4706882419409462e-38, 6.623628153902795e-39, -2.1283453569581765e-38], dtype=torch.float64)
        unit = torch.tensor([7.723565024738833e-46, 7.006492321624085e-46, 7.006492321624085e-46,
            7.006492321624085e-46, 7.006492321624085e-46, 1.0293970363585245e-45, 7.006492321624085e-46,
            9.349785325903216e-46, 8.974129916377702e-46, 8.121457001413342e-46, 1.2695218929646837e-45,
            1.2567763133012259e-45, 7.350990811780672e-46, 1.1765527793844255e-45, 8.765985023623384e-46,
            7.006492321624085e-46, 1.2685926896084407e-45], dtype=torch.float64)

        def program(x1):
            v0 = torch.celu(x1)
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # the remainder of large numbers is wrong by as much as they are rounded when Inductor compiles
    # it
    # https://github.com/pytorch/pytorch/issues/198057
    # found by amp-fuzz 0.1.0, case bd21e7dbb9cb54f6 on compile[inductor]
    # value: v0
    # expected: 76 +- 4.5e-06 at [0], float32
    # observed: 0: excess 1.68e+07, bias 1.68e+07
    @still_there
    def test_compile_remainder(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.6553032, 0.68948215, 0.1444306, -1.0804404, 0.46223265, 0.4516248, 0.21279067,
            -0.641437, -0.7819872, -0.37237027, -0.37810844, 0.12534198, -0.76426387, 0.059487678,
            -0.19895719, -0.090892896], dtype=torch.float32)
        x1 = torch.full((16,), 1.2676506e+30, dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.full((16,), 76.0, dtype=torch.float64)
        unit = torch.full((16,), 4.5299530029296875e-06, dtype=torch.float64)

        def program(x0, x1):
            v0 = torch.remainder(x1, 300.0)
            v1 = torch.remainder(x0, 300.0)
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # indexing with a tensor of one integer fails to compile in an inference_mode region
    # found by amp-fuzz 0.1.0, case ee59cd91cad01257 on compile[aot_eager]
    # raise: v0 = x0[x1]
    # expected: no error
    # observed: RuntimeError: state INTERNAL ASSERT FAILED at
    # "/__w/pytorch/pytorch/aten/src/ATen/core/PythonFallbackKernel.cpp":137, please report a bug to
    # PyTorch. Hit PythonDispatcher dispatch key but PythonDispatcherTLS was not set
    @still_there
    def test_compile_inference_index(self):
        x0 = torch.tensor([-0.9384063], dtype=torch.float32)
        x1 = torch.tensor(0, dtype=torch.int64)

        def program(x0, x1):
            with torch.inference_mode():
                v0 = x0[x1]
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Hit PythonDispatcher dispatch key but" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a compiled program saves inference tensors for a backward pass, where eager raises
    # found by amp-fuzz 0.1.0, case 119c4791ef6b8794 on compile[aot_eager]
    # raise: v1 = torch.conv1d(v0, w2)
    # expected: RuntimeError: Inference tensors cannot be saved for backward. Please do not use Tensors
    # created in inference mode in computation tracked by autograd. To work around this, you can make a
    # clone to get a normal tensor and use it in autograd, or use `torch.no_grad()` instead of
    # `torch.inference_mode()`.
    # observed: no error
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_inference_saved(self):
        x0 = torch.tensor([[-0.9384063]], dtype=torch.float32)
        x1 = torch.tensor([[[1.0458146]]], dtype=torch.float32)
        w2 = torch.tensor([[[1.5795056]]], dtype=torch.float32).requires_grad_()

        def program(x0, x1, w2):
            with torch.inference_mode():
                v0 = torch.conv1d(x0, x1)
            v1 = torch.conv1d(v0, w2)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, w2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "To work around this, you can make a" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # linear interpolation between large numbers of unlike signs is infinite or NaN when compiled
    # found by amp-fuzz 0.1.0, case b11d3d09669aa990 on compile[aot_eager]
    # nonfinite: v0
    # expected: 0 not finite of float32[1, 1, 7]
    # observed: 2 not finite, 2 differ
    @still_there
    def test_compile_interpolation(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        x1 = torch.tensor([[[1.0, 2.0, 1.7014118e+38, -1.7014118e+38]]], dtype=torch.float32)

        expected = torch.full((1, 1, 7), 0.0, dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.nn.functional.interpolate(x1, mode='linear', size=[7])
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        observed = torch.where(observed.isfinite(), 0, observed)
        self.assertFalse(differs(expected, observed))

    # norms of operands of two dtypes that eager's kernels refuse are promoted in a compiled program
    # found by amp-fuzz 0.1.0, case dff11f95dd789613 on compile[aot_eager_decomp_partition]
    # raise: v0 = torch.nn.functional.batch_norm(x0, None, None, x1, x2, True)
    # expected: RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float
    # observed: no error
    @still_there
    def test_compile_mixed_dtype(self):
        x0 = torch.tensor([[[-1.29, -0.36], [0.793, 0.322], [0.062, -0.793]], [[-0.303, -1.19], [-0.414,
            0.94], [-0.322, -1.16]]], dtype=torch.bfloat16)
        x1 = torch.tensor([0.6055, -1.876, 0.9106], dtype=torch.float16)
        x2 = torch.tensor([-0.2115, -0.731, 3.143], dtype=torch.float16)

        def program(x0, x1, x2):
            v0 = torch.nn.functional.batch_norm(x0, None, None, x1, x2, True)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "mixed dtype (CPU): expect parameter to" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # index_put of values of another dtype, which eager refuses, is converted when Inductor compiles
    # it
    # found by amp-fuzz 0.1.0, case 9eb900f1204e9aa6 on compile[inductor]
    # raise: v0 = b1.index_put_([x2.argsort(stable=True)], x3, False)
    # expected: RuntimeError: Index put requires the source and destination dtypes match, got Float for
    # the destination and BFloat16 for the source.
    # observed: no error
    @still_there
    def test_compile_mixed_index(self):
        x0 = torch.tensor([1.0867548, -0.8964968, 0.5331489], dtype=torch.float32)
        b1 = torch.tensor([1.2637616, -1.4911588, -0.74923646, 0.4265081], dtype=torch.float32)
        x2 = torch.tensor([0, 1], dtype=torch.int64)
        x3 = torch.tensor([-0.65, 0.0356], dtype=torch.bfloat16)

        def program(x0, b1, x2, x3):
            v9 = torch.neg(x0)
            v0 = b1.index_put_([x2.argsort(stable=True)], x3, False)
            return v9, v0

        program = torch.compile(program, backend="inductor", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, b1.clone(), x2, x3)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "Index put requires the source and" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a norm of running statistics of two dtypes, which eager's kernel refuses, is promoted in a
    # compiled program
    # found by amp-fuzz 0.1.0, case dd45462e7bec5274 on compile[aot_eager_decomp_partition]
    # raise: v0 = torch.nn.functional.instance_norm(x0, x1.clone(), x2.clone(), None, None, True)
    # expected: RuntimeError: expected scalar type BFloat16 but found Float
    # observed: no error
    @still_there
    def test_compile_mixed_statistics(self):
        x0 = torch.tensor([[[-1.84, 0.357, 0.361, -0.361], [0.453, -0.77, 1.234, -0.15], [-0.387, 0.57,
            0.02, 1.55]], [[-0.457, 0.189, 0.934, -0.36], [-0.855, 0.000153, -1.055, -0.418], [0.088, 0.547,
            -0.52, -2.31]]], dtype=torch.bfloat16)
        x1 = torch.tensor([0.605, -1.875, 0.91], dtype=torch.bfloat16)
        x2 = torch.tensor([0.78858316, 1.6398476, 1.8237989], dtype=torch.float32)

        def program(x0, x1, x2):
            v0 = torch.nn.functional.instance_norm(x0, x1.clone(), x2.clone(), None, None, True)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "expected scalar type BFloat" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # layer_norm of weights whose dtypes eager's kernel refuses is promoted in a compiled program
    # found by amp-fuzz 0.1.0, case 1cd40fa85e38a0d7 on compile[aot_eager_decomp_partition]
    # raise: v1 = torch.nn.functional.layer_norm(x1, [3], x2, x3)
    # expected: RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float
    # observed: no error
    @still_there
    def test_compile_mixed_layer_norm(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([[2.28, -1.336, 0.93], [-1.516, -2.47, 1.55]], dtype=torch.bfloat16)
        x2 = torch.tensor([-0.21150042, -0.73080665, 3.1426768], dtype=torch.float32)
        x3 = torch.tensor([0.62, -0.7793, -0.4744], dtype=torch.float16)

        def program(x0, x1, x2, x3):
            v1 = torch.nn.functional.layer_norm(x1, [3], x2, x3)
            return v1,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2, x3)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "mixed dtype (CPU): expect parameter to" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a matrix times a vector of another dtype, which eager's kernel refuses, is promoted in a
    # compiled program
    # found by amp-fuzz 0.1.0, case 826ba7e7cfabe361 on compile[aot_eager_decomp_partition]
    # raise: v1 = torch.mv(x1, x2)
    # expected: RuntimeError: addmv input tensors must have the same dtype, but got Float, BFloat16, and
    # Float
    # observed: no error
    @still_there
    def test_compile_mixed_mv(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([[2.28, -1.336, 0.93], [-1.516, -2.47, 1.55]], dtype=torch.bfloat16)
        x2 = torch.tensor([-0.21150042, -0.73080665, 3.1426768], dtype=torch.float32)

        def program(x0, x1, x2):
            v1 = torch.mv(x1, x2)
            return v1,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "addmv input tensors must have the same" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # cross of vectors of two dtypes, which eager's kernel refuses, is promoted in a compiled
    # program
    # found by amp-fuzz 0.1.0, case 2f166ebd36a3bf52 on compile[aot_eager_decomp_partition]
    # raise: v1 = torch.cross(x1, x2)
    # expected: RuntimeError: expected scalar type BFloat16 but found Float
    # observed: no error
    @still_there
    def test_compile_mixed_cross(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([0.605, -1.875, 0.91], dtype=torch.bfloat16)
        x2 = torch.tensor([-0.21150042, -0.73080665, 3.1426768], dtype=torch.float32)

        def program(x0, x1, x2):
            v1 = torch.cross(x1, x2)
            return v1,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "expected scalar type BFloat" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # soft_margin_loss and huber_loss of two dtypes have the dtype of their input in eager, and the
    # wider one when compiled; addr to a number that of its vectors
    # found by amp-fuzz 0.1.0, case f46738cf55608f6f on compile[aot_eager_decomp_partition]
    # dtype: v0
    # expected: float32
    # observed: float64
    @still_there
    def test_compile_promotion(self):
        x0 = torch.tensor([1.0867548, -0.8964968, 0.5331489], dtype=torch.float32)
        x1 = torch.tensor([0.6056580053436837, -1.8760833781586648, 0.9107171142089463],
            dtype=torch.float64)

        def program(x0, x1):
            v0 = torch.nn.functional.soft_margin_loss(x0, x1)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, x1)
        value = outputs[0]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # results change places in a compiled program that writes to one input with grad and to one
    # without
    # found by amp-fuzz 0.1.0, case 2a8981f8dbfbbdec on compile[aot_eager]
    # raise: def program(b0, b1, w2):
    # expected: no error
    # observed: RuntimeError: The size of tensor a (2) must match the size of tensor b (3) at non-
    # singleton dimension 0
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_mixed_mutations(self):
        b0 = torch.tensor([0.89777887, 0.28930134, 0.07086403], dtype=torch.float32)
        b1 = torch.tensor([1.4258575, -1.332289], dtype=torch.float32)
        w2 = torch.tensor([0.99680775, 1.7439169], dtype=torch.float32).requires_grad_()

        def program(b0, b1, w2):
            v0 = b0.sqrt_()
            v1 = b1.add_(w2)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(b0.clone(), b1.clone(), w2)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and ") must match the size of tensor b (" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an input that is written in place, and needed for a gradient, fails the check of the backward
    # pass
    # https://github.com/pytorch/pytorch/pull/185876
    # found by amp-fuzz 0.1.0, case 75ab1e8a57b28cc3 on compile[aot_eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: one of the variables needed for gradient computation has been modified by
    # an inplace operation: [torch.FloatTensor [2]], which is output 0 of
    # torch::autograd::CopyBackwards, is at version 1; expected version 0 instead. Hint: enable anomaly
    # detection to find the operation that failed to compute its g
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_mutated_saved(self):
        b0 = torch.tensor([-0.43565676, 1.4942911], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        def program(b0, w1):
            v0 = b0.mul_(w1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(b0.clone(), w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "one of the variables needed for" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # statistics of layer and batch norms are less exact when compiled: in 16 bits beside float32
    # weights
    # found by amp-fuzz 0.1.0, case e95586ad1b51cd72 on compile[aot_eager_decomp_partition]
    # dtype: v1
    # expected: float32
    # observed: bfloat16
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_norm_statistics(self):
        x0 = torch.tensor([[0.00161, -0.352, 0.984], [-0.303, -1.34, -0.62]], dtype=torch.bfloat16)
        w1 = torch.tensor([0.15414855, -0.80779785, -1.0148988], dtype=torch.float32).requires_grad_()
        w2 = torch.tensor([-0.14639086, 0.028077617, 1.8186638], dtype=torch.float32).requires_grad_()

        def program(x0, w1, w2):
            v0, v1, v2 = torch.native_layer_norm(x0, [3], w1, w2, 1e-05)
            return v0, v1, v2

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, w1, w2)
        value = outputs[1]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # batch norm of 16-bit inputs answers its statistics in float32 when compiled
    # found by amp-fuzz 0.1.0, case 9fe288076c4da521 on compile[aot_eager_decomp_partition]
    # dtype: v3
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_compile_batch_norm_statistics(self):
        x0 = torch.tensor([[-0.668, 0.773], [1.38, -1.805]], dtype=torch.bfloat16)
        x1 = torch.tensor([-0.523, -0.0564], dtype=torch.bfloat16)

        def program(x0, x1):
            v0, v1, v2, v3, v4 = torch.ops.aten._native_batch_norm_legit_functional(x0, None, None, x1, x1, False, 1.0, 1.0)
            return v0, v1, v2, v3, v4

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, x1)
        value = outputs[3]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # group_norm is less accurate when compiled: rounded statistics, and a difference of large
    # numbers
    # found by amp-fuzz 0.1.0, case a16711e79c270a7d on compile[aot_eager_decomp_partition]
    # grad-value: w1.grad
    # expected: -1.49995424 +- 2.2e-06 at [1], float32
    # observed: -1.49583435: excess 1.88e+03, bias 674
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_group_norm(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[0.133, 1.086], [-0.355, -1.16], [1.01, 0.096]], dtype=torch.bfloat16)
        w1 = torch.tensor([-0.22084998, 2.0011015], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([0.49998748138898186, -1.499954243669561], dtype=torch.float64)
        unit = torch.tensor([2.7104405028868114e-06, 2.195134149647021e-06], dtype=torch.float64)

        def program(x0, w1):
            v0 = torch.nn.functional.group_norm(x0, 1, w1)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # _weight_norm of a vector is wrong when compiled, and its gradient is memory that nobody wrote;
    # that of float16 raises
    # https://github.com/pytorch/pytorch/issues/191137
    # found by amp-fuzz 0.1.0, case f6385df2a519784a on compile[aot_eager_decomp_partition]
    # value: v0
    # expected: 0.271997064 +- 9e-08 at [2], float32
    # observed: 0.0290032178: excess 2.71e+06, bias 3.1e+06
    @still_there
    def test_compile_weight_norm(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([0.7659984, -0.48406416, 0.27199706, 0.550597, 0.43399373, -2.1110492, -0.6065807,
            -0.54380524], dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([0.7659984230995178, 0.48406416177749634, 0.2719970643520355,
            0.5505970120429993, 0.43399372696876526, 2.111049175262451, 0.6065806746482849,
            0.5438052415847778], dtype=torch.float64)
        unit = torch.tensor([2.5603574926869044e-07, 1.6522716250744196e-07, 8.975228255048151e-08,
            1.881207595255674e-07, 1.5074359710487428e-07, 6.919726991405639e-07, 2.0107582043848993e-07,
            1.8030994031192904e-07], dtype=torch.float64)

        def program(x0, x1):
            v0 = torch._weight_norm(x1, x1, 0)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # _weight_norm of a vector is wrong when compiled, and its gradient is memory that nobody wrote;
    # that of float16 raises
    # https://github.com/pytorch/pytorch/issues/191137
    # found by amp-fuzz 0.1.0, case 09230c6f68948610 on compile[aot_eager_decomp_partition]
    # raise: v0 = torch._weight_norm(x0, x1, 0)
    # expected: RuntimeError: expected scalar type BFloat16 but found Float
    # observed: no error
    @still_there
    def test_compile_weight_norm_2(self):
        x0 = torch.tensor([[-1.29, -0.36, 0.793], [0.322, 0.062, -0.793], [-0.303, -1.19, -0.414], [0.94,
            -0.322, -1.16]], dtype=torch.bfloat16)
        x1 = torch.tensor([[0.07555825], [-0.5473053], [-0.48715296], [0.97741425]], dtype=torch.float32)

        def program(x0, x1):
            v0 = torch._weight_norm(x0, x1, 0)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "expected scalar type BFloat" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # y.index_put(index, y) is wrong when Inductor compiles it
    # https://github.com/pytorch/pytorch/issues/156786
    # found by amp-fuzz 0.1.0, case 644a200bedd625d6 on compile[inductor]
    # value: v1
    # expected: -1.92844363 +- 1.1e-06 at [0, 1], float32
    # observed: 1.20275819: excess 2.9e+06, bias 1.45e+06
    @still_there
    def test_compile_index_put_alias(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.44727704, -0.95477086, 0.2493355], [-0.26604477, -0.6285093, 0.89842063],
            [0.35543743, 0.7043872, -1.6274692]], dtype=torch.float32)
        x1 = torch.tensor([2, 0, 1], dtype=torch.int64)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[-0.9248409845432652, -1.92844362677525, 3.3701150888262132],
            [0.5426917083671636, 1.202758165484175, -1.3750937236121326], [0.605539638529085,
            1.2818716919662752, -2.0931520021646532]], dtype=torch.float64)
        unit = torch.tensor([[5.19630681242358e-07, 1.0799840940042732e-06, 1.9554283491633005e-06],
            [2.3819671695134627e-07, 7.071212345909279e-07, 7.42617602021003e-07], [3.7838388655556223e-07,
            7.245433442474211e-07, 1.3201674007708734e-06]], dtype=torch.float64)

        def program(x0, x1):
            v0 = torch.mm(x0, x0)
            v1 = torch.index_put(v0, [x1.argsort(stable=True)], v0, False)
            return v1,

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # cumsum of a constant forgets its dtype and the constant's when Inductor compiles it
    # https://github.com/pytorch/pytorch/issues/189518
    # found by amp-fuzz 0.1.0, case 5c6bad02198b9c7d on compile[inductor]
    # dtype: v1
    # expected: bfloat16
    # observed: int64
    @still_there
    def test_compile_counted_constant(self):
        x0 = torch.tensor([-0.66681874, 0.7735588, 1.3836, -1.8026496], dtype=torch.float32)

        def program(x0):
            v0 = torch.ones_like(x0, dtype=torch.bool)
            v1 = torch.cumsum(v0, 0, dtype=torch.bfloat16)
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0)
        value = outputs[1]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # what is computed from addr of a number, soft_margin_loss or layer norm of two dtypes, or new
    # statistics of 16 bits, is cast otherwise in a compiled program
    # found by amp-fuzz 0.1.0, case 4b611545347ac936 on compile[aot_eager]
    # dtype: v1
    # expected: float32
    # observed: bfloat16
    @still_there
    def test_compile_promised_dtype(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([0.605, -1.875, 0.91], dtype=torch.bfloat16)

        def program(x0, x1):
            v0 = torch.addr(x0, x1, x1)
            v1 = torch.nn.functional.rms_norm(v0, [3])
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, x1)
        value = outputs[1]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # any and all of uint8 along a dimension, with an out= of bool, raise when they are compiled or
    # exported
    # found by amp-fuzz 0.1.0, case c41d9ccdcd0f2d5a on compile[eager]
    # raise: outputs = program(x0, b1.clone())
    # expected: no error
    # observed: TorchRuntimeError: RuntimeError when making fake tensor call Explanation: Dynamo failed
    # to run FX node with fake tensors: call_function <built-in method any of type object at
    # 0x7ff5344cea40>(*(FakeTensor(..., size=(2, 3), dtype=torch.uint8), 1), **{'out': FakeTensor(...,
    # size=(2,), dtype=torch.bool)}): got RuntimeErro
    @still_there
    def test_compile_any_out(self):
        x0 = torch.tensor([[3, 0, 2], [3, 1, 4]], dtype=torch.uint8)
        b1 = torch.full((2,), False, dtype=torch.bool)

        def program(x0, b1):
            v0 = torch.any(x0, 1, out=b1)
            return v0,

        program = torch.compile(program, backend="eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, b1.clone())
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("TorchRuntimeError:") and "RuntimeError when making fake tensor" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # _grid_sampler_2d_cpu_fallback cannot be compiled
    # found by amp-fuzz 0.1.0, case 7a1f0868122b2533 on compile[aot_eager]
    # raise: outputs = program(x0, x1)
    # expected: no error
    # observed: TorchRuntimeError: RuntimeError when making fake tensor call Explanation: Dynamo failed
    # to run FX node with fake tensors: call_function <built-in method _grid_sampler_2d_cpu_fallback of
    # type object at 0x7ff5344cea40>(*(FakeTensor(..., size=(1, 1, 5, 1)), FakeTensor(..., size=(1, 2,
    # 3, 2)), 0, 0, True), **{}): got Runt
    @still_there
    def test_compile_grid_sampler_fallback(self):
        x0 = torch.tensor([[[[0.039401162], [1.4259386], [-0.35770622], [-0.46685323], [-1.1639199]]]],
            dtype=torch.float32)
        x1 = torch.tensor([[[[0.6702126, -1.7885206], [-0.50589985, -1.5931334], [-0.6922475, 0.75227195]],
            [[2.0887055, 0.5546344], [1.9336766, -0.8426312], [-1.7819005, 0.16628924]]]],
            dtype=torch.float32)

        def program(x0, x1):
            v0 = torch._grid_sampler_2d_cpu_fallback(x0, x1, 0, 0, True)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("TorchRuntimeError:") and "RuntimeError when making fake tensor" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a compiled program raises an AssertionError about tensors_saved_with_vc_check
    # found by amp-fuzz 0.1.0, case 4a92b15477afea00 on compile[aot_eager]
    # raise: def program(w0, w1, x2, x3, x4):
    # expected: no error
    # observed: AssertionError: expected all tensors_saved_with_vc_check to be Tensors, got types:
    # [<class 'torch.Tensor'>, <class 'torch.Tensor'>, <class 'torch.Tensor'>, <class 'torch.Tensor'>,
    # <class 'torch.Tensor'>, <class 'NoneType'>, <class 'torch.Tensor'>, <class 'torch.Tensor'>, <class
    # 'torch.Tensor'>]
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_saved_tensors(self):
        w0 = torch.tensor([[[1.0834756, 0.06734438, 0.62997806], [-0.68889236, 1.2536442, 1.2453364],
            [0.68586236, -0.77002275, -1.0482143], [-0.35697645, -1.8396859, 0.41836172]], [[0.21278414,
            0.8651299, 0.09223595], [-0.6320273, 0.5904331, -0.26436475], [0.15576534, -0.43522218,
            -1.4885353], [0.26857018, 0.24407555, -0.5425911]], [[0.24669078, -1.853467, -1.4547207],
            [1.7735549, 0.48727697, 0.48878348], [0.7571635, -2.3029397, -0.55451953], [-0.7946052,
            -0.47688684, 0.7421534]], [[-0.73839927, -0.59401536, -1.3794029], [-0.41711488, -2.012058,
            0.16891591], [-0.13586143, 0.15170056, 1.8998216], [-0.52273977, -1.1256169, 1.6286528]]],
            dtype=torch.float32).requires_grad_()
        w1 = torch.tensor([[-1.3599243, 1.2908258, 0.19747284], [0.6373696, 0.061102748, -0.9488974],
            [-0.4561577, 0.034213044, 1.5561211], [-0.25012395, -0.9707402, -0.26732305], [1.1688613,
            -1.2656207, -0.36667907], [0.35015061, 1.5385969, -0.92140806], [-1.1376201, 0.9494025,
            -0.083146624], [-0.0786204, 0.48801824, 0.31171325]], dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([[0.56258786, -0.47700286], [-0.70506525, 0.21174617], [0.76440877, 1.4622712],
            [1.975647, 0.41325966], [0.5410766, 0.6400273], [0.47624052, -1.2379626], [0.14812204,
            -2.4164853], [-1.7823031, 1.6268547]], dtype=torch.float32)
        x3 = torch.tensor([-1.8716203, -0.2859021, -0.20869401, -0.36869058, -0.7360292, 0.7717053,
            -0.39390457, 0.40590256], dtype=torch.float32)
        x4 = torch.tensor([[-1.1464994, -0.049048714], [0.47757834, -0.24298137], [1.0730422, -2.0724185],
            [0.8983952, 0.275781]], dtype=torch.float32)

        def program(w0, w1, x2, x3, x4):
            v0, v1, v2, v3 = torch.ops.aten.mkldnn_rnn_layer.default(w0, w1, x2, x3, x3, x4, x4, False, [], 2, 2, 1, True, False, False, True)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(w0, w1, x2, x3, x4)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("AssertionError:") and "expected all" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the backward pass of an RNN layer in a compiled checkpoint raises: its workspace is None
    # found by amp-fuzz 0.1.0, case 610daf35889f5a09 on compile[aot_eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: Expected a proper Tensor but got None (or an undefined Tensor in C++) for
    # argument #22 'workspace'
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_rnn_workspace(self):
        w0 = torch.tensor([[[1.0834756, 0.06734438, 0.62997806], [-0.68889236, 1.2536442, 1.2453364],
            [0.68586236, -0.77002275, -1.0482143], [-0.35697645, -1.8396859, 0.41836172]], [[0.21278414,
            0.8651299, 0.09223595], [-0.6320273, 0.5904331, -0.26436475], [0.15576534, -0.43522218,
            -1.4885353], [0.26857018, 0.24407555, -0.5425911]], [[0.24669078, -1.853467, -1.4547207],
            [1.7735549, 0.48727697, 0.48878348], [0.7571635, -2.3029397, -0.55451953], [-0.7946052,
            -0.47688684, 0.7421534]], [[-0.73839927, -0.59401536, -1.3794029], [-0.41711488, -2.012058,
            0.16891591], [-0.13586143, 0.15170056, 1.8998216], [-0.52273977, -1.1256169, 1.6286528]]],
            dtype=torch.float32).requires_grad_()
        w1 = torch.tensor([[-1.3599243, 1.2908258, 0.19747284], [0.6373696, 0.061102748, -0.9488974],
            [-0.4561577, 0.034213044, 1.5561211], [-0.25012395, -0.9707402, -0.26732305], [1.1688613,
            -1.2656207, -0.36667907], [0.35015061, 1.5385969, -0.92140806], [-1.1376201, 0.9494025,
            -0.083146624], [-0.0786204, 0.48801824, 0.31171325]], dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([[0.56258786, -0.47700286], [-0.70506525, 0.21174617], [0.76440877, 1.4622712],
            [1.975647, 0.41325966], [0.5410766, 0.6400273], [0.47624052, -1.2379626], [0.14812204,
            -2.4164853], [-1.7823031, 1.6268547]], dtype=torch.float32)
        x3 = torch.tensor([-1.8716203, -0.2859021, -0.20869401, -0.36869058, -0.7360292, 0.7717053,
            -0.39390457, 0.40590256], dtype=torch.float32)
        x4 = torch.tensor([[-1.1464994, -0.049048714], [0.47757834, -0.24298137], [1.0730422, -2.0724185],
            [0.8983952, 0.275781]], dtype=torch.float32)

        def program(w0, w1, x2, x3, x4):
            def block0(w0, w1, x2, x3, x4):
                v0, v1, v2, v3 = torch.ops.aten.mkldnn_rnn_layer.default(w0, w1, x2, x3, x3, x4, x4, False, [], 2, 2, 1, True, False, False, True)
                return v0, v1, v2, v3
            v0, v1, v2, v3 = checkpoint(block0, w0, w1, x2, x3, x4, use_reentrant=False)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(w0, w1, x2, x3, x4)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Expected a proper Tensor but got None" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an LSTM on oneDNN cannot be lowered by Inductor
    # found by amp-fuzz 0.1.0, case 4a92b15477afea00 on compile[inductor]
    # raise: def program(w0, w1, x2, x3, x4):
    # expected: no error
    # observed: TypeError: expected Tensor() for op: torch.ops.aten.mkldnn_rnn_layer.default
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_rnn_layer(self):
        w0 = torch.tensor([[[1.0834756, 0.06734438, 0.62997806], [-0.68889236, 1.2536442, 1.2453364],
            [0.68586236, -0.77002275, -1.0482143], [-0.35697645, -1.8396859, 0.41836172]], [[0.21278414,
            0.8651299, 0.09223595], [-0.6320273, 0.5904331, -0.26436475], [0.15576534, -0.43522218,
            -1.4885353], [0.26857018, 0.24407555, -0.5425911]], [[0.24669078, -1.853467, -1.4547207],
            [1.7735549, 0.48727697, 0.48878348], [0.7571635, -2.3029397, -0.55451953], [-0.7946052,
            -0.47688684, 0.7421534]], [[-0.73839927, -0.59401536, -1.3794029], [-0.41711488, -2.012058,
            0.16891591], [-0.13586143, 0.15170056, 1.8998216], [-0.52273977, -1.1256169, 1.6286528]]],
            dtype=torch.float32).requires_grad_()
        w1 = torch.tensor([[-1.3599243, 1.2908258, 0.19747284], [0.6373696, 0.061102748, -0.9488974],
            [-0.4561577, 0.034213044, 1.5561211], [-0.25012395, -0.9707402, -0.26732305], [1.1688613,
            -1.2656207, -0.36667907], [0.35015061, 1.5385969, -0.92140806], [-1.1376201, 0.9494025,
            -0.083146624], [-0.0786204, 0.48801824, 0.31171325]], dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([[0.56258786, -0.47700286], [-0.70506525, 0.21174617], [0.76440877, 1.4622712],
            [1.975647, 0.41325966], [0.5410766, 0.6400273], [0.47624052, -1.2379626], [0.14812204,
            -2.4164853], [-1.7823031, 1.6268547]], dtype=torch.float32)
        x3 = torch.tensor([-1.8716203, -0.2859021, -0.20869401, -0.36869058, -0.7360292, 0.7717053,
            -0.39390457, 0.40590256], dtype=torch.float32)
        x4 = torch.tensor([[-1.1464994, -0.049048714], [0.47757834, -0.24298137], [1.0730422, -2.0724185],
            [0.8983952, 0.275781]], dtype=torch.float32)

        def program(w0, w1, x2, x3, x4):
            v0, v1, v2, v3 = torch.ops.aten.mkldnn_rnn_layer.default(w0, w1, x2, x3, x3, x4, x4, False, [], 2, 2, 1, True, False, False, True)
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        observed = "no error"
        try:
            outputs = program(w0, w1, x2, x3, x4)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("TypeError:") and "expected Tensor() for op: torch" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the gradient of linalg.eig that is ill-defined raises in eager, and is a number when compiled
    # found by amp-fuzz 0.1.0, case f3eabb90d74b9089 on compile[aot_eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: RuntimeError: linalg_eig_backward: The eigenvectors in the complex case are specified up
    # to multiplication by e^{i phi}. The specified loss function depends on this quantity, so it is
    # ill-defined.
    # observed: no error
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_eig_gauge(self):
        w0 = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float32).requires_grad_()

        def program(w0):
            v0, v1 = torch.linalg.eig(w0)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(w0)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "linalg_eig_backward: The eigenvectors" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # binary_cross_entropy of what is no probability raises in eager, and is a number when compiled
    # https://github.com/pytorch/pytorch/issues/193757
    # found by amp-fuzz 0.1.0, case 892ff2c30f90134b on compile[aot_eager_decomp_partition]
    # raise: v0 = torch.nn.functional.binary_cross_entropy(x0, x1)
    # expected: RuntimeError: all elements of target should be between 0 and 1
    # observed: no error
    @still_there
    def test_compile_probability_checks(self):
        x0 = torch.tensor([0.7962993, 0.88440776], dtype=torch.float32)
        x1 = torch.tensor([1.5, 0.5], dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.nn.functional.binary_cross_entropy(x0, x1)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "all elements of target should be between" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # ops that eager's kernels lack for a dtype run in a compiled program
    # found by amp-fuzz 0.1.0, case 8f27f248a8910f75 on compile[aot_eager]
    # raise: v0 = torch.nn.functional.multilabel_margin_loss(x0, x1)
    # expected: NotImplementedError: "multilabel_margin_loss_forward_out_frame" not implemented for
    # 'BFloat16'
    # observed: no error
    @still_there
    def test_compile_not_implemented(self):
        x0 = torch.tensor([1.086, -0.9, 0.53], dtype=torch.bfloat16)
        x1 = torch.full((3,), 1, dtype=torch.int64)

        def program(x0, x1):
            v0 = torch.nn.functional.multilabel_margin_loss(x0, x1)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("NotImplementedError:") and "not implemented for" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a number that float16 cannot hold is refused in eager, and infinite when compiled
    # found by amp-fuzz 0.1.0, case 0466ed9835dd52d3 on compile[inductor]
    # raise: v0 = torch.full_like(x0, 65536.0)
    # expected: RuntimeError: value cannot be converted to type c10::Half without overflow
    # observed: no error
    @still_there
    def test_compile_full_overflow(self):
        x0 = torch.tensor([-0.02809, -0.801], dtype=torch.float16)

        def program(x0):
            v0 = torch.full_like(x0, 65536.0)
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "value cannot be converted to type c" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a number that float16 cannot hold is refused in eager, and infinite when compiled
    # found by amp-fuzz 0.1.0, case 27834782ceafdf94 on compile[aot_eager_decomp_partition]
    # raise: v0 = torch.masked_fill(x0, x1, x2)
    # expected: RuntimeError: value cannot be converted to type c10::Half without overflow
    # observed: no error
    @still_there
    def test_compile_full_overflow_2(self):
        x0 = torch.tensor([-0.9385], dtype=torch.float16)
        x1 = torch.tensor([False], dtype=torch.bool)
        x2 = torch.tensor(65536.0, dtype=torch.float32)

        def program(x0, x1, x2):
            v0 = torch.masked_fill(x0, x1, x2)
            return v0,

        program = torch.compile(program, backend="aot_eager_decomp_partition", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "value cannot be converted to type c" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the gradient of clamp's max raises in eager where min is the wider of the two, and not when
    # compiled
    # found by amp-fuzz 0.1.0, case b9a2f5d56aa5e3f3 on compile[aot_eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: RuntimeError: output with shape [1] doesn't match the broadcast shape [3]
    # observed: no error
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_clamp_broadcast(self):
        x0 = torch.tensor([-0.9384063], dtype=torch.float32)
        x1 = torch.tensor([0.605658, -1.8760834, 0.9107171], dtype=torch.float32)
        w2 = torch.tensor([1.5795056], dtype=torch.float32).requires_grad_()

        def program(x0, x1, w2):
            v0 = torch.clamp(x0, x1, w2)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, x1, w2)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "doesn't match the broadcast shape" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # values that leave the range of their dtype on the way come out finite on one side only
    # found by amp-fuzz 0.1.0, case c13e7f58260156db on compile[inductor]
    # range: v0
    # expected: 0 not finite of float32[2, 1]: native_batch_norm.default left the range
    # observed: 2 not finite, 2 differ
    @still_there
    def test_compile_range(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[8.507059e+37], [0.0]], dtype=torch.float32)
        x1 = torch.tensor([-0.5216261, -0.05634346], dtype=torch.float32)

        expected = torch.full((2, 1), 0.0, dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.nn.functional.batch_norm(x0, None, None, None, None, True)
            v1 = torch.exp(x1)
            return v0, v1

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0, x1)
        observed = outputs[0]

        observed = torch.where(observed.isfinite(), 0, observed)
        self.assertFalse(differs(expected, observed))

    # Inductor looks for the largest or smallest element among values that are not rounded yet, and
    # finds it nowhere
    # https://github.com/pytorch/pytorch/issues/195214
    # found by amp-fuzz 0.1.0, case e624d5f68f2ec091 on compile[inductor]
    # value: v3
    # expected: 1 +- 0 at [0], int64
    # observed: 0: excess inf, bias 0
    @still_there
    def test_compile_elided_casts(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[1.28, 0.414, 0.797, 0.957, -0.973, 0.875, -0.523, 0.84, 0.169, 0.066, -0.0815,
            -1.17, 0.51, 1.57, -0.94, -0.127, -0.59, -3.28, -0.1113, 1.55, 1.14, -0.096, -0.148, 0.203,
            -1.2, -0.44, 1.12, 1.28, -1.195, -0.69, -0.625, 0.202, 0.72, 1.61, -0.684, 1.68, 1.5, -1.7,
            0.22, -0.83, 1.26, -0.342, 1.086, -1.0, -2.17, 0.237, -0.715, -1.484, -1.46, -0.00184, 1.17,
            0.656, 0.527, -0.01355, 0.0352, -0.217, -0.144, 0.111, -0.586, 1.234, -0.414, -1.77, -2.72,
            1.92], [0.167, -1.2, -1.36, -1.07, -0.613, -0.59, 1.14, 0.57, -0.742, 1.34, 0.218, -0.535,
            -0.479, -1.516, 0.117, 0.97, -0.375, -0.41, -1.98, 0.71, 0.159, -1.23, 0.62, 0.277, 0.434,
            -0.74, 0.516, -0.067, 0.467, 0.161, 1.3, -0.117, -1.4, 1.234, 0.246, -0.494, -0.0221, 0.562,
            -0.664, -1.11, 1.08, 1.26, 0.496, -1.37, 0.0845, 0.072, -0.617, -0.0684, -0.459, 0.414, -1.43,
            1.0, -0.0947, -0.116, -1.234, -0.0302, -0.97, -1.46, -0.25, -0.625, -1.12, 1.39, 0.0713, 0.106],
            [0.887, -1.33, -0.48, -2.6, -0.57, -1.19, 0.1235, 0.281, 1.375, -0.159, -0.285, -0.734, -0.38,
            -0.387, 0.67, 0.543, -0.2295, 0.13, 2.2, -1.14, 2.12, -0.156, 0.348, 2.5, 0.293, 1.66, -2.08,
            -0.385, 2.28, 1.33, 1.58, -0.8, -0.477, -0.484, -2.73, 0.088, 0.504, 1.164, 0.395, -0.23,
            -0.344, -0.617, 0.926, -0.98, -2.34, -1.23, 0.633, -1.65, 1.27, 0.144, -0.208, 0.05, -0.566,
            -1.49, -3.38, 1.664, 0.168, -1.836, 1.51, 0.88, 0.052, -0.135, 0.91, 0.222], [-1.62, -0.169,
            -1.6, 0.262, -1.38, -0.0017, -1.305, 0.848, -1.79, -0.824, 0.77, 0.98, 1.75, 0.895, -0.945,
            -0.357, 0.00302, 0.832, 0.0287, 0.664, -1.67, 0.84, -0.254, -1.414, 0.085, -0.484, 2.45, -2.69,
            -1.58, -1.09, -0.0311, -1.11, -0.85, 0.144, 0.367, -1.47, -0.32, -0.22, 0.82, -0.715, 0.238,
            -0.734, 0.957, -1.47, -0.52, 0.5, 0.94, 1.13, -0.88, -0.1104, -1.03, 1.01, -1.1, -0.428, 0.398,
            -0.262, -1.78, -0.477, 0.28, -0.229, -0.0063, 0.222, -1.94, 1.26]], dtype=torch.bfloat16)

        # As torch 2.13.0+cpu computes it here; another CPU may round differently.
        expected = torch.full((4,), 1, dtype=torch.int64)

        def program(x0):
            v0 = torch.div(x0, 300.0)
            v1 = torch.amax(v0, -1, True)
            v2 = torch.eq(v0, v1)
            v3 = torch.sum(v2, -1)
            return v3,

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0)
        observed = outputs[0]

        self.assertFalse(differs(expected, observed))

    # i0 is up to 8 units of rounding off eager's when Inductor compiles it
    # found by amp-fuzz 0.1.0, case 0afc9e662ead3c86 on compile[inductor]
    # value: v0
    # expected: 1.01077637 +- 1.1e-16 at [0], float64
    # observed: 1.01077637: excess 7.91, bias 7.91
    @still_there
    def test_compile_contraction(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([0.207339879295116], dtype=torch.float64)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([1.0107763678481532], dtype=torch.float64)
        unit = torch.tensor([1.1221871963320064e-16], dtype=torch.float64)

        def program(x0):
            v0 = torch.i0(x0)
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        outputs = program(x0)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # view of an out= whose op has other strides does not compile
    # found by amp-fuzz 0.1.0, case 8e81280bf7ba96c3 on compile[aot_eager]
    # raise: outputs = program(x0, b1.clone())
    # expected: no error
    # observed: BackendCompilerFailed: backend='aot_eager' raised: ValueError: Cannot view a tensor with
    # shape torch.Size([2, 2]) and strides (1, 2) as a tensor with shape (4,)!
    @still_there
    def test_compile_out_strides(self):
        x0 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float32)
        b1 = torch.tensor([[1.2637616, -1.4911588], [-0.74923646, 0.4265081]], dtype=torch.float32)

        def program(x0, b1):
            v0 = torch.linalg.cholesky(x0, out=b1)
            v1 = v0.view([4])
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, b1.clone())
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("BackendCompilerFailed:") and "raised: ValueError: Cannot view a" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the backward pass of a convolution of a padded input fails Inductor's check of strides
    # https://github.com/pytorch/pytorch/issues/171622
    # found by amp-fuzz 0.1.0, case 005aeea18bf421e0 on compile[inductor]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: AssertionError: expected size 2==2, stride 1==18 at dim=1; expected size 2==2, stride
    # 18==9 at dim=2; expected size 9==9, stride 2==1 at dim=3
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_conv_strides(self):
        device = "cpu"

        w0 = torch.tensor([[[[-0.5083634, 0.62916857, -0.5595704, 0.9505673, 0.08352002, -0.24909759,
            -0.7592399, -1.1322958, -1.6599877], [0.5206955, -1.641129, 0.9970829, 0.76055294, -0.826834,
            -0.69773465, 0.034478743, 0.39348716, -1.1586916]], [[0.06889094, -1.1273812, -1.1466765,
            -0.3155168, 0.98596525, -0.5381071, 1.4716, -1.4469916, 0.11105835], [-0.24768461, 0.02964559,
            1.8908025, 1.6744981, 0.79687667, -0.16300856, 0.74083793, -1.8776685, 0.058121122]]],
            [[[0.6371337, 0.6082572, -1.0595787, -0.6896459, 0.10282529, 0.01651824, -0.81574565,
            0.73899597, -0.9875876], [-0.09143186, -0.5871422, 0.4752787, 0.13204364, -0.8576347,
            -0.2850027, 1.1543963, 1.6213757, -0.12542114]], [[-0.56926537, -1.0639511, -0.953345,
            -2.0792696, -0.5701559, -1.1247449, -1.6506878, 0.64951843, 0.31548357], [-0.15557833,
            -1.3941789, 0.67813903, 0.27013797, -0.6066681, 0.75003386, -1.0368602, -0.9300904,
            1.5242326]]]], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([[[[-1.2652524, -0.41059494, -0.40245977], [-0.895322, 0.34111327, 0.55280167],
            [-0.17254269, -0.1037417, 0.36283097]], [[-0.36062217, -0.80966026, 1.519677], [2.33507,
            -1.1831807, -0.8551329], [-0.23303, -0.31732288, 1.1141243]]], [[[0.71750766, -0.6219659,
            1.3030983], [-0.41231984, -2.1127157, 0.6270565], [0.37254858, -1.6979779, -0.14134376]],
            [[-1.689342, -2.057038, 0.08549118], [0.93550444, -0.79081625, 1.6386606], [-0.6876758,
            -0.9005247, -1.645851]]]], dtype=torch.float32)

        def program(w0, x1):
            v0 = torch.func.functional_call(torch.nn.Conv2d(2, 2, x1.shape[2:], stride=[1, 1], padding=[2, 0], dilation=[1, 2], groups=1, padding_mode='replicate', bias=None is not None, device='meta'), dict(weight=x1, bias=None), (w0,))
            return v0,

        program = torch.compile(program, backend="inductor", dynamic=False)

        observed = "no error"
        try:
            outputs = program(w0, x1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("AssertionError:") and "; expected size" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a custom op that calls logsigmoid of a transposed tensor raises when Inductor compiles it
    # found by amp-fuzz 0.1.0, case 64f6aa726a4ca1be on compile[inductor]
    # raise: outputs = entered(x0)
    # expected: no error
    # observed: AssertionError: expected size 3==3, stride 4==1 at dim=0; expected size 4==4, stride
    # 1==3 at dim=1
    @still_there
    @torch._functorch.config.patch(enable_autograd_cache=False)
    @torch._inductor.config.patch(fx_graph_cache=False)
    def test_compile_custom_op_strides(self):
        x0 = torch.empty_strided((3, 4), (1, 3), dtype=torch.float32).copy_(torch.tensor([[-1.2861441,
            -0.35868865, 0.79343295, 0.32142022], [0.061936565, -0.79167765, -0.30206853, -1.187549],
            [-0.4135439, 0.94181997, -0.32208398, -1.1537579]], dtype=torch.float32))

        def program(x0):
            v0 = torch.nn.functional.logsigmoid(x0)
            return v0,

        plain = program
        program = torch.compile(program, backend="inductor", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                entered = torch.compile(as_custom_op(plain, "cpu", custom_op), backend="inductor", dynamic=False)
                outputs = entered(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("AssertionError:") and "; expected size" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # chain_matmul returns its out= as it was in a compiled program
    # https://github.com/pytorch/pytorch/pull/193003
    # found by amp-fuzz 0.1.0, case 8c36b90a6a6feb02 on compile[aot_eager]
    # value: v0
    # expected: -0.427225119 +- 1.8e-07 at [0, 0], float32
    # observed: 1.07738566: excess 8.23e+06, bias 2.8e+06
    @still_there
    def test_compile_chain_matmul(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        x1 = torch.tensor([[0.07555825, -0.5473053], [-0.48715296, 0.97741425]], dtype=torch.float32)
        b2 = torch.tensor([[1.0773857, 0.33113658], [0.3198845, 0.1898325]], dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[-0.42722511860214407, 1.1210408102329978], [0.9827085019309312,
            -2.5191870160120686]], dtype=torch.float64)
        unit = torch.tensor([[1.8289018983189034e-07, 4.550003569668846e-07], [4.804215650479962e-07,
            1.195196891100032e-06]], dtype=torch.float64)

        def program(x0, x1, b2):
            v0 = torch.chain_matmul(x0, x1, out=b2)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, x1, b2.clone())
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a compiled program raises the error of a backward pass that is not run
    # found by amp-fuzz 0.1.0, case 24b4ac7c83c03723 on compile[aot_eager]
    # raise: outputs = program(x0, w1)
    # expected: no error
    # observed: BackendCompilerFailed: backend='aot_eager' raised: RuntimeError: derivative for
    # aten::linalg_ldl_factor_ex is not implemented
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_traced_backward(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        w1 = torch.tensor([[0.7717681]], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0, v1 = torch.linalg.ldl_factor(w1)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(x0, w1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("BackendCompilerFailed:") and "raised: RuntimeError: derivative for" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a dropout that drops nothing returns a copy in a compiled program, its input in eager: what is
    # written is another tensor
    # found by amp-fuzz 0.1.0, case 69bbf7ec652bf741 on compile[aot_eager]
    # grad-missing: w1.grad
    # expected: float32[3]
    # observed: None
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_dropout(self):
        x0 = torch.tensor([1.0867548, -0.8964968, 0.5331489], dtype=torch.float32)
        w1 = torch.tensor([0.15414855, -0.80779785, -1.0148988], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            with torch.no_grad():
                v0 = torch.nn.functional.dropout(w1, p=0.0, training=True)
            return v0,

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w1.grad

        expected, observed = "a gradient", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # a view made under no_grad, of what requires grad, has a grad_fn when a compiled program
    # returns it
    # found by amp-fuzz 0.1.0, case 57b0efd2d3366c20 on compile[aot_eager]
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: RuntimeError: element 1 of tensors does not require grad and does not have a grad_fn
    # observed: no error
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_views(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            with torch.no_grad():
                v1 = w1.unsqueeze(-1)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "of tensors does not require grad and" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an autograd.Function that gives its input requires grad under no_grad, when it is compiled
    # found by amp-fuzz 0.1.0, case e2dc8b95f1d03847 on compile[aot_eager]
    # grad-missing: w0.grad
    # expected: None
    # observed: float32[2]
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_given_in_no_grad(self):
        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        same_function = make_same_function()

        def program(w0, w1):
            v0 = torch.mul(w1, w1)
            with torch.no_grad():
                v1 = same_function(w0)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        outputs = program(w0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w0.grad

        expected, observed = "None", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # an inference_mode region in a compiled program raises about version counters, or a saved view
    # of what is no inference tensor
    # https://github.com/pytorch/pytorch/issues/180823
    # found by amp-fuzz 0.1.0, case 50526a85ad344f74 on compile[aot_eager]
    # raise: outputs = program(w0)
    # expected: no error
    # observed: BackendCompilerFailed: backend='aot_eager' raised: RuntimeError: Inference tensors
    # cannot be saved for backward. Please do not use Tensors created in inference mode in computation
    # tracked by autograd. To work around this, you can make a clone to get a normal tensor and use it
    # in autograd, or use `torch.no_grad()` instead
    @still_there
    @torch._functorch.config.patch(backward_pass_autocast='off')
    def test_compile_inference_tensors(self):
        w0 = torch.tensor([[-1.0543742, -1.1267253, -1.3609583], [0.49741676, 0.66263294, -1.0303488]],
            dtype=torch.float32).requires_grad_()

        def program(w0):
            with torch.inference_mode():
                v0 = torch.broadcast_to(w0, [2, 3])
            v1 = torch.fmax(v0, w0)
            return v0, v1

        program = torch.compile(program, backend="aot_eager", dynamic=False)

        observed = "no error"
        try:
            outputs = program(w0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("BackendCompilerFailed:") and "To work around this, you can make a" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # what is computed from native_layer_norm's statistics has another dtype, or raises, where the
    # export is decomposed
    # found by amp-fuzz 0.1.0, case 5caa6c988f331432 on export[decomposed]
    # dtype: v1
    # expected: float32
    # observed: bfloat16
    @still_there
    def test_export_layer_norm(self):
        x0 = torch.tensor([[0.00161, -0.352, 0.984], [-0.303, -1.34, -0.62]], dtype=torch.bfloat16)
        x1 = torch.tensor([0.605658, -1.8760834, 0.9107171], dtype=torch.float32)

        def program(x0, x1):
            _, _, v0 = torch.native_layer_norm(x0, [3], None, x1, 1.0)
            v1 = torch.nn.functional.silu(v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        outputs = program(x0, x1)
        value = outputs[1]

        expected, observed = torch.float32, value.dtype
        self.assertEqual(observed, expected)

    # embedding_bag of computed weights that need gradients cannot be exported and decomposed
    # found by amp-fuzz 0.1.0, case baf7f69540a2e822 on export[decomposed]
    # raise: outputs = program(x0, w1, x2)
    # expected: no error
    # observed: RuntimeError: Autograd not support dtype: Long
    @still_there
    def test_export_embedding_bag(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        w1 = torch.tensor([[0.5589883, -1.2402576], [-1.3581727, -1.057166], [0.7870775, 0.49660268]],
            dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([[0, 1], [2, 2]], dtype=torch.int64)

        def program(x0, w1, x2):
            v0 = torch.mul(w1, 2.0)
            v1 = torch.nn.functional.embedding_bag(x2, v0, mode='sum')
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        observed = "no error"
        try:
            outputs = program(x0, w1, x2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Autograd not support dtype: Long" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # margin losses with an out= cannot be exported
    # found by amp-fuzz 0.1.0, case afc2e2f10568ad4d on export
    # raise: outputs = program(x0, x1, x2, b3.clone())
    # expected: no error
    # observed: IndexError: list index out of range
    @still_there
    def test_export_loss_out(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([0.605658, -1.8760834, 0.9107171], dtype=torch.float32)
        x2 = torch.tensor(0, dtype=torch.int64)
        b3 = torch.tensor(1.8514398, dtype=torch.float32)

        def program(x0, x1, x2, b3):
            v0 = torch.ops.aten.multi_margin_loss.out(x1, x2, reduction=0, out=b3)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [3], 1)

        observed = "no error"
        try:
            outputs = program(x0, x1, x2, b3.clone())
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("IndexError:") and "list index out of range" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # select_scatter of two dtypes has the wider one where the export is decomposed
    # found by amp-fuzz 0.1.0, case 48af6540aa2edbbb on export[decomposed]
    # dtype: v1
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_export_promotion(self):
        x0 = torch.tensor([-0.0281, -0.8], dtype=torch.bfloat16)
        x1 = torch.tensor(1.0458146, dtype=torch.float32)

        def program(x0, x1):
            v1 = torch.select_scatter(x0, x1, 0, 0)
            return v1,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        outputs = program(x0, x1)
        value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # take with an index of no dimension cannot be exported and decomposed
    # found by amp-fuzz 0.1.0, case 9477d04dedb6ceb9 on export[decomposed]
    # raise: outputs = program(x0, x1)
    # expected: no error
    # observed: GuardOnDataDependentSymNode: Could not extract specialized integer from data-dependent
    # expression u0 (unhinted: u0).  (Size-like symbols: none)
    @still_there
    def test_export_take(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor(0, dtype=torch.int64)

        def program(x0, x1):
            v0 = torch.take(x0, x1)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, True), [], 1)

        observed = "no error"
        try:
            outputs = program(x0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("GuardOnDataDependentSymNode:") and "Could not extract specialized integer" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # an inference mode region is forgotten when the program is exported: what it makes has
    # gradients
    # found by amp-fuzz 0.1.0, case 94531d87ab24ca42 on export
    # grad-missing: w1.grad
    # expected: None
    # observed: float32[2]
    @still_there
    def test_export_inference_mode(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            with torch.inference_mode():
                v0 = torch.mul(x0, w1)
            return v0,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w1.grad

        expected, observed = "None", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # what a reentrant checkpoint makes, or one in another, and what comes after it, has no gradient
    # in an exported program
    # found by amp-fuzz 0.1.0, case ba3ebaeddc285d90 on export
    # grad-missing: w1.grad
    # expected: float32[2]
    # observed: None
    @still_there
    def test_export_checkpoint(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            def block0(x0, w1):
                v0 = torch.mul(x0, w1)
                return v0,
            v0, = checkpoint(block0, x0, w1, use_reentrant=True)
            v1 = torch.exp(w1)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w1.grad

        expected, observed = "a gradient", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # what a reentrant checkpoint makes, or one in another, and what comes after it, has no gradient
    # in an exported program
    # found by amp-fuzz 0.1.0, case 373f43a7785ea918 on export
    # grad-value: w1.grad
    # expected: -0.334725544 +- 2.3e-07 at [1], float32
    # observed: -1.1550914: excess 3.53e+06, bias 1.13e+06
    @still_there
    def test_export_checkpoint_2(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.7454065576328688, -0.33472554442446134], dtype=torch.float64)
        unit = torch.tensor([6.092831047918178e-07, 2.321051438053231e-07], dtype=torch.float64)

        def program(x0, w1):
            with torch.inference_mode():
                v1 = torch.exp(w1)
                def block0(x0, w1):
                    v0 = torch.mul(x0, w1)
                    return v0,
                v0, = checkpoint(block0, x0, w1, use_reentrant=True)
            v2 = torch.sin(w1)
            return v1, v0, v2

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # an autograd.Function in an exported program has the gradients of its forward's ops, not those
    # of its backward
    # found by amp-fuzz 0.1.0, case e09593693479e759 on export
    # grad-value: w0.grad
    # expected: -1.5 +- 8.9e-08 at [0], float32
    # observed: 0: excess 1.68e+07, bias 2.37e+07
    @still_there
    def test_export_own_backward(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-1.5, 0.5], dtype=torch.float64)
        unit = torch.tensor([8.940696716308594e-08, 2.9802322387695312e-08], dtype=torch.float64)

        straight_function = make_straight_function()

        def program(w0):
            v0 = straight_function(w0)
            v1 = torch.mul(v0, v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        outputs = program(w0)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w0.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # an error in a no_grad region of an exported program leaves gradients off after it
    # found by amp-fuzz 0.1.0, case ff3c00d9882e3b68 on export
    # state: after an error
    # expected: state as before
    # observed: grad mode: True became False
    @still_there
    def test_export_grad_mode_left(self):
        device = "cpu"

        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        x1 = torch.tensor([0.605, -1.875, 0.91], dtype=torch.bfloat16)
        x2 = torch.tensor([-0.21150042, -0.73080665, 3.1426768], dtype=torch.float32)

        def program(x0, x1, x2):
            with torch.no_grad():
                v1 = torch.cross(x1, x2)
            return v1,

        plain = program
        program = optimised(lambda inputs: exported(plain, inputs, False), [], 1)

        def drive(x0, x1, x2):
            with autocast(device, dtype=torch.bfloat16):
                outputs = program(x0, x1, x2)

        expected = torch_state(device)
        try:
            drive(x0, x1, x2)
        except Exception as error:
            if type(error).__name__ != 'RuntimeError' and torch_state(device) == expected:
                raise
            print("raised:  ", error)
        observed = torch_state(device)
        self.assertEqual(observed, expected)

    # the backward pass of linalg.cond raises for p of 1, -1, inf, -inf and fro, but not in a
    # checkpoint
    # found by amp-fuzz 0.1.0, case 73a23a4746653c8a on eager-cpu
    # relation: checkpoint:
    # expected: no error
    # observed: RuntimeError: one of the variables needed for gradient computation has been modified by
    # an inplace operation: [torch.FloatTensor [3, 3]], which is output 0 of LinalgInvEx, is at version
    # 1; expected version 0 instead. Hint: enable anomaly detection to find the operation that failed to
    # compute its gradient, with to
    @still_there
    def test_linalg_cond_backward(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        def outcome(drive):
            """Return the observed values, or the name of an expected error."""
            try:
                return drive(*inputs())
            except Exception as error:
                if type(error).__name__ not in ['RuntimeError']:
                    raise
                return type(error).__name__

        def inputs():
            w0 = torch.tensor([[0.1532019, 0.00019496407, -0.032149363], [1.1963278, 0.51371646, -1.3298689],
                [-1.30363, -2.0377574, -1.2477838]], dtype=torch.float32).requires_grad_()
            return [w0]

        # checkpoint: Compare a non-reentrant checkpoint with none, including gradients.

        def program(w0):
            v0 = torch.linalg.cond(w0, p=-1)
            v1 = torch.sin(v0)
            return v0, v1

        def drive(w0):
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = checkpoint(program, w0, use_reentrant=False)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)

        expected = outcome(drive)

        def drive(w0):
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(w0)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)

        observed = outcome(drive)

        self.assertFalse(differs(expected, observed))

    # norms and scatters raise under vmap and autocast together, under neither alone
    # https://github.com/pytorch/pytorch/issues/184890
    # found by amp-fuzz 0.1.0, case 02be08d7c7ae7328 on eager-cpu
    # relation: transform: v1
    # expected: no error
    # observed: RuntimeError: expected scalar type BFloat16 but found Float
    @still_there
    def test_vmap_batching_rules(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[-1.2861441, -0.35868865, 0.79343295, 0.32142022], [0.061936565, -0.79167765,
            -0.30206853, -1.187549], [-0.4135439, 0.94181997, -0.32208398, -1.1537579]],
            dtype=torch.float32)
        w1 = torch.tensor([[2.65613, -1.1814224, 1.630129, 2.1118658, -0.25148147], [-0.8497582, -0.6450106,
            -0.13277099, 0.5355035, 0.7893554], [-0.78509164, 0.43999633, 0.1547424, 0.86444116,
            -0.008364939], [-1.382551, -0.55424815, -0.62489885, -1.1182808, -0.5242058]],
            dtype=torch.float32).requires_grad_()
        w2 = torch.tensor([0.9377588, 0.046923526, 0.9079614, 1.1781973, -0.4313399],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1, w2):
            v0 = torch.mm(x0, w1)
            v1 = torch.nn.functional.layer_norm(v0, [5], w2, None)
            v2 = torch.neg(v1)
            return v0, v1, v2

        def drive(x0, w1, w2):
            def loss(*inputs):
                with autocast("cpu", dtype=torch.bfloat16):
                    outputs = program(*inputs)
                    return total(outputs), outputs
            entered = grad(loss, argnums=(1, 2), has_aux=True)
            entered = vmap(entered, in_dims=(0, None, None), randomness="same")
            grads, outputs = entered(twice(x0), w1, w2)

        observed = "no error"
        try:
            drive(x0, w1, w2)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "expected scalar type BFloat" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the bounds of clamp get no gradient in a scripted program, from its second call on
    # found by amp-fuzz 0.1.0, case 1d5795403009c305 on script
    # grad-missing: w1.grad
    # expected: float32[4]
    # observed: None
    @still_there
    def test_torchscript_clamp_bounds(self):
        x0 = torch.tensor([-0.66681874, 0.7735588, 1.3836, -1.8026496], dtype=torch.float32)
        w1 = torch.tensor([-0.6375701, -1.360778, -0.48281416, 1.0008749],
            dtype=torch.float32).requires_grad_()
        w2 = torch.tensor([-0.28911957, 1.0261078, 1.923717, 0.17489779],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1, w2):
            v0 = torch.mul(x0, x0)
            v1 = torch.clamp(v0, None, w1)
            v2, v3 = torch.sort(v1)
            v4 = torch.clamp(v2, None, w2)
            return v0, v1, v2, v3, v4

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(x0, w1, w2)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w1.grad

        expected, observed = "a gradient", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # clamp hands on the gradient of a tensor that it broadcast as it is: it is added too often, or
    # cannot be expanded
    # found by amp-fuzz 0.1.0, case b2ae390f28171876 on script
    # grad-value: w0.grad
    # expected: -2 +- 6e-07 at [], float32
    # observed: -4: excess 3.35e+06, bias 1.86e+06
    @still_there
    def test_torchscript_clamp_broadcast(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor(0.0, dtype=torch.float32).requires_grad_()
        x1 = torch.full((2,), 1.0, dtype=torch.float32)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor(-2.0, dtype=torch.float64)
        unit = torch.tensor(5.961717177704884e-07, dtype=torch.float64)

        def program(w0, x1):
            v0 = torch.clamp(w0, x1)
            v1 = torch.div(w0, v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(w0, x1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w0.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # eager's backward pass of clamp between two tensors raises where one needs a gradient and what
    # is clamped was broadcast; TorchScript's does not
    # found by amp-fuzz 0.1.0, case 386a8ccd9072f500 on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: RuntimeError: output with shape [1] doesn't match the broadcast shape [2]
    # observed: no error
    @still_there
    def test_torchscript_clamp_raises(self):
        w0 = torch.tensor([-0.41808525], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([-0.5216261, -0.05634346], dtype=torch.float32)
        w2 = torch.tensor(1.5795056, dtype=torch.float32).requires_grad_()

        def program(w0, x1, w2):
            v0 = torch.mul(w0, w0)
            v1 = torch.clamp(v0, x1, w2)
            v2 = torch.mul(v1, v1)
            return v0, v1, v2

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(w0, x1, w2)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed.startswith("RuntimeError:") and "doesn't match the broadcast shape" in observed
        wrong = observed == "no error"
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # gradients at relu, clamp, where, addcmul, div and softplus of a scripted program, where
    # something is not finite, a bound is a tensor or a threshold is near
    # found by amp-fuzz 0.1.0, case c7cf2c791a597367 on script
    # grad-nonfinite: w1.grad
    # expected: 0 not finite of float32[8]
    # observed: 4 not finite, 4 differ
    @still_there
    def test_torchscript_formulas(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-1.5221845, -0.054948512, -0.08774376, -1.3395873, 0.6746276, -1.4718187,
            1.769999, -0.33998254], dtype=torch.float32)
        w1 = torch.tensor([1.8670188, 0.026630929, -1.5760306, 0.15615176, -0.7452789, -2.5402057,
            0.32111698, -0.95303434], dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([0.29814106, 0.87045634, 0.27455616, 0.6483831, 0.57061136, -0.21481618,
            -0.10425839, 0.9133396], dtype=torch.float32)

        expected = torch.full((8,), 0.0, dtype=torch.float32)

        def program(x0, w1, x2):
            v0 = torch.relu(w1)
            v1 = torch.pow(v0, 0.5)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(x0, w1, x2)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w1.grad

        observed = torch.where(observed.isfinite(), 0, observed)
        self.assertFalse(differs(expected, observed))

    # a frozen module writes to a constant of its own: each call starts from what the last one left
    # https://github.com/pytorch/pytorch/issues/195422
    # found by amp-fuzz 0.1.0, case 48e1f28d41b883b0 on script[freeze]
    # value: v0
    # expected: -3.24314541 +- 9.3e-07 at [1], float32
    # observed: -4.8096509: excess 1.68e+06, bias 6.05e+05
    @still_there
    def test_freeze_kept_constants(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([-0.5216261, -0.05634346], dtype=torch.float32)
        w2 = torch.tensor([0.99680775, 1.7439169], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.7832528948783875, -3.2431454062461853], dtype=torch.float64)
        unit = torch.tensor([2.504536721348316e-07, 9.314370248425519e-07], dtype=torch.float64)

        def program(w0, x1, w2):
            v0 = torch.add(w0, w0)
            v1 = v0.type_as(x1)
            v2 = v1.cumsum_(-1)
            v3 = torch.neg(x1)
            v4 = torch.add(w2, w2)
            v5 = v4.type_as(x1)
            v6 = v5.cumsum_(-1)
            return v0, v1, v2, v3, v4, v5, v6

        plain = program
        program = optimised(lambda inputs: frozen(torch.jit.script(plain), inputs, [0, 2]), [], 3)

        outputs = program(w0, x1, w2)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # a frozen module writes to a constant of its own: each call starts from what the last one left
    # https://github.com/pytorch/pytorch/issues/195422
    # found by amp-fuzz 0.1.0, case 48e1f28d41b883b0 on trace[freeze]
    # value: v0
    # expected: -3.24314541 +- 9.3e-07 at [1], float32
    # observed: -4.8096509: excess 1.68e+06, bias 6.05e+05
    @still_there
    def test_freeze_kept_constants_2(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([-0.5216261, -0.05634346], dtype=torch.float32)
        w2 = torch.tensor([0.99680775, 1.7439169], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([-0.7832528948783875, -3.2431454062461853], dtype=torch.float64)
        unit = torch.tensor([2.504536721348316e-07, 9.314370248425519e-07], dtype=torch.float64)

        def program(w0, x1, w2):
            v0 = torch.add(w0, w0)
            v1 = v0.type_as(x1)
            v2 = v1.cumsum_(-1)
            v3 = torch.neg(x1)
            v4 = torch.add(w2, w2)
            v5 = v4.type_as(x1)
            v6 = v5.cumsum_(-1)
            return v0, v1, v2, v3, v4, v5, v6

        plain = program
        program = optimised(lambda inputs: frozen(torch.jit.trace(plain, tuple(inputs), check_trace=False), inputs, [0, 2]), [], 3)

        outputs = program(w0, x1, w2)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # integers and a frozen weight of no dimensions, of 16 bits, make float32
    # found by amp-fuzz 0.1.0, case 85afc7edea996575 on trace[freeze]
    # dtype: v0
    # expected: float16
    # observed: float32
    @still_there
    def test_freeze_scalar_weight(self):
        x0 = torch.tensor([-3, 3, -2], dtype=torch.int64)
        w1 = torch.tensor(0.772, dtype=torch.float16).requires_grad_()

        def program(x0, w1):
            with torch.no_grad():
                v0 = torch.add(x0, w1)
            return v0,

        plain = program
        program = optimised(lambda inputs: frozen(torch.jit.trace(plain, tuple(inputs), check_trace=False), inputs, [1]), [], 3)

        outputs = program(x0, w1)
        value = outputs[0]

        expected, observed = torch.float16, value.dtype
        self.assertEqual(observed, expected)

    # values that leave the range of their dtype on the way make other infinities and NaN in an
    # optimised scripted program
    # found by amp-fuzz 0.1.0, case 40928a20891e1541 on script
    # range: w0.grad
    # expected: 24 not finite of float16[1, 3, 8]: mul.Tensor, _to_copy.default left the range
    # observed: 24 not finite, 7 differ
    @still_there
    def test_torchscript_range(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        w0 = torch.tensor([[[-0.5327, -1.18, 0.1204, 0.05368, 0.02872, 0.4043, -0.2993, -1.651], [-0.9077,
            -0.1526, -0.602, 0.1663, 0.509, -0.8433, -1.295, -0.421], [-1.467, 0.09357, 0.3823, 0.2625,
            1.445, 1.137, 0.0833, 0.943]]], dtype=torch.float16).requires_grad_()
        x1 = torch.tensor([[[1.8755412e+38, -3.8875678e+36, 5.3793985e+37, -7.059731e+18, 5.698291e+18,
            1.355102e+19, 2.5863572e+17, 2.2704421e+38], [1.1813577e+19, -1.0691116e+19, -1.6712031e+19,
            1.6544249e+19, 9.676871e+18, -2.8570654e+38, -2.1286756e+38, 9.587047e+37], [-3.0805692e+38,
            1.6474002e+38, 9.761201e+18, -9.798188e+18, -2.7842822e+38, -1.0195538e+19, -1.750902e+38,
            -5.1662896e+18]]], dtype=torch.float32)

        expected = torch.tensor([[[nan, -inf, inf, -inf, -inf, -inf, nan, -inf], [nan, nan, nan, inf, -inf,
            nan, inf, nan], [-inf, -inf, inf, -inf, inf, inf, -inf, -inf]]], dtype=torch.float16)

        def program(w0, x1):
            v0 = x1 * w0
            v1 = torch.mul(v0, w0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(w0, x1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w0.grad

        observed = torch.where(observed.isfinite(), 0, observed)
        self.assertFalse(differs(expected, observed))

    # writing to the result of linear of a vector raises in a scripted program, from its second call
    # on
    # found by amp-fuzz 0.1.0, case 425d5334ed60fc7f on script
    # raise: outputs = program(w0, x1)
    # expected: no error
    # observed: RuntimeError: a view of a leaf Variable that requires grad is being used in an in-place
    # operation.
    @still_there
    def test_torchscript_linear_inplace(self):
        w0 = torch.tensor([-0.41808525], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([[1.0458146]], dtype=torch.float32)

        def program(w0, x1):
            v0 = torch.tanh(w0)
            v1 = torch.nn.functional.linear(v0, x1, w0)
            v2 = v1.exp_()
            return v0, v1, v2

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(w0, x1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "a view of a leaf Variable that requires" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a backward pass raises for a value that was written to, which only an optimised scripted
    # program has saved
    # found by amp-fuzz 0.1.0, case d3d88d19b2500997 on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: one of the variables needed for gradient computation has been modified by
    # an inplace operation: [torch.FloatTensor [2]], which is output 4 of torch::jit::(anonymous
    # namespace)::DifferentiableGraph, is at version 1; expected version 0 instead. Hint: enable anomaly
    # detection to find the operation that
    @still_there
    def test_torchscript_saved(self):
        w0 = torch.tensor([-0.39162645, -1.2299463], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([-0.5216261, -0.05634346], dtype=torch.float32)

        def program(w0, x1):
            v0 = torch.mul(w0, x1)
            v1 = torch.clamp(v0, None, 1.0)
            v2 = v1.type_as(x1)
            v3 = v2.cumsum_(-1)
            return v0, v1, v2, v3

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(w0, x1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "one of the variables needed for" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the backward pass of cat raises for a weight of the shape [0] in an optimised scripted program
    # found by amp-fuzz 0.1.0, case 892d998f6351eb3a on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: Function torch::jit::(anonymous namespace)::DifferentiableGraphBackward
    # returned an invalid gradient at index 1 - got [0, 17] but expected shape compatible with [0]
    @still_there
    def test_torchscript_cat_empty(self):
        w0 = torch.tensor([[1.7459594, 1.0227219, 0.051827863, -0.59484226, -1.4798952, -0.79561466,
            0.58745426, -0.78592116, -0.52453357, 0.3971624, -0.63190824, 0.03473996, -0.6812881, 0.2991766,
            -0.13039578, -2.156602, -1.6378566], [-0.2287854, 0.053843766, 1.0686185, -0.83763814,
            0.045810215, 0.5667744, -0.8992594, 0.64321953, -0.8932671, -0.70313853, -1.070251, -1.8048363,
            0.7942332, -0.5909401, 1.0221808, 0.019025633, -1.0207262], [-0.25503087, 0.098857716,
            -0.898033, 2.46524, -1.7813777, 0.42700127, -0.27177066, -0.31068635, -0.18524331, 1.5990734,
            0.6855515, 1.0576022, -0.036111657, -0.32978988, 0.82738453, -0.21942824, -0.35814866],
            [1.3035358, 1.0833278, -0.45473623, -2.2091568, 0.11847659, -0.24891488, -2.7284517, 0.9380757,
            -0.711014, -0.62985307, -0.024020288, -0.11736596, 1.6291342, 0.49280688, -0.31393963,
            -0.82470113, -1.7519171]], dtype=torch.float32).requires_grad_()
        w1 = torch.zeros((0,), dtype=torch.float32).requires_grad_()

        def program(w0, w1):
            v0 = torch.cat([w0, w1], -2)
            v1 = torch.mul(v0, 2.0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(w0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Function torch::jit::(anonymous" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the gradient of linear with a weight of one dimension raises in a scripted program, from its
    # second call on
    # found by amp-fuzz 0.1.0, case 3151a16e68c5d95d on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: shape '[-1, 4]' is invalid for input of size 1
    @still_there
    def test_torchscript_linear_vector(self):
        x0 = torch.tensor([-0.66681874, 0.7735588, 1.3836, -1.8026496], dtype=torch.float32)
        w1 = torch.tensor([-0.6375701, -1.360778, -0.48281416, 1.0008749],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mul(x0, x0)
            v1 = torch.nn.functional.linear(v0, w1, None)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "is invalid for input of size" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the gradient of a norm, mm, linear or softmax raises for two dtypes in a scripted program that
    # adds or multiplies a wider value
    # found by amp-fuzz 0.1.0, case 8ff8514b75e4fc9f on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: expected scalar type BFloat16 but found Float
    @still_there
    def test_torchscript_mixed_gradients(self):
        x0 = torch.tensor([[-1.2861441, -0.35868865, 0.79343295, 0.32142022], [0.061936565, -0.79167765,
            -0.30206853, -1.187549], [-0.4135439, 0.94181997, -0.32208398, -1.1537579]],
            dtype=torch.float32)
        w1 = torch.tensor([[-0.467, -0.73, -0.434, -1.484], [1.51, -1.2, 0.202, -0.324], [0.56, 0.0106,
            0.393, 0.309]], dtype=torch.bfloat16).requires_grad_()
        x2 = torch.tensor([1.1134325, 0.9215077, -1.015535, 0.9399412], dtype=torch.float32)
        x3 = torch.tensor([1.5346911, 1.704494, 3.2447035, 1.1102985], dtype=torch.float32)

        def program(x0, w1, x2, x3):
            v0 = torch.nn.functional.batch_norm(w1, x2.clone(), x3.clone(), )
            v1 = torch.add(x0, v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(x0, w1, x2, x3)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "expected scalar type BFloat" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the gradient of mv raises for two dtypes in a scripted program, behind a softmax with a wider
    # dtype or the like
    # found by amp-fuzz 0.1.0, case c77f69cc1dd1b707 on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: addmv input tensors must have the same dtype, but got Double, Half, and
    # Double
    @still_there
    def test_torchscript_mixed_vectors(self):
        x0 = torch.tensor([[-1.286, -0.3586, 0.7935, 0.3215], [0.06195, -0.7915, -0.302, -1.1875], [-0.4136,
            0.942, -0.322, -1.153]], dtype=torch.float16)
        w1 = torch.tensor([-0.6377, -1.36, -0.483, 1.001], dtype=torch.float16).requires_grad_()

        def program(x0, w1):
            v0 = torch.mv(x0, w1)
            v1 = torch.softmax(v0, 0, dtype=torch.float64)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "addmv input tensors must have the same" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a backward pass, or an op with out=, raises for what requires grad in an optimised scripted
    # program though nothing that it was made of does
    # found by amp-fuzz 0.1.0, case a59c636565a2450a on script
    # raise: outputs = program(x0, w1, b2.clone())
    # expected: no error
    # observed: RuntimeError: sub(): functions with out=... arguments don't support automatic
    # differentiation, but one of the arguments requires grad.
    @still_there
    def test_torchscript_requires_grad(self):
        x0 = torch.tensor([[-0.9384063]], dtype=torch.float32)
        w1 = torch.tensor(0.7717681, dtype=torch.float32).requires_grad_()
        b2 = torch.tensor([[1.4028168]], dtype=torch.float32)

        def program(x0, w1, b2):
            v0 = torch.mm(x0, x0)
            v1 = torch.div(v0, w1)
            v2 = torch.sub(v0, x0, out=b2)
            return v1,

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [2], 3)

        observed = "no error"
        try:
            outputs = program(x0, w1, b2.clone())
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "arguments don't support automatic" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # a weight that is used under no_grad alone has a gradient in an optimised scripted program
    # https://github.com/pytorch/pytorch/issues/128261
    # found by amp-fuzz 0.1.0, case 27beefa893f49197 on script
    # grad-missing: w2.grad
    # expected: None
    # observed: float32[1]
    @still_there
    def test_torchscript_no_grad(self):
        w0 = torch.tensor([[-0.41808525]], dtype=torch.float32).requires_grad_()
        x1 = torch.tensor(1.0458146, dtype=torch.float32)
        w2 = torch.tensor([1.5795056], dtype=torch.float32).requires_grad_()
        x3 = torch.tensor(True, dtype=torch.bool)

        def program(w0, x1, w2, x3):
            v0 = torch.addmm(x1, w0, w0)
            with torch.no_grad():
                v1 = torch.cat([w2])
                v2 = torch.where(x3, x1, v1)
            return v0, v1, v2

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(w0, x1, w2, x3)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w2.grad

        expected, observed = "None", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # a scripted program that was optimised while it trained raises in inference mode
    # https://github.com/pytorch/pytorch/issues/82550
    # found by amp-fuzz 0.1.0, case a7902f7211a87d94 on trace
    # raise: program(x0, w1)
    # expected: no error
    # observed: RuntimeError: Inference tensors cannot be saved for backward. Please do not use Tensors
    # created in inference mode in computation tracked by autograd. To work around this, you can make a
    # clone to get a normal tensor and use it in autograd, or use `torch.no_grad()` instead of
    # `torch.inference_mode()`.
    @still_there
    def test_torchscript_inference_saved(self):
        x0 = torch.tensor([[-0.9384063]], dtype=torch.float32)
        w1 = torch.tensor([[0.7717681]], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            v1 = torch.exp(v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.trace(plain, tuple(inputs), check_trace=False), [], 3)

        observed = "no error"
        try:
            weights = [w1]
            try:
                program(x0, w1)
                raise Interrupted
            except Interrupted:
                pass
            nudge(weights)
            with torch.inference_mode():
                program(x0, w1)
            outputs = program(x0, w1)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "To work around this, you can make a" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the product in addmm is rounded in a scripted program, or leaves the range, and any dtypes and
    # shapes are added
    # found by amp-fuzz 0.1.0, case 6e092ad619d9f0cb on script
    # value: v0
    # expected: 1 +- 0.0018 at [1, 0], float16
    # observed: 0: excess 564, bias 232
    @still_there
    def test_torchscript_addmm(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([[2.0], [-2048.0]], dtype=torch.float16)
        x1 = torch.tensor([[1.0, 1.0], [2048.0, 1.0]], dtype=torch.float16)
        x2 = torch.full((2, 1), 1.0, dtype=torch.float16)

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[4.0], [1.0]], dtype=torch.float64)
        unit = torch.tensor([[0.003866409359558176], [0.0017744960769908724]], dtype=torch.float64)

        def program(x0, x1, x2):
            v0 = torch.addmm(x0, x1, x2)
            return v0,

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(x0, x1, x2)
        observed = outputs[0]

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # float16 times a number beyond its range, in place, is infinite in a scripted program
    # found by amp-fuzz 0.1.0, case bf88a73adc4ad699 on script
    # nonfinite: v1
    # expected: 0 not finite of float16[2]
    # observed: 2 not finite, 2 differ
    @still_there
    def test_torchscript_mul_scalar(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        b1 = torch.full((2,), -0.5, dtype=torch.float16)

        expected = torch.full((2,), 0.0, dtype=torch.float16)

        def program(x0, b1):
            v1 = b1.mul_(65536.0)
            v2 = torch.exp(x0)
            return v1, v2

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [1], 3)

        outputs = program(x0, b1.clone())
        observed = outputs[0]

        observed = torch.where(observed.isfinite(), 0, observed)
        self.assertFalse(differs(expected, observed))

    # torch.kl_div and six other losses that are called without `reduction` are means in a scripted
    # program, and not in Python
    # found by amp-fuzz 0.1.0, case e597d8a62d371acd on script
    # shape: v0
    # expected: [3]
    # observed: []
    @still_there
    def test_torchscript_reduction(self):
        x0 = torch.tensor([1.1851971, 1.5376309, 1.2216635], dtype=torch.float32)
        x1 = torch.tensor([1.102344, -0.022849072, 0.31617266], dtype=torch.float32)

        def program(x0, x1):
            v0 = torch.kl_div(x0, x1, log_target=True)
            return v0,

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(x0, x1)
        value = outputs[0]

        expected, observed = [3], list(value.shape)
        self.assertEqual(observed, expected)

    # a sum, product or quotient with a number raises in a scripted program where its out= has
    # another dtype
    # found by amp-fuzz 0.1.0, case 0ad6d0996a5e3993 on script
    # raise: outputs = program(x0, b1.clone())
    # expected: no error
    # observed: RuntimeError: Expected out tensor to have dtype float, but got c10::BFloat16 instead
    @still_there
    def test_torchscript_scalar_out(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        b1 = torch.tensor([1.43, -1.336], dtype=torch.bfloat16)

        def program(x0, b1):
            v0 = torch.mul(x0, 2.0, out=b1)
            return v0,

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [1], 3)

        observed = "no error"
        try:
            outputs = program(x0, b1.clone())
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Expected out tensor to have dtype" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # what a scripted program computes under no_grad and again without it has no gradient, or one
    # under no_grad too
    # https://github.com/pytorch/pytorch/pull/76075
    # found by amp-fuzz 0.1.0, case e0bea96499e9da6b on script
    # grad-missing: w1.grad
    # expected: float32[2]
    # observed: None
    @still_there
    def test_torchscript_common_subexpressions(self):
        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        w1 = torch.tensor([-1.05073, 0.8373267], dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            with torch.no_grad():
                v0 = torch.exp(w1)
            v1 = torch.exp(w1)
            v2 = torch.mul(v0, x0)
            v3 = torch.add(v1, x0)
            return v2, v3

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        outputs = program(x0, w1)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        value = w1.grad

        expected, observed = "a gradient", "None" if value is None else "a gradient"
        self.assertEqual(observed, expected)

    # the gradient of gaussian_nll_loss is masked in a trace where the variance is below eps
    # found by amp-fuzz 0.1.0, case 6ca2f0846f005212 on trace
    # grad-value: w2.grad
    # expected: -0.06 +- 3.6e-08 at [0, 0], float32
    # observed: 0: excess 1.68e+06, bias 8.99e+05
    @still_there
    def test_trace_grad_modes(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        x0 = torch.tensor([-0.028083976, -0.80090946], dtype=torch.float32)
        x1 = torch.tensor([[0.7659984, -0.48406416, 0.27199706, 0.550597, 0.43399373, -2.1110492,
            -0.6065807, -0.54380524]], dtype=torch.float32)
        w2 = torch.tensor([[1.7862163]], dtype=torch.float32).requires_grad_()

        # The float64 result, and the unit of rounding (64 perturbed runs).
        expected = torch.tensor([[-0.06]], dtype=torch.float64)
        unit = torch.tensor([[3.5815931384020064e-08]], dtype=torch.float64)

        def program(x0, x1, w2):
            v0 = torch.nn.functional.gaussian_nll_loss(x1, x1, w2, eps=100.0, reduction='sum')
            return v0,

        plain = program
        program = optimised(lambda inputs: torch.jit.trace(plain, tuple(inputs), check_trace=False), [], 3)

        outputs = program(x0, x1, w2)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observed = w2.grad

        away = ((observed.detach().double() - expected) / unit).abs()
        away = float(away.nan_to_num(nan=float("inf")).max())
        self.assertLessEqual(away, 4.0)

    # torch.jit.trace ends in an internal assertion for full_like of a bool
    # found by amp-fuzz 0.1.0, case cd326f09470c92af on trace
    # raise: outputs = program(x0)
    # expected: no error
    # observed: RuntimeError: 0 INTERNAL ASSERT FAILED at
    # "/__w/pytorch/pytorch/torch/csrc/jit/ir/alias_analysis.cpp":623, please report a bug to PyTorch.
    # We don't have an op for aten::full_like but it isn't a special case.  Argument types: Tensor,
    # bool, NoneType, NoneType, NoneType, bool, NoneType,
    @still_there
    def test_trace_bool_scalar(self):
        x0 = torch.tensor([-3, 3, -2], dtype=torch.int64)

        def program(x0):
            v0 = torch.full_like(x0, True)
            return v0,

        plain = program
        program = optimised(lambda inputs: torch.jit.trace(plain, tuple(inputs), check_trace=False), [], 3)

        observed = "no error"
        try:
            outputs = program(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Argument types: Tensor, bool, NoneType," in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # torch.jit.trace of max(x, out=b) and min(x, out=b) is max(x, b): another shape, other values
    # found by amp-fuzz 0.1.0, case a41d220eaba8beea on trace
    # shape: v0
    # expected: []
    # observed: [2, 3]
    @still_there
    def test_trace_max_out(self):
        x0 = torch.tensor([[0.0016112087, -0.35228622, 0.9826507], [-0.3036243, -1.3431978, -0.6199277]],
            dtype=torch.float32)
        b1 = torch.tensor(-0.34287426, dtype=torch.float32)
        x2 = torch.tensor([[1.0202048, 0.42648107, 1.0661471], [-1.4412152, 0.6186241, 1.5019829],
            [-0.7380799, -0.50114846, 2.2760067]], dtype=torch.float32)

        def program(x0, b1, x2):
            v0 = torch.max(x0, out=b1)
            v1 = torch.neg(b1)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.trace(plain, tuple(inputs), check_trace=False), [1], 3)

        outputs = program(x0, b1.clone(), x2)
        value = outputs[0]

        expected, observed = [], list(value.shape)
        self.assertEqual(observed, expected)

    # a program traced in inference mode raises where its numbers are saved for a backward pass
    # found by amp-fuzz 0.1.0, case 461c0252f7d66c92 on trace
    # raise: outputs = program(w0, x1, b2.clone())
    # expected: no error
    # observed: RuntimeError: Inference tensors cannot be saved for backward. Please do not use Tensors
    # created in inference mode in computation tracked by autograd. To work around this, you can make a
    # clone to get a normal tensor and use it in autograd, or use `torch.no_grad()` instead of
    # `torch.inference_mode()`.
    @still_there
    def test_trace_inference_constants(self):
        w0 = torch.tensor([[0.20906784, -0.4466765], [-1.677639, -1.0397965]],
            dtype=torch.float32).requires_grad_()
        x1 = torch.tensor([[0.07555825, -0.5473053], [-0.48715296, 0.97741425]], dtype=torch.float32)
        b2 = torch.tensor([[1.0773857, 0.33113658], [0.3198845, 0.1898325]], dtype=torch.float32)

        def program(w0, x1, b2):
            v0 = torch.mm(w0, w0)
            v1 = v0.mul_(2.0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.trace(plain, tuple(inputs), check_trace=False), [2], 3)

        observed = "no error"
        try:
            with torch.inference_mode():
                program(w0, x1, b2.clone())
            outputs = program(w0, x1, b2.clone())
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "To work around this, you can make a" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the check of torch.jit.trace finds two traces of one program to differ, without autocast too
    # found by amp-fuzz 0.1.0, case a9da9602e5ea3dc5 on trace[check]
    # raise: outputs = program(x0)
    # expected: no error
    # observed: TracingCheckError: Tracing failed sanity checks!
    @still_there
    def test_trace_check_names(self):
        x0 = torch.empty_strided((3, 2), (4, 2), dtype=torch.float32).copy_(torch.tensor([[0.0016112087,
            -0.35228622], [0.9826507, -0.3036243], [-1.3431978, -0.6199277]], dtype=torch.float32))

        def program(x0):
            v0 = x0.contiguous().view([1, 3, 2])
            return v0,

        plain = program
        program = optimised(lambda inputs: traced(plain, inputs, []), [], 3)

        observed = "no error"
        try:
            outputs = program(x0)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("TracingCheckError:") and "Tracing failed sanity checks!" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # gradients of a scripted program round elsewhere, or raise for two dtypes, from the third call
    # on
    # https://github.com/pytorch/pytorch/pull/72760
    # found by amp-fuzz 0.1.0, case 19c398459648cd12 on script
    # raise: if starts: torch.autograd.backward(starts, cotangents)
    # expected: no error
    # observed: RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half !=
    # c10::BFloat16
    @still_there
    def test_torchscript_autodiff(self):
        x0 = torch.tensor([[-3.0, 3.0], [-2.0, 1.0]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            with torch.autocast("cpu", dtype=torch.float16):
                v0 = torch.mm(x0, w1)
            return v0,

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "to have the same dtype, but got: c" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # ops that promote are float32 where a part of a scripted program falls back: of a weight in a
    # no_grad region, or after another part
    # found by amp-fuzz 0.1.0, case 0078bd5615ec87aa on script
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_torchscript_fallback(self):
        x0 = torch.tensor([[-0.028083976, -0.80090946]], dtype=torch.float32)
        w1 = torch.tensor([[-1.05073], [0.8373267]], dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([[0.84506834]], dtype=torch.float32)
        w3 = torch.tensor([-1.3962387, -0.27155128], dtype=torch.float32).requires_grad_()

        def program(x0, w1, x2, w3):
            v1 = torch.mul(x0, w3)
            with torch.no_grad():
                v0 = torch.addmm(x2, x0, w1)
            return v1, v0

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1, x2, w3)
            value = outputs[1]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # ops that promote are float32 where a part of a scripted program falls back: of a weight in a
    # no_grad region, or after another part
    # found by amp-fuzz 0.1.0, case ae7cd162cb5f4b22 on script
    # dtype: v3
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_torchscript_fallback_4(self):
        x0 = torch.tensor([[-0.668, 0.773], [1.38, -1.805]], dtype=torch.bfloat16)
        w1 = torch.tensor([[-0.637, -1.36], [-0.482, 1.0]], dtype=torch.bfloat16).requires_grad_()
        w2 = torch.tensor([0.99680775, 1.7439169], dtype=torch.float32).requires_grad_()

        def program(x0, w1, w2):
            v2 = torch.atan2(w2, w2)
            with torch.no_grad():
                with torch.autocast("cpu", enabled=False):
                    v0 = torch.mul(x0, w1)
                    v1 = torch.mm(v0, w1)
                    v3 = v1 / -1.5
            return v2, v0, v1, v3

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1, w2)
            value = outputs[3]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # ops that promote are float32 where a part of a scripted program falls back: of a weight in a
    # no_grad region, or after another part
    # found by amp-fuzz 0.1.0, case a7f12473cbe3ec9b on script
    # dtype: v4
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_torchscript_fallback_5(self):
        x0 = torch.tensor(-0.9384063, dtype=torch.float32)
        w1 = torch.tensor(0.7717681, dtype=torch.float32).requires_grad_()
        x2 = torch.tensor([0.84506834], dtype=torch.float32)

        def program(x0, w1, x2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                v0 = torch.prelu(x0, w1)
                v1 = torch.add(x2, x0)
            v2 = torch.prelu(v1, x0)
            with torch.autocast("cpu", enabled=False):
                v3 = torch.add(x0, v2)
                v4 = torch.mean(v3)
            return v0, v4

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0, w1, x2)
            value = outputs[1]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # ops that promote are float32 where a part of a scripted program falls back: of a weight in a
    # no_grad region, or after another part
    # found by amp-fuzz 0.1.0, case e9f1cabadbcae692 on trace
    # dtype: step1.v1
    # expected: float16
    # observed: float32
    @still_there
    def test_torchscript_fallback_6(self):
        w0 = torch.tensor([[0.2091, -0.4468], [-1.678, -1.04]], dtype=torch.float16).requires_grad_()

        def program(w0):
            v0 = torch.div(w0, 2)
            v1 = torch.mul(w0, v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.trace(plain, tuple(inputs), check_trace=False), [], 3)

        weights = [w0]
        with autocast("cpu", dtype=torch.float16):
            outputs = program(w0)
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        freeze(weights)
        w0.grad = None
        with autocast("cpu", dtype=torch.float16):
            outputs = program(w0)
            value = outputs[1]

        expected, observed = torch.float16, value.dtype
        self.assertEqual(observed, expected)

    # ops that promote are float32 in a trace that was saved and loaded, and in 16 bits before
    # found by amp-fuzz 0.1.0, case 01002fce3c088718 on trace
    # dtype: v0
    # expected: bfloat16
    # observed: float32
    @still_there
    def test_trace_saved_dtypes(self):
        x0 = torch.tensor([-0.0281, -0.8], dtype=torch.bfloat16)

        def program(x0):
            v0 = torch.mul(x0, x0)
            return v0,

        plain = program
        program = optimised(lambda inputs: reloaded(torch.jit, torch.jit.trace(plain, tuple(inputs), check_trace=False)), [], 3)

        with autocast("cpu", dtype=torch.bfloat16):
            outputs = program(x0)
            value = outputs[0]

        expected, observed = torch.bfloat16, value.dtype
        self.assertEqual(observed, expected)

    # tracing raises, or its check does, where a weight's cast stands in autocast's cache already
    # https://github.com/pytorch/pytorch/issues/84092
    # found by amp-fuzz 0.1.0, case da03d9fc8884e669 on trace[check]
    # raise: outputs = program(x0, w1)
    # expected: no error
    # observed: RuntimeError: Cannot insert a Tensor that requires grad as a constant. Consider making
    # it a parameter or input, or detaching the gradient
    @still_there
    def test_trace_weight_cache(self):
        x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
        w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]],
            dtype=torch.float32).requires_grad_()

        def program(x0, w1):
            v0 = torch.mm(x0, w1)
            return v0,

        plain = program
        program = optimised(lambda inputs: traced(plain, inputs, [1]), [], 3)

        observed = "no error"
        try:
            with autocast("cpu", dtype=torch.bfloat16):
                outputs = program(x0, w1)
            starts = trains(outputs)
            cotangents = [cotangent(o) for o in starts]
            if starts: torch.autograd.backward(starts, cotangents)
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "Consider making it a parameter or" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])

    # the second backward pass of a scripted norm raises for two dtypes under autocast
    # found by amp-fuzz 0.1.0, case 88329ada57214425 on script
    # raise: if seconds: torch.autograd.backward(seconds, [cotangent(g) for g in seconds])
    # expected: no error
    # observed: RuntimeError: expected scalar type BFloat16 but found Float
    @still_there
    def test_torchscript_backward_pass(self):
        w1 = torch.tensor([[-0.467, -0.73, -0.434, -1.484], [1.51, -1.2, 0.202, -0.324], [0.56, 0.0106,
            0.393, 0.309]], dtype=torch.bfloat16).requires_grad_()
        x2 = torch.tensor([1.1134325, 0.9215077, -1.015535, 0.9399412], dtype=torch.float32)
        x3 = torch.tensor([1.5346911, 1.704494, 3.2447035, 1.1102985], dtype=torch.float32)

        def program(w1, x2, x3):
            v0 = torch.nn.functional.batch_norm(w1, None, None, x2, x3, True)
            v1 = torch.sigmoid(v0)
            return v0, v1

        plain = program
        program = optimised(lambda inputs: torch.jit.script(plain), [], 3)

        observed = "no error"
        try:
            weights = [w1]
            outputs = program(w1, x2, x3)
            with autocast("cpu", dtype=torch.bfloat16):
                starts = trains(outputs)
                cotangents = [cotangent(o) for o in starts]
                grads = torch.autograd.grad(starts, weights, cotangents, create_graph=True, allow_unused=True) if starts else [None] * len(weights)
                seconds = trains([g for g in grads if g is not None])
                if seconds: torch.autograd.backward(seconds, [cotangent(g) for g in seconds])
        except Exception as error:
            observed = " ".join(f"{type(error).__name__}: {error}".split())
        right = observed == "no error"
        wrong = observed.startswith("RuntimeError:") and "expected scalar type BFloat" in observed
        if not right and not wrong:
            self.skipTest(f"cannot tell: {observed[:300]}")
        self.assertTrue(right, observed[:300])


if __name__ == "__main__":
    run_tests()
