"""A device that a user has installed: a package out of tree, judged through the command.

The package is written here: the device in Python under another name, honest or with a fault that a
vendor may well have. It is installed as a vendor's would be, by being importable.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import amp_fuzz
from amp_fuzz.backends import privateuse1
from amp_fuzz.backends.devices import policies_of, with_device
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.config import ConfigError, resolve
from amp_fuzz.interfaces.cli import main
from amp_fuzz.reference import PolicyTableError
from tests.forks import forked

pytestmark = pytest.mark.thorough

PACKAGE = '''
"""A device module: naming it, its tensors and its autocast are those of the template."""

import os
from dataclasses import replace

from amp_fuzz.backends import privateuse1

FAULT = os.environ.get("MYDEV_FAULT", "")


class Mine(privateuse1.Autocast):
    def register(self):
        if FAULT == "policy":
            rules = {k: v for k, v in self.table.rules.items() if not k.startswith("softmax")}
            self.table = replace(self.table, rules=rules)
        super().register()

    def fall_through(self):
        if FAULT != "fallthrough":
            super().fall_through()


privateuse1.install("cuda", device="mydev", autocast=Mine)
'''
TABLE = """
device = "mydev"
dispatch_key = "AutocastPrivateUse1"
default_dtype = "float16"
source = "what mydev promises"

[[context]]
dtypes = ["bfloat16", "float16"]
does = "on"
versions = ">=2.7"
source = "torch.mydev.get_amp_supported_dtype()"

[[context]]
dtypes = ["*"]
does = "off"
versions = ">=2.7"
source = "torch/amp/autocast_mode.py, autocast.__init__"

