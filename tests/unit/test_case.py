"""Cases: an id that never changes, JSON both ways, and one line for each kind of bad file."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_fuzz import catalogue
from amp_fuzz.backends.source import case_source
from amp_fuzz.cases.case import (
    FORMAT,
    Case,
    CaseError,
    Plan,
    bare,
    each_call,
    in_a_row,
    load,
    loads,
    map_autocast,
    single,
    unselective,
    uses_autocast,
)
from amp_fuzz.cases.literals import bits_of, numbers
from amp_fuzz.cases.program import (
    Autocast,
    AutocastDType,
    Checkpoint,
    DType,
    Float,
    NoGrad,
    ProgramError,
    Ref,
    Region,
    Statement,
    regions,
    statements,
)
from amp_fuzz.strategies import cases, plans
from tests.helpers import BF16, F16, STEADY, call, case, drawn, one_line, under, x

LITERAL = case(
    [x("x0", 2, 3), x("w1", 3, 2, dtype="bfloat16", domain="ties", layout="strided")],
    call("mm", "x0", "w1"),
    under(Autocast(enabled=False), call("add", "v0", "v0", to="v1", alpha=0.5)),
    seed=7,
    backward="inside",
)
TEXT = (
    '{"program":{"inputs":[{"name":"x0","shape":[2,3],"dtype":"float32","domain":"normal",'
    '"layout":"contiguous","role":"input","bound":0},{"name":"w1","shape":[3,2],'
    '"dtype":"bfloat16","domain":"ties","layout":"strided","role":"weight","bound":0}],'
    '"body":[{"type":"statement","op":"mm","form":"function","args":[{"type":"ref","name":"x0"},'
    '{"type":"ref","name":"w1"}],"kwargs":[],"outputs":["v0"]},{"type":"region","context":'
    '{"type":"autocast","device":null,"dtype":null,"enabled":false,"cache_enabled":null},'
    '"body":[{"type":"statement","op":"add","form":"function","args":[{"type":"ref","name":"v0"},'
    '{"type":"ref","name":"v0"}],"kwargs":[["alpha",{"type":"float","hex":"0x1.0000000000000p-1"'
    '}]],"outputs":["v1"]}]}],"outputs":["v0","v1"]},"plan":{"contexts":[{"type":"autocast",'
    '"device":null,"dtype":"bfloat16","enabled":true,"cache_enabled":null}],"entry":"context",'
    '"backward":"inside","backward_context":null,"second":"none","steps":1,"loop":"outside",'
    '"first_pass":"none","calls":1,"checkpoint":"none","thread":"none","interrupted":false,'
    '"scaler":false},"seed":7,"version":1}'
)


def changed(*path: Any, to: Any) -> bytes:
    """Return the literal case's JSON with the value at a path replaced."""
    tree = json.loads(TEXT)
    place = tree
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return json.dumps(tree).encode()


def nested(depth: int) -> Any:
    """Return a statement inside so many regions, as JSON."""
    node = json.loads(TEXT)["program"]["body"][0]
    for _ in range(depth):
        node = {"type": "region", "context": {"type": "no_grad"}, "body": [node]}
    return node


# -- identity ------------------------------------------------------------------------------------


def test_the_canonical_json_never_changes() -> None:
    assert LITERAL.json().decode() == TEXT


def test_the_id_never_changes() -> None:
    """Findings, baselines and issues hold ids: a new one for an old case breaks them all."""
    assert LITERAL.id == "d3759964a907e2cb"


def test_a_field_that_came_later_is_written_where_it_says_something() -> None:
    later = msgspec.structs.replace(LITERAL, plan=Plan(transform="vmap"))
    assert b'"transform":"vmap"' in later.json()
    assert loads(later.json()) == later
    text = msgspec.structs.replace(LITERAL.program.inputs[0], name='x,"transform":"none"')
    program = msgspec.structs.replace(LITERAL.program, inputs=(text,))
    odd = msgspec.structs.replace(LITERAL, program=program)
    assert msgspec.json.decode(odd.json(), type=Case) == odd


