"""The tier ``bpf`` in a guest, with what must have run there: ``python -m tests.vm.tier --kernel 6.1 [--smoke]``.

``tier.toml`` names the files and how many of their tests pass and are skipped on each kernel. A guest in which fewer
pass, more are skipped, or that says nothing, fails. What it did goes to ``build/vm/kernel-SERIES.json``; a smoke run or
one of some files adds to what is there of the same kernel. A file marked "not run" runs when it is named only.
``--here`` runs the same files on the kernel of this host, for the support matrix.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vm import guest
from tests.vm.kernels import SERIES, KernelsError, kernel
from tests.vm.rootdisk import REPOSITORY, RootDiskError

TABLE = Path(__file__).with_name("tier.toml")
RESULTS = REPOSITORY / "build" / "vm"
#: Deadlines of the tests are stretched so much; nothing is asked to be fast there.
SLOW = 30
#: In the table: how a file's tests end on a kernel is not known.
NOT_RUN = "not run"
ANY = 1000  # skips
_TEST_TIMEOUT_S = 1200
_PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
}  # those that are needed are named; two thirds of pytest's start
#: A guest is given up after these; a smoke run takes a third of its time where nothing else runs.
TIMEOUT_S = {True: 2700, False: 10800}


@dataclasses.dataclass(frozen=True)
class Expected:
    """How the tests of one file end on one kernel."""

    path: str
    passed: int
    skipped: int = 0
    why: str = ""  # of the skips
    deselect: tuple[str, ...] = ()  # starts of tests' names


@dataclasses.dataclass(frozen=True)
class Seen:
    """How one test ended: passed, skipped, failed."""

    path: str
    name: str
    outcome: str
    reason: str = ""
    s: float = 0.0


def expected(
    series: str, smoke: bool, table: Mapping[str, Any] | None = None, only: Sequence[str] = ()
) -> list[Expected]:
    """Return what the table says of a kernel, in its order; with *smoke* only what it marks so, by its own counts.

    *only*: parts of paths. A file so named is taken without a count where the table has none.
    """
    rows = tomllib.loads(TABLE.read_text()) if table is None else table
    out = []
    for path, row in rows.items():
        cell = row["smoke"] if smoke and isinstance(row.get("smoke"), dict) else row.get(series, NOT_RUN)
        named = any(part in path for part in only)
        if (smoke and not row.get("smoke")) or (only and not named) or (cell == NOT_RUN and not named):
            continue
        if cell == NOT_RUN:
            cell = {"passed": 0, "skipped": ANY}
        without = (*row.get("deselect", ()), *cell.get("without", ()))
        out.append(Expected(path, cell["passed"], cell.get("skipped", 0), cell.get("why", ""), without))
    return out


def read_junit(path: Path) -> list[Seen]:
    """Return the tests of pytest's report, in its order; none when there is no report, or half of one."""
    try:
        cases = list(ET.parse(path).iter("testcase"))
    except (OSError, ET.ParseError):
        return []
    out = []
    for case in cases:
        bad, skip = next((c for c in case if c.tag in ("failure", "error")), None), case.find("skipped")
        which = "failed" if bad is not None else "skipped" if skip is not None else "passed"
        said = bad if bad is not None else skip
        reason = " ".join((said.get("message") or "").split())[:300] if said is not None else ""
        file = (case.get("classname") or "").replace(".", "/") + ".py"
        out.append(Seen(file, case.get("name") or "", which, reason, float(case.get("time") or 0)))
    return out


def problems(must: Iterable[Expected], seen: Sequence[Seen]) -> list[str]:
    """Return what is wrong with a run, one line each; empty when all that must pass did."""
    out = [f"{s.path}::{s.name} failed: {s.reason}" for s in seen if s.outcome == "failed"]
    for e in must:
        mine = [s for s in seen if s.path == e.path]
        passed = sum(s.outcome == "passed" for s in mine)
        skips = [s for s in mine if s.outcome == "skipped"]
        if passed < e.passed:
            out.append(f"{e.path}: {passed} passed, the table says {e.passed}")
        if len(skips) > e.skipped:
            said = "; ".join(sorted({f"{s.name}: {s.reason}" for s in skips}))
            out.append(f"{e.path}: {len(skips)} skipped, the table says {e.skipped} ({said})")
    return out


def _pytest(must: Sequence[Expected], report: str) -> list[str]:
    options = ["-v", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "tests.vm.telling"]
    options += ["-o", f"timeout={_TEST_TIMEOUT_S}", f"--junitxml={report}"]
    options += [f"--deselect={e.path}::{name}" for e in must for name in e.deselect]
    return [str(REPOSITORY / ".venv/bin/python"), "-m", "pytest", *options, *(e.path for e in must)]


