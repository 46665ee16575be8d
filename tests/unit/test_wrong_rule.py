"""A rule that does not hold is another case, which can run, and differs where the rule is used."""

from __future__ import annotations

from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.cases.program import Autocast, Region
from amp_fuzz.findings.wrong_rule import RULES, broken_rules, without
from tests.helpers import BF16, F16, call, case, drawn, eager, under, x

OFF = Autocast(enabled=False)
FIRST, SECOND = call("mm", "x0", "x0"), call("mm", "x0", "x0", to="v1")
NESTED = case([x("x0", 4, 4)], FIRST, under(OFF, SECOND), contexts=(F16,))


def test_every_case_without_a_rule_is_a_case() -> None:
    for example in drawn(60):
        for name in RULES:
            made = without(example, name)
            made.program.check()
            made.plan.check()


def test_the_rules_that_a_case_uses_are_tried() -> None:
    compiled = CompileBackend("aot_eager")
    names = set(broken_rules(compiled, NESTED))
    assert "enabled in the program=True" in names
    assert "enabled in the program=False" not in names  # it says so already
    plain = case([x("x0", 4, 4)], FIRST, contexts=())
    assert set(broken_rules(compiled, plain)) == {"the backward pass=inside"}
    assert list(broken_rules(eager(), NESTED)) == []


def test_a_context_may_end_too_late_or_start_too_late() -> None:
    third = call("mm", "x0", "x0", to="v2")
    example = case([x("x0", 4, 4)], under(BF16, FIRST, SECOND), third, contexts=())
    late = without(example, "start of contexts in the program=a statement late")
    assert late.program.body == (FIRST, Region(BF16, (SECOND,)), third)
    longer = without(example, "end of contexts in the program=a statement late")
    assert longer.program.body == (Region(BF16, (FIRST, SECOND, third)),)


def test_a_decorator_is_a_context_of_what_is_compiled() -> None:
    example = case([x("x0", 4, 4)], FIRST, contexts=(BF16, F16), entry="decorator")
    made = without(example, "dtype in the program=that of the outer context")
    assert made.plan.contexts == (BF16,)
    assert made.program.body == (Region(Autocast(), (FIRST,)),)
