"""The interpreters of other Debian releases, in file systems and PID namespaces of their own; and one without a GIL."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from whyspan.code.layouts import SUPPORTED
from whyspan_probes.registry import Found, discover

from tests import freethreaded, roots
from tests.bpf.box import ENTER
from tests.bpf.stalls import SCRIPT, hold, run, sampled
from tests.bpf.waiting import until
from tests.conftest import required_tiers

pytestmark = pytest.mark.bpf  # needs root; root folders are made here, no inference server is needed

T = TypeVar("T")
EACH_S = 0.25
#: The interpreter of the unstable release is another one from time to time.
ROLLING = "sid"

SPINNING = """
import sys, threading
def spinning():
    while True:
        pass
threading.Thread(target=spinning, daemon=True).start()
print("ready", flush=True)
spinning()
"""


def made(make: Callable[[], T], *, required: bool = True) -> T:
    """What is cached, or made now; without it the test is skipped, unless the tier is required."""
    try:
        return make()
    except roots.RootsError as e:
        if required and "engine" in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def samples() -> Found:
    (found,) = (f for f in discover() if f.probe.name == "samples")
    return found


def boxed(root: Path, folder: Path, *command: str) -> list[str]:
    """A command in a root folder, whose writes go to *folder*, and in a PID namespace: a child of what this is."""
    spaces = ("unshare", "--pid", "--mount", "--fork", "--kill-child")
    return [*spaces, "sh", "-c", ENTER, "sh", str(root), str(folder), *command]


@pytest.mark.parametrize("suite", roots.SUITES)
def test_other_releases(suite: str, samples: Found, tmp_path: Path) -> None:
    # What is unstable cannot always be installed.
    root = made(lambda: roots.root(suite), required=suite != ROLLING)
    (tmp_path / "upper").mkdir()
    shutil.copy(SCRIPT, tmp_path / "upper")
    program = (root / "usr/bin/python3").resolve()
    version = (3, int(program.name.removeprefix("python3.")))
    if suite == ROLLING and version not in SUPPORTED:
        pytest.skip(f"{suite} has {program.name}, which is not supported yet")
    command = boxed(root, tmp_path, "/usr/bin/python3", f"/{SCRIPT.name}")
    ran = run(samples, command, EACH_S, child=True)
    assert ran.version == version
    hold(ran)
    assert {c[1] for t in ran.told for c in t["callers"]} >= {f"/{SCRIPT.name}"}


def test_one_without_a_global_lock_is_not_walked_and_says_so(samples: Found) -> None:
    if not freethreaded.made():
        pytest.skip("five minutes of compiling: `python -m tests.freethreaded` makes it once")
    program = made(freethreaded.interpreter)
    with sampled(samples, [str(program), "-c", SPINNING]) as one:

        def seen() -> bool:
            one.drain()
            return len({s.tid for s in one.samples()}) == 2 and len(one.samples()) > 100

        until(seen, "samples of both threads")
        assert one.problem(one.process.pid) == (
            f"CPython {freethreaded.VERSION} without a global lock is not supported"
        )
        stacks = [s.stack for s in one.samples() if s.stack is not None]
        assert len(stacks) > 100 and not any(s.python for s in stacks)
        assert one.process.poll() is None
