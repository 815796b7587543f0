"""Stalls on a script: python stack_work.py [SECONDS_EACH]. Runs under any CPython from 3.11 on; imports little.

Before each stall the interpreter's own dump of the stack is taken; a line of JSON for each tells it, and when the stall
began and ended (CLOCK_MONOTONIC), and between which lines the innermost function spends its time.
"""

import asyncio
import functools
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
TOLD: list[dict[str, object]] = []


def dump(depth: int) -> list[tuple[str, str, int]]:
    """The interpreter's own account of the stack, from the caller's caller on, innermost first."""
    out = []
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        out.append((frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return out


def spin(name: str) -> int:
    stack = dump(2)
    n = 0
    began = time.monotonic_ns()
    end = began + int(SECONDS * 1e9)
    first = sys._getframe().f_lineno + 1
    while time.monotonic_ns() < end:
        n += 1
        n ^= 1
    TOLD.append(
        {
            "name": name,
            "tid": threading.get_native_id(),
            "from_ns": began,
            "until_ns": end,
            "function": "spin",
            "lines": [first, first + 2],
            "callers": stack,
        }
    )
    return n


def plain() -> int:
    return spin("plain")


def recursion(n: int, name: str) -> int:
    return recursion(n - 1, name) if n else spin(name)


def generator() -> Iterator[int]:
    yield 1
    yield spin("generator")


class Method:
    @functools.cache  # noqa: B019  # C code between two frames of Python
    def cached(self) -> int:
        return spin("method behind C")


async def coroutine() -> int:
    await asyncio.sleep(0)
    return await inner()


async def inner() -> int:
    return spin("coroutine")


def callback() -> str:
    return re.sub("x", lambda match: str(spin("callback from C"))[:0], "x")


def executed() -> None:
    for i in range(3):
        names: dict[str, object] = {"spin": spin}
        exec(f"def made_{i}():\n\n    return spin('made {i}')\n", names)
        names[f"made_{i}"]()  # type: ignore[operator]
        names.clear()


def comprehension() -> list[int]:
    return [spin("comprehension") for _ in range(1)]


def in_thread() -> None:
    thread = threading.Thread(target=plain_in_thread)
    thread.start()
    thread.join()


def plain_in_thread() -> int:
    return spin("thread")


def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    plain()
    recursion(20, "recursion")
    recursion(200, "deep recursion")
    list(generator())
    Method().cached()
    asyncio.run(coroutine())
    callback()
    executed()
    comprehension()
    in_thread()
    for told in TOLD:
        print(json.dumps(told), flush=True)


main()
