"""Run the bench and write ``build/bench/summary.json``: the figures that the README quotes.

Needs root and a quiet machine of two CPUs or more. Each part says what it does; ``--only`` picks some.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tracefs
from tests.bench import cost, ingest, malloc, page, plugin, stitch, vllm_cost
from tests.demo.procs import ROOT

#: Figures whose targets stand in the project's plan: name -> (limit, whether less is better).
TARGETS: dict[str, tuple[float, bool]] = {
    "malloc_watched_ratio": (0.99, False),
    "plugin_direct_cost_ratio": (0.005, True),
    "stitched_wrong": (0, True),
    "stitched_missing": (0, True),
    "ingest_events_per_busy_s": (20e6, False),
    "lost_at_1m_per_s": (0, True),
    "loss_unaccounted": (0, True),
    "direct_cost_ratio": (0.02, True),
    "direct_cost_ratio_all_slow": (0.02, True),
    "pss_mb": (150, True),
    "start_s": (1.0, True),
    "verdict_s": (2.0, True),
    "direct_cost_ratio_vllm": (0.02, True),
    "direct_cost_ratio_vllm_half": (0.02, True),
    "throughput_ratio_vllm_low": (0.97, False),
    "ttft_ratio_vllm": (1.02, True),
    "list_10k_ms": (300, True),
    "timeline_first_draw_ms": (500, True),
    "pan_half_frames_per_s": (30, False),
    "pan_tenth_frames_per_s": (30, False),
}


def bench_stitch(directory: Path) -> dict[str, Any]:
    """1,000 concurrent requests, keep-alive and pipelined, under asyncio and uvloop."""
    return stitch.run(directory)


def bench_ingest(directory: Path) -> dict[str, Any]:
    """Records per busy second; loss at a million a second; exact loss with 4 KiB rings."""
    steady = ingest.run(directory, rate=1_000_000, seconds=10.0)
    flood = ingest.run(directory, rate=0, seconds=5.0)
    tiny = ingest.run(directory, rate=0, seconds=2.0, ring_bytes=8192)
    unaccounted = sum(abs(r["sent"] - r["received"] - r["dropped"]) for r in (steady, flood, tiny))
    return {
        "ingest_events_per_busy_s": max(steady["per_busy_s"], flood["per_busy_s"]),
        "ingest_events_per_busy_s_at_1m": steady["per_busy_s"],
        "lost_at_1m_per_s": steady["dropped"],
        "sent_at_1m_per_s": steady["sent"],
        "flood_events_per_s": flood["sent"] / 5.0,
        "lost_in_flood": flood["dropped"],
        "tiny_ring_dropped": tiny["dropped"],
        "loss_unaccounted": unaccounted,
    }


def bench_cost(directory: Path) -> dict[str, Any]:
    """Direct cost with every request ordinary, and with every request slow; memory, start-up, verdict delay."""
    ordinary = cost.run(directory / "cost", all_slow=False)
    slow = cost.run(directory / "cost", all_slow=True, seconds=100.0)  # until memory has levelled off
    started = cost.start(directory / "cost")
    keys = (
        "server_cores",
        "agent_cores",
        "bpf_cores",
        "probe_hits_per_s",
        "ns_per_hit",
        "probes",
        "requests_per_s",
    )
    return {
        "direct_cost_ratio": ordinary["direct_cost_ratio"],
        "direct_cost_ratio_all_slow": slow["direct_cost_ratio"],
        "pss_mb": max(ordinary["pss_mb"], slow["pss_mb"]),
        **started,
        "verdict_s": slow["verdict_s"],
        "verdict_median_s": slow["verdict_median_s"],
        "cost": {k: ordinary[k] for k in keys},
        "cost_all_slow": {k: slow[k] for k in keys},
    }


def bench_vllm(directory: Path) -> dict[str, Any]:
    """Cost on a real vLLM server: direct, and paired windows with the agent on the worker's CPU (25 min)."""
    return vllm_cost.run(directory / "vllm", PAIRS["vllm"])


def bench_plugin(directory: Path) -> dict[str, Any]:
    """what a mark costs, and the plugin on a vLLM in a closed loop"""
    return plugin.run(directory)


def bench_malloc(directory: Path) -> dict[str, Any]:
    """malloc in a watched process against the same unwatched, in turns; and with uprobes"""
    return malloc.run(directory)


def bench_page(directory: Path) -> dict[str, Any]:
    """the page in a headless browser: a list of 10,000 requests, a timeline of 50,000 pieces"""
    return page.run(directory / "page")


#: Pairs of windows; ``--pairs`` changes it.
PAIRS = {"vllm": vllm_cost.PAIRS}

PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "stitch": bench_stitch,
    "ingest": bench_ingest,
    "cost": bench_cost,
    "vllm": bench_vllm,
    "plugin": bench_plugin,
    "malloc": bench_malloc,
    "page": bench_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="run these parts only")
    parser.add_argument(
        "--pairs", type=int, default=vllm_cost.PAIRS, help="pairs of windows of the part vllm"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "summary.json")
    args = parser.parse_args()
    PAIRS["vllm"] = args.pairs
    if os.geteuid() != 0:
        print("the bench needs root", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = json.loads(args.out.read_text()) if args.only and args.out.exists() else {}
    summary["machine"] = {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    parts = list(args.only or PARTS)
    for number, name in enumerate(parts, 1):
        print(f"[{number}/{len(parts)}] {name}: {PARTS[name].__doc__}", flush=True)
        began = time.monotonic()
        with tracefs.mounted():
            summary |= PARTS[name](args.out.parent)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    args.out.write_text(json.dumps(summary, indent=2) + "\n")
    for key, (limit, less) in TARGETS.items():
        if key in summary:
            value = summary[key]
            met = value is not None and (value <= limit if less else value >= limit)
            target = f"target {'<=' if less else '>='} {limit:,.4g}"
            print(f"  {key:28} {value:>16,.4g}   {target}  {'met' if met else 'MISSED'}")
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
