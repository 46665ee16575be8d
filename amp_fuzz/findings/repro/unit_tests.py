"""Write findings as unit tests in PyTorch's own style, which need torch alone.

A test is expected to fail while the divergence is there. It is skipped where it cannot tell: torch
or an op is missing, or a different error is raised.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from amp_fuzz.backends import Backend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.settings import SETTINGS
from amp_fuzz.findings.repro.as_test import HELPERS, configured, constant, program_of, test_name
from amp_fuzz.findings.repro.parts import PAD, Found
from amp_fuzz.findings.repro.script import (
    TIMEOUT,
    TORCH_IMPORTS,
    brief,
    imports,
    joined,
    pieces,
    repro,
)

__all__ = ["EXPECTED", "Method", "method_of", "unit_tests"]

EXPECTED = "    @unittest.expectedFailure\n"
"""The line that expects a test to fail."""


@dataclass(frozen=True, slots=True)
class Method:
    """A test method.

    name: of the method. head: the comment above it. patches: of a compiler's configuration, as
    decorators, and the imports that these need. body: its lines. helpers: functions and constants
    of the module that it uses. modules: imports of the user's own ops. resets: whether the compiler
    keeps something of it.
    """

    name: str
    head: str
    imports: tuple[str, ...]
    patches: tuple[str, ...]
    body: str
    helpers: tuple[str, ...]
    modules: str
    resets: bool


def method_of(
    case: Case,
    backend: Backend,
    finding: Found,
    *,
    name: str = "",
    note: Sequence[str] = (),
    prefix: str = "",
) -> Method:
    """Return a finding as a test method.

    note: lines of the comment above it. The other arguments and errors are those of `repro`.
    """
    name = name or test_name(case, finding)
    parts = pieces(case, backend, finding)
    above = (part for line in note for part in textwrap.wrap(line, 94, break_long_words=False))
    head = "\n".join([*(f"# {line}" for line in above), parts.head])
    resets = bool(parts.cleanup)
    script, run = f"SCRIPT_OF_{name.removeprefix('test_').upper()}", _RUN.format(timeout=TIMEOUT)
    if finding.kind in ("crash", "timeout"):
        held = constant(script, program_of(parts, prefix))
        return Method(name, head, (), (), _DIES.format(script), (run, held), "", resets)
    if backend.device != "cpu":  # torch is told of a device that is missing
        held = constant(script, repro(case, backend, finding, prefix=prefix))
        return Method(name, head, (), (), _APART.format(script), (run, held), "", resets)
    ahead, patches = configured(parts.configuration)
    helpers = [part for part in parts.body if part.startswith(HELPERS)]
    *body, last = [part for part in parts.body if part not in helpers]
    restored = _restored(case, parts.cleanup)
    lines = joined([*parts.setup, prefix, *restored, *body, _asserting(last)])
    lines = _locally(lines) + brief(lines, finding)
    if "torch.set_num_threads(" in lines:
        lines = f"self.addCleanup(torch.set_num_threads, torch.get_num_threads())\n{lines}"
    return Method(
        name,
        head,
        tuple(ahead),
        tuple(patches),
        re.sub(r"\n\n\n+", "\n\n", lines),
        (*parts.helpers, *helpers),
        parts.modules,
        resets,
    )


def unit_tests(methods: Sequence[Method], *, doc: str = "") -> str:
    """Return a module of tests. doc: its docstring; "" for one test, without helpers of its own."""
    mark = f"{PAD}@still_there\n" if doc else EXPECTED
    shared = _shared(methods)
    texts = []
    for method in methods:
        local = [part for part in method.helpers if part not in shared]
        body = joined([*local, method.body]) if local else method.body
        body = re.sub(r"\n\n\n+", "\n\n", body)
        lines = [*(f"@{patch}" for patch in method.patches), f"def {method.name}(self):"]
        lines.append(textwrap.indent(body, PAD))
        head, under = (textwrap.indent(t, PAD) for t in (method.head, "\n".join(lines)))
        texts.append(f"{head}\n{mark}{under}")
    if any(method.resets for method in methods):
        texts.insert(0, textwrap.indent(_RESETTING, PAD).rstrip())
    tests = "class TestAutocastFindings(TestCase):\n" + "\n\n".join(texts)
    code = joined([(_STILL_THERE if doc else ""), *shared, tests])
    standard, ours = imports(code)
    ahead = [line for method in methods for line in method.imports]
    if doc and any(method.resets for method in methods):
        ahead += _COMPILERS  # once, and not in the process of each test
    standard = _sorted(standard.splitlines())
    ours = _sorted([*ours.splitlines(), *ahead, _TESTING])
    modules = "".join(dict.fromkeys(method.modules for method in methods))
    top = f'{_OWNER}\n"""{doc}"""\n\n' if doc else f"{_OWNER}\n"
    return (
        f"{top}{standard}\n\n{ours}{modules}\n\n\n{code}\n\n\n"
        f'if __name__ == "__main__":\n{PAD}run_tests()\n'
    )


def _sorted(lines: Iterable[str]) -> str:
    """Return imports in PyTorch's order, those of one module together."""
    whole: set[str] = set()
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        match = re.fullmatch(r"from (\S+) import (.*)", line)
        if match is None:
            whole.add(line)
        else:
            parts[match[1]] |= set(match[2].split(", "))
    named = (f"from {module} import {', '.join(sorted(parts[module]))}" for module in sorted(parts))
    return "\n".join([*sorted(whole), *named])


