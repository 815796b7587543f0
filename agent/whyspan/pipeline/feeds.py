"""The collector's side of the feeds: which there are, whose they are, and their marks, checked and stamped."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from whyspan import config as configuration
from whyspan import discovery
from whyspan.discovery import Candidate, Found
from whyspan.feeds import find, messages
from whyspan.feeds.find import Endpoint
from whyspan.feeds.messages import Feed, FeedsMessageError, FeedState, Setup
from whyspan.feeds.timing import MAX_AGE_NS
from whyspan.marks import Mark
from whyspan.pipeline.feeds_process import FeedsProcess
from whyspan.text import clean

log = logging.getLogger("whyspan.collector")

#: The name under which lost marks are counted.
LOST: Final = "feed_mark"
_LOOK_S: Final = (
    5.0,
    30.0,
)  # at a process without and with endpoints: a server listens minutes after its start
_MAX_LOOKED: Final = 64  # processes
_MAX_CMDLINE: Final = 64 << 10
_MAX_MARKS: Final = 16_384  # per batch
_MAX_ENDED: Final = 16
_PROC: Final = Path("/proc")


class _Looked(msgspec.Struct):
    start: float
    engine: str = ""
    endpoints: list[Endpoint] = []
    next_s: float = 0.0


class _Wanted(msgspec.Struct):
    """A feed and the process whose it is; ``feed.id`` 0 when it cannot be had."""

    feed: Feed
    tgid: int
    service: str
    problem: str
    state: FeedState


class Feeds:
    """All feeds of all watched processes. ``drain`` is called with each batch and never waits."""

    def __init__(self, settings: configuration.Feeds, process: FeedsProcess | None = None) -> None:
        """*process* is for tests."""
        self._settings = settings
        self.process = process or FeedsProcess()
        self._looked: dict[int, _Looked] = {}
        self._wanted: dict[tuple[object, ...], _Wanted] = {}
        self._by_id: dict[int, _Wanted] = {}
        self._ended: deque[_Wanted] = deque(maxlen=_MAX_ENDED)
        self._ids = 0
        self._lost = 0
        self._changed = False

    def look(self, found: Mapping[int, Found]) -> None:
        """Find the feeds of the processes that are watched; cheap when nothing is new."""
        if not self._settings.enabled:
            return
        now_s = time.monotonic()
        wanted: dict[tuple[object, ...], tuple[Found, str, Endpoint]] = {}
        taken: set[tuple[str, str]] = set()
        for f, engine, e in [*self._named(found), *self._found(found, now_s)]:
            if (e.kind, e.endpoint) not in taken:
                taken.add((e.kind, e.endpoint))
                wanted[f.tgid, f.start, e] = f, engine, e
        for key in [k for k in self._wanted if k not in wanted]:
            old = self._wanted.pop(key)
            if self._by_id.pop(old.feed.id, None):
                self._changed = True
                alive = old.tgid in found
                old.state.state = "stopped" if alive else "ended"
                if not alive:
                    old.problem = f"process {old.tgid} has ended"
                self._ended.append(old)
        for key, (f, engine, e) in list(wanted.items())[: messages.MAX_FEEDS]:
            if key not in self._wanted:
                self._wanted[key] = self._want(f, engine, e)

    def reconfigure(self, settings: configuration.Feeds) -> None:
        """Go by other settings: feeds that are still wanted go on, the others are found, or end, at the next look."""
        self._settings = settings
        self._changed = True
        if not settings.enabled:
            self._wanted.clear()
            self._by_id.clear()
            self.process.close()

    def drain(self, found: Mapping[int, Found]) -> list[Mark]:
        """Return the marks that have arrived, by time; none is later than now."""
        self.look(found)
        self.process.tend(self._setup(), self._changed)
        self._changed = False
        packets, report, bad = self.process.receive()
        now_ns = time.monotonic_ns()
        out: list[Mark] = []
        self._lost += bad
        for packet in packets:
            self._lost += packet.lost
            for raw in packet.entries:
                mark = self._mark(raw, now_ns) if len(out) < _MAX_MARKS else None
                if mark is None:
                    self._lost += 1
                else:
                    out.append(mark)
        for state in report.feeds if report else ():
            if state.id in self._by_id:
                self._by_id[state.id].state = state
        out.sort(key=lambda m: m.ts_ns)
        return out

    def new_losses(self) -> dict[str, int]:
        """Return the marks lost since the last call, by name; empty when there are none."""
        lost, self._lost = self._lost, 0
        return {LOST: lost} if lost else {}

    def states(self) -> dict[str, Any]:
        """Return how the process and every feed is, JSON-like."""
        p = self.process
        shown = [*self._wanted.values(), *self._ended]
        return {
            "enabled": self._settings.enabled,
            "tgid": p.tgid,
            "cpu_s": p.cpu_s,
            "rss_bytes": p.rss_bytes,
            "restarts": p.restarts,
            "last_end": p.last_end,
            "feeds": [self._state(w) for w in shown],
        }

    def close(self) -> None:
        """End the process."""
        self.process.close()

    def _setup(self) -> Setup:
        feeds = [w.feed for w in self._by_id.values()]
        return Setup(self._settings.interval_s, self._settings.timeout_s, feeds)

    def _want(self, found: Found, engine: str, e: Endpoint) -> _Wanted:
        problem = e.problem or ("" if found.tgid else f"no process of service {found.service} is watched")
        id_ = 0
        if not problem:
            self._ids += 1
            id_ = self._ids
        feed = Feed(id_, e.kind, engine, e.endpoint, e.replay, e.topic, e.rank)
        out = _Wanted(feed, found.tgid, found.service, problem, FeedState(id_))
        if id_:
            self._by_id[id_] = out
            self._changed = True
        else:
            out.state.state = "stopped"
            log.warning("feed %s of %s %s: %s", e.kind, found.service, clean(e.endpoint), problem)
        return out

    def _named(self, found: Mapping[int, Found]) -> list[tuple[Found, str, Endpoint]]:
        out = []
        for n in self._settings.named:
            # The first process of a service is the one that was started; its children come after it.
            ours = [f for f in found.values() if f.service == n.service]
            ours.sort(key=lambda f: (f.rule.startswith("child of"), f.start))
            owner = ours[0] if ours else Found(0, 0.0, n.service, "")
            out.append((owner, n.engine, Endpoint(n.kind, n.endpoint, n.replay, n.topic)))
        return out

    def _found(self, found: Mapping[int, Found], now_s: float) -> list[tuple[Found, str, Endpoint]]:
        for tgid in [t for t in self._looked if t not in found]:
            del self._looked[tgid]
        out = []
        for f in sorted(found.values(), key=lambda f: f.start)[:_MAX_LOOKED]:
            looked = self._looked.get(f.tgid)
            if looked is None or looked.start != f.start:
                looked = self._looked[f.tgid] = _Looked(f.start)
            if now_s >= looked.next_s:
                cmdline = _cmdline(f.tgid)
                looked.engine = _engine(f, cmdline)
                fresh = find.endpoints(f.tgid, looked.engine, cmdline)
                # A server that no longer listens is down; it has not gone elsewhere.
                kinds = {e.kind for e in fresh}
                looked.endpoints = fresh + [e for e in looked.endpoints if e.kind not in kinds]
                looked.next_s = now_s + _LOOK_S[messages.METRICS in kinds]
            out += [(f, looked.engine, e) for e in looked.endpoints if getattr(self._settings, e.kind)]
        return out

    def _mark(self, raw: msgspec.Raw, now_ns: int) -> Mark | None:
        try:
            entry = messages.decode_entry(raw)
        except FeedsMessageError:
            return None
        wanted = self._by_id.get(entry.feed)
        if wanted is None or not isinstance(entry.body, messages.KINDS[wanted.feed.kind]):
            return None
        ts_ns = min(max(entry.ts_ns, now_ns - MAX_AGE_NS, 0), now_ns)
        return Mark(ts_ns, 0, wanted.tgid, entry.body)

    def _state(self, w: _Wanted) -> dict[str, Any]:
        s = w.state
        return {
            "name": f"{w.service} {w.feed.kind}" + (f" {w.feed.rank}" if w.feed.rank else ""),
            "service": w.service,
            "tgid": w.tgid,
            "kind": w.feed.kind,
            "engine": w.feed.engine,
            "endpoint": clean(w.feed.endpoint),
            "replay": clean(w.feed.replay),
            "state": s.state,
            "problem": w.problem,
            "marks": s.marks,
            "events": s.events,
            "gaps": s.gaps,
            "missed": s.missed,
            "repaired": s.repaired,
            "engine_restarts": s.restarts,
            "errors": s.errors,
            "last_error": clean(s.last_error),
        }


def _cmdline(tgid: int, proc: Path = _PROC) -> tuple[str, ...]:
    try:
        with (proc / str(tgid) / "cmdline").open("rb") as f:
            data = f.read(_MAX_CMDLINE)
    except OSError:
        return ()
    return tuple(word.decode("utf-8", "replace") for word in data.rstrip(b"\0").split(b"\0"))


def _engine(found: Found, cmdline: tuple[str, ...]) -> str:
    engine = discovery.engine_of(Candidate(found.tgid, 0, found.start, "", "", cmdline))
    if not engine and found.rule.startswith("libraries"):
        engine = found.service
    return engine if engine in messages.ENGINES else ""
