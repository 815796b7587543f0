"""User-space probes: refused wherever they could harm the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from whyspan_probes.safety import has_shadow_stack, refuse_user_probe, seccomp_mode

PLAIN, FILTERED, SHADOW, GONE = 1, 2, 3, 4


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A fake /proc: one plain process, one with a seccomp filter, one with a shadow stack."""
    texts = {
        PLAIN: "Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\nx86_Thread_features:\t\n",
        FILTERED: "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t3\n",
        SHADOW: "Seccomp:\t0\nx86_Thread_features:\tshstk wrss\nx86_Thread_features_locked:\tshstk\n",
    }
    for tgid, text in texts.items():
        (tmp_path / str(tgid)).mkdir()
        (tmp_path / str(tgid) / "status").write_text(text)
    return tmp_path


def test_seccomp_mode(proc: Path) -> None:
    assert [seccomp_mode(t, proc) for t in (PLAIN, FILTERED, SHADOW, GONE)] == [0, 2, 0, 0]
    own = next(ln for ln in Path("/proc/self/status").read_text().splitlines() if ln.startswith("Seccomp:"))
    assert seccomp_mode(os.getpid()) == int(own.split()[1])


@pytest.mark.parametrize("text", ["Seccomp:\tx\n", "", "Seccomp_filters:\t5\n"])
def test_a_status_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "status").write_text(text)
    assert seccomp_mode(5, tmp_path) == 0


def test_shadow_stack(proc: Path) -> None:
    assert [has_shadow_stack(t, proc) for t in (PLAIN, FILTERED, SHADOW, GONE)] == [False, False, True, False]
    # That it may not be switched off does not mean that it is on.
    (proc / str(PLAIN) / "status").write_text("x86_Thread_features:\t\nx86_Thread_features_locked:\tshstk\n")
    assert not has_shadow_stack(PLAIN, proc)


@pytest.mark.parametrize(
    ("section", "tgid", "host", "reason"),
    [
        ("uprobe/libc:malloc", PLAIN, ("6.12.0", "none", "x86_64"), ""),
        ("uretprobe/libc:malloc", PLAIN, ("6.12.0", "", "x86_64"), ""),
        ("uprobe/libc:malloc", FILTERED, ("6.12.0", "", "x86_64"), ""),
        ("uretprobe/libc:malloc", FILTERED, ("6.11.0-rc1", "", "x86_64"), "seccomp"),
        ("uretprobe.s/libc:malloc", FILTERED, ("6.18.3", "", "x86_64"), "seccomp"),
        ("uretprobe", FILTERED, ("7.0.0", "", "x86_64"), "seccomp"),
        ("uretprobe/libc:malloc", FILTERED, ("6.10.14", "", "x86_64"), ""),
        ("uretprobe/libc:malloc", SHADOW, ("6.6.0", "", "x86_64"), "shadow stack"),
        ("uprobe/libc:malloc", SHADOW, ("6.6.0", "", "x86_64"), ""),
        ("usdt/python:gc", SHADOW, ("6.12.0", "", "x86_64"), ""),
        ("uprobe/libc:malloc", PLAIN, ("6.12.0", "integrity", "x86_64"), ""),
        ("uprobe/libc:malloc", PLAIN, ("6.12.0", "confidentiality", "x86_64"), "lockdown"),
        ("usdt/python:gc", PLAIN, ("6.12.0", "confidentiality", "x86_64"), "lockdown"),
        ("uprobe/libc:malloc", PLAIN, ("6.12.0", "", "aarch64"), "arm64"),
        ("usdt", PLAIN, ("6.12.0", "", "aarch64"), "arm64"),
        ("uretprobe/libc:malloc", GONE, ("6.12.0", "", "x86_64"), ""),
        # What is not attached to a process cannot harm it.
        ("tp_btf/sched_switch", FILTERED, ("6.12.0", "confidentiality", "aarch64"), ""),
        ("kretprobe/do_exit", FILTERED, ("6.12.0", "", "x86_64"), ""),
    ],
)
def test_refusals(proc: Path, section: str, tgid: int, host: tuple[str, str, str], reason: str) -> None:
    kernel, lockdown, machine = host
    why = refuse_user_probe(section, tgid, kernel, lockdown=lockdown, machine=machine, proc=proc)
    assert reason in why
    assert bool(why) == bool(reason)
    if "stack" in reason or "seccomp" in reason:
        assert str(tgid) in why