[[group]]
policy = "lower_precision_fp"
versions = ">=2.7"
source = "its manual"
ops = ["mm"]
"""
MAIN = "import sys; from amp_fuzz.interfaces.cli import main; sys.exit(main())"

needs_device = pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")


@dataclass(frozen=True, slots=True)
class Vendor:
    """A folder where the device's package can be imported."""

    folder: Path
    files: Path

    def run(
        self, *words: str, fault: str = "", program: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a fork, or what is given to Python in a new process."""
        root = str(Path(amp_fuzz.__file__).parents[1])
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("AMP_FUZZ_")},
            "PYTHONPATH": os.pathsep.join((root, str(self.folder))),
            "MYDEV_FAULT": fault,
            "COLUMNS": "200",
        }
        if not program:
            place = {"folder": self.folder, "environment": environment, "files": self.files}
            done = forked(main, words, **place, seconds=500)  # type: ignore[arg-type]
            return subprocess.CompletedProcess(words, done.code, done.out, done.err)
        return subprocess.run(
            [sys.executable, *program, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@pytest.fixture
def vendor(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    for name in ("torch_mydev", "mydev_tools"):  # found by its name, and by --plugins
        (tmp_path / name).mkdir()
    (tmp_path / "torch_mydev" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "mydev_tools" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "torch_leaves.py").write_text("raise SystemExit('no licence')\n")
    (tmp_path / "table.toml").write_text(TABLE)
    (tmp_path / "bad.toml").write_text("device = ")
    (tmp_path / "typo.toml").write_text(TABLE.replace('["mm"]', '["mm", "lineer"]'))
    return Vendor(tmp_path, tmp_path_factory.mktemp("outputs"))


# -- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--device=nosuch",), 4, "torch has no device 'nosuch', and there is no module torch_no"),
        (("--device=cpu",), 2, "--device: 'cpu' is one of torch's own devices: choose --backends="),
        (("--device=npu:0",), 2, "--device: 'npu:0' is not a device name: write it as in torch"),
        (("--policies=cuda",), 2, "--policies: policies of which device? add device=NAME"),
        (
            ("--policies=cudaa",),
            2,
            "--policies: cudaa: no such table or file: did you mean 'cuda'?",
        ),
        (("--policies=zzz",), 2, "--policies: zzz: no such table or file: use one of cpu, cuda,"),
        (("--device=mydev", "--policies=cude"), 2, "--policies: cude: no such table or file: did"),
        (("--device=mydev", "--policies=none.toml"), 2, "none.toml: cannot be read (No such file"),
        (("--device=mydev", "--policies=bad.toml"), 2, "bad.toml: not TOML: Invalid value"),
        (("--device=mydev", "--policies=typo.toml"), 2, "no op 'lineer'; did you mean 'linear'?"),
        (("--device=mydev", "--policies=~none/a.toml"), 2, "--policies: '~none/a.toml' is not a p"),
        (("--device=leaves",), 4, "torch_leaves cannot be imported: SystemExit: no licence"),
        (("--device=mydev", "--plugins=torch_leaves"), 2, "cannot be imported: SystemExit: no lic"),
        (("--device=mydev", "--plugins=no_such"), 2, "--plugins: 'no_such' cannot be imported"),
        (("--backends=eager-mydev",), 2, "name an installed device with --device="),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(
    vendor: Vendor, words: tuple[str, ...], code: int, text: str
) -> None:
    done = vendor.run("audit", "--ops=mm", *words)
    assert done.returncode == code
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


@needs_device
def test_an_audit_without_a_dtype_to_audit_in_is_no_success(vendor: Vendor) -> None:
    wide = TABLE.replace('"bfloat16", "float16"', '"float64"').replace("float16", "float64")
    (vendor.folder / "wide.toml").write_text(wide)
    done = vendor.run("audit", "--ops=mm", "--device=mydev", "--policies=wide.toml")
    assert done.returncode == 5
    assert "or no backend autocasts to bfloat16 or float16" in done.stderr


def test_a_device_is_run_unless_other_backends_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AMP_FUZZ_DEVICE", "AMP_FUZZ_POLICIES"):
        monkeypatch.setenv(name, "")
    given: dict[str, object] = {"device": "mydev", "policies": "xpu"}
    options = with_device(resolve(given, environ={}, start=tmp_path))
    assert options.backends == ("eager-mydev", "eager-mydev[shadow]")
    assert (os.environ["AMP_FUZZ_DEVICE"], os.environ["AMP_FUZZ_POLICIES"]) == ("mydev", "xpu")
    given["backends"] = ("eager-cpu",)
    assert with_device(resolve(given, environ={}, start=tmp_path)).backends == ("eager-cpu",)


def test_a_file_of_policies_is_beside_the_configuration_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AMP_FUZZ_DEVICE", "AMP_FUZZ_POLICIES"):
        monkeypatch.setenv(name, "")
    (tmp_path / "table.toml").write_text(TABLE)
    (tmp_path / "amp-fuzz.toml").write_text('device = "mydev"\npolicies = "table.toml"\n')
    with_device(resolve({}, environ={}, start=tmp_path))
    assert os.environ["AMP_FUZZ_POLICIES"] == str(tmp_path / "table.toml")
    assert set(policies_of("mydev", str(tmp_path / "table.toml")).rules) == {"mm"}
    (tmp_path / "amp-fuzz.toml").write_text('device = "mydev"\npolicies = "other.toml"\n')
    with pytest.raises(ConfigError, match=r"amp-fuzz\.toml: .*other\.toml: cannot be read"):
        with_device(resolve({}, environ={}, start=tmp_path))


def test_ops_that_torch_does_not_have_are_no_policies(tmp_path: Path) -> None:
    """Of other libraries' ops nothing is said: theirs may not be loaded yet."""
    path = tmp_path / "table.toml"
    for op, problem in (
        ("sum.dim_Intlist", "has no op 'sum.dim_Intlist'; did you mean 'sum.dim_IntList'?"),
        ("zzzzzzzzz", "has no op 'zzzzzzzzz'; write it as in 'sum.dim_IntList'"),
    ):
        path.write_text(TABLE.replace('"mm"', f'"{op}"'))
        with pytest.raises(PolicyTableError, match=re.escape(problem)) as raised:
            policies_of("mydev", str(path))
        assert raised.value.place == "lower_precision_fp, >=2.7"
        if privateuse1.supported():
            with pytest.raises(PolicyTableError, match=re.escape(problem)):
                privateuse1.install(path, device="wrongops")
    path.write_text(TABLE.replace('"mm"', '"mine::attention"'))
    assert set(policies_of("mydev", str(path)).rules) == {"mine::attention"}
    later = TABLE.replace('"mm"', '"zzzzzzzzz"').replace(">=2.7", ">=99")
    path.write_text(TABLE + later[later.index("[[group]]") :])
    assert set(policies_of("mydev", str(path)).rules) == {"mm"}


# -- honest, and with a fault ---------------------------------------------------------------------


@needs_device
def test_an_honest_device_conforms(vendor: Vendor) -> None:
    words = ("audit", "--device=mydev", "--ops=mm,softmax", "--workers=1")
    done = vendor.run(*words, program=("-c", MAIN))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("eager-mydev")]
    assert [(name, own, differ) for name, _, _, _, own, _, differ in rows] == [
        ("eager-mydev", "0", "0"),
        ("eager-mydev[shadow]", "0", "0"),
    ]
    assert all(int(agree) > 20 for _, _, agree, *_ in rows)


@needs_device
def test_a_wrong_policy_is_found(vendor: Vendor) -> None:
    words = ("audit", "--device=mydev", "--backends=eager-mydev", "--ops=softmax", "--workers=1")
    done = vendor.run(*words, "--plugins=mydev_tools", fault="policy")
    assert done.returncode == 1, done.stdout + done.stderr
    text = "eager-mydev softmax(float16) under bfloat16: float32 expected, float16 observed"
    assert text in done.stdout


