"""The live source of batches: probes, rings, heads and host facts, drained together."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
from whyspan_probes.errors import ProbeError
from whyspan_probes.features import in_host_pid_namespace
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found as FoundProbe
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Events, Schema
from whyspan_probes.state import ProbeState

from whyspan import cgroups, hostfacts, memfacts
from whyspan.code.native import Native
from whyspan.code.stacks import Stacks
from whyspan.code.workkinds import WorkKinds
from whyspan.config import Targets
from whyspan.discovery import Discovery, Found
from whyspan.diskfacts import DiskFacts
from whyspan.errors import ConfigError
from whyspan.fdcounts import DescriptorCounts
from whyspan.fdfacts import FdFacts
from whyspan.heads import HeadAssembler
from whyspan.lockfacts import LockFacts
from whyspan.model import Batch, Fact, ProcessFact
from whyspan.pipeline.markring import MarkRing
from whyspan.pipeline.observed import Observed, host_cpus
from whyspan.pipeline.snapshots import Snapshots
from whyspan.pipeline.strangers import Strangers
from whyspan.pipeline.waitwatch import WaitWatch
from whyspan.text import clean

log = logging.getLogger("whyspan.collector")

#: The probes whose programs run when they are asked to.
_WAITS, _SNAPSHOTS = "waits", "snapshots"
#: How long after its last request a thread still counts as one that serves.
_SERVES_S = 30.0

_SCAN_EVERY_S = 5.0
_FACTS_EVERY_S = 2.0
_WHOLE_EVERY = 5  # of so many refreshes one reads everything again
_FULL = ("oom_victim", "memcg_reclaim")  # events that name a memory cgroup at its limit
_MAX_REFRESHED = 200  # processes and cgroups looked at again per refresh


class LiveSource:
    """Owns the probes' session and turns it into batches.

    Raises on construction what ``Session`` raises, ConfigError when this process sees other process ids than the
    kernel reports, and ProbeError when no probe can be attached; one that cannot is only a state.
    """

    def __init__(
        self,
        probes: Iterable[FoundProbe],
        discovery: Discovery,
        *,
        ring_bytes: int,
        header_allow: Iterable[str],
        disabled: Iterable[str] = (),
        probe_config: Mapping[str, Mapping[str, int]] | None = None,
        kernel: KernelBtf | None = None,
        stall_ms: float = 200.0,
        known_frames: Iterable[str] = (),
        progress: Callable[[ProbeState], None] = lambda _: None,
    ) -> None:
        if not in_host_pid_namespace():
            raise ConfigError(
                "not in the host's PID namespace: run this container with --pid=host (hostPID: true)"
            )
        cgroups.join_host_namespace()
        kinds = WorkKinds(Path(name) for name in known_frames)
        self.session = Session(probes, ring_bytes, kernel)
        try:
            self.session.attach(probe_config, disabled, progress)
            states = [p.state for p in self.session.probes]
            failed = [s for s in states if s.state == "failed"]
            if failed and not any(p.attached for p in self.session.probes):
                raise ProbeError(f"no probe can be attached: {failed[0].name}: {failed[0].reason}")
        except BaseException:
            self.session.close()
            raise
        self.schema = Schema(self.session.event_types())
        self.discovery = discovery
        self._heads = HeadAssembler(list(header_allow))
        self._marks = MarkRing(self.session.maps.marks, self.schema.kind("mark"))
        self._lost: dict[str, int] = {}
        self._services: list[str] = []
        self._threads: dict[int, set[int]] = {}  # by tgid, the threads already named
        self._fds = FdFacts()
        self._described: dict[int, ProcessFact] = {}
        self._strangers = Strangers()
        self._descriptor_counts = DescriptorCounts()
        self._disks = DiskFacts(self.schema)
        self._locks = LockFacts()
        self._stacks = Stacks(self.session.maps, kinds)
        self.snapshots = Snapshots(self._walk, stall_ms)
        self._serving: dict[
            int, float
        ] = {}  # threads, and until when they count as such, by CLOCK_MONOTONIC in s
        self._waits = WaitWatch(self._look)
        self._observed = Observed()
        self._memory = memfacts.Sampler()
        self._hooked: dict[tuple[str, ...], str] = {}  # what the log last said of a probe's hook in a file
        self._next_scan_s = self._next_facts_s = 0.0
        self._refreshes = 0
        self._mounts: list[cgroups.Mount] = []
        self._pending: list[Fact] = [host_cpus()]
        self._rows = RowBuffer()
        self._positions: list[int | None] = []  # of each ring's first record not taken, at the last look
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.session.maps.waiter.register(self._wake, select.EPOLLIN)
        self.scan()

    def scan(self) -> None:
        """Look for processes to watch, now."""
        self._follow_scan(*self.discovery.scan(), "is gone")

    def _follow_scan(self, new: Iterable[Found], gone: Iterable[int], how: str) -> None:
        for found in new:
            self._watch(found.tgid, found.service)
            log.info("watching process %d as %s (%s)", found.tgid, found.service, found.rule)
        for tgid in gone:
            self.session.maps.unwatch(tgid)
            self._forget(tgid)
            log.info("process %d %s", tgid, how)
        self._attach_to_files()

    def wait(self, timeout_s: float) -> None:
        """Wait that long, taking records out of rings that fill faster than that."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self.session.wait(left_s) and not self._stopped:
                self._take()
            if self._stopped:
                return

    def relieve(self) -> None:
        """Take records out of the rings, for the next batch, while the core is busy with this one."""
        self._take()

    def moving(self) -> bool:
        """Whether every ring has been emptied, or moved on, since the last call: what the watchdog goes by.

        A record that is never finished holds its ring up for good; new rings are the only cure.
        """
        before, self._positions = self._positions, [ring.waiting_at for ring in self.session.maps.rings]
        return not any(at is not None and at == b for at, b in zip(self._positions, before, strict=False))

    def retarget(self, targets: Targets) -> list[int]:
        """Watch other processes from now on. Returns those that live on and are no longer watched."""
        new, gone = self.discovery.retarget(targets)
        self._follow_scan(new, gone, "is no longer watched")
        return gone

    def allow_headers(self, headers: Collection[str]) -> None:
        """Keep these request headers from now on."""
        self._heads.allow(headers)

    def interrupt(self) -> None:
        """End a wait early, now and from now on; safe in a signal handler."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)

    def drain(self) -> Batch:
        """Take everything that has arrived. Times before the batch's ``now_ns`` are complete."""
        now_ns = time.monotonic_ns()
        # Events first: then the head of every response in them is already in the blob ring.
        self._take()
        events = self._rows.take()
        heads = self._heads.feed(self.session.maps.blobs.drain())
        marks = self._marks.take()
        facts, self._pending = self._pending, []
        facts += self._follow(events)
        now_s = now_ns / 1e9
        facts += self._locks.follow(self.discovery.found, now_s)
        facts += self._stacks.take()
        self._follow_interpreters(now_s)
        if now_s >= self._next_facts_s:
            self._next_facts_s = now_s + _FACTS_EVERY_S
            facts += self._refresh()
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + _SCAN_EVERY_S
            self.scan()
        else:
            self._attach_to_files()
        return Batch(now_ns, events, heads, facts, self._new_losses(), marks)

    def tell(self, facts: Iterable[Fact]) -> None:
        """Have the next batch hold these facts, too."""
        self._pending += facts

    def watched_cpu_s(self) -> float:
        """Return the CPU seconds burnt so far by the processes found, as /proc has them."""
        tick = os.sysconf("SC_CLK_TCK")
        total = 0.0
        for tgid in self.discovery.found:
            try:
                with open(f"/proc/{tgid}/stat") as f:
                    fields = f.read().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / tick
            except (OSError, IndexError, ValueError):
                continue
        return total

    def close(self) -> None:
        """Detach everything."""
        self._waits.close()
        self._stacks.close()
        self.session.close()
        os.close(self._wake)

    def _take(self) -> None:
        for ring in self.session.maps.rings:
            ring.drain(self._rows)
        self._marks.drain()

    def _attach_to_files(self) -> None:
        """Hook the libraries that watched processes have mapped since; looks only at those that are due."""
        if not self.session.follow(self.discovery.found, time.monotonic()):
            return
        for p in self.session.probes:
            now = {(f.hook, f.path, f.build_id): f for f in p.state.files}
            for key, f in now.items():
                if self._hooked.get((p.probe.name, *key)) != f.state:
                    why = f" ({clean(f.reason)})" if f.reason else ""
                    log.info("probe %s: %s in %s: %s%s", p.probe.name, f.hook, clean(f.path), f.state, why)
            self._hooked = {k: v for k, v in self._hooked.items() if k[0] != p.probe.name}
            self._hooked |= {(p.probe.name, *key): f.state for key, f in now.items()}

    def _look(self, tgids: Iterable[int]) -> None:
        for probe in self.session.probes:
            if probe.probe.name == _WAITS:
                probe.walk("look", tgids)
        self.snapshots.look(tgids, time.monotonic_ns())

    def _walk(self, hook: str, tgids: Iterable[int]) -> dict[int, bytes]:
        found = next((p for p in self.session.probes if p.probe.name == _SNAPSHOTS), None)
        return found.walk(hook, tgids) if found is not None else {}

    @property
    def native(self) -> Native:
        """Who names native frames: its process, its CPU time, its state."""
        return self._stacks.native

    def look_for_waits(self, serving: Iterable[int]) -> None:
        """Have blocked and stalled threads looked for while requests are served, by these threads just now."""
        # A request is known some drains after its beginning: who serves one will soon serve another.
        now_s = time.monotonic()
        self._serving |= dict.fromkeys(serving, now_s + _SERVES_S)
        self._serving = {tid: until_s for tid, until_s in self._serving.items() if until_s > now_s}
        self.snapshots.serving = frozenset(self._serving)
        self._waits.look_at(self.discovery.found if self._serving else ())

    def _follow_interpreters(self, now_s: float) -> None:
        for tgid, one in self._stacks.follow(self.discovery.found, now_s).items():
            if one.problem:
                log.info("process %d: frames of Python are not read: %s", tgid, one.problem)

    def _watch(self, tgid: int, service: str) -> None:
        if service not in self._services:
            self._services.append(service)
        try:
            self.session.maps.watch(tgid, self._services.index(service))
        except OSError as e:
            log.warning("%s", e)
            return
        self._pending += self._describe(tgid, service)

    def _describe(self, tgid: int, service: str) -> list[Fact]:
        fact = hostfacts.process_fact(tgid, service)
        if fact is None:
            return []
        changed: list[Fact] = [] if fact == self._described.get(tgid) else [fact]
        self._described[tgid] = fact
        return changed + self._new_threads(tgid)

    def _new_threads(self, tgid: int) -> list[Fact]:
        return hostfacts.thread_facts(tgid, self._threads.setdefault(tgid, set()))

    def _forget(self, tgid: int) -> None:
        self._threads.pop(tgid, None)
        self._described.pop(tgid, None)
        self._stacks.again(tgid)

    def _refresh(self) -> list[Fact]:
        """New threads' names, and what somebody may have just changed: cgroup, CPU mask, quota."""
        out: list[Fact] = []
        whole = self._refreshes % _WHOLE_EVERY == 0
        self._refreshes += 1
        for found in list(self.discovery.found.values())[:_MAX_REFRESHED]:
            known = self._described.get(found.tgid)
            if whole or known is None or hostfacts.moved(known):
                out += self._describe(found.tgid, found.service)
            else:
                out += self._new_threads(found.tgid)
        if whole:
            self._mounts = cgroups.mounts()
        for path in sorted({fact.cgroup for fact in self._described.values()})[:_MAX_REFRESHED]:
            out += hostfacts.cgroup_facts(path, self._mounts)
        out += self._observed.own(self.discovery.ours())
        return out + self._memory.facts(self.discovery.found)

    def _follow(self, events: Events) -> list[Fact]:
        """Act on forks, execs and exits, and look up the descriptors that somebody blocked on."""
        out: list[Fact] = []
        for row in self.schema.select(events, "sched_fork"):
            parent, child = int(row["tgid"]), int(row["child_tgid"])
            if parent != child:
                self.discovery.adopt(parent, child)
                found = self.discovery.found.get(child)
                if found:
                    out += self._describe(child, found.service)
        for row in self.schema.select(events, "sched_exec"):
            tgid = int(row["tgid"])
            found = self.discovery.found.get(tgid)
            if found:
                self.session.look_again(tgid)
                self._locks.again(tgid)
                self._stacks.again(tgid)
                out += self._describe(tgid, found.service)
        out += self._observed.tracers(self.schema.select(events, "sched_switch_out"))
        # Before exits are followed: what was watched until now is no stranger.
        names = self.schema.select(events, "sched_name")
        if len(names):
            ours = np.isin(names["tgid"], list(self.discovery.found))
            out += self._strangers.facts(names[~ours], time.monotonic())
        for row in self.schema.select(events, "sched_exit"):
            if row["aux"] == 1:
                tgid = int(row["tgid"])
                if tgid in self.discovery.found:
                    log.info("process %d has ended", tgid)
                    # The kernel took it off the set; a scan may have put it back on just then.
                    self.session.maps.unwatch(tgid)
                self.discovery.forget(tgid)
                self._forget(tgid)
        out += self._disks.facts(events, time.monotonic())
        refused = self.schema.select(events, "descriptor_refused")
        if len(refused):
            out += self._descriptor_counts.facts(refused, time.monotonic())
        full = [self.schema.select(events, name)["cgroup_id"] for name in _FULL if name in self.schema.types]
        out += self._memory.groups({i for ids in full for i in ids.tolist()})
        return out + self._fds.of(self.schema.select(events, "fd_block"))

    def _new_losses(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for p in self.session.probes:
            total = 0
            for t in p.types:
                count = sum(self.session.maps.drops.read(t.kind))
                total += count
                if count > self._lost.get(t.name, 0):
                    out[t.name] = count - self._lost.get(t.name, 0)
                    self._lost[t.name] = count
            p.state.drops = total
        stacks = self._stacks.bad + self._stacks.crowded_out
        for name, total in (("head", self._heads.lost), ("bad_mark", self._marks.bad), ("stack", stacks)):
            if total > self._lost.get(name, 0):
                out[name] = total - self._lost.get(name, 0)
                self._lost[name] = total
        if self._marks.crowded_out > self._lost.get(
            "", 0
        ):  # counted under the name of those lost in the ring
            out["mark"] = out.get("mark", 0) + self._marks.crowded_out - self._lost.get("", 0)
            self._lost[""] = self._marks.crowded_out
        return out
