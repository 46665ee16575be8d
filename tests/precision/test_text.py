"""What `amp_fuzz.precision` says: text, code to paste, data and page."""

from __future__ import annotations

import json
import linecache
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import amp_fuzz
from amp_fuzz.interfaces.precision.pasting import Names, code_of, statement_at
from amp_fuzz.interfaces.precision.result import PrecisionResult, Remedy, Statement, Value
from amp_fuzz.interfaces.precision.sites import Place
from amp_fuzz.interfaces.precision.watch import Event

LINE = Place("rotary", "model.py", 12)


def result(**fields: object) -> PrecisionResult:
    """Return a result whose output has lost its digits."""
    made = PrecisionResult(
        *("Model", "cuda", "bfloat16", "loses digits", 1.2),
        values=(Value("output", "float32", 0.3, 2.41, 6.9, "digits"),),
        statements=(Statement(LINE, False, ("mul",), math.inf, 0.3, 0.3, 0, 0, 8),),
        events=(Event("collapse", LINE, False, "mul", "8 numbers become 2"),),
        remedy=Remedy(lines=(LINE,), tried=5, share=0.031, code="with x:\n    y"),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def test_the_text_of_a_result() -> None:
    assert str(result(skipped=("no kernel for a::b",))) == (
        "amp_fuzz.precision of Model, bfloat16 autocast on cuda: LOSES DIGITS\n"
        "  harmed    output keeps 0.3 of 2.4 digits; 1.2 are asked, float32 keeps 6.9\n"
        "  because   model.py:12 (rotary): 8 numbers become 2\n"
        "  remedy    Run model.py:12 (rotary) in float32, as below: no smaller set is enough "
        "(5 sets\n            tried); 3.1 % of the 16-bit products.\n"
        "  skipped   no kernel for a::b\n"
        "\n"
        "    with x:\n"
        "        y"
    )


def test_a_statement_without_an_event_says_what_it_lost() -> None:
    said = "  because   model.py:12 (rotary): mul leaves 0.3 digits of exact operands"
    assert said in str(result(events=())).splitlines()


def test_an_update_that_does_not_move_comes_before_the_values() -> None:
    unharmed = (Value("output", "float32", 2.2, 2.41, 6.9),)
    event = Event("stuck", LINE, False, "lerp_", "9 of 9 elements do not move")
    found = result(verdict="breaks", values=unharmed, events=(event,), remedy=None)
    assert [line.split()[0] for line in str(found).splitlines()] == [
        *("amp_fuzz.precision", "because", "to", "keeps")
    ]


def test_the_text_has_at_most_twenty_lines_and_the_code() -> None:
    values = tuple(Value(f"weight{i}", "float32", 0.1, 2.4, 7.0, "digits") for i in range(99))
    events = tuple(
        Event("overflow", Place(f"block.{i}", "a.py", i), False, "mm", "word " * 30)
        for i in range(9)
    )
    lines = tuple(Place(f"block.{i}", "a.py", 3) for i in range(99))
    remedy = Remedy(("a", "b"), lines, "minimal", 99, 0.5, "float16", 16.0)
    text = str(result(values=values, events=events, remedy=remedy, skipped=("a",)))
    assert len(text.splitlines()) <= 26
    assert max(map(len, text.splitlines())) <= 96
    assert "and 95 more" in text
    assert "a.py:3 (block.0, block.1, block.2 and 96 more)" in text


def test_a_result_is_data() -> None:
    found = json.loads(json.dumps(result().as_dict()))
    assert found["statements"][0]["given"] == "inf"
    assert found["remedy"]["lines"][0] == {"module": "rotary", "file": "model.py", "line": 12}


def test_a_failure_carries_the_result() -> None:
    with pytest.raises(amp_fuzz.PrecisionLost, match="LOSES DIGITS") as caught:
        result().raise_if_failed()
    assert caught.value.result == result()
    result(verdict="harmless").raise_if_failed()


def test_progress_is_told_of_each_step() -> None:
    told: list[tuple[str, float]] = []
    linear = torch.nn.Linear(4, 4)
    amp_fuzz.precision(linear, torch.ones(2, 4), digits=5, progress=lambda *step: told.append(step))
    texts = [text for text, _ in told]
    assert texts[:2] == ["running under autocast beside exact copies", "running without autocast"]
    assert texts[2:4] == ["looking for a remedy: 0 runs", "looking for a remedy: 1 run"]
    assert all(0 <= share <= 1 for _, share in told)


# -- code -----------------------------------------------------------------------------------------

SOURCE = """\
def forward(self, h, x, ü):
    scores = (self.q(h) * 900) @ (
        self.k(h) * 900
    ).transpose(-1, -2) + ü * x.shape[0]
    x += h
    y = self.q(self.k(h)) + self.q(x + h)
    def g(x): return torch.log(x.float() + h)
    out = self.rnn(x)[0] * h
    x[0] = h
    if x.sum() > 0:
        z = lambda x: x * h
    return x if self.q(h).sum() else h
"""
KNOWN = Names(frozenset(("h", "x", "ü")), frozenset(("self.q", "self.k", "self.rnn")))


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    linecache.checkcache(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            3,
            (
                "q_out = self.q(h)\nk_out = self.k(h)\nWITH\n"
                "    scores = (q_out.float() * 900) @ (\n"
                "        k_out.float() * 900\n"
                "    ).transpose(-1, -2) + ü.float() * x.shape[0]"
            ),
        ),
        (5, "WITH\n    x = x.float() + h.float()"),
        (
            6,
            (
                "q_out = self.q(self.k(h))\nWITH\n"
                "    y = q_out.float() + self.q(x.float() + h.float())"
            ),
        ),
        (7, "WITH\n    return torch.log(x.float() + h.float())"),
        (8, "WITH\n    out = self.rnn(x.float())[0] * h.float()"),
        (9, "WITH\n    x[0] = h.float()"),
        (10, "# m: compute this in float32, with autocast off: if x.sum() > 0:"),
        (11, "# m: compute this in float32, with autocast off: z = lambda x: x * h"),
        (12, "WITH\n    return x.float() if self.q(h.float()).sum() else h.float()"),
    ],
)
def test_a_statement_in_float32(source: str, line: int, code: str) -> None:
    place = Place("", source, line)
    made = code_of([place], [], "cuda", {place: KNOWN})
    made = re.sub(r"^with .*enabled=False\):  # model.py:\d+$", "WITH", made, flags=re.M)
    assert re.sub(r"^# model.py:\d+", "# m", made) == code