def added(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's result with what an earlier run on the same kernel says of other tests and alternatives."""
    if old.get("release") != new["release"]:
        return dict(new)
    tests, hooks = ("path", "name"), ("probe", "hook", "alternative")
    both = {
        key: [*{tuple(row[f] for f in fields): row for row in (*old[key], *new[key])}.values()]
        for key, fields in (("tests", tests), ("alternatives", hooks))
    }
    return {**new, **both, "smoke": new["smoke"] and old["smoke"]}


def _write(
    name: str, facts: dict[str, Any], seen: Sequence[Seen], report: Path, wrong: list[str], *, part: bool
) -> None:
    """Write what a run did; the same keys for guests and for the host."""
    what = {
        "kernel": name,
        **facts,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "problems": wrong,
        "tests": [dataclasses.asdict(s) for s in seen],
        "alternatives": json.loads(report.read_text())["rows"] if report.is_file() else [],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"kernel-{name}.json"
    if part and path.is_file():
        what = added(json.loads(path.read_text()), what)
    path.write_text(json.dumps(what, indent=1) + "\n")


def run_guest(
    series: str, *, smoke: bool = False, only: Sequence[str] = (), show: Callable[[str], object] | None = None
) -> list[str]:
    """Run the tier in a guest of a series and return the problems; *only* takes files by parts of their paths.

    Raises:
        GuestError, KernelsError, RootDiskError: there was no run.
    """
    must = expected(series, smoke, only=only)
    if not must:
        return [f"the table has no file for {series}"]
    chosen, out = kernel(series), RESULTS / f"out-{series}"
    ended = guest.run(
        chosen,
        _pytest(must, f"{guest.OUT}/junit.xml"),
        out,
        timeout_s=TIMEOUT_S[smoke],
        env={
            "WHYSPAN_REQUIRE": "bpf",
            "WHYSPAN_SLOW": str(SLOW),
            "WHYSPAN_VM_REPORT": f"{guest.OUT}/alternatives.json",
            **_PLUGINS,
        },
        show=show,
    )
    seen = read_junit(out / "junit.xml")
    wrong = problems(must, seen)
    if not wrong and ended.status:
        wrong = [f"pytest ended with {ended.status}"]
    facts = {
        "release": chosen.release,
        "smoke": smoke,
        "boot_s": round(ended.boot_s, 1),
        "ran_s": round(ended.ran_s, 1),
    }
    _write(series, facts, seen, out / "alternatives.json", wrong, part=smoke or bool(only))
    return wrong


def run_here(only: Sequence[str] = ()) -> list[str]:
    """Run the files of the table on this host's kernel and return what failed."""
    paths = [*tomllib.loads(TABLE.read_text())]
    must = [Expected(p, 0, ANY) for p in paths if not only or any(part in p for part in only)]
    out = RESULTS / "out-here"
    out.mkdir(parents=True, exist_ok=True)
    junit, report = out / "junit.xml", out / "alternatives.json"
    for old in (junit, report):
        old.unlink(missing_ok=True)
    began = time.monotonic()
    done = subprocess.run(
        _pytest(must, str(junit)),
        cwd=REPOSITORY,
        env={**os.environ, **_PLUGINS, "WHYSPAN_REQUIRE": "bpf", "WHYSPAN_VM_REPORT": str(report)},
        check=False,
    )
    seen = read_junit(junit)
    wrong = problems(must, seen) or ([f"pytest ended with {done.returncode}"] if done.returncode else [])
    facts = {"release": os.uname().release, "smoke": False, "ran_s": round(time.monotonic() - began, 1)}
    _write("here", facts, seen, report, wrong, part=bool(only))
    return wrong


def main() -> int:
    """Run what the command line says; 1 when something is wrong with it."""
    parser = argparse.ArgumentParser(description="The tier bpf in a guest with a stock kernel.")
    parser.add_argument("--kernel", choices=sorted(SERIES), default="6.12")
    parser.add_argument("--smoke", action="store_true", help="only what the table marks so")
    parser.add_argument("--here", action="store_true", help="on this host's kernel instead")
    parser.add_argument("only", nargs="*", help="parts of paths of files")
    given = parser.parse_args()
    try:
        if given.here:
            wrong = run_here(given.only)
        else:
            reason = guest.lacking()
            if reason:
                raise guest.GuestError(reason)
            wrong = run_guest(
                given.kernel,
                smoke=given.smoke,
                only=given.only,
                show=lambda text: print(text, end="", flush=True),
            )
    except (guest.GuestError, KernelsError, RootDiskError) as e:
        wrong = [str(e)]
    for line in wrong:
        print(f"tier: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
