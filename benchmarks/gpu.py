"""Everything there is to learn from an accelerator, in one command of at most nine minutes.

    make gpu                        # the accelerator that torch sees here
    make gpu DEVICE=privateuse1     # no accelerator: a PrivateUse1 device with CUDA's policies

It runs from the source tree, with the interpreter that starts it and the packages that stand there,
without a network. What an interpreter lacks comes from wheels in ``wheels/`` (`make gpu-bundle`).

Each step has a share of the time. A step that fails, or is stopped because its time is up, does not
stop the others. The results are in one folder: gpu.json, the log of each step, the reports, the
findings. Exit codes: 0 if every step went well, 1 if one found something or failed, 2 for wrong
usage, 4 if torch, another package or the accelerator is missing.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / ".gpu"  # an installation without a build: entry points, and what was in wheels/
WHEELS = ROOT / "wheels"
MISSING = 4
_STANDIN = "privateuse1"
_GRACE = 15.0  # seconds in which a stopped step may write what it has
Row = dict[str, Any]


class Missing(Exception):
    """Something that a run needs is not here. The message says what to do."""


# -- setting up -----------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Make the package and its entry points importable, and return the environment to use them in.

    Nothing is built: entry points are read from a folder of metadata, which is written here.
    """
    try:
        import tomllib
    except ImportError:
        here = f"{sys.executable} is Python {platform.python_version()}"
        raise Missing(f"{here}: give one from 3.11 on: make gpu PYTHON=/path/to/python") from None

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shutil.rmtree(SETUP, ignore_errors=True)
    site = SETUP / "site"
    site.mkdir(parents=True)
    sys.path[:0] = [str(SETUP), str(site)]
    provide(project["dependencies"], site)
    name, version = project["name"], project["version"]
    info = SETUP / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    )
    (info / "entry_points.txt").write_text(text)
    path = [str(ROOT), str(SETUP), str(site), os.environ.get("PYTHONPATH", "")]
    # Dozens of processes import torch, which is slow where nothing keeps the bytecode.
    dropped = ("AMP_FUZZ_", "PYTHONDONTWRITEBYTECODE", "NVIDIA_TF32_OVERRIDE")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(dropped)},
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "160",
        # cuBLAS repeats itself: other settings are for a run to vary.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Asking whether there is a device must not make later forks impossible.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def provide(requirements: Sequence[str], site: Path) -> None:
    """Unpack the wheels of packages that are not installed. Raises `Missing`."""
    lacking, waiting = [], list(requirements)
    # What compares versions comes first.
    waiting.sort(key=lambda requirement: not requirement.startswith("packaging"))
    while waiting:
        requirement = waiting.pop(0)
        if stands(requirement):
            continue
        wheel = wheel_of(requirement)
        if wheel is None:
            lacking.append(requirement)
            continue
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
        importlib.invalidate_caches()
        needs = importlib.metadata.requires(_name(requirement)) or []
        waiting += [need for need in needs if "extra ==" not in need and _wanted(need)]
    if not lacking:
        return
    if any(_name(requirement) == "torch" for requirement in lacking):
        raise Missing(
            f"{sys.executable} has no torch that fits: give an interpreter that has it: "
            "make gpu PYTHON=/path/to/python"
        )
    names, here = " ".join(map(_name, lacking)), f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise Missing(
        f"{sys.executable} lacks {', '.join(lacking)}: where there is a network, run\n"
        f'  make gpu-bundle GPU_PYTHON={here} GPU_PACKAGES="{names}"\n'
        "and bring the folder wheels/ along, or install them here"
    )


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _wanted(requirement: str) -> bool:
    """Return whether a requirement's marker is for this interpreter."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})


def stands(requirement: str) -> bool:
    """Return whether an installed package meets a requirement."""
    try:
        version = importlib.metadata.version(_name(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it is lacking itself, and comes first
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def wheel_of(requirement: str) -> Path | None:
    """Return a wheel of a package in ``wheels/`` that this interpreter can use, or None."""
    from_name = re.compile(r"(?P<name>.+?)-[^-]+(?:-\d[^-]*)?-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl")
    major, minor = sys.version_info[:2]
    for path in sorted(WHEELS.glob("*.whl"), reverse=True):
        found = from_name.fullmatch(path.name)
        if found is None or _name(found["name"]) != _name(requirement):
            continue
        python, abi, where = found["tags"].split("-")
        own = f"cp{major}{minor}" in python.split(".") or abi == "abi3" or abi == "none"
        if own and (where == "any" or platform.machine() in where):
            return path
    return None


# -- the steps ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What a device is called. eager, compiled: backends; options: of every command."""

    device: str
    eager: str
    compiled: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def target_of(device: str) -> Target:
    """Return the names of a device; the stand-in is a vendor's device, and compiles on the CPU."""
    if device != _STANDIN:
        names = f"eager-{device}", f"compile[inductor]@{device}"
        return Target(device, *names, environment={"FAULTS_DEVICE": device})
    own, plugin = "ampdev", "benchmarks.standin"
    inherited = {"AMP_FUZZ_PLUGINS": plugin, "AMP_FUZZ_DEVICE": own, "FAULTS_DEVICE": own}
    options = (f"--device={own}", f"--plugins={plugin}")
    return Target(own, f"eager-{own}", "compile[inductor]", options, inherited)


