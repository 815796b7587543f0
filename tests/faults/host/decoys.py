"""Decoys: anomalies that are real and harmless, going on while a fault does. None of them slows the server.

They have their own processes, cgroups and devices, the clients' CPU and the lowest priority there. Each yields a proof
that it happened, in words, which raises DemoError when it did not.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from tests.demo.procs import DemoError, cpu_ns, python, spawn, stop
from tests.faults.host.decoy_work import MIB
from tests.faults.host.fault import VLLM, Hands
from tests.faults.host.groups import MemoryGroup

Proof = Callable[[], str]
Decoy = Callable[[Hands], AbstractAsyncContextManager[Proof]]

LOSETUP = "/usr/sbin/losetup"


@contextmanager
def _process(
    hands: Hands, work: str, *args: object, join: Callable[[], None] | None = None, out: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = spawn(
        python("tests.faults.host.decoy_work", work, *args),
        hands.rest_cpu,
        before_exec=join,
        stdout=subprocess.DEVNULL if out is None else out,
    )
    try:
        yield process
    finally:
        stop(process)


@contextmanager
def _group(name: str, mib: int) -> Iterator[MemoryGroup]:
    group = MemoryGroup(f"decoy-{name}", mib * MIB)
    try:
        yield group
    finally:
        group.remove()


def _lines(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


@asynccontextmanager
async def cpu_hog(hands: Hands) -> AsyncIterator[Proof]:
    """A process that burns CPU where the server's work is not, at idle priority."""
    with _process(hands, "spin") as process:

        def proof() -> str:
            used_ms = cpu_ns(process.pid) / 1e6
            if used_ms < 50:
                raise DemoError(f"the decoy only used {used_ms:.0f} ms of CPU")
            return f"process {process.pid} used {used_ms:.0f} ms of CPU {hands.rest_cpu} at idle priority"

        yield proof


@asynccontextmanager
async def page_cache(hands: Hands) -> AsyncIterator[Proof]:
    """A process that reads more than its memory cgroup may keep: reclaim, but nobody else's."""
    with (
        _group("churn", 32) as group,
        _process(hands, "churn", "--folder", hands.folder, "--mib", 256, join=group.join),
    ):
        before = group.hits()

        def proof() -> str:
            hits = group.hits() - before
            if hits < 10:
                raise DemoError(f"the decoy's group reached its limit only {hits} times")
            return f"a foreign memory cgroup reached its limit {hits} times"

        yield proof
    (hands.folder / "decoy-churn").unlink(missing_ok=True)


@asynccontextmanager
async def leak(hands: Hands) -> AsyncIterator[Proof]:
    """A process that keeps taking memory, in a cgroup of its own."""
    with _group("leak", 256) as group, _process(hands, "leak", "--mib", 128, join=group.join):

        def proof() -> str:
            name = "memory.peak" if group.version == 2 else "memory.max_usage_in_bytes"
            most = int((group.folder / name).read_text()) // MIB
            if most < 24:
                raise DemoError(f"the decoy took only {most} MiB")
            return f"a foreign process took {most} MiB"

        yield proof


@asynccontextmanager
async def disk_writer(hands: Hands) -> AsyncIterator[Proof]:
    """A process that writes to a loop device of its own, whose image is in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="whyspan-decoy-") as folder:
        image = Path(folder) / "image"
        with image.open("wb") as file:
            file.truncate(16 * MIB)
        done = subprocess.run([LOSETUP, "-f", "--show", image], capture_output=True, text=True, check=True)
        device = done.stdout.strip()
        stat = Path("/sys/block") / Path(device).name / "stat"
        try:
            before = int(stat.read_text().split()[4])
            with _process(hands, "write", "--folder", device):

                def proof() -> str:
                    writes = int(stat.read_text().split()[4]) - before
                    if writes < 20:
                        raise DemoError(f"only {writes} writes to the decoy's disk")
                    return f"{writes} writes to {device}"

                yield proof
        finally:
            subprocess.run([LOSETUP, "-d", device], check=False)


@asynccontextmanager
async def tcp_burst(hands: Hands) -> AsyncIterator[Proof]:
    """Two processes that send each other bursts of 16 MiB."""
    file = hands.folder / "decoy-burst"
    with file.open("wb") as out, _process(hands, "burst", out=out.fileno()):

        def proof() -> str:
            sent = sum(_lines(file)) // MIB
            if sent < 16:
                raise DemoError("the decoy sent nothing")
            return f"{sent} MiB sent between two foreign processes"

        yield proof


@asynccontextmanager
async def gc_pauses(hands: Hands) -> AsyncIterator[Proof]:
    """A Python process with long collections."""
    file = hands.folder / "decoy-gc"
    with file.open("wb") as out, _process(hands, "collect", out=out.fileno()):

        def proof() -> str:
            pauses = _lines(file)
            if not pauses:
                raise DemoError("the decoy's collector never ran")
            return f"{len(pauses)} collections of up to {max(pauses)} ms in a foreign process"

        yield proof


@asynccontextmanager
async def scrape(hands: Hands) -> AsyncIterator[Proof]:
    """A monitor that often gets a page of the server that costs it nothing."""
    file = hands.folder / "decoy-scrape"
    url = f"http://{hands.host}:{hands.port}/{'health' if hands.server == VLLM else 'healthz'}"
    with file.open("wb") as out, _process(hands, "scrape", "--url", url, out=out.fileno()):

        def proof() -> str:
            answers = _lines(file)
            if not answers:
                raise DemoError("the decoy got no answer")
            return f"{len(answers)} cheap answers to a monitor"

        yield proof


DECOYS: dict[str, Decoy] = {
    f.__name__: f for f in (cpu_hog, page_cache, leak, disk_writer, tcp_burst, gc_pauses, scrape)
}


@asynccontextmanager
async def none(_: Hands) -> AsyncIterator[Proof]:
    """Nothing beside the fault."""
    yield str


def by_name(name: str) -> Decoy:
    """Return a decoy; the empty name is none."""
    return DECOYS[name] if name else none
