"""Which disk a folder lies on."""

from __future__ import annotations

import os
from pathlib import Path


def disk_of(folder: Path) -> tuple[int, int] | None:
    """Return (major, minor) of the whole disk, not of its partition; None when there is no block device."""
    device = folder.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not node.exists():
        return None
    node = node.resolve()
    if (node / "partition").exists():
        node = node.parent
    major, _, minor = (node / "dev").read_text().strip().partition(":")
    return int(major), int(minor)
