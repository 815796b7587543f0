"""Writes a file anew every quarter of a second and never waits for the disk: ``FILE MEGABYTES``."""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    """Write until killed."""
    fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
    block = os.urandom(1 << 20)
    while True:
        os.ftruncate(fd, 0)
        for i in range(int(sys.argv[2])):
            os.pwrite(fd, block, i << 20)
        time.sleep(0.25)


if __name__ == "__main__":
    main()
