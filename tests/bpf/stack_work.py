"""Stalls on a script: python stack_work.py [SECONDS_EACH [tame]]. Runs under any CPython from 3.11 on; imports little.

Before each stall the interpreter's own dump of the stack is taken; a line of JSON for each tells it, when the stall
began and ended (CLOCK_MONOTONIC), and where its innermost function is meanwhile: between two lines, or, where functions
call each other all the time (``calls``), which function may have called which on what line. It waits for the end of its
input before it ends, so that whoever watches can read what it has.
"""

import asyncio
import ctypes
import functools
import json
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import CodeType, FrameType

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
TOLD: list[dict[str, object]] = []
FIRST = threading.current_thread()
LONG = "long_" * 60
#: Where code was that is in no file; with a second argument nothing that other tools might not escape.
NOWHERE = "/no/such file\n\x1b[31m\u00e9\u4e2d\U0001f600.py" if len(sys.argv) < 3 else "/no/such_file.py"
#: Stalls last as long of the thread's own time, and so have as many samples on a machine that is busy.
now, used = time.monotonic_ns, time.thread_time_ns


def dump(depth: int) -> list[tuple[str, str, int]]:
    """The interpreter's own account of the stack, from the caller's caller on, innermost first."""
    out = []
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        out.append((frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return out


def tell(name: str, began: int, ended: int, callers: list[tuple[str, str, int]], **more: object) -> None:
    tid = threading.get_native_id()
    TOLD.append({"name": name, "tid": tid, "from_ns": began, "until_ns": ended, "callers": callers, **more})


def spin(name: str) -> int:
    stack = dump(2)
    n = 0
    first = sys._getframe().f_lineno + 1
    began, end = now(), used() + int(SECONDS * 1e9)
    while used() < end:
        for _ in range(50):
            n ^= 1
    ended = now()
    tell(name, began, ended, stack, function="spin", lines=[first, first + 4])
    return n


def plain() -> int:
    return spin("plain")


def recursion(n: int, name: str) -> int:
    return recursion(n - 1, name) if n else spin(name)


def generator() -> Iterator[int]:
    yield 1
    yield spin("generator")


def delegating() -> Iterator[int]:
    yield from (n + 1 for n in generator_below())


def generator_below() -> Iterator[int]:
    yield spin("generators below one another")


class Method:
    @functools.cache  # noqa: B019  # C code between two frames of Python
    def cached(self) -> int:
        return spin("method behind C")

    def __getattr__(self, name: str) -> int:
        return spin("attribute")

    @property
    def held(self) -> int:
        return spin("property")


async def coroutine() -> int:
    await asyncio.sleep(0)
    return await inner() + sum([n async for n in asynchronous()])


async def inner() -> int:
    return spin("coroutine")


async def asynchronous() -> AsyncIterator[int]:
    await asyncio.sleep(0)
    yield spin("asynchronous generator")


async def gathered() -> None:
    await asyncio.gather(inner_task(1), inner_task(2))


async def inner_task(n: int) -> int:
    await asyncio.sleep(0)
    return spin(f"task {n}")


def callback() -> str:
    return re.sub("x", lambda match: str(spin("callback from re"))[:0], "x")


def by_key() -> list[int]:
    return sorted([1], key=lambda n: spin("callback from sorted"))


def reduced() -> int:
    return functools.reduce(lambda a, b: spin("callback from reduce"), [1, 2])


def through_ctypes() -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    compare = function(lambda a, b: spin("callback from libc") * 0)
    numbers = (ctypes.c_int * 2)(1, 2)
    ctypes.CDLL(None).qsort(numbers, 2, 4, compare)
    return 0


def long_call() -> None:
    stack = dump(2)
    rounds = range(int(SECONDS * 3e7))
    line = sys._getframe().f_lineno + 2
    began = now()  # the line between has nearly all of the time
    sum(rounds)
    ended = now()
    tell("long call of C", began, ended, stack, function="long_call", lines=[line - 1, line + 1])


def executed() -> None:
    for i in range(3):
        names: dict[str, object] = {"spin": spin}
        exec(f"def made_{i}():\n\n    return spin('made {i}')\n", names)
        names[f"made_{i}"]()  # type: ignore[operator]
        names.clear()


def deleted() -> None:
    """The function has no other owner than its own frame any more."""
    names: dict[str, object] = {"spin": spin}
    source = "def gone(names):\n    s = names.pop('spin')\n    names.clear()\n    return s('gone')\n"
    exec(compile(source, NOWHERE, "exec"), names)
    names.pop("gone")(names)  # type: ignore[operator]


def named_oddly() -> None:
    names: dict[str, object] = {"spin": spin}
    for i, name in enumerate((LONG, "n\u00e9", "\u4e2d\u6587", "\U00010400")):
        exec(compile(f"def {name}():\n    spin('odd name {i}')\n", name, "exec"), names)
        names[name]()  # type: ignore[operator]


def comprehension() -> list[int]:
    return [spin("comprehension") for _ in range(1)]


def in_threads() -> None:
    threads = [threading.Thread(target=plain_in_thread, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plain_in_thread(n: int) -> int:
    return spin(f"thread {n}")


def ping(n: int) -> int:
    return pong(n - 1) if n else 0


def pong(n: int) -> int:
    return 1 + ping(n - 1) if n else 0


def counted(n: int) -> Iterator[int]:
    for i in range(n):
        yield ping(i % 3)


def keyed(n: int) -> int:
    return -ping(n % 2)


def churn() -> None:
    """Frames begin and end all the time: whatever moment is looked at, a call is one that is there."""
    stack = dump(2)
    here = sys._getframe().f_lineno + 2
    began, end = now(), used() + int(SECONDS * 3e9)
    while used() < end:
        ping(30)
        sum(counted(6))
        sorted(range(5), key=keyed)
        sum(ping(n) for n in range(5))
    ended = now()
    made: Callable[[], CodeType] = lambda: next(  # noqa: E731
        c for c in churn.__code__.co_consts if isinstance(c, CodeType) and c.co_name == "<genexpr>"
    )
    functions = {f.__name__: f.__code__ for f in (ping, pong, counted, keyed)}
    functions["churn.<locals>.<genexpr>"] = made()
    spans = {name: [c.co_firstlineno, max(n for *_, n in c.co_lines() if n)] for name, c in functions.items()}
    tell(
        "churn",
        began,
        ended,
        stack,
        function="churn",
        lines=[here - 1, here + 5],
        functions=spans,
        calls=[
            ["churn", here + 1, "ping"],
            ["churn", here + 2, "counted"],
            ["churn", here + 3, "keyed"],
            ["churn", here + 4, "churn.<locals>.<genexpr>"],
            ["churn.<locals>.<genexpr>", here + 4, "ping"],
            ["ping", spans["ping"][1], "pong"],
            ["pong", spans["pong"][1], "ping"],
            ["counted", spans["counted"][1], "ping"],
            ["keyed", spans["keyed"][1], "ping"],
        ],
    )


def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    plain()
    recursion(20, "recursion")
    recursion(126 - len(dump(1)), "just fits")
    recursion(200, "deep recursion")
    list(generator())
    list(delegating())
    Method().cached()
    Method().missing  # noqa: B018
    Method().held  # noqa: B018
    asyncio.run(coroutine())
    asyncio.run(gathered())
    callback()
    by_key()
    reduced()
    through_ctypes()
    long_call()
    executed()
    deleted()
    named_oddly()
    comprehension()
    in_threads()
    churn()
    for told in TOLD:
        print(json.dumps(told), flush=True)
    print("end", flush=True)
    sys.stdin.read()


main()
