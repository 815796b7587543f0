"""Hosts that lack something: an old libbpf, the privilege, tracefs. One clear line each, and what can still run."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from whyspan_probes import features
from whyspan_probes.libbpf import MIN_VERSION
from whyspan_probes.registry import discover

pytestmark = pytest.mark.bpf

WHYSPAN = str(Path(sys.executable).with_name("whyspan"))
#: Attaches everything and prints the states.
ATTACH = """
import json
from dataclasses import asdict
from whyspan_probes.loader import Session
from whyspan_probes.registry import discover
session = Session(discover(), 1 << 16)
try:
    session.attach()
    print(json.dumps({p.state.name: asdict(p.state) for p in session.probes}))
finally:
    session.close()
"""
#: Runs a command as root without any capability, and as nobody.
WITHOUT_PRIVILEGE = {
    "no capability": ["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
    "nobody": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"],
}


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd="/", env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def old_libbpf() -> str:
    """The system's libbpf, if it is older than what the probes need."""
    name = "libbpf.so.1"
    try:
        lib = ctypes.CDLL(name)
    except OSError:
        pytest.skip(f"no {name} here")
    version = (lib.libbpf_major_version(), lib.libbpf_minor_version())
    if version >= MIN_VERSION:
        pytest.skip(f"the system's libbpf is {version[0]}.{version[1]}: new enough")
    return name


def test_an_old_libbpf_is_refused_in_one_line(old_libbpf: str, tmp_path: Path) -> None:
    done = run(sys.executable, "-c", ATTACH, WHYSPAN_LIBBPF=old_libbpf)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("whyspan_probes.errors.LibbpfMissingError: no libbpf >= 1.3 found (")
    assert f"{old_libbpf}: version 1." in last
    done = run(WHYSPAN, "run", "--state-dir", str(tmp_path), WHYSPAN_LIBBPF=old_libbpf)
    assert done.returncode == 3
    errors = [line for line in done.stderr.splitlines() if "no libbpf >= 1.3" in line]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr


def test_a_library_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "libnone.so"
    path.write_text("not a library")
    done = run(sys.executable, "-c", ATTACH, WHYSPAN_LIBBPF=str(path))
    assert "LibbpfMissingError: no libbpf >= 1.3 found" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("who", list(WITHOUT_PRIVILEGE))
def test_without_privilege_one_line_says_so(who: str) -> None:
    drop = WITHOUT_PRIVILEGE[who]
    if run(*drop, sys.executable, "-c", "import whyspan_probes").returncode:
        pytest.skip(f"{sys.executable} is out of reach of {who}")
    done = run(*drop, sys.executable, "-c", ATTACH)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("PermissionError", "whyspan_probes.errors.PrivilegeError")), done.stderr
    with tempfile.TemporaryDirectory() as state:  # pytest's own folders are closed to others
        Path(state).chmod(0o777)
        done = run(*drop, WHYSPAN, "run", "--state-dir", state)
    assert done.returncode == 3, done.stderr
    errors = [line for line in done.stderr.splitlines() if " ERROR whyspan.collector: " in line]
    assert len(errors) == 1, done.stderr
    assert "CAP_BPF" in errors[0]
    assert "Traceback" not in done.stderr


def test_without_tracefs_the_probes_that_need_it_say_so() -> None:
    mounted = features.tracefs()
    assert mounted  # a fixture saw to that
    script = f'while umount "{mounted}" 2>/dev/null; do :; done; exec "$@"'
    done = run("unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", ATTACH)
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    # They hook system calls: what tracepoints do not see is left to fentry and kprobes, where the kernel has these.
    on_calls = {"edges", "descriptors"}
    for name in on_calls:
        p = states[name]
        refusals = [p["reason"], *(why for hook in p["hooks"].values() for why in hook["refused"])]
        assert any("tracepoint/syscalls/" in why and "tracefs is not mounted" in why for why in refusals), p
        assert p["state"] == ("attached" if any(h["used"] for h in p["hooks"].values()) else "failed"), p
    assert {n: s["state"] for n, s in states.items() if n not in on_calls} == {
        f.probe.name: "attached" if f.probe.hooks else "waiting"
        for f in discover()
        if f.probe.name not in on_calls
    }
    assert features.tracefs() == mounted  # only the other mount namespace lost it
