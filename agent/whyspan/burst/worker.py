"""A burst in a process of its own, as the collector starts it: ``python -m whyspan.burst.worker``.

Its last line on standard error is what became of it. Ended by SIGTERM, or with whoever started it, it stops and
still writes what it has.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

from whyspan_probes.errors import ProbeFrameworkError
from whyspan_probes.kernel_btf import KernelBtf

from whyspan.burst import files, malloc, samples, syscalls
from whyspan.burst.errors import TooDearError
from whyspan.burst.options import Options
from whyspan.errors import WhyspanError

KINDS: dict[str, ModuleType] = {"malloc": malloc, "samples": samples, "syscalls": syscalls}
#: Exit statuses: the burst was made; it failed; it would have been too dear.
DONE, FAILED, TOO_DEAR = 0, 1, 4
_PR_SET_PDEATHSIG = 1
_ROWS = 1000


def main() -> int:
    """Make one burst and write its report."""
    parser = argparse.ArgumentParser(prog="whyspan-burst", description="Internal: started by the collector.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--btf", type=Path, default=None)
    arguments = parser.parse_args()
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stopped.append(n))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != arguments.parent:  # it has gone already
        return FAILED
    try:
        options = Options(
            tgid=arguments.pid,
            seconds=arguments.seconds,
            top=_ROWS,
            kernel=KernelBtf.find(arguments.btf),
            stopped=lambda: bool(stopped),
        )
        files.write(arguments.out, KINDS[arguments.kind].run(options))
    except (WhyspanError, ProbeFrameworkError, OSError) as e:
        print(e, file=sys.stderr)
        return TOO_DEAR if isinstance(e, TooDearError) else FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
