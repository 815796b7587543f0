"""How fast the boards are on a fleet: ``python -m tests.boards.fleet [--hosts 50] [--hours 24] [--data FOLDER]``.

Fills a real Prometheus with the series of 50 hosts, 200 each, one sample a minute, for a day that ends now, runs every
query of every board and alert once as Grafana would for that day, and prints how long each took. No store is warm: each
query is asked once. Exit status 1 when a query took longer than the limit, or had no answer. Some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from whyspan.tally import BOUNDS_S

from tests.boards import boards, tools
from tests.boards.stores import Prometheus, QueryError

MINUTE_S: Final = 60
#: A block of Prometheus; promtool reads its whole input once for each that is in it, so that each gets its own file.
BLOCK_S: Final = 7200
SERIES: Final = 200
SERVICE: Final = 'whyspan_service="chat"'
MODEL: Final = 'gen_ai_request_model="llama"'
CAUSES: Final = (
    *("cpu.throttled", "cpu.runqueue", "memory.reclaim", "io.disk_contention", "net.dns", "lock.malloc"),
    *("python.gil", "engine.queueing", "engine.kv_preemption", "engine.prefill_interference", "unknown"),
)


class Series(NamedTuple):
    """One series of a host: its name with labels, and by how much it rises a minute; 0: a gauge around 1."""

    text: str
    rise: float


def _labels(*parts: str) -> str:
    return ",".join(p for p in parts if p)


def of_host(host: int) -> list[Series]:
    """Return the series of a host."""
    own = _labels(f'host_name="gpu-{host:02d}"', f'instance="gpu-{host:02d}:9464"', 'job="whyspan"')
    out: list[Series] = []

    def add(name: str, *labels: str, rise: float = 0.0) -> None:
        out.append(Series(f"{name}{{{_labels(own, *labels)}}}", rise))

    def each(name: str, label: str, values: tuple[str, ...], *labels: str, rise: float = 0.0) -> None:
        for value in values:
            add(name, *labels, f'{label}="{value}"', rise=rise)

    for base in ("request_duration", "time_to_first_token", "time_per_output_token"):
        name = f"gen_ai_server_{base}_seconds"
        for at, bound in enumerate((*map(str, BOUNDS_S), "+Inf")):
            add(f"{name}_bucket", SERVICE, MODEL, f'le="{bound}"', rise=12.0 * (at + 1))
        add(f"{name}_count", SERVICE, MODEL, rise=300)
        add(f"{name}_sum", SERVICE, MODEL, rise=90)
    add("gen_ai_server_request_duration_seconds_count", SERVICE, MODEL, 'error_type="500"', rise=1)
    for code in ("200", "429", "500"):
        add(
            "whyspan_request_count_total",
            *(SERVICE, f'http_response_status_code="{code}"', 'whyspan_outcome="ok"'),
            rise=100,
        )
    for objective in ("e2e", "ttft", "success"):
        for result, rise in (("good", 297.0), ("bad", 3.0)):
            add(
                "whyspan_slo_request_count_total",
                *(SERVICE, f'whyspan_slo_objective="{objective}"', f'whyspan_slo_result="{result}"'),
                rise=rise,
            )
    for cause in CAUSES:
        label = f'whyspan_cause="{cause}"'
        add(
            "whyspan_cause_excess_time_seconds_total", SERVICE, MODEL, label, 'whyspan_phase="decode"', rise=2
        )
        add("whyspan_finding_count_total", SERVICE, label, rise=1)
    add("whyspan_request_not_explained_total", SERVICE, 'whyspan_kind="slow"', rise=1)
    for gauge in ("jitter_ratio", "inter_token_stddev_seconds"):
        add(f"whyspan_request_{gauge}", SERVICE)
    engine = (SERVICE, 'whyspan_engine_name="vllm"')
    for gauge in ("sequence_running", "sequence_waiting", "sequence_zombie", "frozen"):
        add(f"whyspan_engine_{gauge}", *engine)
    for gauge in ("kv_utilization_ratio", "kv_fragmentation_ratio"):
        add(f"whyspan_engine_{gauge}", *engine)
    each("whyspan_engine_kv_blocks", "whyspan_state", ("used", "cached", "free"), *engine)
    for counter in (
        *(
            "step_count",
            "step_time_seconds",
            "batch_count",
            "batch_sequences",
            "preemption_count",
            "kv_evicted",
        ),
        *("token_computed", "token_recomputed", "token_prompt", "token_cached", "token_output"),
    ):
        add(f"whyspan_engine_{counter}_total", *engine, rise=60)
    add("whyspan_engine_prompt_count_total", SERVICE, 'whyspan_template="rag"', rise=60)
    for resource in ("cpu", "memory", "io"):
        each(
            "whyspan_host_pressure_ratio",
            "whyspan_pressure",
            ("some", "full"),
            f'whyspan_resource="{resource}"',
        )
    add("whyspan_host_throttled_time_seconds_total", SERVICE, rise=1)
    add("whyspan_host_cpu_limit", SERVICE)
    for gauge in ("blocked_seconds", "lock_waits"):
        add(f"whyspan_burst_malloc_{gauge}", SERVICE, 'whyspan_thread="w"', 'whyspan_size_class="1 KiB"')
    for gauge in (
        "utilization_ratio",
        "memory_utilization_ratio",
        "memory_usage_bytes",
        "memory_limit_bytes",
    ):
        each(f"hw_gpu_{gauge}", "hw_id", ("gpu0", "gpu1"))
    each("whyspan_gpu_fragmentation_ratio", "hw_id", ("gpu0", "gpu1"))
    for gauge in (
        "collector_up_ratio",
        "request_open",
        "finding_queued",
        "target_cpu_usage",
        "store_ok_ratio",
    ):
        add(f"whyspan_{gauge}")
    for gauge in ("store_size_bytes", "spool_size_bytes", "spool_items", "spool_oldest_seconds"):
        add(f"whyspan_{gauge}")
    add("whyspan_build_info_ratio", 'service_version="0.1.0"', 'whyspan_kernel="6.12"')
    add("whyspan_target_count", SERVICE)
    each("whyspan_spool_lost_total", "whyspan_signal", ("traces", "metrics"), rise=0.001)
    each("whyspan_span_count_total", "whyspan_result", ("sent", "failed"), rise=60)
    each("whyspan_finding_dropped_total", "whyspan_queue", ("collector", "store"), rise=0.001)
    for counter in ("event_count", "event_dropped", "probe_missed"):
        each(f"whyspan_{counter}_total", "whyspan_probe", ("sched", "sockets"), rise=60)
    for gauge in ("hit_rate_per_second", "hit_time_seconds", "cpu_utilization_ratio"):
        each(f"whyspan_probe_{gauge}", "whyspan_probe", ("sched", "sockets"))
    each("whyspan_probe_state_ratio", "whyspan_probe", ("sched", "sockets"), 'whyspan_state="attached"')
    for process in ("collector", "exporter"):
        add("whyspan_process_cpu_time_seconds_total", f'whyspan_process="{process}"', rise=0.2)
        add("whyspan_process_memory_usage_bytes", f'whyspan_process="{process}"')
    number = 0
    while len(out) < SERIES:  # the rest is culprits: the widest metric there is
        name = f'whyspan_culprit_name="backup-{number}"'
        cause = f'whyspan_cause="{CAUSES[number % len(CAUSES)]}"'
        kind = 'whyspan_culprit_kind="process"'
        add("whyspan_cause_culprit_time_seconds_total", SERVICE, cause, kind, name, rise=0.5)
        number += 1
    assert len(out) == SERIES, len(out)
    return out


def _block(file: Path, fleet: list[list[Series]], begin_s: int, end_s: int, epoch_s: int) -> int:
    """Write the samples of a block's time as OpenMetrics; return how many."""
    times = range(begin_s, end_s, MINUTE_S)
    with file.open("w") as out:
        for host, series in enumerate(fleet):
            for number, one in enumerate(series):
                out.write("".join(_lines(one, times, epoch_s, host + number)))
        out.write("# EOF\n")
    return len(times) * sum(map(len, fleet))