@dataclass(frozen=True)
class Step:
    """share: of the time that is left for it and the later ones. words: after the interpreter."""

    name: str
    what: str
    share: float
    words: tuple[str, ...]


def steps_of(target: Target, out: Path, workers: int) -> list[Step]:
    """Return the steps; ``{seconds}`` in the words is the time that a step has."""
    command, pytest = ("-m", "amp_fuzz"), ("-m", "pytest", "-q", "-m", "gpu")
    kept = (f"--store={out / 'store'}", f"--workers={workers}")
    run = (*command, "run", "--cases=100000", "--seconds={seconds}", "--minimize=10", *kept)
    audited = f"{target.eager},fake-cuda,privateuse1"
    return [
        Step("tests", "the tests marked gpu", 60, (*pytest, "tests/backends/test_accelerator.py")),
        Step(
            "honest",
            f"{target.eager} against the reference",
            90,
            (*run, f"--backends={target.eager}", f"--report={out / 'honest'}", *target.options),
        ),
        Step(
            "compiled",
            f"{target.compiled} against the reference",
            90,
            (*run, f"--backends={target.compiled}", f"--report={out / 'compiled'}"),
        ),
        Step(
            "audit",
            f"{target.eager} against its table, fake-cuda and privateuse1",
            120,
            (
                *(*command, "audit", f"--backends={audited}"),
                *(f"--report={out / 'audit'}", *kept, *target.options),
            ),
        ),
        Step(
            "faults",
            f"the CPU's seeded faults on {target.device}",
            90,
            (
                *("benchmarks/faults.py", f"--workers={workers}", "--seconds=8"),
                *("--budget={seconds}", f"--output={out / 'faults.json'}"),
            ),
        ),
        Step(
            "speed",
            f"cases a second on {target.eager}",
            40,
            (
                *("benchmarks/speed.py", f"--backend={target.eager}", "--cases=2000"),
                *("--seconds={seconds}", f"--output={out / 'speed.json'}"),
            ),
        ),
    ]


