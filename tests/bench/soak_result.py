"""Judges the record of a soak. Pure but for reading it: lines in, a table, JSON and an exit status out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.bench.soak_plan import SPOOL_MB, STORE_MB
from tests.bench.soak_slope import slope

#: A process's memory before that is of its start: libraries, a window of 60 s, a baseline, the store's cache, and what
#: the core remembers of the last 16,384 requests and 10,000 connections (8 min at 2,000 a minute).
WARM_S = 600.0
LONG_MIN = 30.0
MIB = 1 << 20
STORE_BYTES, SPOOL_BYTES = STORE_MB * MIB, SPOOL_MB * MIB
#: A collector's counters are told every second of what was drained half a second ago; a request's end is known 0.5 s
#: after it. What ended so long before the last that is in the store is in it.
TOLD_NS = 3_000_000_000


class Record(NamedTuple):
    """What a soak left."""

    samples: list[dict[str, Any]]
    events: list[dict[str, Any]]
    sent: list[list[Any]]  # trace, start, end (monotonic ns), status, error
    found: dict[str, list[Any]]  # by id: trace, slow bits, cause
    spans: dict[str, int]
    counters: list[list[Any]]  # instance, name, label, value, updated
    last: dict[str, Any]
    log: str


def read(folder: Path) -> Record:
    """Read a record; a line that is still being written is left out."""

    def lines(name: str) -> list[Any]:
        path = folder / name
        return [json.loads(t) for t in path.read_text().split("\n")[:-1]] if path.exists() else []

    end = folder / "findings.json"
    last = (
        json.loads(end.read_text())
        if end.exists()
        else {"found": {}, "spans": {}, "counters": [], "last": {}}
    )
    log = (folder / "agent.log").read_text(errors="replace")
    return Record(lines("samples.jsonl"), lines("events.jsonl"), lines("sent.jsonl"), log=log, **last)


def memory(
    samples: Sequence[Mapping[str, Any]], what: str, warm_s: float = WARM_S
) -> dict[str, dict[str, Any]]:
    """Return the slope of one figure of each process that lived long enough, by role and process id."""
    series: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for s in samples:
        for role, p in s["processes"].items():
            series.setdefault((role, p["pid"]), []).append((s["at_s"], p[what]))
    out = {}
    for (role, pid), points in series.items():
        kept = [(t, v) for t, v in points if t - points[0][0] >= warm_s]
        found = slope([t for t, _ in kept], [v / MIB for _, v in kept]) if kept else None
        if found is not None:
            out[f"{role} {pid}"] = found._asdict() | {
                "flat": found.flat,
                "most": max(v for _, v in kept) / MIB,
            }
    return out


def whole(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the slope of the PSS of all processes together since the last of them was started."""
    pids = [tuple(sorted(p["pid"] for p in s["processes"].values())) for s in samples]
    same = [s for s, p in zip(samples, pids, strict=True) if p == pids[-1]]
    kept = [s for s in same if s["at_s"] - same[0]["at_s"] >= WARM_S]
    total = [sum(p["pss"] for p in s["processes"].values()) / MIB for s in kept]
    found = slope([s["at_s"] for s in kept], total) if kept else None
    return None if found is None else found._asdict() | {"flat": found.flat, "most": max(total)}


def counts(record: Record) -> dict[str, int]:
    """Return the counters of all collectors together, by ``name/label``."""
    out: Counter[str] = Counter()
    for _, name, label, value, _ in record.counters:
        out[f"{name}/{label}"] += value
    return dict(out)


def away(record: Record) -> list[tuple[int, int]]:
    """Return when no collector counted, as monotonic ns: from what the last one told to the next one."""
    out, killed = [], 0
    for e in record.events:
        offset = e["unix_ns"] - int(e["at_s"] * 1e9)
        if e["what"] == "kill" and e["role"] == "collector":
            told = max((c[4] for c in e["counters"]), default=e["unix_ns"])
            killed = min(told - offset, int(e["at_s"] * 1e9)) - TOLD_NS
        elif e["what"] == "reload" and e["kind"] == "rebuild":
            killed = int(e["at_s"] * 1e9) - TOLD_NS
        elif e["what"] == "back" and e["role"] == "collector":
            out.append((killed, int(e["at_s"] * 1e9) + TOLD_NS))
    return out


