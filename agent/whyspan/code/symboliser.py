"""Names places in code: a process of its own, which reads one question from its input and answers on its output.

It lives for one question: bcc's library weighs 75 MB. It reads what anybody may have written (ELF files, perf maps) and
may die of it, so that each file is answered by a line of its own, and whoever asked sees at which it died.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import json
import os
import resource
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from whyspan.code import perfmap, theirs, unwindtable
from whyspan.code.asked import Line, Module, Question
from whyspan.code.bcclib import Bcc, Collected
from whyspan.code.kernelsymbols import KernelSymbols

_CPU_S: Final = 20
_MEMORY: Final = 4 << 30  # the debug information of a large library is mapped whole
_ANSWER: Final = 8 << 20
_PR_SET_PDEATHSIG: Final = 1
#: A busy machine is when names are wanted. How much of it this takes is bounded by whoever asks.
_NICE: Final = 5
#: The interpreter that Debian's package of bcc belongs to.
_DEBIAN: Final = "/usr/bin/python3"
_SYSCALLS: Final = Path(__file__).with_name("bccsyscalls.py")
_SYSCALLS_S: Final = 20.0


def of_module(bcc: Bcc, module: Module) -> list[tuple[int, int, str]]:
    """Return the ranges that hold the module's offsets. Raises OSError when its file cannot be had."""
    if module.vdso:
        found = Collected(module.offsets)
        bcc.vdso(found)
        return [(start, end, bcc.demangle(name)) for _, start, end, name in found.ranges()]
    fd, tgid = theirs.opened(module)
    try:
        path = f"/proc/self/fd/{fd}"
        moved: dict[int, tuple[int, int, int]] = {}
        for section in bcc.sections(path):
            offset, size, address = section
            moved |= {at - offset + address: section for at in module.offsets if offset <= at < offset + size}
        found = Collected(list(moved))
        bcc.symbols(path, found)
        build_id = bcc.build_id(path)
        if build_id:
            with contextlib.suppress(OSError):
                debug = theirs.debug_file(tgid, build_id)
                bcc.symbols(f"/proc/self/fd/{debug}", found)
                os.close(debug)
        begins: Sequence[int] = ()
        with contextlib.suppress(OSError, OverflowError):
            begins = unwindtable.function_starts(fd)
    finally:
        os.close(fd)
    out = []
    for at, start, end, name in found.ranges():
        offset, size, address = moved[at]
        first, last, text = max(start, address), min(end, address + size), bcc.demangle(name)
        i = bisect_right(begins, at)
        if not text and i and begins[i - 1] >= first:
            # No name, but a place to begin at, which is as good for telling it from others.
            first = begins[i - 1]
            last = min([last, *begins[i : i + 1]])
            text = f"+0x{first - address + offset:x}"
        out.append((first - address + offset, last - address + offset, text))
    return out


def _files(modules: Sequence[Module]) -> None:
    try:
        bcc = Bcc()
    except (OSError, AttributeError) as e:
        _say(Line(by="maps", why=str(e)))
        return
    _say(Line(by="bcc"))
    for number, module in enumerate(modules):
        try:
            _say(Line(module=number, ranges=of_module(bcc, module)))
        except (OSError, ValueError, OverflowError) as e:
            _say(Line(module=number, why=str(e)))


def _made(made: Sequence[tuple[int, list[int]]]) -> None:
    for tgid, addresses in made:
        try:
            _say(Line(made=tgid, ranges=perfmap.of_process(tgid, addresses)))
        except (OSError, ValueError, KeyError, IndexError) as e:
            _say(Line(made=tgid, why=str(e)))


def _kernel(addresses: Sequence[int]) -> dict[str, str]:
    symbols = KernelSymbols()
    return {str(a): symbols.name(a) for a in addresses}


def _syscalls(numbers: Sequence[int]) -> dict[str, str]:
    """Return names of system calls by bcc's table, which its module for Python has."""
    try:
        done = subprocess.run(
            [_DEBIAN, "-I", str(_SYSCALLS), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SYSCALLS_S,
            check=False,
        )
        return msgspec.json.decode(done.stdout or b"{}", type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
        return {}


def _say(line: Line) -> None:
    sys.stdout.write(json.dumps(msgspec.to_builtins(line)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer one question."""
    ct.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(_NICE)
    for limit, value in (
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, _ANSWER),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    if question.parent not in (0, os.getppid()):  # it has gone already
        return
    if question.syscalls:
        _say(Line(syscalls=_syscalls(question.syscalls)))
    if question.kernel:
        _say(Line(kernel=_kernel(question.kernel)))
    _files(question.modules)
    _made(question.made)
    _say(Line(end=True))


if __name__ == "__main__":
    main()
