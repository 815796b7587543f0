"""Addresses of stacks: which of them can be true, and what they are called.

Names come from a process of their own, which lives for one question: it loads bcc's C++ library and reads the debug
information of whatever the process maps, and what it took (40 MB and more) goes with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan.text import clean

_PROC: Final = Path("/proc")
_SCRIPT: Final = Path(__file__).with_name("symboliser.py")
_TIMEOUT_S: Final = 30.0
_MAX_ADDRESSES: Final = 8192
_MAX_ANSWER: Final = 8 << 20
_MAX_MAPS: Final = 65_536
_NAME_CHARS: Final = 160


class Mapping(NamedTuple):
    """A piece of code in memory."""

    start: int
    end: int
    offset: int
    path: str


class Code:
    """The code that a process maps; empty when it has ended."""

    def __init__(self, tgid: int, proc: Path = _PROC) -> None:
        self.maps: list[Mapping] = []
        try:
            text = (proc / str(tgid) / "maps").read_bytes()
        except OSError:
            text = b""
        for line in text.split(b"\n")[:_MAX_MAPS]:
            fields = line.split(None, 5)
            if len(fields) >= 5 and b"x" in fields[1]:
                start, _, end = fields[0].partition(b"-")
                path = fields[5].decode(errors="replace") if len(fields) > 5 else ""
                self.maps.append(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), path))
        self._starts = [m.start for m in self.maps]

    def holds(self, address: int) -> bool:
        """Whether there is code at the address."""
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self.maps[at].end

    def true_part(self, frames: Iterable[int]) -> list[int]:
        """Return the frames up to the first that cannot be one.

        A walk over frame pointers goes astray in code that has none: what it finds then is mostly no code at all.
        """
        out = []
        for address in frames:
            if not self.holds(address):
                break
            out.append(address)
        return out


def of_call(caller: int, frames: Sequence[int]) -> list[int]:
    """Return the stack below a function that was just entered.

    The first frame is the function itself. Its caller is not among those that frame pointers lead to (nor is, of a
    library without, the one above); some kernels (6.11) have it all the same.
    """
    rest = list(frames[1:])
    if rest and rest[0] == caller:
        rest = rest[1:]
    return [caller, *rest] if caller else rest


class Names(NamedTuple):
    """What addresses and numbers are called; ``by``: bcc, maps (module and offset only), or why there are none."""

    user: dict[int, str]
    kernel: dict[int, str]
    syscalls: dict[int, str]
    by: str

    def stack(self, frames: Iterable[int]) -> list[str]:
        """Return the names of a program's frames."""
        return [self.user.get(a, f"0x{a:x}") for a in frames]


def name(
    tgid: int,
    code: Code,
    user: Iterable[int],
    *,
    kernel: Iterable[int] = (),
    syscalls: Iterable[int] = (),
    command: Sequence[str] = (),
) -> Names:
    """Ask for names; an answer that does not come leaves the addresses as they are. *command* is for tests."""
    question = {
        "tgid": tgid,
        "user": list(dict.fromkeys(user))[:_MAX_ADDRESSES],
        "kernel": list(dict.fromkeys(kernel))[:_MAX_ADDRESSES],
        "syscalls": list(dict.fromkeys(syscalls))[:1024],
        "maps": code.maps,
    }
    try:
        done = subprocess.run(
            [*(command or (sys.executable, "-I", str(_SCRIPT)))],
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode or len(done.stdout) > _MAX_ANSWER:
            return Names({}, {}, {}, f"none: the symboliser ended with status {done.returncode}")
        answer = json.loads(done.stdout)
        return Names(
            _checked(answer, "user"),
            _checked(answer, "kernel"),
            _checked(answer, "syscalls"),
            clean(str(answer["by"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, subprocess.TimeoutExpired) as e:
        return Names({}, {}, {}, f"none: the symboliser failed: {type(e).__name__}")


def _checked(answer: Any, kind: str) -> dict[int, str]:
    return {int(a): clean(str(text), _NAME_CHARS) for a, text in answer.get(kind, {}).items() if text}


def waits_in(frames: Iterable[str]) -> str:
    """Return the function that a sleep was for: the first above the scheduler's own."""
    names = list(frames)
    last = max((i for i, n in enumerate(names) if "schedule" in n), default=-1)
    return names[last + 1] if last + 1 < len(names) else ""
