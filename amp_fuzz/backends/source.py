"""Turn a case into Python source, which backends run and repros print.

The text uses only ``torch``, ``device`` and the helpers in its globals: `autocast`, `checkpoint`,
`observe`, ... (see `amp_fuzz.backends.harness`). It is built from names that `catalogue.check` has
looked up and from literals of known types, so no text of a case file is ever executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from amp_fuzz.cases.case import CUSTOM_OPS, Case, Update
from amp_fuzz.cases.program import (
    FP8,
    Arg,
    Around,
    Autocast,
    AutocastDType,
    Branch,
    Checkpoint,
    Context,
    DType,
    Float,
    InferenceMode,
    Items,
    Node,
    Program,
    Ref,
    Region,
    Statement,
    TensorSpec,
    Uncompiled,
    fp8_words,
    statements,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.catalogue.casting import CASTS

__all__ = [
    "argument",
    "autocast_call",
    "case_source",
    "cast_lines",
    "driver_source",
    "imports_of",
    "program_source",
    "setup_source",
    "statement_source",
]

_INDENT = "    "
_FUNCTIONS: Mapping[str, str] = {
    "custom_fwd": "as_function(program, device, custom_fwd, custom_bwd)",
    "cast_inputs": "as_function(program, device, custom_fwd, custom_bwd, torch.float32)",
    "setup_context": "as_function_apart(program, device, custom_fwd, custom_bwd)",
    "function": "as_function(program, device, undecorated, undecorated)",
    "function_apart": "as_function_apart(program, device, undecorated, undecorated)",
    "custom_op": "as_custom_op(program, device, custom_op)",
    "register_autocast": "as_custom_op(program, device, custom_op, torch.float32)",
}
"""The source of an entry's ``autograd.Function`` or custom op around a program."""
_SELECTIVE = ", context_fn=saving_products"
_HOOKS: Mapping[str, str] = {"tensor": "with_hook", "accumulated": "with_post_hook"}
_UPDATES: Mapping[Update, str] = {
    "in_place": "nudge",
    "copied": "copy_halves",
    "data": "set_data",
    "cast": "recast",
    "frozen": "freeze",
}
"""The function that changes the weights after a step."""


def argument(arg: Arg) -> str:
    """Return the source text of an argument."""
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Float):
        text = repr(arg.value)
        return text if text[-1].isdigit() else f'float("{text}")'
    if isinstance(arg, DType):
        return f"torch.{arg.name}"
    if isinstance(arg, Items):
        return "[" + ", ".join(argument(a) for a in arg.items) + "]"
    return repr(arg)


def imports_of(program: Program) -> tuple[str, ...]:
    """Return the modules that must be imported before a program can be called, torch aside."""
    named = (module for s in statements(program.body) for module in CATALOGUE[s.op].imports)
    return tuple(dict.fromkeys(named))


def statement_source(statement: Statement) -> str:
    """Return one statement as an assignment."""
    op = CATALOGUE[statement.op]
    args = [argument(a) for a in statement.args]
    kwargs = [(name, argument(a)) for name, a in statement.kwargs]
    call = op.render(statement.form, args, kwargs)
    comma = "," if len(statement.outputs) == 1 and op.unpacks else ""
    return f"{', '.join(statement.outputs)}{comma} = {call}"


def autocast_call(context: Autocast, default: str | None = None) -> str:
    """Return the constructor call of an autocast context."""
    words = [repr(context.device) if context.device else "device"]
    dtype = context.dtype or default
    words += [f"dtype=torch.{dtype}"] if dtype else []
    words += [] if context.enabled else ["enabled=False"]
    words += [] if context.cache_enabled is None else [f"cache_enabled={context.cache_enabled}"]
    return f"autocast({', '.join(words)})"


def program_source(program: Program, *, marks: bool = False) -> str:
    """Return the program as a function of its inputs that returns a tuple of its outputs.

    With `marks`, each statement is preceded by a call ``mark(number, locals())``. The lines that
    make its custom functions and ops come first.
    """
    params = ", ".join(spec.name for spec in program.inputs)
    lines = setup_source(program).splitlines()
    lines += ["", ""] if lines else []
    lines.append(f"def program({params}):")
    lines += _Body(marks).lines(program.body, 1)
    lines.append(f"{_INDENT}return {_tuple(program.outputs)}")
    return "\n".join(lines) + "\n"


def setup_source(program: Program) -> str:
    """Return the lines that make a program's custom functions and ops."""
    setup = dict.fromkeys(CATALOGUE[s.op].setup for s in statements(program.body))
    return "\n".join(line for line in setup if line)