def performed(step: Step, seconds: float, environment: Mapping[str, str], out: Path) -> Row:
    """Run a step, and return how it ended. Its output is in a log."""
    own = max(seconds - _GRACE, 5.0)
    words = [word.replace("{seconds}", f"{own:.0f}") for word in step.words]
    start, stopped = time.monotonic(), False
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            stopped = True
            process.send_signal(signal.SIGINT)  # a command writes what it has
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        finally:
            _end(process)
    lines = (out / f"{step.name}.log").read_text(errors="replace").splitlines()
    return {
        "what": step.what,
        "command": " ".join(["python", *words]),
        "exit code": process.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "stopped": stopped,
        "said": [line[:300] for line in lines if line.strip()][-12:],
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a step and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- the results ----------------------------------------------------------------------------------


def facts(device: str) -> int:
    """Print what is here as JSON, and return an exit code."""
    import torch

    found: Row = {
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "built for": f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu",
    }
    here = torch.accelerator.current_accelerator(check_available=True)
    if device in ("", "auto"):
        device = here.type if here is not None else ""
    if device not in ("cuda", _STANDIN) or (device == "cuda" and not torch.cuda.is_available()):
        seen = f"torch {torch.__version__}, built for {found['built for']}"
        said = f"{seen}, sees no {device} device here" if device else f"{seen}, sees no device here"
        if here is not None and device not in ("cuda", ""):
            said = f"no backends for {device!r}"
        print(f"{said}: to try the command without one, make gpu DEVICE={_STANDIN}")
        return MISSING
    found["device"] = device
    if device == "cuda":
        found |= _cuda()
    names = ("numpy", "hypothesis", "pytest", "pandas", "click", "msgspec", "triton")
    found["versions"] = {name: version for name in names if (version := _version(name))}
    print(json.dumps(found))
    return 0


def _cuda() -> Row:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory GiB": round(properties.total_memory / 2**30, 1),
        "devices": torch.cuda.device_count(),
        "driver": _driver(),
        "cudnn": cudnn.version(),
        "flags": {
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "matmul TF32": matmul.allow_tf32,
            "cudnn TF32": cudnn.allow_tf32,
            "cudnn benchmark": cudnn.benchmark,
            "fp16 reduced-precision reduction": matmul.allow_fp16_reduced_precision_reduction,
            "bf16 reduced-precision reduction": matmul.allow_bf16_reduced_precision_reduction,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            **{name: os.environ.get(name, "") for name in ("CUBLAS_WORKSPACE_CONFIG",)},
        },
    }


