"""How the engines are just now, and what they have done so far: for ``whyspan engines`` and for the metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Any, Final

from whyspan.engines.records import Instance, Job, StageRun, StepRun
from whyspan.engines.table import EngineTable
from whyspan.facts import Facts
from whyspan.marks import Gauges
from whyspan.text import clean

MAX_ENGINES: Final = 64
#: Means are over the steps of so long, at most so many.
RECENT_NS: Final = 10_000_000_000
_MAX_RECENT: Final = 256
#: An engine whose last step is older and that has no job is at rest.
_REST_NS: Final = 1_000_000_000
#: An abort takes a moment to get through; as in ``causes.engine_zombie_request``.
ZOMBIE_NS: Final = 500_000_000
#: Feeds are read every few seconds: what is older than this says nothing of now.
_GAUGES_NS: Final = 60_000_000_000
# With these, and strings as long as they may be, 64 engines take less than half of a message of the link.
_MAX_STAGES: Final = 12
_MAX_MISSING: Final = 12
_MAX_SETTINGS: Final = 24
_MAX_MODEL: Final = 8
_CHARS: Final = 64
#: Counters of a feed, by the name that the marks' totals have for the same.
_GAUGE_COUNTS: Final = {
    "prompt_tokens": "prompt_tokens",
    "prompt_tokens_cached": "cached_tokens",
    "generation_tokens": "output_tokens",
    "preemptions": "preemptions",
}
_COUNTED: Final = (
    "steps",
    "batches",
    "sequences",
    "tokens",
    "step_ns",
    "preemptions",
    "recomputed",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "evicted_blocks",
)
_ORDER: Final = {"core": 0, "server": 1, "frontend": 2, "worker": 3}
#: Since when an engine core has made no progress, 0 when it makes some: (table, core, now) in ns.
Frozen = Callable[[EngineTable, int, int], int]
Key = tuple[str, str, str]  # name, service, label


def status(
    table: EngineTable, facts: Facts, now_ns: int, frozen_since: Frozen | None = None
) -> list[dict[str, Any]]:
    """Return the processes of engines, JSON-like, at most 64: cores first, those that ended last.

    What is not known is None. ``state`` is that of the marks: ok, degraded, off, heard; feeds where only these speak;
    ended.

    Args:
        table: What they have said.
        facts: Whose processes they are.
        now_ns: CLOCK_MONOTONIC.
        frozen_since: Tells a frozen core; none is, without it.
    """
    cores = set(table.known_cores())
    fed = _fed(table, facts, now_ns)
    instances = {i.tgid: i for i in table.instances()}
    tgids = dict.fromkeys([*cores, *instances, *fed])
    entries = [_entry(table, facts, tgid, instances.get(tgid), now_ns) for tgid in tgids]
    for e in entries:
        if e["tgid"] in cores:
            _add_core(e, table, now_ns, frozen_since)
        if e["tgid"] in fed:
            _add_feed(e, fed[e["tgid"]])
    entries.sort(key=lambda e: (e["state"] == "ended", _ORDER.get(e["role"], 4), e["service"], e["tgid"]))
    return entries[:MAX_ENGINES]


def _entry(
    table: EngineTable, facts: Facts, tgid: int, instance: Instance | None, now_ns: int
) -> dict[str, Any]:
    hello = instance.hello if instance is not None else None
    ended = bool(table.ended_ns(tgid) or (instance is not None and instance.ended_ns))
    health = table.health.get(tgid)
    stages = instance.stages[:_MAX_STAGES] if instance is not None else []
    return {
        "tgid": tgid,
        "service": clean(facts.service(tgid), _CHARS),
        "engine": clean(table.engine_of(tgid), _CHARS),
        "version": clean(hello.version, _CHARS) if hello else "",
        "role": clean(hello.role, _CHARS) if hello else "core" if table.last_step(tgid) else "",
        "rank": hello.rank if hello else 0,
        "state": "ended" if ended else clean(instance.state, _CHARS) if instance is not None else "heard",
        "missing": [clean(name, _CHARS) for name in hello.missing[:_MAX_MISSING]] if hello else [],
        "config": _settings(hello.config, _MAX_SETTINGS) if hello else {},
        "model": _settings(hello.model, _MAX_MODEL) if hello else {},
        "stages": [_stage(s, stages[0].begin_ns) for s in stages],
        "stages_from_ns": stages[0].begin_ns if stages else 0,  # CLOCK_MONOTONIC
        "exec_ns": facts.started_ns(tgid),
        "health": health[1].status if health is not None and now_ns - health[0] < _GAUGES_NS else None,
        "steps": 0,
        "running": None,
        "waiting": None,
        "kv_usage": None,
        "kv_blocks": None,
        "fragmentation": None,
        "prefix_hit_ratio": None,
        "recompute_ratio": None,
        "batch": None,
        "tokens_per_step": None,
        "step_ms": None,
        "preemptions": None,
        "evicted_blocks": None,
        "zombies": None,
        "frozen_s": None,
    }


def _settings(found: Mapping[str, str], limit: int) -> dict[str, str]:
    return {clean(k, _CHARS): clean(v, _CHARS) for k, v in list(found.items())[:limit]}


def _stage(stage: StageRun, from_ns: int) -> dict[str, Any]:
    return {
        "name": clean(stage.name, _CHARS),
        "what": clean(stage.what, _CHARS),
        "at_ms": (stage.begin_ns - from_ns) / 1e6,  # after the first one began
        "ms": (stage.end_ns - stage.begin_ns) / 1e6,
        "again": stage.again,
    }


def _add_core(e: dict[str, Any], table: EngineTable, now_ns: int, frozen_since: Frozen | None) -> None:
    core = e["tgid"]
    counts, last = table.counts_of(core), table.last_step(core)
    e["steps"] = counts.get("steps", 0)
    e["preemptions"], e["evicted_blocks"] = counts.get("preemptions", 0), counts.get("evicted_blocks", 0)
    e["prefix_hit_ratio"] = _ratio(counts.get("cached_tokens", 0), counts.get("prompt_tokens", 0))
    e["recompute_ratio"] = _ratio(counts.get("recomputed", 0), counts.get("tokens", 0))
    if e["state"] == "ended":
        return  # what it held is gone with it
    live = table.live_jobs(core)
    e["zombies"] = sum(1 for j in live if j.admitted_ns and 0 < j.client_left_ns < now_ns - ZOMBIE_NS)
    e["fragmentation"] = fragmentation(live)
    if last is not None:
        rests = bool(last.done_ns) and not live and now_ns - last.done_ns > _REST_NS
        e["running"], e["waiting"] = (0, 0) if rests else (last.running, last.waiting)
        total = last.kv_used + last.kv_free
        used = 0 if rests else last.kv_used
        if total:
            e["kv_usage"] = used / total
            cached = min(last.kv_cached, total - used)
            e["kv_blocks"] = {"used": used, "cached": cached, "free": total - used - cached}
    _add_means(e, table.steps(core, now_ns - RECENT_NS, now_ns)[-_MAX_RECENT:])
    since_ns = frozen_since(table, core, now_ns) if frozen_since is not None else 0
    e["frozen_s"] = (now_ns - since_ns) / 1e9 if since_ns else 0.0


def _add_means(e: dict[str, Any], steps: Iterable[StepRun]) -> None:
    done = [s for s in steps if s.done_ns and not s.empty]
    if done:
        e["batch"] = sum(s.batch for s in done) / len(done)
        e["tokens_per_step"] = sum(s.tokens for s in done) / len(done)
        e["step_ms"] = sum(s.wall_ns for s in done) / len(done) / 1e6


def fragmentation(jobs: Iterable[Job]) -> float | None:
    """Return the share of the KV blocks given to *jobs* that no token fills, 0..1; None when they hold none.

    A plain decode step does not tell of the block it may take: a job has at least what its tokens need. Blocks shared
    by prefix count for each that has them.
    """
    capacity = filled = 0
    for j in jobs:
        if not j.block_size or not j.blocks:
            continue
        tokens = j.prompt_tokens - max(j.prefill_left, 0) + max(j.output_tokens - 1, 0)
        blocks = max(j.blocks, ceil(tokens / j.block_size))
        capacity += blocks * j.block_size
        filled += tokens
    return 1 - filled / capacity if capacity else None


def _fed(table: EngineTable, facts: Facts, now_ns: int) -> dict[int, Gauges]:
    """What feeds say lately of processes whose service has no core that names requests in its steps."""
    named = [c for c in table.known_cores() if not table.ended_ns(c) and not table.anonymous(c)]
    marked = {facts.service(core) for core in named} - {""}
    return {
        tgid: gauges
        for tgid, (ts_ns, gauges) in table.gauges.items()
        if now_ns - ts_ns < _GAUGES_NS and facts.service(tgid) not in marked
    }


def _add_feed(e: dict[str, Any], gauges: Gauges) -> None:
    if e["state"] == "ended":
        return
    values = gauges.values
    e["engine"] = e["engine"] or clean(gauges.engine, _CHARS)
    e["role"] = e["role"] or "server"
    if e["state"] == "heard":
        e["state"] = "feeds"
    for name in ("running", "waiting", "preemptions"):
        e[name] = int(values[name]) if name in values else e[name]
    e["kv_usage"] = values.get("kv_usage", e["kv_usage"])
    queries, hits = values.get("prefix_queries"), values.get("prefix_hits", 0.0)
    if queries is None:
        queries, hits = values.get("prompt_tokens", 0.0), values.get("prompt_tokens_cached", 0.0)
    e["prefix_hit_ratio"] = _ratio(hits, queries)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Totals:
    """What engines have done since watching began, by service and engine; a process that goes takes nothing along."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], Mapping[str, float]] = {}

    def update(self, table: EngineTable, facts: Facts, now_ns: int) -> Counter[Key]:
        """Return what came since the last call, by (name, service, label), as `Client.count` takes it.

        ``engine_`` and a name of ``EngineTable.counts``, label the engine; ``engine_prompts``, label the tag of the
        template. Of an engine that makes no marks, what its feed counts.
        """
        out: Counter[Key] = Counter()
        seen: dict[tuple[int, str], Mapping[str, float]] = {}
        for core in table.known_cores():
            engine = table.engine_of(core)
            service = facts.service(core)
            now = table.counts_of(core)
            counts = {name: now[name] for name in _COUNTED if name in now}
            for name, n in self._more(core, "marks", counts, seen).items():
                out[f"engine_{name}", service, engine] += n
            for tag, n in self._more(core, "templates", dict(table.templates_of(core)), seen).items():
                out["engine_prompts", service, tag] += n
        for tgid, gauges in _fed(table, facts, now_ns).items():
            counts = {
                to: int(gauges.values[name]) for name, to in _GAUGE_COUNTS.items() if name in gauges.values
            }
            if (tgid, "feed") in self._seen:  # what it counted before is not ours
                for name, n in self._more(tgid, "feed", counts, seen).items():
                    out[f"engine_{name}", facts.service(tgid), gauges.engine] += n
            seen[tgid, "feed"] = counts
        self._seen = seen
        return +out

    def _more(
        self, tgid: int, kind: str, now: Mapping[str, int], seen: dict[tuple[int, str], Mapping[str, float]]
    ) -> dict[str, int]:
        before = self._seen.get((tgid, kind), {})
        seen[tgid, kind] = now
        # Less than before: it began anew.
        return {
            name: int(n - before.get(name, 0) if n >= before.get(name, 0) else n) for name, n in now.items()
        }