def test_modules_of_one_statement_share_its_code(source: str) -> None:
    places = [Place("a", source, 2), Place("b", source, 3)]
    made = code_of(places, [], "cuda", dict.fromkeys(places, KNOWN))
    assert made.count("with torch.autocast") == 1
    assert "# model.py:2 (a, b)\n" in made


def test_a_call_for_submodules_is_complete() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    code = code_of([], ["1"], "cpu", {})
    exec(compile(code, "pasted", "exec"), {"model": model})
    with torch.autocast("cpu"):
        assert model[0](torch.ones(1, 2)).dtype is torch.bfloat16
        assert model(torch.ones(1, 2)).dtype is torch.float32


def test_a_root_that_is_not_the_callable_is_called_by_its_name() -> None:
    code = code_of([], ["lin", "net.0"], "cpu", {}, roots=("lin", "net"))
    assert code.endswith(
        "run_in_float32(lin, {''}, \"cpu\")\n\nrun_in_float32(net, {'0'}, \"cpu\")"
    )


def test_no_statement_is_found_where_there_is_no_source() -> None:
    assert statement_at("no-such-file.py", 3) is None


# -- page -----------------------------------------------------------------------------------------


def test_the_page_says_everything_and_escapes_it(tmp_path: Path) -> None:
    odd = Event("overflow", LINE, False, "mm", "<script>alert(1)</script>")
    result(name="A<b>", events=(odd,)).write_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "A&lt;b&gt;" in text
    for said in (
        "1 of 1 values is harmed",
        "output",
        "rotary",
        "3.1 %",
        "with x:",
        ">copy</button>",
    ):
        assert said in text
    assert "http" not in text.replace("http-equiv", "")


def test_the_page_of_a_harmless_result() -> None:
    from amp_fuzz.interfaces.precision.page import page

    text = page(result(verdict="harmless", values=(), statements=(), events=(), remedy=None))
    assert "every value keeps 1.2 digits" in text
    assert 'id="remedy"' not in text
