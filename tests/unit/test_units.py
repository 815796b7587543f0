"""The units: systemd takes them, and they are as closed as SECURITY.md says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.capabilities import CAPABILITIES

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "packaging/systemd"
NAMES = ("whyspan", "whyspan-exporter")
SECURITY = (ROOT / "SECURITY.md").read_text()


@pytest.fixture(scope="module")
def analyze() -> str:
    """The program; skips where there is none."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("needs systemd-analyze")
    return found


def settings(path: Path) -> dict[str, list[str]]:
    """Return what a unit sets, every key with all its values."""
    out: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            out.setdefault(key, []).append(value)
    return out


def test_systemd_takes_them(analyze: str, tmp_path: Path) -> None:
    for name in NAMES:
        text = (UNITS / f"{name}.service").read_text()
        # The interpreter is the package's, which is not installed here.
        (tmp_path / f"{name}.service").write_text(text.replace("/usr/lib/whyspan/bin/python", sys.executable))
    done = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "whyspan" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("name", NAMES)
def test_their_exposure_is_what_is_stated(analyze: str, name: str) -> None:
    done = subprocess.run(
        [analyze, "security", "--offline=yes", "--no-pager", str(UNITS / f"{name}.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    stated = re.search(rf"`{name}.service` \| ([\d.]+) ", SECURITY)
    assert stated, "SECURITY.md states no figure"
    assert float(found[1]) <= float(stated[1])


def test_every_capability_has_its_reason() -> None:
    unit = settings(UNITS / "whyspan.service")
    held = unit["AmbientCapabilities"][0].split()
    assert unit["CapabilityBoundingSet"][0].split() == held
    assert set(held) == set(CAPABILITIES)
    for name in held:
        assert f"| `{name}` |" in SECURITY
    assert settings(UNITS / "whyspan-exporter.service")["CapabilityBoundingSet"] == [""]


def test_the_drop_in_takes_one_away() -> None:
    unit = settings(UNITS / "whyspan.service")
    less = settings(UNITS / "no-sys-admin.conf")
    for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert less[key][0] == ""  # begins anew: lists add up
        assert less[key][1].split() == [c for c in unit[key][0].split() if c != "CAP_SYS_ADMIN"]


def test_what_would_break_tracing_or_gpus_is_not_set() -> None:
    unit = settings(UNITS / "whyspan.service")
    for key in ("PrivateDevices", "ProtectClock", "ProtectKernelTunables", "PrivateTmp", "PrivateUsers"):
        assert key not in unit
        assert key in SECURITY


def test_both_name_the_same_package() -> None:
    for name, module in (
        ("whyspan", "whyspan.pipeline.collector"),
        ("whyspan-exporter", "whyspan_exporters.exporter"),
    ):
        unit = settings(UNITS / f"{name}.service")
        assert unit["Type"] == ["notify"]
        start = f"/usr/lib/whyspan/bin/python -I -m {module} --config /etc/whyspan/whyspan.toml"
        assert unit["ExecStart"] == [start]
    sysusers = (ROOT / "packaging/sysusers.d/whyspan.conf").read_text()
    for name in NAMES:
        user = settings(UNITS / f"{name}.service")["User"][0]
        assert re.search(rf"^u {user}\s", sysusers, re.MULTILINE)
