"""``whyspan doctor`` and ``whyspan probes``: without privilege, without an agent, and for real."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from whyspan import cli
from whyspan.doctor import attach, kernel, privileges
from whyspan.doctor import report as report_module
from whyspan.doctor.check import State
from whyspan_exporters.records import Status
from whyspan_exporters.store import Store
from whyspan_probes import libbpf
from whyspan_probes.errors import LibbpfMissingError, PrivilegeError
from whyspan_probes.features import Features
from whyspan_probes.registry import discover
from whyspan_probes.state import HEALTHY, FileState

from tests.unit.doctor import facts

Run = Callable[..., "tuple[int, str, str]"]

NAMES = [f.probe.name for f in discover()]
FINE = Features("6.12.0", True, "none", "/sys/kernel/tracing", frozenset({"CAP_BPF", "CAP_PERFMON"}))
BARE = Features("5.10.0-9", False, "confidentiality", "", frozenset(), False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command line as its entry point does; returns exit status, standard output and error."""
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    monkeypatch.setenv("WHYSPAN_OVERRIDES", json.dumps({"run": {"state_dir": str(tmp_path / "state")}}))

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return call


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host look like one without capabilities; loading anything fails the test."""
    monkeypatch.setattr(report_module, "read_features", lambda: FINE._replace(capabilities=frozenset()))
    nothing = privileges.Rights(0, frozenset(), False, 0)
    monkeypatch.setattr(privileges, "_rights", lambda *_: nothing)
    monkeypatch.setattr("whyspan_probes.loader.Session", lambda *_, **__: pytest.fail("tried to load"))


def _checks(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {c["id"]: c for c in report["checks"]}


def test_doctor_without_privilege(run: Run, unprivileged: None) -> None:
    status, out, err = run("doctor", "--json")
    report = json.loads(out)
    assert (status, err, report["healthy"], report["state"]) == (4, "", False, "failed")
    assert report["exit_status"] == 4
    checks = _checks(report)
    assert checks["privilege.load"] == {
        "id": "privilege.load",
        "title": "may load probes",
        "state": "failed",
        "found": "neither CAP_BPF nor CAP_PERFMON",
        "lacks": "no program loads",
        "remedy": "run as root, or grant CAP_BPF and CAP_PERFMON",
    }
    assert [i for i, c in checks.items() if c["state"] == "failed"] == ["privilege.load"]
    assert [p["name"] for p in report["probes"]] == NAMES
    assert {p["state"] for p in report["probes"]} == {"unknown"}
    for p in report["probes"]:
        assert "no privilege to load programs" in p["reason"] or "not built" in p["reason"]
        assert checks[f"probe.{p['name']}"]["state"] == "unknown"


def test_doctor_in_words(run: Run, unprivileged: None) -> None:
    status, out, _ = run("doctor")
    assert status == 4
    lines = [ln.split() for ln in out.splitlines()]
    at = next(i for i, words in enumerate(lines) if words[:1] == ["NO"])
    assert [" ".join(words) for words in lines[at : at + 3]] == [
        "NO may load probes neither CAP_BPF nor CAP_PERFMON",
        "lost: no program loads",
        "do: run as root, or grant CAP_BPF and CAP_PERFMON",
    ]
    assert ["ok", "kernel", "6.12.0"] in lines  # what is fine has nothing to do
    for name in NAMES:
        assert any(ln.startswith(f"{name} ") and "no privilege" in ln for ln in out.splitlines())
    assert out.splitlines()[-1] == "whyspan does not work here: see NO above."


def test_doctor_names_every_lack_with_its_remedy(
    run: Run, unprivileged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise LibbpfMissingError("no libbpf >= 1.3: set WHYSPAN_LIBBPF")

    monkeypatch.setattr(report_module, "read_features", lambda: BARE)
    monkeypatch.setattr(libbpf, "libbpf", missing)
    monkeypatch.setattr(attach, "states", lambda *_, **__: [])
    checks = _checks(json.loads(run("doctor", "--json")[1]))
    failed = [i for i, c in checks.items() if c["state"] == "failed"]
    assert {"kernel.version", "kernel.lockdown", "privilege.pid_namespace", "install.libbpf"} <= set(failed)
    assert checks["kernel.tracefs"]["state"] == "limited"
    assert checks["install.libbpf"]["found"] == "no libbpf >= 1.3: set WHYSPAN_LIBBPF"
    assert all(c["remedy"] and c["lacks"] for c in checks.values() if c["state"] in ("failed", "limited"))


@pytest.mark.parametrize(
    ("release", "ok"), [("5.16.9", False), ("5.17.0-rc1", True), ("6.1.0", True), ("x", False)]
)
def test_doctor_knows_the_oldest_kernel(release: str, ok: bool) -> None:
    found = facts.KERNEL._replace(features=FINE._replace(kernel=release))
    assert (kernel.checks(found)[0].state is State.OK) is ok


def test_doctor_no_attach_only_looks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "read_features", lambda: FINE)
    monkeypatch.setattr("whyspan_probes.loader.Session", lambda *_, **__: pytest.fail("tried to load"))
    report = json.loads(run("doctor", "--no-attach", "--json")[1])
    assert {p["reason"] for p in report["probes"] if "not built" not in p["reason"]} <= {"not tried"}


@pytest.mark.parametrize(
    "error", [PrivilegeError("refused"), PermissionError(1, "refused"), OSError(12, "refused")]
)
def test_doctor_when_the_kernel_refuses(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(report_module, "read_features", lambda: FINE)
    monkeypatch.setattr("whyspan_probes.loader.Session", refuse)
    status, out, err = run("doctor", "--json")
    report = json.loads(out)
    assert (status, err) == (4, "")  # no programs, no paths
    assert all("refused" in p["reason"] or "not built" in p["reason"] for p in report["probes"])


def test_doctor_finds_servers(run: Run, unprivileged: None) -> None:
    child = subprocess.Popen(["/opt/bin/llama-server", "300"], executable="/bin/sleep")
    try:
        report = json.loads(run("doctor", "--json")[1])
        (found,) = (e for e in report["engines"] if e["tgid"] == child.pid)
        assert (found["service"], found["rule"], found["vpid"]) == ("llama.cpp", "command line", 0)
        assert (found["container_id"], found["pod_uid"], found["maps"]) == ("", "", "")
        program, *libraries = found["libraries"]
        assert program["path"] == os.path.realpath("/bin/sleep")
        assert all(lib["state"] == "" for lib in found["libraries"])
        (libc,) = libraries
        assert libc["path"].endswith("/libc.so.6")
        assert len(libc["build_id"]) == 40
        out = run("doctor")[1]
        (line,) = (ln for ln in out.splitlines() if ln.startswith(f"{child.pid} "))
        assert line.split()[1:5] == ["llama.cpp", "command", "line", "-"]
        assert f"libc.so.6 ({libc['build_id'][:8]})" in line
    finally:
        child.kill()
        child.wait()


def test_doctor_with_a_wrong_configuration(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[targets]\nautomatic = true\n")
    status, out, err = run("doctor", "--config", path)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "targets.automatic" in err


@pytest.mark.bpf
def test_doctor_really_attaches(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if not all(f.object_path.exists() for f in discover()):
        pytest.skip("the probes are not built: run `make build`")
    status, out, _ = run("doctor", "--json")
    report = json.loads(out)
    states = {p["name"]: p["state"] for p in report["probes"]}
    assert list(states) == NAMES
    assert states["sched"] in ("attached", "partial")
    found = {c["state"] for c in [*report["checks"], *(c for e in report["engines"] for c in e["checks"])]}
    assert status == (4 if "failed" in found else 3 if found & {"limited", "unknown"} else 0)
    assert report["healthy"] is (status == 0)
    checks = _checks(report)
    assert all(s in HEALTHY for name, s in states.items() if checks[f"probe.{name}"]["state"] == "ok")
    for p in report["probes"]:
        if p["state"] == "attached":
            kernel = [h.name for f in discover() if f.probe.name == p["name"] for h in f.probe.hooks]
            assert all(p["hooks"][name]["used"] for name in kernel)
        else:
            assert p["reason"]
    # Nothing stays attached: no program of ours is held by this process any more.
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not [link for link in held if link.startswith("anon_inode:") and "bpf" in link]


def test_probes_without_a_store(run: Run) -> None:
    status, out, err = run("probes", "--json")
    report = json.loads(out)
    assert (status, err, report["status"]) == (0, "", {})
    assert [p["name"] for p in report["probes"]] == NAMES
    for row, found in zip(report["probes"], discover(), strict=True):
        p = found.probe
        assert (row["state"], row["hits_per_s"], row["drops"]) == ("not running", 0.0, 0)
        assert (row["title"], row["cost"], row["joins"], row["needs"]) == (p.title, p.cost, p.joins, p.needs)
        assert row["events"] == {k: dict(v) for k, v in p.events.items()}
        assert set(row["hooks"]) == set(p.hook_names())


def test_probes_in_words_with_fields(run: Run) -> None:
    status, out, _ = run("probes", "--fields")
    assert status == 0
    assert out.count("not running") == len(NAMES)
    flat = " ".join(out.split())
    for found in discover():
        for event, fields in found.probe.events.items():
            assert event in flat
            for name, text in fields.items():
                assert f"{name} {' '.join(text.split())}" in flat
    assert "aux" not in run("probes")[1]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with what a running agent has just said of itself."""
    path = tmp_path / "s.db"
    sink = Store(path, max_age_ns=10**18, max_bytes=64 << 20)
    state = {
        "name": "sched",
        "state": "partial",
        "reason": "an optional hook \x1b[31mis missing",
        "hooks": {"switch": {"used": ["tp_btf/sched_switch"], "refused": []}},
        "hits_per_s": 12345.6,
        "ns_per_hit": 321.4,
        "core_ratio": 0.00397,
        "drops": 7654321,
    }
    files = [
        FileState("mark", "/a/whyspan_inproc/_marker.abi3.so", "attached", "uprobe.multi", "", ["f"], [7, 8]),
        FileState("mark", "/b\x1b/whyspan_inproc/_marker.abi3.so", "refused", "", "a reason"),
    ]
    marker = {"name": "marker", "state": "partial", "reason": "r", "files": [asdict(f) for f in files]}
    ghost = {"name": "no_such_probe", "state": "attached"}
    report = {
        "probes": [state, marker, ghost, "junk"],
        "bpf_core_ratio": 0.0123,
        "target_cores": 1.5,
        "events": 1234567,
    }
    sink.emit([Status("i", report)])
    assert sink.flush() == ""
    sink.close()
    return path


