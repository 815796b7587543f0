"""samples and waits: stacks of Python as the interpreter itself says them, on this kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from whyspan.code.stacks import Stacks
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Schema

from tests.bpf.stalls import SCRIPT, hold, run, sampled
from tests.bpf.waiting import until

pytestmark = pytest.mark.bpf

#: How long each stall lasts.
EACH_S = 0.2


def pythons() -> list[str]:
    """Return the interpreters that are here, Debian's own and pyenv's; those of other releases are tried in
    tests/engine/test_other_pythons.py."""
    found = [p for p in ("/usr/bin/python3", sys._base_executable) if Path(p).exists()]  # type: ignore[attr-defined]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found += [str(p) for p in sorted(root.glob("versions/3.1[1-4].*/bin/python3"))]
    return list({os.path.realpath(p): p for p in found}.values())


BLOCKED = """
import os, queue, sys, threading, time
lock, q, (r, w) = threading.Lock(), queue.Queue(), os.pipe()
lock.acquire()
def locked(): lock.acquire()
def queued(): q.get()
def piped(): os.read(r, 1)
for f in (locked, queued, piped):
    threading.Thread(target=f, daemon=True).start()
print("ready", flush=True)
def sleeper(n):
    return sleeper(n - 1) if n else sys.stdin.readline()
sleeper(3)
"""


@pytest.mark.parametrize("python", pythons())
def test_samples_name_the_function_and_the_line(python: str, probes: dict[str, Found]) -> None:
    ran = run(probes["samples"], [python, str(SCRIPT)], EACH_S)
    judged = hold(ran)
    holding = sum(s.aux & 1 for s in ran.samples)
    assert holding > 0.8 * judged.samples


@pytest.mark.parametrize("frozen", ["on", "off"])
def test_frames_of_modules_that_are_frozen(frozen: str, probes: dict[str, Found]) -> None:
    """``-m`` runs the script below frames of runpy, which is part of the program or read from its file."""
    command = ["env", f"PYTHONPATH={SCRIPT.parent}", sys.executable, "-X", f"frozen_modules={frozen}"]
    ran = run(probes["samples"], [*command, "-m", SCRIPT.stem], EACH_S)
    hold(ran)
    (files,) = {
        tuple(dict.fromkeys(c[1] for c in t["callers"][-2:])) for t in ran.told if t["name"] == "plain"
    }
    assert (files == ("<frozen runpy>",)) == (frozen == "on")


EMBEDDER = r"""
#include <Python.h>
int main(int argc, char **argv)
{
	FILE *script = argc > 1 ? fopen(argv[1], "r") : NULL;
	PyConfig config;
	if (!script)
		return 2;
	PyConfig_InitPythonConfig(&config);
	config.parse_argv = 0;
	PyConfig_SetBytesArgv(&config, argc - 1, argv + 1);
	if (PyStatus_Exception(Py_InitializeFromConfig(&config)))
		return 3;
	return PyRun_SimpleFileExFlags(script, argv[1], 1, NULL);
}
"""


@pytest.mark.parametrize("linked", ["shared", "static"])
def test_an_interpreter_within_another_program(linked: str, tmp_path: Path, probes: dict[str, Found]) -> None:
    """Debian's interpreter as a library, or as part of a program that is not called python."""
    config = shutil.which("python3-config", path="/usr/bin")
    compiler = shutil.which("cc") or shutil.which("g++")
    if config is None or compiler is None:
        pytest.skip("needs python3-dev and a C compiler")
    version = subprocess.check_output(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    )
    library = f"libpython{version.decode().strip()}"
    flags = subprocess.check_output([config, "--embed", "--cflags", "--ldflags"], text=True).split()
    if linked == "static":
        flags = [f"-l:{library}.a" if f == f"-l{library[3:]}" else f for f in flags] + [
            "-lz",
            "-lexpat",
            "-rdynamic",
            "-no-pie",
        ]
    source, program = tmp_path / "served.c", tmp_path / "served"
    source.write_text(EMBEDDER)
    subprocess.run([compiler, "-x", "c", str(source), "-x", "none", "-o", str(program), *flags], check=True)
    hold(run(probes["samples"], [str(program), str(SCRIPT)], EACH_S))


FORKED = """
import os, sys, time
def child():
    print("ready", flush=True)
    while True:
        pass
if os.fork() == 0:
    child()
sys.stdin.read()
"""


@pytest.mark.parametrize("python", pythons())
def test_a_child_that_was_forked_knows_its_own_thread(python: str, probes: dict[str, Found]) -> None:
    with sampled(probes["samples"], [python, "-c", FORKED], child=True) as one:

        def seen() -> bool:
            one.drain()
            return len(one.samples()) > 20

        until(seen, "samples of the child")
        named = {tuple(f.function for f in s.stack.python) for s in one.samples() if s.stack}
    assert named == {("child", "<module>")}


def test_blocked_threads_are_told_once_where_they_are(probes: dict[str, Found]) -> None:
    session = Session([probes["waits"]], 1 << 20)
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        session.attach(config={"waits": {"min_ns": 20_000_000}})
        state = session.probes[0].state
        if state.state != "attached":
            pytest.skip(state.reason)
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        stacks, schema, rows = Stacks(session.maps), Schema(session.event_types()), RowBuffer()
        session.maps.watch(child.pid, 0)
        stacks.follow([child.pid], time.monotonic())
        named: dict[int, list[str]] = {}
        kernel: dict[int, list[str]] = {}

        def look() -> bool:
            session.probes[0].walk("look", [child.pid])
            for ring in session.maps.rings:
                ring.drain(rows)
            facts = {f.id: f for f in stacks.take()}
            for row in schema.select(rows.take(), "wait_stack"):
                tid = int(row["tid"])
                assert tid not in named, "told twice in one block"
                fact = facts[int(row["stack"])]
                named[tid] = [f.function for f in fact.python]
                kernel[tid] = fact.kernel
            return len(named) == 4

        until(look, "four blocked threads")
        innermost = {names[0] for names in named.values()}
        # Queue.get waits in Condition.wait unless it is written in C.
        assert innermost - {"Queue.get", "Condition.wait"} == {"locked", "piped", "sleeper"}
        assert named[child.pid] == ["sleeper"] * 4 + ["<module>"]
        assert any("futex" in name for k in kernel.values() for name in k)
        for _ in range(5):
            session.probes[0].walk("look", [child.pid])
        assert len(named) == 4
        assert child.poll() is None
        # A thread that has moved on, and blocks anew, is told again.
        child.communicate("\n")
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
        session.close()


def test_a_process_that_is_gone_is_walked_over_for_nothing(probes: dict[str, Found]) -> None:
    session = Session([probes["waits"]], 1 << 20)
    try:
        session.attach()
        session.probes[0].walk("look", [2**22 - 1])
        assert session.probes[0].state.state in ("attached", "failed")
    finally:
        session.close()