def _shared(methods: Iterable[Method]) -> list[str]:
    """Return the helpers of the module: none gives a name that an earlier one has a meaning."""
    found: list[str] = []
    taken: set[str] = set()
    for part in dict.fromkeys(part for method in methods for part in method.helpers):
        nodes = ast.parse(part).body
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if not names & taken:
            found.append(part)
            taken |= names
    return found


def _locally(lines: str) -> str:
    """Return imports of what lines read that they then give another meaning."""
    stored = {
        node.id
        for node in ast.walk(ast.parse(lines))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return "".join(f"{line}\n" for name, line in TORCH_IMPORTS.items() if name in stored)


def _restored(case: Case, after: Sequence[str]) -> list[str]:
    """Return lines that have settings restored after the test."""
    lines = []
    for i, line in enumerate(case.plan.settings, 1):
        setting = SETTINGS[line]
        lines.append(
            f"setting{i} = {setting.get}\n\n\ndef restore{i}():\n{PAD}"
            f"{setting.put.format(f'setting{i}')}\n\n\nself.addCleanup(restore{i})"
        )
    if "torch.use_deterministic_algorithms(False)" in after:
        lines.append("self.addCleanup(torch.use_deterministic_algorithms, False)")
    return lines


def _asserting(text: str) -> str:
    """Return a comparison that fails where a script exits with 1, and skips where with 125."""
    text = re.sub(r"^print\(.*\)\n", "", text, flags=re.MULTILINE)
    text = text.replace("sys.exit(observed != expected)", "self.assertEqual(observed, expected)")
    text = text.replace("sys.exit(0 if right else 1 if wrong else 125)", _TELLING)
    text = re.sub(r"sys\.exit\(away > (.*)\)$", r"self.assertLessEqual(away, \1)", text)
    return re.sub(r"sys\.exit\((?:bool)?(.*)\)$", r"self.assertFalse(\1)", text)


_TELLING = """\
if not right and not wrong:
    self.skipTest(f"cannot tell: {observed[:300]}")
self.assertTrue(right, observed[:300])"""

_RUN = '''\
def run_script(text, *arguments):
    """Run a script in a new Python; return its exit code, None if it hangs, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "script.py")
        with open(path, "w") as file:
            file.write(text)
        command = [sys.executable, path, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout={timeout})
        except subprocess.TimeoutExpired:
            return None, "it hangs"
    return done.returncode, done.stdout + done.stderr
'''

_DIES = """\
code, printed = run_script({}, "child")
self.assertEqual(code, 0, printed)"""

_APART = """\
code, printed = run_script({})
if code not in (0, 1):
    self.skipTest(f"cannot tell: {{printed[-300:]}}")
self.assertEqual(code, 0, printed)"""

_OWNER = '# Owner(s): ["module: amp (automated mixed precision)"]'
_TESTING = "from torch.testing._internal.common_utils import TestCase, run_tests"

_COMPILERS = ("import torch._inductor.compile_fx", "import torch._inductor.lowering")

_RESETTING = """\
def setUp(self):
    super().setUp()
    torch._dynamo.reset()

def tearDown(self):
    torch._dynamo.reset()
    super().tearDown()
"""

_STILL_THERE = '''\
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
'''
