"""Prints the names of system calls by bcc's table: a script, run by the interpreter that has Debian's bcc."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print {number: name} of the numbers given, as JSON; nothing without bcc."""
    try:
        from bcc.syscall import syscalls  # type: ignore[import-untyped]  # not the package of that name on PyPI
    except Exception:  # another package of that name raises whatever it likes
        return
    numbers = [int(n) for n in sys.argv[1:]]
    print(json.dumps({str(n): syscalls[n].decode(errors="replace") for n in numbers if n in syscalls}))


if __name__ == "__main__":
    main()