def ledger(record: Record) -> dict[str, Any]:
    """Hold what the client sent against what the agent counted and stored, and what was stored against what arrived."""
    begin = next(int(e["at_s"] * 1e9) for e in record.events if e["what"] == "ready")
    objective_ns = next(e["objective_ms"] for e in record.events if e["what"] == "ready") * 1_000_000
    gaps = away(record)

    def in_gap(start_ns: int, end_ns: int) -> bool:
        return any(start_ns < until and end_ns > since for since, until in gaps)

    sent = [s for s in record.sent if s[1] >= begin]
    reached = [s for s in sent if s[3] > 0]
    unseen = [s for s in reached if in_gap(s[1], s[2])]
    counted = counts(record)
    requests = sum(v for k, v in counted.items() if k.startswith("requests/"))
    lost = {k.partition("/")[2]: v for k, v in counted.items() if k.startswith("lost_events/")}
    not_explained = sum(v for k, v in counted.items() if k.startswith("not_explained/"))
    slow = [s for s in reached if s[3] == 200 and not s[4] and s[2] - s[1] > objective_ns]
    explained = {trace for trace, _, _ in record.found.values()}
    missing = [s for s in slow if s[0] not in explained and not in_gap(s[1], s[2])]
    to_send = {trace for trace, bits, _ in record.found.values() if bits}
    return {
        "sent": len(sent),
        "sent_per_minute": 60 * len(sent) / max((sent[-1][2] - begin) / 1e9, 1) if sent else 0.0,
        "not_reached": dict(Counter(s[4] or "no status" for s in sent if s[3] == 0)),
        "reached": len(reached),
        "while_no_collector_counted": len(unseen),
        "no_collector_s": sum(until - since for since, until in gaps) / 1e9,
        "counted": requests,
        "not_counted": max(0, len(reached) - len(unseen) - requests),
        "by_outcome": {k.partition("/")[2]: v for k, v in counted.items() if k.startswith("requests/")},
        "lost_events": lost,
        "slow_by_client": len(slow),
        "without_finding": len(missing),
        "not_explained": not_explained,
        "findings": len(record.found),
        "findings_to_send": len(to_send),
        "findings_not_received": len(to_send - set(record.spans)),
        "findings_dropped": sum(record.last.get("findings_dropped", {}).values()),
        "spans_received": sum(record.spans.values()),
        "sinks": record.last.get("sinks", {}),
    }