def test_probes_of_a_running_agent(run: Run, store: Path) -> None:
    status, out, _ = run("probes", "--store", store, "--json")
    report = json.loads(out)
    rows = {r["name"]: r for r in report["probes"]}
    assert status == 0
    assert list(rows) == NAMES
    assert (rows["sched"]["state"], rows["sched"]["drops"]) == ("partial", 7654321)
    assert rows["sockets"]["state"] == "not running"
    assert report["status"]["events"] == 1234567
    out = run("probes", "--store", store)[1]
    (line,) = (ln for ln in out.splitlines() if ln.startswith("sched "))
    assert "partial: an optional hook \\x1b[31mis missing" in line
    assert line.split()[-5:] == ["tp_btf/sched_switch", "12,346", "321", "0.397", "7,654,321"]
    assert "\x1b" not in out
    lines = [" ".join(ln.split()) for ln in out.splitlines() if ln.startswith("marker ")]
    assert lines[-2:] == [
        "marker mark /a/whyspan_inproc/_marker.abi3.so attached by uprobe.multi 7, 8",
        "marker mark /b\\x1b/whyspan_inproc/_marker.abi3.so refused: a reason",
    ]
    assert "probes 1.23% and collector 0.00% of a core" in " ".join(out.split())
    assert "1,234,567 events since the start" in out


def test_probes_with_a_store_that_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database" * 100)
    status, out, _ = run("probes", "--store", tmp_path / "x.db")
    assert status == 0
    assert "not running" in out
