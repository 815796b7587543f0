"""Who would catch an exception of C++ that leaves a function: a return probe on the function would end the process.

A return probe puts the kernel's own code where the return address was. The unwinder knows nothing of it and takes it
for the end of the stack: an exception that would have been caught further up calls std::terminate instead (measured:
SIGABRT). Where nobody would catch it, as under Python's ctypes, it ends the process with or without a probe.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from whyspan_probes import libraries, symbols

_CATCH = "__cxa_begin_catch"  # Itanium C++ ABI 2.5.3: called by every handler
_MAX_FILES = 1024


def who_may_catch(tgid: int, functions: Collection[str], proc: Path = Path("/proc")) -> str:
    """Return a file of the process that may catch what one of these functions throws, or an empty string.

    That is one that has handlers and uses the function by name, or the program itself if it has handlers: it may have
    looked the function up. Not seen: a library that looks it up; a program whose C++ library is linked into it
    without a trace.
    """
    root = proc / str(tgid)
    if _CATCH in _named([root / "exe"], [_CATCH]):
        return libraries.executable(tgid, proc).path
    code = (f for f in libraries.mapped(tgid, proc).files if f.executable)
    for file in itertools.islice(code, _MAX_FILES):
        ways = [root / "map_files" / file.span, Path(f"{root / 'root'}{file.path}")]
        used = _named(ways, [_CATCH, *functions])
        if _CATCH in used and len(used) > 1:
            return file.path
    return ""


def _named(ways: Iterable[Path], names: Collection[str]) -> set[str]:
    """Which of the names a file uses and does not define; *ways* lead to it. None when it cannot be read."""
    for path in ways:
        try:
            # Not blocking on a pipe, nor waking a device: whoever owns the path may have put either there.
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            continue
        try:
            used = symbols.named(fd, names)
            return used - symbols.find(fd, used - {_CATCH}).keys() if len(used) > 1 else used
        except (OSError, symbols.ElfError):
            continue
        finally:
            os.close(fd)
    return set()
