"""A folder of case files is a regression suite, and one case can be judged again by name."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs.corpus import kept_findings
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import GOOD, KNOWN, eager

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("forking")

FUZZ = ("--amp-fuzz", "--amp-fuzz-backends=eager-cpu", "-m", "amp_fuzz", "-p", "no:randomly")
WRONG = """
import torch
library = torch.library.Library("aten", "IMPL")
key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def wrong(a, b):
    with torch._C._ExcludeDispatchKeyGuard(key):
        return torch.mm(a, b)


library.impl("mm", wrong, "AutocastCPU")
"""


def folder_of(pytester: pytest.Pytester, **cases: Case) -> Path:
    folder = pytester.path / "tests" / "amp_cases"
    folder.mkdir(parents=True)
    for name, one in cases.items():
        (folder / f"{name}.json").write_bytes(one.json())
    return folder


def test_a_folder_is_collected_as_ordinary_items(pytester: pytest.Pytester) -> None:
    folder_of(pytester, good=GOOD, known=KNOWN)
    pytester.makepyprojecttoml('[tool.amp-fuzz]\ncorpus = "tests/amp_cases"\n')
    result = pytester.runpytest_subprocess(*FUZZ, "-k", "corpus", "-v")
    result.assert_outcomes(passed=2, deselected=result.parseoutcomes().get("deselected", 0))
    result.stdout.fnmatch_lines(
        [
            "amp-fuzz::corpus::good.json[[]eager-cpu[]] PASSED*",
            "amp-fuzz::corpus::known.json[[]eager-cpu[]] PASSED*",
        ]
    )


@pytest.mark.thorough
def test_an_ini_setting_names_the_folder_and_one_item_runs_alone(
    pytester: pytest.Pytester,
) -> None:
    folder_of(pytester, good=GOOD, known=KNOWN)
    pytester.makeini("[pytest]\namp_fuzz_corpus = tests/amp_cases\n")
    result = pytester.runpytest_subprocess(*FUZZ, "amp-fuzz::corpus::good.json[eager-cpu]")
    result.assert_outcomes(passed=1)


def test_a_regression_fails_and_can_be_replayed(pytester: pytest.Pytester) -> None:
    folder_of(pytester, good=GOOD)
    pytester.makeconftest(WRONG)
    corpus = "--amp-fuzz-corpus=tests/amp_cases"
    result = pytester.runpytest_subprocess(*FUZZ, corpus, "amp-fuzz::corpus")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "good.json diverges on eager-cpu: dtype",
            "  expected  bfloat16",
            "  observed  float32",
            f"amp-fuzz replay {GOOD.id}",
        ]
    )
    # It is kept as a finding: its id names it, while the bug is there and after.
    again = f"--amp-fuzz-replay={GOOD.id[:8]}"
    result = pytester.runpytest_subprocess(again, "-m", "amp_fuzz")
    result.assert_outcomes(failed=1)
    (pytester.path / "conftest.py").unlink()
    result = pytester.runpytest_subprocess(again, "-m", "amp_fuzz")
    result.assert_outcomes(passed=1)


@pytest.mark.thorough
def test_a_file_is_replayed_without_the_flag(pytester: pytest.Pytester) -> None:
    folder = folder_of(pytester, known=KNOWN)
    result = pytester.runpytest_subprocess(f"--amp-fuzz-replay={folder / 'known.json'}", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["amp-fuzz::replay::known.json[[]eager-cpu[]] PASSED*"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON, or cut short"),
        (GOOD.json().decode().replace('"mm"', '"nn"'), "nn"),
        (json.dumps({"program": 3}), "Expected `object`, got `int` - at `$.program`"),
    ],
)
def test_a_bad_file_is_named_with_the_place(
    pytester: pytest.Pytester, text: str, said: str
) -> None:
    folder = folder_of(pytester)
    (folder / "bad.json").write_text(text)
    result = pytester.runpytest_subprocess(*FUZZ, "--amp-fuzz-corpus=tests/amp_cases")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line.startswith("ERROR: amp-fuzz: ")]
    assert "tests/amp_cases/bad.json: " in line
    assert said in line


def test_a_missing_file_is_named(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*FUZZ, "--amp-fuzz-corpus=nowhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: amp-fuzz: corpus: nowhere is missing: make the folder that holds the case files"]
    )
    result = pytester.runpytest_subprocess("--amp-fuzz-replay=0123")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: amp-fuzz: *no finding has the id '0123'*"])


@pytest.mark.thorough
def test_a_finding_is_judged_on_its_own_backend(pytester: pytest.Pytester) -> None:
    folder = folder_of(pytester)
    with quiet():
        finding = judge_of(eager(), ()).judge(KNOWN).finding("", KNOWN)
    path = Store(pytester.path / "other").save(finding)
    path.rename(folder / "finding.json")
    backends = "--amp-fuzz-backends=eager-cpu,fake-cuda"
    more = (backends, "--amp-fuzz-corpus=tests/amp_cases", "--collect-only", "-q")
    result = pytester.runpytest_subprocess("--amp-fuzz", *more, "amp-fuzz::corpus")
    assert [line for line in result.outlines if "::" in line] == [
        "amp-fuzz::corpus::finding.json[eager-cpu]"
    ]


# -- the store's findings -------------------------------------------------------------------------

FIRST = ("amp-fuzz::eager-cpu::findings", "-p", "no:cacheprovider")


def saved(pytester: pytest.Pytester, *cases: Case) -> Store:
    """Return a store that holds findings of these cases."""
    store = Store(pytester.path / ".amp-fuzz")
    with quiet():
        finding = judge_of(eager(), ()).judge(KNOWN).finding("", KNOWN)
    for one in cases:
        store.save(msgspec.structs.replace(finding, case=one, minimised=one, known=""))
    return store


@pytest.mark.thorough
def test_the_findings_of_the_store_come_first_and_what_is_fixed_is_said(
    pytester: pytest.Pytester,
) -> None:
    saved(pytester, GOOD, KNOWN)
    result = pytester.runpytest_subprocess(*FUZZ, "--amp-fuzz-cases=3", "--amp-fuzz-ops=abs", "-v")
    assert result.ret == 0
    items = [line for line in result.outlines if line.startswith("amp-fuzz::") and "PASSED" in line]
    assert items[0].startswith("amp-fuzz::eager-cpu::findings PASSED")
    result.stdout.fnmatch_lines(
        [
            "amp-fuzz: judged first: 2 findings of the store",
            f"fixed: {GOOD.id} on eager-cpu (raise at mm): remove it: rm .amp-fuzz/findings/*.json",
        ]
    )
    (said,) = [line for line in result.outlines if line.startswith("fixed: ")]
    assert GOOD.id in said


@pytest.mark.thorough
def test_a_finding_that_is_still_there_fails(pytester: pytest.Pytester) -> None:
    saved(pytester, GOOD)
    pytester.makeconftest(WRONG)
    result = pytester.runpytest_subprocess(*FUZZ, *FIRST)
    result.assert_outcomes(failed=1)
    assert not [line for line in result.outlines if line.startswith("fixed: ")]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_workers_collect_the_same_whatever_is_found_meanwhile(
    pytester: pytest.Pytester, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of those who run this test
    # Each worker saves a finding as soon as it starts: before others, or it, collect.
    store = saved(pytester, GOOD)
    other = saved(pytester, KNOWN).root / "findings" / f"{KNOWN.id}.json"
    text = other.read_text()
    other.unlink()
    pytester.makeconftest(
        "import os, pathlib\n"
        "if 'PYTEST_XDIST_WORKER' in os.environ:\n"
        f"    pathlib.Path({str(other)!r}).write_text({text!r})\n"
    )
    result = pytester.runpytest_subprocess(*FUZZ, *FIRST, *more)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["amp-fuzz: judged first: 1 finding of the store"])
    (run,) = store.runs()
    judged = [r.id for r in store.records(run) if isinstance(r, CaseRecord)]
    assert judged == [GOOD.id]


def test_the_newest_findings_are_judged_and_the_others_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(pytester, GOOD, KNOWN)
    os.utime(store.root / "findings" / f"{KNOWN.id}.json", ns=(1, 1))
    monkeypatch.setattr("amp_fuzz.runs.corpus.MOST", 1)
    found, trouble = kept_findings(store, [eager()])
    assert [kept.case for kept in found] == [GOOD]
    (said,) = trouble
    assert said.startswith("the 1 oldest findings of eager-cpu; the newest 1 are (remove settled")
    assert [k.case for k in kept_findings(store, [eager()], [KNOWN.id, "gone"])[0]] == [KNOWN]


@pytest.mark.thorough
def test_sessions_keep_the_smallest_case_of_each_feature(pytester: pytest.Pytester) -> None:
    few = (*FUZZ, "--amp-fuzz-cases=20", "--amp-fuzz-ops=abs,relu", "-n", "2")
    pytester.runpytest_subprocess(*few)
    folder = pytester.path / ".amp-fuzz" / "covered" / "eager-cpu"
    assert {"op-abs.json", "op-relu.json"} <= {path.name for path in folder.iterdir()}
    corpus = f"--amp-fuzz-corpus={folder}"
    result = pytester.runpytest_subprocess(*FUZZ, corpus, "amp-fuzz::corpus")
    result.assert_outcomes(passed=len(list(folder.iterdir())))
