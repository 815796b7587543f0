"""Names addresses: a program of its own, which reads one question from its input and answers on its output.

The question and the answer are JSON. It imports nothing of whyspan, so that it runs under the interpreter that has
Debian's bcc, which need not be ours. Without bcc the answer is module and offset, from the mappings in the question.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from bisect import bisect_right
from typing import Any

_DEBIAN = "/usr/bin/python3"
_AGAIN = "WHYSPAN_SYMBOLISER_AGAIN"
_CPU_S = 25
_MEMORY = 4 << 30  # the debug information of a large library is mapped whole
_TEXT = 400


def _bcc() -> Any:
    """Return bcc's class, looking also under the interpreter that Debian's package belongs to; None without."""
    try:
        from bcc import BPF  # type: ignore[import-untyped]  # Debian's; not the package of that name on PyPI

        return BPF
    except Exception:  # another package of that name raises whatever it likes
        same = os.path.realpath(sys.executable) == os.path.realpath(_DEBIAN)
        if not same and os.path.exists(_DEBIAN) and _AGAIN not in os.environ:
            os.execve(_DEBIAN, [_DEBIAN, "-I", os.path.abspath(__file__)], {**os.environ, _AGAIN: "1"})
        return None


def _where(address: int, maps: list[list[Any]], starts: list[int]) -> str:
    at = bisect_right(starts, address) - 1
    if at < 0 or address >= maps[at][1]:
        return ""
    start, _, offset, path = maps[at]
    return f"{os.path.basename(path) or '(anonymous)'}+0x{address - start + offset:x}"


def _user(bpf: Any, question: dict[str, Any]) -> dict[str, str]:
    maps = sorted(question["maps"])
    starts = [m[0] for m in maps]
    out = {}
    for address in question["user"]:
        text = ""
        if bpf is not None:
            try:
                # An address to return to may be the first of the next function.
                text = bpf.sym(address - 1, question["tgid"], show_module=True).decode(errors="replace")
            except Exception:
                text = ""
        if not text or "[unknown]" in text:
            text = _where(address, maps, starts)
        out[str(address)] = text[:_TEXT]
    return out


def _kernel(addresses: list[int]) -> dict[str, str]:
    if not addresses:
        return {}
    places = []
    try:
        with open("/proc/kallsyms") as f:
            for line in f:
                address, kind, name, *_ = line.split()
                if kind in "tTwW":
                    places.append((int(address, 16), name))
    except OSError:
        return {}
    places.sort()
    starts = [p[0] for p in places]
    if not starts or not starts[-1]:  # the kernel shows none
        return {}
    return {str(a): places[bisect_right(starts, a) - 1][1] for a in addresses if a >= starts[0]}


def _syscalls(bpf: Any, numbers: list[int]) -> dict[str, str]:
    if bpf is None or not numbers:
        return {}
    try:
        from bcc.syscall import syscalls  # type: ignore[import-untyped]
    except Exception:
        return {}
    return {str(n): syscalls[n].decode(errors="replace") for n in numbers if n in syscalls}


def main() -> None:
    """Answer one question."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    bpf = _bcc()
    question = json.load(sys.stdin)
    answer = {
        "by": "bcc" if bpf is not None else "maps",
        "user": _user(bpf, question),
        "kernel": _kernel(question["kernel"]),
        "syscalls": _syscalls(bpf, question["syscalls"]),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
