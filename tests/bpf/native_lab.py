"""Native programs for the tests of stacks, and what is told of them: stacks as facts, until one is as expected."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import pytest
from whyspan.code.stacks import Stacks
from whyspan.model import StackFact
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found
from whyspan_probes.rings import RowBuffer

from tests.bpf.waiting import until

SOURCE = Path(__file__).with_name("native_work.cpp")
#: Without libstdc++, so that it runs in any root.
_FLAGS = ["-O0", "-fno-exceptions", "-fno-omit-frame-pointer", "-Wl,--build-id"]


def build(out: Path, *flags: str) -> Path:
    """Compile the program, with frame pointers and a build id."""
    subprocess.run(["gcc", *_FLAGS, *flags, "-o", str(out), str(SOURCE)], check=True)
    return out


def build_id(path: Path) -> str:
    """Return a program's build id."""
    notes = subprocess.run(["readelf", "-n", str(path)], check=True, capture_output=True, text=True).stdout
    return notes.partition("Build ID: ")[2].split()[0]


class Lab:
    """Samples, or looks at the waits of, one process, whose standard output begins with a line when it is ready."""

    def __init__(self, probe: Found, command: Sequence[str]) -> None:
        self._session = Session([probe], 1 << 20)
        self.stacks = Stacks(self._session.maps)
        self.facts: dict[int, StackFact] = {}
        self.told = 0
        self._rows = RowBuffer()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        #: The process that is watched: this, or a child of it.
        self.tgid = self.process.pid

    def __enter__(self) -> Lab:
        try:
            self._session.attach(config={"waits": {"min_ns": 20_000_000}})
            state = self._session.probes[0].state
            if state.state != "attached":
                pytest.skip(state.reason)
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "ready\n"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        self.stacks.close()
        self._session.close()

    def watch(self, tgid: int = 0) -> None:
        """Begin to watch the process, or a child of it."""
        self.tgid = tgid or self.tgid
        self._session.maps.watch(self.tgid, 0)
        self.stacks.follow([self.tgid], time.monotonic())

    def look(self) -> dict[int, StackFact]:
        """Take what has arrived, and return all that is known."""
        if self._session.probes[0].probe.name == "waits":
            self._session.probes[0].walk("look", [self.tgid])
        for ring in self._session.maps.rings:
            ring.drain(self._rows)
        self._rows.take()
        for fact in self.stacks.take():
            self.told += 1
            self.facts[fact.id] = fact
        return self.facts

    def until(self, wanted: Callable[[StackFact], bool], what: str) -> StackFact:
        """Return a stack that is as wanted, as soon as there is one."""

        def found() -> StackFact | None:
            return next((f for f in self.look().values() if wanted(f)), None)

        fact: StackFact | None = until(found, what, every_s=0.05)
        assert fact is not None
        return fact


def functions(frames: Iterable[str]) -> list[str]:
    """Return the functions of frames, without their modules; of those without names, the module and offset."""
    return [f.partition(" [")[0] for f in frames]
