"""What ``whyspan_inproc`` costs its host, without a uprobe: ``python -m tests.bench.marker``. No root is needed.

The trap of a watched mark comes on top: ``tests.bench.marker_watched`` has it. CPU time of the thread, the best of
several rounds, so that a busy machine shows as little as possible.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.build_inproc import SOURCE, build

ROUNDS = 7
DECODES = (1, 256)
# Figures that others use.
USUAL = "emit of an Executed, counter raised"
STEP = f"a Step of {DECODES[0]} decode"
STEP_MORE = "a Step, for each further decode"


def cost(call: Callable[[], object], count: int) -> float:
    """Return the ns that one call takes, less those of calling nothing."""

    def once(what: Callable[[], object]) -> float:
        begin = time.thread_time_ns()
        for _ in range(count):
            what()
        return (time.thread_time_ns() - begin) / count

    return min(once(call) for _ in range(ROUNDS)) - min(once(lambda: None) for _ in range(ROUNDS))


def measure(counter: ctypes.c_ushort) -> dict[str, float]:
    """Return ns by name; ``counter`` is the marker's, which a uprobe would raise."""
    import types

    from whyspan_inproc import _marker, emit, kinds
    from whyspan_inproc.hooks import Hook

    module: Any = types.ModuleType("engine")
    module.Engine = type("Engine", (), {"add": lambda self, request: request})
    engine = module.Engine()
    payload = b"x" * 200
    executed = {"step": 4_242, "begin_ns": time.monotonic_ns(), "tokens": 256, "requests": 256}
    plain = cost(lambda: engine.add(1), 100_000)
    Hook("core", "engine", "Engine.add", "self", before=lambda *_: None).install(module)
    found: dict[str, float] = {}
    for watched in (0, 1):
        counter.value = watched
        state = "counter raised" if watched else "unwatched"
        found[f"_marker.mark, 200 bytes, {state}"] = cost(lambda: _marker.mark(8, payload), 100_000)
        found[f"emit.watched, {state}"] = cost(emit.watched, 100_000)
        found[f"a hook on a method, {state}"] = cost(lambda: engine.add(1), 100_000) - plain
        found[USUAL if watched else "emit of an Executed, unwatched"] = cost(
            lambda: emit.emit(kinds.EXECUTED, executed), 20_000
        )
    few, many = (cost(step(count), 2_000) for count in DECODES)
    found[STEP] = few
    found[f"a Step of {DECODES[1]} decodes"] = many
    found[STEP_MORE] = (many - few) / (DECODES[1] - DECODES[0])
    counter.value = 0
    return found


def step(decodes: int) -> Callable[[], object]:
    """Return what tells a step of so many requests, as after ``Scheduler.schedule``."""
    from whyspan_inproc.vllm_plugin.numbers import Numbers
    from whyspan_inproc.vllm_plugin.steps import Maker

    from tests.unit.inproc.scheduler import Cached, Output, Scheduler

    scheduler, numbers = Scheduler(), Numbers()
    names = [f"cmpl-{i:032x}-0-deadbeef" for i in range(decodes)]
    scheduler.runs(*names)
    for name in names:
        numbers.give(name)
    output = Output(dict.fromkeys(names, 1), cached=Cached(names))
    maker = Maker(numbers)
    return lambda: maker.step(scheduler, output, 1, 2, False)


def main() -> None:
    """Measure a copy of the package in a process of its own, where no uprobe is on the marker's file."""
    if sys.argv[1:] and sys.argv[1] != "--json":
        sys.path.insert(0, sys.argv[1])
        from whyspan_inproc import _marker

        library = ctypes.CDLL(_marker.__file__)
        print(json.dumps(measure(ctypes.c_ushort.in_dll(library, "whyspan_mark_v1_semaphore"))))
        return
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "whyspan_inproc"
        shutil.copytree(SOURCE.parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        build(package)
        command = [sys.executable, "-m", "tests.bench.marker", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    if "--json" in sys.argv:
        print(done.stdout)
        return
    for name, ns in json.loads(done.stdout).items():
        print(f"{ns:8.0f} ns  {name}")


if __name__ == "__main__":
    main()
