"""Names of disks, file systems and swap, as /proc and /sys have them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from whyspan.model import DiskFact, Fact, SwapFact
from whyspan.text import clean

_MAX_NAME, _MAX_PATH = 64, 512
_MAX_SWAPS: Final = 16
_MAX_MOUNTS: Final = 2
_MINOR: Final = 0xFFFFF


def swap_fact(proc: Path = Path("/proc")) -> SwapFact:
    """Return what /proc/swaps lists; of a file the number is not known without asking its file system."""
    names, devs = [], []
    try:
        lines = (proc / "swaps").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return SwapFact()
    for line in lines[:_MAX_SWAPS]:
        name, kind = [*line.split(), "", ""][:2]
        names.append(clean(f"{kind} {name}", _MAX_PATH))
        if kind == "partition" and name.startswith("/dev/"):
            try:
                number = os.stat(name).st_rdev  # devtmpfs does not hang
            except OSError:
                continue
            devs.append(os.major(number) << 20 | os.minor(number))
    return SwapFact(tuple(devs), tuple(names))


def disk_facts(devs: Iterable[int], proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> list[Fact]:
    """Return the names of devices and where the host has them mounted."""
    mounts: dict[int, list[str]] = {}
    kinds: dict[int, str] = {}
    try:
        lines = (proc / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        major, _, minor = fields[2].partition(":") if len(fields) > 4 else ("", "", "")
        if not (major.isdigit() and minor.isdigit()):
            continue
        dev = int(major) << 20 | int(minor)
        kinds.setdefault(dev, " ".join(kind[:2]))
        for number in {dev, _whole(dev, sys)}:
            mounts.setdefault(number, []).append(fields[4].replace("\\040", " "))
    out: list[Fact] = []
    for dev in devs:
        name = _link(sys / "dev" / "block" / f"{dev >> 20}:{dev & _MINOR}") or kinds.get(dev, "")
        if name:
            places = tuple(clean(m, _MAX_PATH) for m in dict.fromkeys(mounts.get(dev, [])))[:_MAX_MOUNTS]
            out.append(DiskFact(dev, clean(name, _MAX_NAME), places))
    return out


def _link(path: Path) -> str:
    try:
        return os.readlink(path).rsplit("/", 1)[-1]
    except OSError:
        return ""


def _whole(dev: int, sys: Path) -> int:
    """The disk that a partition is on; a whole disk's own number."""
    node = sys / "dev" / "block" / f"{dev >> 20}:{dev & _MINOR}"
    try:
        if not (dev >> 20 and (node / "partition").exists()):
            return dev
        major, _, minor = (node / ".." / "dev").read_text().strip().partition(":")
        return int(major) << 20 | int(minor)
    except (OSError, ValueError):
        return dev