def test_the_id_depends_on_every_part() -> None:
    others = [
        msgspec.structs.replace(LITERAL, seed=8),
        msgspec.structs.replace(LITERAL, plan=Plan()),
        map_autocast(LITERAL, cache_enabled=False),
        bare(LITERAL),
    ]
    assert len({c.id for c in (LITERAL, *others)}) == 5


def test_equal_cases_are_one_key() -> None:
    again = loads(LITERAL.json())
    assert again == LITERAL
    assert hash(again) == hash(LITERAL)
    assert again.id == LITERAL.id


# -- JSON both ways ------------------------------------------------------------------------------


@given(cases(max_statements=6))
@STEADY
def test_json_round_trips(drawn_case: Case) -> None:
    again = loads(drawn_case.json())
    assert again == drawn_case
    assert again.json() == drawn_case.json()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e308])
def test_a_float_literal_keeps_every_bit(value: float) -> None:
    held = case([x("x0", 2)], call("add", "x0", value))
    (_, literal) = loads(held.json()).program.body[0].args  # type: ignore[union-attr]
    assert isinstance(literal, Float)
    if math.isnan(value):
        assert math.isnan(literal.value)
    else:
        assert struct.pack("<d", literal.value) == struct.pack("<d", value)


def test_fields_left_out_take_their_defaults() -> None:
    tree = json.loads(TEXT)
    del tree["plan"], tree["version"], tree["program"]["inputs"][0]["layout"]
    assert loads(json.dumps(tree)).plan == Plan()


# -- bad files -----------------------------------------------------------------------------------

_BOMB = b"[" * 100_000
_ITEMS = '{"type":"items","items":[' * 50 + "1" + "]}" * 50
_MM = ("program", "body", 0)
_X = ("program", "inputs", 0)