def flat(result: Mapping[str, Any], processes: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether no process's own memory rises. After half an hour each one that is there must have been judged."""
    slopes = result["pss_anon"]
    known = result["minutes"] < LONG_MIN or all(
        f"{role} {p['pid']}" in slopes for role, p in processes.items()
    )
    return known and all(m["flat"] for m in slopes.values())


def levels(samples: Sequence[Mapping[str, Any]], what: str) -> dict[str, dict[str, int]]:
    """Return least, most and last of a figure of each process after its warm-up, by role and process id."""
    out: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    for s in samples:
        for role, p in s["processes"].items():
            name = f"{role} {p['pid']}"
            if s["at_s"] - first.setdefault(name, s["at_s"]) >= WARM_S / 10:
                out.setdefault(name, []).append(p[what])
    return {name: {"least": min(v), "most": max(v), "first": v[0], "last": v[-1]} for name, v in out.items()}


def judge(record: Record) -> dict[str, Any]:
    """Return all figures, and under ``failed`` what is not as it must be."""
    facts = ledger(record)
    sink = facts["sinks"].get("otlp", {})
    spans = sink.get("traces", {})
    kills = [e for e in record.events if e["what"] == "kill"]
    out: dict[str, Any] = {
        "minutes": (record.samples[-1]["at_s"] - record.samples[0]["at_s"]) / 60,
        "pss": memory(record.samples, "pss"),
        "pss_anon": memory(record.samples, "pss_anon"),
        "pss_together": whole(record.samples),
        "fds": levels(record.samples, "fds"),
        "threads": levels(record.samples, "threads"),
        "store_most": max(s["store"] for s in record.samples),
        "spool_most": max(s["spool"] for s in record.samples),
        "files": sorted({name for s in record.samples for name in s["files"]}),
        "files_at_the_end": record.last.get("files", {}),
        "ledger": facts,
        "kills": len(kills),
        "restarts": record.log.count("restarting in"),
        "tracebacks": record.log.count("Traceback"),
        "reloads": Counter(e["kind"] for e in record.events if e["what"] == "reload"),
        "reloads_in_the_log": record.log.count("INFO whyspan.collector: reloaded")
        + record.log.count("not reloaded"),
        "outages": sum(e["what"] == "outage" for e in record.events),
        "faults": Counter("error" if e["error"] else "on" for e in record.events if e["what"] == "fault"),
        "fault_errors": [
            f"{e['name']}: {e['error']}" for e in record.events if e["what"] == "fault" and e["error"]
        ],
        "probes_unwell": sorted({f"{n}: {s}" for line in record.samples for n, s in line["unwell"].items()}),
    }
    allowed = sum(facts["lost_events"].values())
    checks: dict[str, Callable[[], bool]] = {
        "PSS of every process flat": lambda: flat(out, record.samples[-1]["processes"]),
        "store within its bound": lambda: out["store_most"] <= STORE_BYTES,
        "spool within its bound": lambda: out["spool_most"] <= SPOOL_BYTES,
        "no more requests uncounted than events lost": lambda: facts["not_counted"] <= allowed,
        "slow ones without a finding are counted": lambda: facts["without_finding"] <= facts["not_explained"],
        "findings not received are counted": lambda: (
            facts["findings_not_received"] <= spans.get("dropped", 0)
        ),
        "restarts are those of the kills": lambda: out["restarts"] == out["kills"],
        "no traceback": lambda: out["tracebacks"] == 0,
        "descriptors do not grow": lambda: all(v["last"] <= v["first"] + 8 for v in out["fds"].values()),
        "threads do not grow": lambda: all(v["last"] <= v["first"] + 2 for v in out["threads"].values()),
        "it stopped in order": lambda: any(
            e["what"] == "agent ended" and e["status"] == 0 for e in record.events
        ),
        "nothing broke in the soak itself": lambda: not any(e["what"] == "broke" for e in record.events),
    }
    out["failed"] = [name for name, holds in checks.items() if not holds()]
    out["checks"] = list(checks)
    return out


def table(result: Mapping[str, Any]) -> Table:
    """Return what a reader wants to see of it."""
    out = Table(
        "process",
        "PSS MiB (mean, most)",
        "slope MiB/h [95%]",
        "anonymous MiB/h [95%]",
        "noise",
        "fds",
        "threads",
    )
    for name, p in result["pss"].items():
        a = result["pss_anon"][name]
        fds, threads = result["fds"].get(name, {}), result["threads"].get(name, {})
        out.add_row(
            name,
            f"{p['mean']:.1f}, {p['most']:.1f}",
            f"{p['per_hour']:+.2f} [{p['low']:+.2f}, {p['high']:+.2f}]",
            f"{a['per_hour']:+.2f} [{a['low']:+.2f}, {a['high']:+.2f}]",
            f"{a['noise']:.2f}",
            *(f"{v.get('first')} -> {v.get('last')} (most {v.get('most')})" for v in (fds, threads)),
        )
    return out


def report(folder: Path, console: Console) -> int:
    """Judge the record in a folder, write ``result.json`` there, print it; 1 when a check failed."""
    result = judge(read(folder))
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(table(result))
    plain = {k: v for k, v in result.items() if k not in ("pss", "pss_anon", "fds", "threads")}
    console.print_json(json.dumps(plain))
    for name in result["checks"]:
        console.print(("FAILED  " if name in result["failed"] else "ok      ") + name, markup=False)
    return 1 if result["failed"] else 0
