"""Pressure and throttling as the kernel shows them, on files made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from whyspan import pressure
from whyspan.cgroups import Mount


def test_pressure_of_the_last_ten_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "pressure"
    folder.mkdir()
    (folder / "cpu").write_text(
        "some avg10=12.50 avg60=1.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0 total=0\n"
    )
    (folder / "io").write_text("some avg10=100.00 avg60=1.00 avg300=0.00 total=7\n")
    (folder / "memory").write_text("nonsense\nsome avg10=many\nsome\n\n")
    assert pressure.pressure(tmp_path) == {"cpu": {"some": 0.125, "full": 0.0}, "io": {"some": 1.0}}
    assert pressure.pressure(tmp_path / "nowhere") == {}


def test_memory_and_runnable_threads(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       16384 kB\nMemFree:            7 kB\nMemAvailable:    many kB\n"
        "MemAvailable:    1024 kB\nHugePages_Total: 3\n"
    )
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 17/480 11206\n")
    assert pressure.memory(tmp_path) == {"total_bytes": 16 << 20, "available_bytes": 1 << 20}
    assert pressure.runnable(tmp_path) == 17
    (tmp_path / "loadavg").write_text("nonsense\n")
    assert pressure.runnable(tmp_path) is None
    assert (pressure.memory(tmp_path / "nowhere"), pressure.runnable(tmp_path / "nowhere")) == ({}, None)


def group(root: Path, path: str, quota: str, throttled: int, version: int) -> None:
    folder = root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(quota)
        (folder / "cpu.stat").write_text(f"usage_usec 9\nnr_throttled 3\nthrottled_usec {throttled}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(quota.split(maxsplit=1)[0].replace("max", "-1"))
        (folder / "cpu.cfs_period_us").write_text(quota.split()[1])
        (folder / "cpu.stat").write_text(f"nr_periods 9\nnr_throttled 3\nthrottled_time {throttled}000\n")


@pytest.mark.parametrize("version", [1, 2])
def test_throttled_time_of_services(tmp_path: Path, version: int) -> None:
    mount = Mount(tmp_path, "/", version, frozenset({"cpu"} if version == 1 else ()))
    watched = [("chat", "/pod/a"), ("chat", "/pod/b"), ("embed", "/free"), ("batch", "/pod/a")]
    group(tmp_path, "/pod", "400000 100000", 1000, version)
    group(tmp_path, "/pod/a", "50000 100000", 100, version)
    group(tmp_path, "/pod/b", "max 100000", 0, version)
    group(tmp_path, "/free", "max 100000", 0, version)
    t = pressure.Throttling([mount])
    assert t.look(watched) == {"chat": 0, "batch": 0}  # what was before is not ours
    # a is held to half a CPU, b to what the pod has, of which a's is a part; the pod's time counts once for chat.
    assert t.limits == {"chat": 4.0, "batch": 0.5}
    group(tmp_path, "/pod", "400000 100000", 1007, version)
    group(tmp_path, "/pod/a", "50000 100000", 113, version)
    assert t.look(watched) == {"chat": 20, "batch": 20}
    assert t.look(watched) == {"chat": 0, "batch": 0}
    group(tmp_path, "/pod/a", "50000 100000", 5, version)  # made anew
    assert t.look(watched) == {"chat": 0, "batch": 0}
    group(tmp_path, "/pod/a", "50000 100000", 8, version)
    assert t.look(watched) == {"chat": 3, "batch": 3}
    assert t.look([]) == {}
    assert t.limits == {}


def test_groups_that_cannot_be_seen_have_no_limit(tmp_path: Path) -> None:
    t = pressure.Throttling([Mount(tmp_path, "/elsewhere", 2, frozenset())])
    assert t.look([("chat", "/pod/a"), ("chat", "")]) == {}
    assert t.limits == {}