BAD = {
    "empty": (b"", "not JSON"),
    "cut short": (TEXT[:-40].encode(), "not JSON, or cut short"),
    "not JSON": (b"hello", "not JSON"),
    "not UTF-8": (b'{"seed": "\xff\xfe"}', "not JSON"),
    "a number": (b"5", "Expected `object`"),
    "a list": (b"[]", "Expected `object`"),
    "NaN": (TEXT.replace('"seed":7', '"seed":NaN').encode(), "not JSON"),
    "no program": (b"{}", "required field `program`"),
    "nesting bomb": (_BOMB, "not JSON"),
    "nesting bomb of objects": (b'{"program":' * 100_000, "not JSON"),
    "nested regions": (changed("program", "body", to=[nested(40)]), "nests more than 16 regions"),
    "nested lists": (
        TEXT.replace('{"type":"ref","name":"x0"}', _ITEMS).encode(),
        "$.body[0] nests more than",
    ),
    "unknown field": (changed("colour", to=1), "unknown field `colour`"),
    "unknown field inside": (changed(*_MM, "colour", to=1), "$.program.body[0]"),
    "unknown node": (changed(*_MM, "type", to="loop"), "$.program.body[0].type"),
    "wrong dtype": (changed(*_X, "dtype", to="float8"), "$.inputs[0].dtype='float8'"),
    "wrong domain": (changed(*_X, "domain", to="odd"), "$.program.inputs[0].domain"),
    "wrong layout": (changed(*_X, "layout", to="odd"), "$.program.inputs[0].layout"),
    "wrong role": (changed(*_X, "role", to="odd"), "$.program.inputs[0].role"),
    "wrong type": (changed("seed", to="seven"), "$.seed"),
    "a real seed": (changed("seed", to=1.5), "$.seed"),
    "a negative seed": (changed("seed", to=-1), "$.seed=-1: use 0 to"),
    "a huge seed": (changed("seed", to=2**70), "$.seed="),
    "huge shape": (changed(*_X, "shape", to=[2**40, 2]), "$.inputs[0].shape"),
    "huge empty shape": (changed(*_X, "shape", to=[0, 2**70]), "$.inputs[0].shape"),
    "negative shape": (changed(*_X, "shape", to=[-1]), "negative size"),
    "rank 100": (changed(*_X, "shape", to=[1] * 100), "100 dimensions"),
    "a huge integer": (changed(*_MM, "args", 1, to=2**80), "more than 64 bits"),
    "integer of 10,000 digits": (
        TEXT.replace('"seed":7', '"seed":' + "9" * 10_000).encode(),
        "",
    ),
    "huge bound": (
        changed(*_X, to={"name": "x0", "shape": [2], "dtype": "int64", "domain": "index",
                         "bound": 2**70}),
        "$.inputs[0].bound",
    ),
    "long name": (changed(*_X, "name", to="x" + "1" * 5000), "5001 characters"),
    "bad float": (
        changed(*_MM, "args", 1, to={"type": "float", "hex": "0x1p99999"}),
        "write it as float.hex() does",
    ),
    "bad dtype literal": (
        changed(*_MM, "args", 1, to={"type": "dtype", "name": "os.system"}),
        "$.body[0] has dtype 'os.system'",
    ),
    "unknown autocast dtype": (
        changed("plan", "contexts", 0, "dtype", to="int64"),
        "$.contexts[0].dtype='int64'",
    ),
    "unknown device": (
        changed("plan", "contexts", 0, "device", to="tpu"),
        "$.contexts[0].device='tpu'",
    ),
    "use before definition": (
        changed(*_MM, "args", 0, to={"type": "ref", "name": "v9"}),
        "$.body[0] uses 'v9'",
    ),
    "undefined output": (changed("program", "outputs", to=["v9"]), "$.outputs[0]='v9'"),
    "no output": (changed("program", "outputs", to=[]), "$.outputs is empty"),
    "too many contexts": (
        changed("plan", "contexts", to=[{"type": "autocast"}] * 40),
        "$.contexts has 40",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(name: str) -> None:
    text, said = BAD[name]
    with pytest.raises(CaseError) as caught:
        loads(text, "my.json")
    assert one_line(caught.value)
    assert str(caught.value).startswith("my.json: ")
    assert said in str(caught.value)


def test_a_version_from_the_future_says_upgrade() -> None:
    text = changed("version", to=FORMAT + 1).replace(b'"seed"', b'"field of the future"')
    with pytest.raises(CaseError, match="newer amp-fuzz") as caught:
        loads(text)
    assert "upgrade" in str(caught.value)


def test_every_cut_of_a_file_is_an_error() -> None:
    for end in range(0, len(TEXT), 17):
        with pytest.raises(CaseError):
            loads(TEXT[:end])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"none\.json: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(CaseError, match="Is a directory"):
        load(tmp_path)


_ODD = [
    None, True, -1, 0, 2**63, 2**80, 1.5, "", "x0", "v0", "lambda", "\"'\n\\", "torch.mm", [], {},
    [[]], ["x0"], {"type": "ref", "name": "x0"}, {"type": "items", "items": []},
]  # fmt: skip


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(p for key, sub in items for p in _places(sub, (*path, key)))]


def damaged(tree: Any, rng: random.Random) -> Any:
    """Return a copy with one value somewhere replaced or deleted."""
    tree = copy.deepcopy(tree)
    *parents, last = rng.choice(_places(tree)[1:])
    place = tree
    for step in parents:
        place = place[step]
    if rng.random() < 0.3:
        del place[last]
    else:
        place[last] = copy.deepcopy(rng.choice(_ODD))
    return tree


def fate(text: str) -> Exception | None:
    """Return the error of a text that is refused; compile the source of one that is not."""
    try:
        read = loads(text)
        catalogue.check(read.program)
    except (CaseError, ProgramError) as error:
        return error
    compile(case_source(read), "case", "exec")
    return None


@pytest.mark.thorough
def test_a_damaged_file_is_an_error_of_one_line_or_source_that_compiles() -> None:
    rng = random.Random(0)
    refused = accepted = 0
    for honest in drawn(300, statements=4):
        tree = json.loads(honest.json())
        for _ in range(8):
            error = fate(json.dumps(damaged(tree, rng)))
            assert error is None or one_line(error), error
            refused += error is not None
            accepted += error is None
    assert refused > 500
    assert accepted > 100


# -- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(backward="under"), "$.backward_context belongs to backward='under'"),
        (Plan(backward_context=BF16), "$.backward_context belongs to backward='under'"),
        (Plan(steps=0), "$.steps=0: use 1 to 8"),
        (Plan(steps=9), "$.steps=9: use 1 to 8"),
        (Plan(calls=0), "$.calls=0: use 1 to 8"),
        (Plan(backward="none", second="retain"), "leaves nothing for second"),
        (Plan(backward="none", steps=2), "leaves nothing for second, steps"),
        (Plan(backward="none", scaler=True), "leaves nothing for second, steps, scaler"),
        (Plan(backward="none", micro_batches=2), "leaves nothing for second, steps, scaler"),
        (Plan(backward="none", hook="tensor"), "leaves nothing for second, steps, scaler"),
        (Plan(micro_batches=9), "$.micro_batches=9: use 1 to 8"),
        (Plan(micro_batches=2, second="retain"), "$.micro_batches=2 needs second='none'"),
        (Plan(update="data"), "$.update='data' needs steps, and no scaler or hook"),
        (Plan(update="cast", steps=2, scaler=True), "needs steps, and no scaler or hook"),
        (Plan(update="frozen", steps=2, hook="tensor"), "needs steps, and no scaler or hook"),
        (Plan(contexts=(), entry="decorator"), "$.entry='decorator' needs a context"),
        (Plan(contexts=(BF16, Autocast(dtype="int8"))), "$.contexts[1].dtype='int8'"),
        (
            Plan(backward="under", backward_context=Autocast(device="tpu")),
            "$.backward_context.device='tpu'",
        ),
        (Plan(contexts=(BF16,) * 17), "$.contexts has 17"),
        (Plan(transform="vmap", steps=2, calls=2), "stands alone: leave out steps, calls"),
        (Plan(later=((F16,),), steps=2), "$.later stands alone: leave out steps"),
        (Plan(later=((F16,),), backward="inside"), "needs backward='none' or 'outside'"),
        (Plan(later=((NoGrad(), Autocast(dtype="int8")),)), "$.later[0][1].dtype='int8'"),
        (Plan(later=((F16,) * 17,)), "$.later[0] has 17"),
        (Plan(later=((),) * 8), "$.later has 8 calls: use 7 at most"),
        (Plan(reuse="graph"), "$.reuse='graph' belongs to $.later"),
        (Plan(transform="grad", backward="none"), "'grad' needs backward outside or inside"),
        (Plan(transform="jvp", backward="none"), "'jvp' needs backward outside or inside"),
        (
            Plan(transform="vmap_grad", backward="under", backward_context=BF16),
            "'vmap_grad' needs backward outside or inside",
        ),
    ],
)
def test_a_plan_that_cannot_be_driven_is_refused(plan: Plan, said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        plan.check()
    assert said in str(caught.value)


def test_a_reentrant_checkpoint_is_not_selective() -> None:
    both = Checkpoint(use_reentrant=True, selective=True)
    one = case([x("x0", 2)], under(both, call("relu", "x0")))
    with pytest.raises(ProgramError, match="selective=True needs use_reentrant=False"):
        one.program.check()


def test_a_checkpoint_that_is_not_selective_keeps_its_json() -> None:
    plain, selective = (
        case([x("x0", 2)], under(Checkpoint(selective=how), call("relu", "x0")))
        for how in (False, True)
    )
    assert b'{"type":"checkpoint","use_reentrant":false}' in plain.json()
    assert b'"selective":true' in selective.json()
    assert loads(selective.json()) == selective
    assert unselective(selective) == plain


def test_a_later_call_may_be_the_only_one_under_autocast() -> None:
    plain = case([x("x0", 2, 2)], call("mm", "x0", "x0"), contexts=())
    assert uses_autocast(plain.with_plan(later=((), (NoGrad(), F16))))
    assert not uses_autocast(plain.with_plan(later=((NoGrad(),), (AutocastDType("float16"),))))


def test_each_call_alone_has_what_is_around_it() -> None:
    other = Autocast(device="cpu")
    one = case(
        [x("x0", 2, 2)],
        under(Autocast(), under(other, call("mm", "x0", "x0"))),
        contexts=(F16,),
        later=((), (NoGrad(), BF16), (AutocastDType("float16"),)),
        reuse="region",
    )
    first, second, third, fourth = each_call(one).values()
    assert first == case(one.program.inputs, *one.program.body, contexts=(F16,))
    assert second.plan == Plan(contexts=())
    assert (third.plan.contexts, third.program.body) == (
        (BF16,),
        (under(NoGrad(), *one.program.body),),
    )
    # A default dtype is of one device.
    assert list(regions(fourth.program.body)) == [F16, other]
    assert list(each_call(one)) == ["", "later0.", "later1.", "later2."]


def test_calls_in_a_row_are_one_program() -> None:
    relu = call("relu", "v0", to="v1")
    one = case([x("x0", 2, 2)], call("mm", "x0", "x0"), under(F16, relu), later=((NoGrad(), BF16),))
    row, names = in_a_row(one.with_plan(reuse="graph"))
    first = call("mm", "x0", "x0", to="v700000"), under(F16, call("relu", "v700000", to="v700001"))
    then = call("mm", "x0", "x0", to="v710000"), under(F16, call("relu", "v710000", to="v710001"))
    body = under(BF16, *first), under(BF16, under(NoGrad(), *then))
    assert row == case([x("x0", 2, 2)], *body, contexts=())
    assert names == {
        "v0": "v700000",
        "v1": "v700001",
        "later0.v0": "v710000",
        "later0.v1": "v710001",
    }


@given(st.sampled_from(["cpu", "cuda", "mtia"]).flatmap(lambda d: plans(device=d)))
@STEADY
def test_drawn_plans_can_be_driven(plan: Plan) -> None:
    plan.check()


def test_a_plan_prints_what_it_changes() -> None:
    assert str(Plan()) == "autocast(device, bfloat16)"
    assert str(Plan(contexts=())) == "bare"
    plan = Plan(contexts=(F16, BF16), backward="under", backward_context=Autocast(enabled=False))
    assert str(plan) == (
        "autocast(device, float16) > autocast(device, bfloat16), backward=under, "
        "backward_context=autocast(device, enabled=False)"
    )


# -- variants ------------------------------------------------------------------------------------

NESTED = case(
    [x("x0", 2)],
    under(BF16, under(Checkpoint(), under(F16, call("relu", "x0")))),
    backward="under",
    backward_context=BF16,
)


def test_bare_leaves_no_autocast_and_every_other_region() -> None:
    plain = bare(NESTED)
    assert list(regions(plain.program.body)) == [Checkpoint()]
    assert plain.plan.contexts == ()
    assert plain.plan.backward == "outside"
    plain.plan.check()
    assert isinstance(plain.program.body[0], Region)


def test_map_autocast_reaches_every_context() -> None:
    off = map_autocast(NESTED, enabled=False)
    found = [*off.plan.contexts, off.plan.backward_context, *regions(off.program.body)]
    assert [c.enabled for c in found if isinstance(c, Autocast)] == [False] * 4


def test_in_float32_no_16_bit_dtype_is_left_and_values_stay() -> None:
    spec = x("x0", 2, dtype="bfloat16", values=bits_of([1.5, -2.0], "bfloat16"))
    cast = Statement("to", "method", (Ref("x0"), DType("float16")), (), ("v0",))
    plain = single(case([spec, x("x1", dtype="float64")], under(BF16, cast)))
    assert "bfloat16" not in str(plain.program.inputs)
    assert [s.dtype for s in plain.program.inputs] == ["float32", "float64"]
    assert numbers(plain.program.inputs[0].values, "float32") == [1.5, -2.0]
    (statement,) = statements(plain.program.body)
    assert statement.args[1] == DType("float32")


def test_a_case_with_other_fields_keeps_the_rest() -> None:
    one = case([x("x0", 2)], call("abs", "x0"), seed=3)
    changed = one.with_plan(steps=2).with_program(outputs=("x0",))
    assert (changed.plan.steps, changed.program.outputs, changed.seed) == (2, ("x0",), 3)
    assert changed.with_plan(steps=1).with_program(outputs=one.program.outputs) == one