def _lines(one: Series, times: range, epoch_s: int, seed: int) -> Iterator[str]:
    for t in times:
        minute = (t - epoch_s) / MINUTE_S
        value = one.rise * minute if one.rise else 1 + math.sin(minute / 37 + seed) / 2
        yield f"{one.text} {value:.4f} {t}\n"


def fill(folder: Path, hosts: int, hours: float, end_s: int) -> int:
    """Make the blocks of a Prometheus; return how many samples they hold."""
    promtool = tools.program("promtool")
    assert promtool is not None
    fleet = [of_host(n) for n in range(hosts)]
    begin_s = end_s - int(hours * 3600)
    samples, at = 0, begin_s
    while at < end_s:
        to = min((at // BLOCK_S + 1) * BLOCK_S, end_s)
        file = folder / "samples.om"
        samples += _block(file, fleet, at, to, begin_s)
        argv = [
            str(promtool),
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "-q",
            str(file),
            str(folder / "data"),
        ]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        file.unlink()
        at = to
    return samples


class Timed(NamedTuple):
    """How one query went."""

    where: str
    seconds: float
    cpu_s: float  # of the store, which other work beside it lengthens less
    series: int


def ask(store: Prometheus, hours: float, end_s: int) -> list[Timed]:
    """Ask every query for the whole time."""
    span_s = hours * 3600
    step_s = max(MINUTE_S, math.ceil(span_s / boards.max_points() / MINUTE_S) * MINUTE_S)
    # Grafana: four times the interval at which samples come, or a step and one of them.
    values = {"__range": f"{int(span_s)}s", "__rate_interval": f"{max(4 * MINUTE_S, step_s + MINUTE_S)}s"}
    out = []
    instant = boards.instant_places()
    for query in [*boards.panel_queries(values), *boards.link_queries(), *boards.alert_queries()]:
        if query.language != "promql":
            continue
        began, cpu_s = time.perf_counter(), store.cpu_s()
        if query.where in instant or query.where.startswith("alert"):
            series = len(store.query(query.text, end_s - 1))
        else:
            # From a trace Grafana asks for the ten minutes on either side of it.
            back_s, every_s = (1200, MINUTE_S) if query.where.startswith("trace") else (span_s, step_s)
            series = store.query_range(query.text, end_s - back_s, end_s - 1, every_s)
        out.append(Timed(query.where, time.perf_counter() - began, store.cpu_s() - cpu_s, series))
    return out


def main() -> int:
    """Fill, ask, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.boards.fleet", description=__doc__)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--data", type=Path, help="where the data is, or is made and kept for another run")
    parser.add_argument("--fill-only", action="store_true", help="make the data, ask nothing")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds for one query")
    args = parser.parse_args()
    if reason := tools.lacking():
        print(reason, file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = args.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whyspan-fleet-")))
        filled = folder / "end"
        if not filled.exists():
            folder.mkdir(parents=True, exist_ok=True)
            began, end_s = time.perf_counter(), int(time.time()) // MINUTE_S * MINUTE_S
            samples = fill(folder, args.hosts, args.hours, end_s)
            filled.write_text(str(end_s))
            print(
                f"{samples:,} samples of {args.hosts * SERIES:,} series in {time.perf_counter() - began:.0f} s"
            )
        if args.fill_only:
            return 0
        store = Prometheus(folder, set(os.sched_getaffinity(0)), [])
        stack.callback(store.stop)
        try:
            store.start()
            store.favour()
            timed = ask(store, args.hours, int(filled.read_text()))
        except QueryError as e:
            print(e, file=sys.stderr)
            return 1
    for t in sorted(timed, key=lambda t: -t.seconds):
        print(f"{t.seconds * 1e3:8.1f} ms  {t.cpu_s * 1e3:6.0f} ms CPU  {t.series:5d} series  {t.where}")
    slow = [t for t in timed if t.seconds > args.limit]
    empty = [t for t in timed if not t.series]
    print(f"{len(timed)} queries: {len(slow)} over {args.limit:g} s, {len(empty)} without an answer")
    return 1 if slow or empty else 0


if __name__ == "__main__":
    sys.exit(main())