def cast_lines(program: Program) -> dict[int, bool]:
    """Return the lines of a program's source that are casts: their numbers, from 1.

    For each, whether its result is used only once, and not returned.
    """
    body = list(statements(program.body))
    if not any(s.op in CASTS for s in body):
        return {}
    used = Counter([*program.outputs, *program.outputs, *(n for s in body for n in uses(s))])
    casts = {statement_source(s): used[s.outputs[0]] == 1 for s in body if s.op in CASTS}
    lines = enumerate(program_source(program).splitlines(), 1)
    return {number: casts[line.strip()] for number, line in lines if line.strip() in casts}


def _tuple(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


# Results that torch declares as optional: TorchScript must be told that they are present.
_OPTIONAL = {"multi_head_attention_forward": 1}


def _optional(statement: Statement) -> list[str]:
    """Return the results of a statement whose type is optional but which are never None."""
    number = _OPTIONAL.get(statement.op, len(statement.outputs))
    if any(name == "need_weights" and value is False for name, value in statement.kwargs):
        return []
    return [name for name in statement.outputs[number:] if name != "_"]


class _Body:
    """Writes the body of one program; numbers its statements and the blocks that are functions."""

    def __init__(self, marks: bool) -> None:
        self.marks, self.statements, self.blocks = marks, 0, 0

    def lines(self, body: tuple[Node, ...], depth: int) -> list[str]:
        pad = _INDENT * depth
        lines: list[str] = []
        for node in body:
            if isinstance(node, Statement):
                if self.marks:
                    lines.append(f"{pad}mark({self.statements}, locals())")
                self.statements += 1
                lines.append(pad + statement_source(node))
                lines += (f"{pad}assert {name} is not None" for name in _optional(node))
            elif isinstance(node.context, Checkpoint):
                how = f", use_reentrant={node.context.use_reentrant}"
                how += _SELECTIVE if node.context.selective else ""
                lines += self.called(node, "checkpoint", how, depth)
            elif isinstance(node.context, Uncompiled):
                lines += self.called(node, "uncompiled", "", depth)
            elif isinstance(node.context, Branch):
                lines += self.called(node, "", "", depth)
            else:
                lines.append(f"{pad}with {_context(node.context)}:")
                lines += self.lines(node.body, depth + 1)
        return lines

    def called(self, region: Region, by: str, how: str, depth: int) -> list[str]:
        """Write a body as a function of what it reads that returns its values, and its call.

        A branch is called directly. It returns in its last region, after its last statement, which
        is on both sides.

        Arguments must be passed, not closed over: reentrant checkpoints give gradients only to
        arguments.
        """
        pad = _INDENT * depth
        name = f"block{self.blocks}"
        self.blocks += 1
        made: list[str] = []
        read: dict[str, None] = {}
        for statement in statements(region.body):
            read |= dict.fromkeys(n for n in uses(statement) if n not in made)
            made += [n for n in statement.outputs if n != "_"]
        lines = [f"{pad}def {name}({', '.join(read)}):"]
        body, last = self.lines(region.body, depth + 1), f"return {_tuple(made)}"
        if by or not read:
            lines += [*body, f"{pad}{_INDENT}{last}"]
        else:
            blocks, count = _end(region.body)
            inner = pad + _INDENT * (1 + blocks)
            end = len(body) - count
            side = [*body[end:], inner + last]
            lines += [*body[:end], f"{inner}if decided({next(iter(read))}):"]
            lines += [*(_INDENT + line for line in side), *side]
        given = ", ".join([name, *read] if by else read)
        call = f"{by or name}({given}{how})"
        return [*lines, f"{pad}{_tuple(made)} = {call}"]


def _end(body: tuple[Node, ...]) -> tuple[int, int]:
    """Return in how many ``with`` blocks a body ends, and how many lines its last statement has.

    None, if it ends in a function.
    """
    last = body[-1]
    if isinstance(last, Statement):
        return 0, 1 + len(_optional(last))
    if isinstance(last.context, (Checkpoint, Uncompiled, Branch)):
        return 0, 0
    blocks, count = _end(last.body)
    return 1 + blocks, count


def _context(context: Context | Around) -> str:
    if isinstance(context, Autocast):
        return autocast_call(context)
    if isinstance(context, AutocastDType):
        return f"autocast_dtype(device, torch.{context.dtype})"
    if isinstance(context, FP8):
        return f"fp8({', '.join(fp8_words(context))})"
    return "torch.inference_mode()" if isinstance(context, InferenceMode) else "torch.no_grad()"


def driver_source(case: Case) -> str:
    """Return the plan as a function of the inputs, in straight-line code.

    It calls ``program`` and reports through ``observe(label, tensor)``.
    """
    return "\n".join(_Driver(case).lines()) + "\n"


def case_source(case: Case, *, marks: bool = False) -> str:
    """Return the program and its driver."""
    return program_source(case.program, marks=marks) + "\n\n" + driver_source(case)


class _Driver:
    """Writes the driver of one case."""

    def __init__(self, case: Case) -> None:
        self.plan, self.program = case.plan, case.program
        self.weights = [s.name for s in case.program.inputs if s.requires_grad]
        self.maps = case.plan.transform in ("vmap", "vmap_grad")
        self.differentiates = case.plan.differentiates and bool(self.weights)
        self.text: list[str] = []
        self.depth = 0

    def lines(self) -> list[str]:
        params = ", ".join(s.name for s in self.program.inputs)
        self.put(f"def drive({params}):")
        self.depth += 1
        if self.weights:
            self.put(f"weights = [{', '.join(self.weights)}]")
        if self.plan.scaler and self.weights:
            self.put("optimizer = torch.optim.SGD(weights, lr=0.125)")
            self.put("scaler = torch.amp.GradScaler(device, init_scale=1024.0)")
        if self.plan.hook != "none" and self.weights:
            how = _HOOKS[self.plan.hook]
            self.put(f"watched = [{', '.join(f'{how}({w})' for w in self.weights)}]")
        if self.differentiates:
            self.differentiate()
            return self.text
        if self.plan.interrupted:
            self.interrupted()
        if self.plan.later:
            self.calls()
            self.backward("")
        elif self.plan.loop == "inside" and self.plan.passes > 1:
            self.enter()
            self.steps(self.pass_inside)
            self.depth -= len(self.plan.contexts)
        else:
            self.steps(self.pass_entering)
        return self.text

    def put(self, line: str) -> None:
        self.text.append(_INDENT * self.depth + line)

    # -- contexts -----------------------------------------------------------------------------

    def enter(self) -> None:
        for context in self.plan.contexts:
            self.put(f"with {autocast_call(context)}:")
            self.depth += 1

    def interrupted(self) -> None:
        self.put("try:")
        self.depth += 1
        self.enter()
        self.put(f"program({self.inputs()})")
        self.put("raise Interrupted")
        self.depth -= len(self.plan.contexts) + 1
        self.put("except Interrupted:")
        self.put(f"{_INDENT}pass")
        if self.weights:
            self.put("nudge(weights)")

    # -- one training step --------------------------------------------------------------------

    def steps(self, one: Callable[[str], None]) -> None:
        plan = self.plan
        for step in range(plan.steps):
            prefix = f"step{step}." if plan.steps > 1 else ""
            for batch in range(plan.micro_batches):
                if batch:
                    self.next_batch()
                one(f"{prefix}batch{batch}." if plan.micro_batches > 1 else prefix)
            self.update(prefix)

    def next_batch(self) -> None:
        for spec in self.program.inputs:
            if not spec.requires_grad:
                self.put(f"{spec.name} = halved({spec.name})")

    def pass_entering(self, prefix: str) -> None:
        """Enter the contexts, call the program, leave them; the backward inside or after."""
        entry, depth = self.plan.entry, self.depth
        contexts = self.plan.contexts
        outer = contexts if entry != "decorator" else contexts[:-1]
        for context in outer:
            self.put(f"with {autocast_call(context)}:")
            self.depth += 1
        function = "entered"
        if entry == "decorator":
            self.put(f"entered = {autocast_call(contexts[-1])}(program)")
        elif entry != "context":
            self.put(f"entered = {_FUNCTIONS[entry]}")
        elif self.maps:
            self.put(f"entered = {self.mapped('program')}")
        elif self.plan.transform == "functionalize":
            self.put("entered = functionalize(program)")
        else:
            function = "program"
        self.forward(prefix, function)
        if self.plan.backward == "inside":
            self.backward(prefix)
            self.depth = depth
        else:
            self.depth = depth
            self.backward(prefix)

    def pass_inside(self, prefix: str) -> None:
        self.forward(prefix, "program")
        self.backward(prefix)

    def inputs(self) -> str:
        """Return the arguments of a call; buffers that the program writes are passed as copies."""
        return ", ".join(map(self.passed, self.program.inputs))

    def passed(self, spec: TensorSpec) -> str:
        if self.is_mapped(spec):
            return f"twice({spec.name})"
        return f"{spec.name}.clone()" if spec.role == "buffer" else spec.name

    # -- transforms ---------------------------------------------------------------------------

    def is_mapped(self, spec: TensorSpec) -> bool:
        """Return whether an input is mapped: all but the weights, or all if all are weights."""
        return self.maps and (not spec.requires_grad or self.only_weights)

    @property
    def only_weights(self) -> bool:
        return len(self.weights) == len(self.program.inputs)

    def mapped(self, function: str) -> str:
        dims = _tuple(["0" if self.is_mapped(s) else "None" for s in self.program.inputs])
        return f'vmap({function}, in_dims=({dims}), randomness="same")'

    def differentiate(self) -> None:
        """Transform a function of the program, inside the contexts or with the contexts in it."""
        inside = self.plan.backward == "inside"
        if inside:
            self.enter()
        if self.plan.transform in ("grad", "vmap_grad"):
            self.loss(inside)
        else:
            self.derivatives(inside)

    def function(self, head: str, inside: bool, call: str, returned: str) -> None:
        """Write a function that calls the program, with the contexts in it if nothing is inside."""
        depth = self.depth
        self.put(f"def {head}:")
        self.depth += 1
        if not inside:
            self.enter()
        self.put(f"outputs = {call}")
        self.put(f"return {returned}")
        self.depth = depth

    def loss(self, inside: bool) -> None:
        """Write the gradients of a loss."""
        self.function("loss(*inputs)", inside, "program(*inputs)", "total(outputs), outputs")
        names = [s.name for s in self.program.inputs]
        numbers = _tuple([str(names.index(w)) for w in self.weights])
        self.put(f"entered = grad(loss, argnums=({numbers}), has_aux=True)")
        if self.maps:
            self.put(f"entered = {self.mapped('entered')}")
        self.put(f"grads, outputs = entered({self.inputs()})")
        self.seen("{}", "outputs", self.program.outputs)
        self.seen("{}.grad", "grads", self.weights)

    def derivatives(self, inside: bool) -> None:
        """Write tangents of the outputs, or derivatives of their sums, as of the weights.

        The other inputs are constants of the function: an integer has no tangent.
        """
        name, given = self.plan.transform, ", ".join(self.weights)
        forward = name in ("jvp", "forward_ad")
        returned = "outputs" if forward else "sums(outputs)"
        returned += ", outputs" if name in ("jacrev", "jacfwd") else ""
        self.function(f"function({given})", inside, f"program({self.inputs()})", returned)
        if forward:
            tangents = _tuple([f"cotangent({w})" for w in self.weights])
            call = f"{name}(function, ({_tuple(self.weights)}), ({tangents}))"
            self.put(f"results, tangents = {call}")
            self.seen("{}", "results", self.program.outputs)
            self.seen("tangent.{}", "tangents", self.program.outputs)
            return
        numbers = f"argnums=({_tuple([str(i) for i in range(len(self.weights))])})"
        drawn = ', randomness="same"' if name == "jacfwd" else ""
        call = f"{name}(function, {numbers}, has_aux=True{drawn})({given})"
        self.put(f"derivatives, results = {call}")
        self.seen("{}", "results", self.program.outputs)
        self.seen("{}.grad", "derivatives", self.weights)

    def seen(self, label: str, values: str, names: Sequence[str]) -> None:
        """Write what observes some values, each under the label of its name."""
        for j, name in enumerate(names):
            self.put(f'observe("{label.format(name)}", {values}[{j}])')

    # -- several calls, each under contexts of its own ------------------------------------------

    def calls(self) -> None:
        """Call the program once for each context; `outputs` are those of all calls."""
        plan, whole = self.plan, self.plan.reuse != "calls"
        names = ["outputs", *(f"later{i}" for i in range(len(plan.later)))]
        params = ", ".join(s.name for s in self.program.inputs)
        depth = self.depth
        if plan.reuse == "region":
            self.put("entered = region(program)")
        if whole:
            self.put(f"def calls({params}):")
        for name, contexts in zip(names, (plan.contexts, *plan.later), strict=True):
            self.depth = depth + whole
            for context in contexts:
                self.put(f"with {_context(context)}:")
                self.depth += 1
            function = "entered" if plan.reuse == "region" else "program"
            self.put(f"{name} = {function}({self.inputs()})")
            if not whole:
                self.observed(name)
        if whole:
            self.depth = depth
            self.put(f"{_INDENT}return {_tuple(names)}")
            self.put(f"{_tuple(names)} = graph(calls)({params})")
            for name in names:
                self.observed(name)
        self.depth = depth
        if plan.backward != "none" and self.weights:
            self.put(f"outputs = ({', '.join(f'*{name}' for name in names)})")

    def observed(self, name: str) -> None:
        """Write what observes the results of one of several calls."""
        prefix = "" if name == "outputs" else f"{name}."
        for i, output in enumerate(self.program.outputs):
            self.put(f'observe("{prefix}{output}", {name}[{i}])')

    # -- forward and backward -----------------------------------------------------------------

    def forward(self, prefix: str, function: str) -> None:
        plan = self.plan
        if plan.first_pass != "none":
            self.put(f"with torch.{plan.first_pass}():")
            self.put(f"{_INDENT}{function}({self.inputs()})")
        call = f"{function}({self.inputs()})"
        given = ", ".join(filter(None, [function, self.inputs()]))
        if plan.checkpoint != "none":
            reentrant = plan.checkpoint == "reentrant"
            selective = _SELECTIVE if plan.checkpoint == "selective" else ""
            call = f"checkpoint({given}, use_reentrant={reentrant}{selective})"
        elif plan.thread == "inside":
            call = f"in_thread({given})"
        for i in range(plan.calls):
            if i and plan.entry in CUSTOM_OPS:
                call = call.replace("entered", "program")
            self.put(f"outputs = {call}")
            label = f"{prefix}call{i}." if plan.calls > 1 else prefix
            for j, name in enumerate(self.program.outputs):
                self.put(f'observe("{label}{name}", outputs[{j}])')

    def backward(self, prefix: str) -> None:
        plan = self.plan
        if plan.backward == "none" or not self.weights:
            return
        depth = self.depth
        if plan.backward == "under" and plan.backward_context is not None:
            self.put(f"with {autocast_call(plan.backward_context)}:")
            self.depth += 1
        outputs = "outputs"
        if plan.scaler:
            outputs = "scaled"
            self.put("scaled = [scaler.scale(o) for o in trains(outputs)]")
        self.put(f"starts = trains({outputs})")
        self.put("cotangents = [cotangent(o) for o in starts]")
        if plan.second == "double":
            self.double(prefix)
        else:
            again = plan.second == "retain"
            self.once(f"{prefix}", retain=again)
            if again:
                self.clear()
                self.once(f"{prefix}again.", retain=False)
        self.depth = depth

    def once(self, prefix: str, *, retain: bool) -> None:
        keep = ", retain_graph=True" if retain else ""
        self.differentiated(f"if starts: torch.autograd.backward(starts, cotangents{keep})")
        self.grads(prefix)

    def differentiated(self, line: str) -> None:
        """Write a line that runs a backward pass, in one thread if it is of two devices.

        Two threads would hand gradients to each other in any order, so that a sum of three may
        differ in a bit, and recompute a checkpoint at the same time (docs/reference/devices.md).
        """
        if self.program.mixed:
            self.put("with torch.autograd.set_multithreading_enabled(False):")
        self.depth += self.program.mixed
        self.put(line)
        self.depth -= self.program.mixed

    def double(self, prefix: str) -> None:
        self.differentiated(
            "grads = torch.autograd.grad(starts, weights, cotangents, "
            "create_graph=True, allow_unused=True) if starts else [None] * len(weights)"
        )
        self.hooked(prefix)
        for i, weight in enumerate(self.weights):
            self.put(f'observe("{prefix}{weight}.grad", grads[{i}])')
        self.put("seconds = trains([g for g in grads if g is not None])")
        last = "if seconds: torch.autograd.backward(seconds, [cotangent(g) for g in seconds])"
        self.differentiated(last)
        self.grads(f"{prefix}second.")

    def hooked(self, prefix: str) -> None:
        for i, weight in enumerate(self.weights if self.plan.hook != "none" else ()):
            self.put(f'observe("{prefix}hook.{weight}.grad", watched[{i}][0])')

    def grads(self, prefix: str) -> None:
        self.hooked(prefix)
        for weight in self.weights:
            self.put(f'observe("{prefix}{weight}.grad", {weight}.grad)')

    def clear(self) -> None:
        for weight in self.weights:
            self.put(f"{weight}.grad = None")

    def update(self, prefix: str) -> None:
        if not self.weights or (self.plan.steps == 1 and not self.plan.scaler):
            return
        if self.plan.scaler:
            self.put("if any(w.grad is not None for w in weights):")
            self.put(f"{_INDENT}scaler.unscale_(optimizer)")
            self.put(f"{_INDENT}scaler.step(optimizer)")
            self.put(f"{_INDENT}scaler.update()")
            for weight in self.weights:
                self.put(f'observe("{prefix}{weight}.updated", {weight})')
        elif self.plan.update == "replaced":
            for weight in self.weights:
                self.put(f"{weight} = renewed({weight})")
            self.put(f"weights = [{', '.join(self.weights)}]")
            return
        else:
            self.put(f"{_UPDATES[self.plan.update]}(weights)")
        self.clear()
