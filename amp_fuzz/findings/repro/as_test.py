"""Write a finding as a test that imports only torch and pytest.

It is the repro's source with ``assert`` instead of the exit code. Everything except helpers is
inside the test function, and global settings of torch are restored.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from amp_fuzz.backends import Backend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.cases.settings import SETTINGS
from amp_fuzz.findings.repro.parts import PAD, Found
from amp_fuzz.findings.repro.script import TIMEOUT, Pieces, imports, joined, pieces

__all__ = ["HELPERS", "configured", "constant", "program_of", "pytest_form", "test_name"]


def pytest_form(case: Case, backend: Backend, finding: Found, *, prefix: str = "") -> str:
    """Return a test module that fails while a divergence is there.

    Arguments and errors are those of `repro`. Any error that the case does not expect fails it too.
    """
    name = test_name(case, finding)
    parts = pieces(case, backend, finding)
    if finding.kind in ("crash", "timeout"):
        script = constant("SCRIPT", program_of(parts, prefix))
        test = _WATCHED.format(name=name, timeout=TIMEOUT)
        return f"{parts.head}\nimport subprocess\nimport sys\n\n{script}\n\n{test}"
    ahead, patches = configured(parts.configuration)
    helpers = [part for part in parts.body if part.startswith(HELPERS)]
    *body, last = [part for part in parts.body if part not in helpers]
    device = next(part for part in parts.setup if re.search("^device = ", part, re.MULTILINE))
    fake = [part for part in parts.setup if part is not device]
    entered = [part.removesuffix(_ENTER) for part in fake]
    contexts = [*patches, *(["FakeTensorMode()"] if entered != fake else [])]
    inside = re.sub(r"\n\n\n+", "\n\n", joined([device, *body, _asserting(last)]))
    test = f"def {name}(as_before):\n{textwrap.indent(inside, PAD)}"
    fixture = _fixture(contexts, parts.cleanup, case.plan.settings)
    code = joined([*entered, prefix, *parts.helpers, *helpers, fixture, test])
    return f"{parts.head}\n{_imports(code, ahead)}{parts.modules}\n\n\n{code}\n"


def test_name(case: Case, finding: Found) -> str:
    """Return the name of the test: its ops, its kind, and the start of the case's id."""
    ops = list(dict.fromkeys(s.op for s in statements(case.program.body)))
    words = "_".join([*ops[:2], finding.kind, case.id[:8]])
    return "test_" + re.sub(r"\W+", "_", words)


# -- from a script to a test ----------------------------------------------------------------------

HELPERS = ("def contents(", "def line_of(")
_ENTER = "FakeTensorMode().__enter__()\n"
_EXIT = re.compile(r"sys\.exit\((?:bool)?(.*)\)$", re.MULTILINE)


def _asserting(text: str) -> str:
    """Return the comparison, which fails where a script exits with 1 or 125."""
    text = re.sub(r'print\("torch: *", torch\.__version__\)\n', "", text)
    text = text.replace('print("torch", torch.__version__, ', "print(")
    text = text.replace("sys.exit(observed != expected)", "assert observed == expected")
    text = re.sub(r"wrong = .*\nsys\.exit\(.*\)", "assert right", text)
    return _EXIT.sub(r"assert not \1", text)


def configured(text: str) -> tuple[list[str], list[str]]:
    """Return the imports of a compiler's configuration, and its settings as patches."""
    lines = text.splitlines()
    ahead = [line for line in lines if line.startswith("import ")]
    pattern = r"(.*)\.(\w+) = (.*)"
    settings = (re.fullmatch(pattern, line) for line in lines)
    return ahead, [f"{m[1]}.patch({m[2]}={m[3]})" for m in settings if m]


def _fixture(contexts: Sequence[str], after: Sequence[str], settings: Sequence[str]) -> str:
    chosen = [(f"setting{i}", SETTINGS[line]) for i, line in enumerate(settings, 1)]
    inside = ["yield"]
    for context in reversed(["torch.random.fork_rng(devices=[])", *contexts]):
        inside = [f"with {context}:", *(PAD + line for line in inside)]
    before = "threads = torch.get_num_threads()"
    saved = [f"{name} = {setting.get}" for name, setting in chosen]
    restored = [setting.put.format(name) for name, setting in chosen]
    restored = ["torch.set_num_threads(threads)", *restored]
    lines = [before, *saved, *after, *inside, *restored, *after]
    doc = '"""Leave torch as the test found it."""'
    body = "".join(f"{PAD}{line}\n" for line in [doc, *lines])
    return f"@pytest.fixture\ndef as_before():\n{body}"


def _imports(code: str, ahead: list[str]) -> str:
    standard, ours = imports(code)
    first, *more = ours.splitlines()
    return "\n".join([standard, "", "import pytest", first, *ahead, *more]).lstrip("\n")


# -- what kills its process -----------------------------------------------------------------------

_WATCHED = """\
def {name}(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), "child"], timeout={timeout})
    assert done.returncode == 0
"""


def program_of(parts: Pieces, prefix: str) -> str:
    """Return a script that runs a program, and compares nothing, if it is called with "child"."""
    *body, _ = parts.body  # without the part that starts the child
    code = joined([*parts.setup, parts.configuration, prefix, *parts.helpers, *body])
    standard, ours = imports(code)
    return f"{standard}\n\n{ours}{parts.modules}\n\n{code}\n".lstrip("\n")


def constant(name: str, script: str) -> str:
    """Return the definition of a constant that holds a script."""
    script = script.replace("'''", r"''\x27")  # a string of the case must not end it
    return f"{name} = r'''\n{script}'''\n"