@needs_device
def test_a_table_of_one_s_own_is_what_it_is_held_to(vendor: Vendor) -> None:
    """The device has CUDA's policies; of these the vendor promises only one."""
    words = ("audit", "--device=mydev", "--backends=eager-mydev", "--workers=1")
    done = vendor.run(*words, "--policies=table.toml", "--ops=mm,softmax")
    assert done.returncode == 1, done.stdout + done.stderr
    text = "eager-mydev softmax(float16) under bfloat16: float16 expected, float32 observed"
    assert text in done.stdout
    assert "eager-mydev mm(" not in done.stdout


@needs_device
@pytest.mark.parametrize("backend", ["eager-mydev", "eager-mydev[shadow]"])
def test_a_device_in_python_has_no_bugs_of_torch_s_own_kernels(
    vendor: Vendor, backend: str
) -> None:
    """A transform comes before autocast there, too, but a float16 input does not raise."""
    one = case(
        [x("w0", 2), x("x1", dtype="float16")],
        call("tensordot", "x1", "w0", dims=0),
        backward="inside",
        transform="grad",
    )
    (vendor.folder / "case.json").write_bytes(one.json())
    done = vendor.run("replay", "case.json", "--device=mydev", f"--backend={backend}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transform-before-autocast" in done.stdout


@needs_device
@pytest.mark.slow
def test_a_missing_fallthrough_is_found_and_can_be_replayed(vendor: Vendor) -> None:
    words = ("--device=mydev", "--backends=eager-mydev", "--minimize=5")
    run = ("run", *words[:2], "--ops=relu", "--cases=6", "--seed=1", "--workers=1", words[2])
    done = vendor.run(*run, fault="fallthrough")
    assert done.returncode == 1, done.stdout + done.stderr
    (line, *_) = [s for s in done.stdout.splitlines() if s.strip().startswith("amp-fuzz replay ")]
    replay = line.split()[1:]
    assert "--device=mydev" in replay
    assert vendor.run(*replay, fault="fallthrough").returncode == 1
    assert vendor.run(*replay).returncode == 0


@needs_device
@pytest.mark.slow
def test_a_baseline_holds_findings_of_the_device(vendor: Vendor) -> None:
    words = ("--device=mydev", "--ops=softmax", "--cases=6", "--seed=1", "--minimize=5")
    run = ("run", *words, "--backends=eager-mydev", "--workers=1")
    assert vendor.run(*run, fault="policy").returncode == 1
    done = vendor.run("baseline", "update", "--reason=known", fault="policy")
    assert done.returncode == 0, done.stdout + done.stderr
    unnamed = vendor.run("baseline", "check", fault="policy")
    assert unnamed.returncode == 5
    assert "with --device=mydev" in " ".join(unnamed.stdout.split())
    there = vendor.run("baseline", "check", "--device=mydev", fault="policy")
    assert there.returncode == 0, there.stdout + there.stderr
    assert "still there" in there.stdout
    fixed = vendor.run("baseline", "check", "--device=mydev")
    assert fixed.returncode == 1
    assert "amp-fuzz baseline prune --device=mydev" in fixed.stdout
    pruned = vendor.run("baseline", "prune", "--device=mydev")
    assert pruned.returncode == 0
    assert ": fixed" in pruned.stdout


@needs_device
def test_the_doctor_looks_at_the_device(vendor: Vendor) -> None:
    done = vendor.run("doctor", "--device=mydev")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "backend eager-mydev" in line]
    assert [row[:3] for row in rows] == [
        ["ok", "backend", "eager-mydev"],
        ["ok", "backend", "eager-mydev[shadow]"],
    ]
    done = vendor.run("doctor", "--device=nosuch")
    assert done.returncode == 4
    assert "2 broken: backend eager-nosuch, backend eager-nosuch[shadow]" in done.stdout
    done = vendor.run("doctor", "--device=mydev", "--policies=typo.toml")
    assert done.returncode == 2
    assert "did you mean 'linear'?" in " ".join(done.stdout.split())


@needs_device
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("", 0), ("policy", 1)])
def test_pytest_takes_the_device_too(vendor: Vendor, fault: str, code: int) -> None:
    words = ("--amp-fuzz", "--amp-fuzz-device=mydev", "--amp-fuzz-ops=softmax")
    more = ("--amp-fuzz-cases=12", "--amp-fuzz-seed=1", "-q", "-p", "no:cacheprovider")
    done = vendor.run(*words, *more, fault=fault, program=("-m", "pytest"))
    assert done.returncode == code, done.stdout + done.stderr
    assert "passed" in done.stdout if not fault else "eager-mydev" in done.stdout