def _driver() -> str:
    words = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def outcomes(store: Path) -> Row:
    """Return the counts of a store's cases by backend and outcome, its findings and incidents."""
    counts: dict[str, Counter[str]] = {}
    known: dict[str, Counter[str]] = {}
    incidents: list[str] = []
    for path in sorted(store.glob("runs/*/records-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # cut short
                continue
            if record.get("type") == "case":
                counts.setdefault(record["backend"], Counter())[record["outcome"]] += 1
                ids = record.get("known", "").split("+")
                known.setdefault(record["backend"], Counter()).update(filter(None, ids))
            elif record.get("type") == "incident":
                incidents.append(f"{record['backend']}: {record['kind']}: {record['detail']}")
    return {
        "outcomes": {name: dict(found) for name, found in counts.items()},
        "known": {name: dict(found.most_common()) for name, found in known.items()},
        "incidents": dict(Counter(incidents).most_common()),
        "findings": sorted(path.stem for path in store.glob("findings/*.json")),
    }


def cells(path: Path, device: str) -> Row:
    """Return the counts of an audit: by backend, and of the device against each other backend."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    status: dict[str, Counter[str]] = {}
    seen: dict[str, dict[tuple[str, ...], str]] = {}
    for row in rows:
        status.setdefault(row["backend"], Counter())[row["status"]] += 1
        call = tuple(row[name] for name in ("op", "call", "shapes", "autocast_dtype", "inputs"))
        seen.setdefault(row["backend"], {})[call] = row["observed"]
    ours = seen.pop(device, {})
    pairs: Row = {}
    for other, theirs in seen.items():
        counts: Counter[str] = Counter()
        differ: dict[str, Counter[str]] = {}
        for call in ours.keys() & theirs.keys():
            kind = _kind(ours[call], theirs[call], other)
            counts[kind] += 1
            if kind not in _ALIKE:
                said = f"{kind}: {ours[call]} | {theirs[call]}"
                differ.setdefault(call[0], Counter())[said] += 1
        rows_ = {op: dict(found.most_common(3)) for op, found in sorted(differ.items())}
        pairs[f"{device} | {other}"] = {"cells": dict(counts), "ops": rows_}
    return {"status": {name: dict(found) for name, found in status.items()}, "pairs": pairs}


_ALIKE = ("equal", "both raise", "the fake kernel says nothing")


def _kind(ours: str, theirs: str, other: str) -> str:
    from amp_fuzz.reports.conformance import _FAKE_ERRORS

    raises = ours.startswith("raises"), theirs.startswith("raises")
    if ours == theirs:
        return "equal"
    if all(raises):
        return "both raise"
    if other.startswith("fake-") and theirs in _FAKE_ERRORS:
        return "the fake kernel says nothing"
    if raises[0]:
        return "only the device raises"
    return "only the other raises" if raises[1] else "dtypes differ"


def _read(path: Path) -> Row:
    try:
        found: Row = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def table(result: Row) -> Iterator[str]:
    """Yield the lines that are printed at the end."""
    for name, step in result["steps"].items():
        ended = "stopped" if step["stopped"] else f"exit code {step['exit code']}"
        yield f"{name:10} {step['seconds']:6.1f} s  {ended:13} {step['what']}"
    for name, counts in result["runs"]["outcomes"].items():
        yield f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}"
    for pair, found in result["audit"].get("pairs", {}).items():
        yield f"{pair}: {', '.join(f'{n} {kind}' for kind, n in found['cells'].items())}"
    for section in ("semantic", "policy"):
        if rows := result["faults"].get(section, {}).get("faults"):
            found_ = sum(row["found"] for row in rows)
            yield f"faults, {section}: {found_} of {len(rows)} tried are found"
    if result["speed"].get("cases"):
        yield f"speed: {result['speed']['cases a second by the clock']} cases a second"
    yield f"findings: {len(result['runs']['findings'])}"


def main() -> int:
    """Run all steps, and return an exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--device", default="", help=f"cuda or {_STANDIN} (default: what is here)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps (default 9)")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-results", metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--only", default="", metavar="STEP,...", help="only these steps")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.facts:
        return facts(options.device)
    # A job in the background has Ctrl-C ignored, and so would be the steps, which it stops.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = time.monotonic() + options.minutes * 60 - _GRACE
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    out: Path = options.output.absolute()
    try:
        around = environment()
        here = _facts(options.device, around)
        out.mkdir(parents=True, exist_ok=False)
    except Missing as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return MISSING
    except FileExistsError:
        said = f"{out} is there already: move it, or choose another: make gpu OUT=FOLDER"
        print(f"make gpu: {said}", file=sys.stderr)
        return 2
    target = target_of(here["device"])
    print(
        f"{here.get('name', here['device'])}, torch {here['torch']}: results in {out}", flush=True
    )
    steps = steps_of(target, out, options.workers)
    if options.only:
        chosen = options.only.split(",")
        if unknown := set(chosen) - {step.name for step in steps}:
            parser.error(f"no step {', '.join(unknown)}: use {', '.join(s.name for s in steps)}")
        steps = [step for step in steps if step.name in chosen]
    result: Row = {"began": began, "commit": _commit(), **here, "minutes": options.minutes}
    result["steps"] = {}
    for number, step in enumerate(steps):
        left = deadline - time.monotonic()
        seconds = left * step.share / sum(other.share for other in steps[number:])
        print(f"{step.name}: {step.what}, at most {seconds:.0f} s", flush=True)
        # What compiles is no vendor's device.
        more = {} if step.name == "compiled" else target.environment
        around_step = {**around, **more}
        result["steps"][step.name] = performed(step, seconds - _GRACE, around_step, out)
        result["runs"] = outcomes(out / "store")
        result["audit"] = cells(out / "audit" / "audit.csv", target.eager)
        result["faults"] = _read(out / "faults.json")
        result["speed"] = _read(out / "speed.json")
        (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    result["seconds"] = round(time.monotonic() - deadline + options.minutes * 60 - _GRACE, 1)
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(result)), flush=True)
    print(f"{result['seconds']:.0f} s, results: {out}")
    return int(any(s["exit code"] and not s["stopped"] for s in result["steps"].values()))


def _facts(device: str, around: Mapping[str, str]) -> Row:
    """Return what another process says of this machine. Raises `Missing`."""
    words = (sys.executable, __file__, "--facts", f"--device={device}")
    done = subprocess.run(words, env=dict(around), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(done.stdout.strip() or done.stderr.strip())
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _commit() -> str:
    words = ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
