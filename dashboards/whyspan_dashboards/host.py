"""Board 3, *Host and GPU*: quota, run queue, memory, disk, network, allocator; and GPUs where there are some."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from whyspan_dashboards import board
from whyspan_dashboards import names as n
from whyspan_dashboards.panels import Look, Query, above, lines, rows

UID = "whyspan-host"
_H, _S = n.HOST, n.SERVICE
#: Beginnings of cause ids, one panel each.
FAMILIES = ("cpu", "memory", "io", "net", "lock", "python", "engine", "observer", "client")
_GPU = "Filled on hosts with a GPU. "


def _pressure() -> list[object]:
    return [
        lines(
            Look(
                "Pressure",
                "Share of the last 10 s in which some task waited for CPU, memory or I/O; full: all of them did.",
                "percentunit",
                "host#pressure",
                most=1,
                steps=above(0.1, 0.3),
            ),
            Query(
                f"max by (host_name, whyspan_resource, whyspan_pressure) (whyspan_host_pressure_ratio{{{_H}}})",
                "{{host_name}} {{whyspan_resource}} {{whyspan_pressure}}",
            ),
        ),
        lines(
            Look(
                "Throttled by CPU quota",
                "Seconds per second, summed over CPUs, in which a watched process's control group was out of quota. "
                "Above 5% alerts.",
                "percentunit",
                "throttled",
                steps=above(0.01, n.THROTTLED_SHARE),
            ),
            Query(n.rate(n.THROTTLED, _S, "host_name, whyspan_service"), "{{host_name}} {{whyspan_service}}"),
        ),
        lines(
            Look(
                "CPU in use and allowed",
                "CPUs that watched processes use; CPUs they may.",
                "none",
                "host#cpu",
            ),
            Query(f"sum by (host_name) (whyspan_target_cpu_usage{{{_H}}})", "used {{host_name}}"),
            Query(
                f"sum by (host_name, whyspan_service) (whyspan_host_cpu_limit{{{_S}}})",
                "allowed {{host_name}} {{whyspan_service}}",
            ),
        ),
    ]


def _lost() -> list[object]:
    cause = f'{_S}, whyspan_cause=~"($family)[.].*"'
    kinds = "host_name, whyspan_cause, whyspan_culprit_kind, whyspan_culprit_name"
    return [
        lines(
            Look(
                "Lost to: $family",
                "Seconds that requests lost per second: cpu is quota, run queue, NUMA, power; memory is reclaim, swap, "
                "faults; io is disk and log; net is loss, DNS, connections.",
                "s",
                "host#lost-to",
                span=24,
                repeat="family",
            ),
            Query(n.rate(n.EXCESS, cause, "whyspan_cause"), "{{whyspan_cause}}", exemplar=True),
            stacked=True,
        ),
        rows(
            Look(
                "Who", "Processes, disks, peers that requests waited for.", "s", "tail#top-culprits", span=24
            ),
            Query(f"topk(20, {n.increase(n.CULPRIT, cause, kinds)})"),
            {
                "host_name": "Host",
                "whyspan_cause": "Cause",
                "whyspan_culprit_kind": "Kind",
                "whyspan_culprit_name": "Culprit",
                "Value": "Time lost",
            },
        ),
    ]


def _malloc() -> list[object]:
    labels = "whyspan_service, whyspan_thread, whyspan_size_class"
    columns = {"whyspan_service": "Service", "whyspan_thread": "Thread", "whyspan_size_class": "Size"}
    blocked = f"max by ({labels}) (whyspan_burst_malloc_blocked_seconds{{{_S}}})"
    waits = f"sum by ({labels}) (whyspan_burst_malloc_lock_waits{{{_S}}})"
    return [
        rows(
            Look("Asleep within malloc", "Mean per call, in the newest burst.", "s", "host#malloc", span=12),
            Query(f"topk(20, {blocked})"),
            columns | {"Value": "Blocked"},
        ),
        rows(
            Look(
                "Allocator's lock",
                "Acquisitions that blocked, in the newest burst.",
                "none",
                "host#malloc",
                span=12,
            ),
            Query(f"topk(20, {waits})"),
            columns | {"Value": "Waits"},
        ),
    ]


def _gpu() -> list[object]:
    by = "host_name, hw_id"
    busy = f"hw_gpu_utilization_ratio{{{_H}}}"
    spread = f"max by (host_name) ({busy}) - min by (host_name) ({busy})"
    legend = "{{host_name}} {{hw_id}}"
    return [
        lines(
            Look(
                "GPU busy", _GPU + "Share of time in which a kernel ran.", "percentunit", "gpu#busy", most=1
            ),
            Query(f"avg by ({by}) (hw_gpu_utilization_ratio{{{_H}}})", legend),
        ),
        lines(
            Look(
                "GPU memory",
                _GPU + "Above 90% for 5 minutes alerts.",
                "percentunit",
                "gpu#memory",
                most=1,
                steps=above(0.8, n.GPU_MEMORY_FULL),
            ),
            Query(f"max by ({by}) ({n.GPU_MEMORY}{{{_H}}})", legend),
        ),
        lines(
            Look("GPU memory in use", _GPU + "Bytes, and the limit.", "bytes", "gpu#memory"),
            Query(f"sum by ({by}) (hw_gpu_memory_usage_bytes{{{_H}}})", "used " + legend),
            Query(f"sum by ({by}) (hw_gpu_memory_limit_bytes{{{_H}}})", "limit " + legend),
        ),
        lines(
            Look(
                "GPU memory fragmentation",
                _GPU + "Above 35% alerts.",
                "percentunit",
                "fragmentation",
                span=12,
                most=1,
                steps=above(0.25, n.FRAGMENTED),
            ),
            Query(f"max by ({by}) ({n.GPU_FRAGMENTATION}{{{_H}}})", legend),
        ),
        lines(
            Look(
                "Imbalance between GPUs",
                _GPU + "Busiest less idlest of a host.",
                "percentunit",
                "gpu#imbalance",
                span=12,
                most=1,
                steps=above(0.2, 0.4),
            ),
            Query(spread, "{{host_name}}"),
        ),
    ]


def make() -> Dashboard:
    """Return the board."""
    return board.make(
        UID,
        "Host and GPU",
        "What the machine does to the requests on it.",
        [
            board.choice(*board.HOST),
            board.choice(*board.SERVICE),
            board.picked("family", "Causes", FAMILIES, "Kinds of causes, one panel each.", multi=True),
        ],
        [
            ("Quota and pressure", _pressure()),
            ("CPU, memory, disk, network, locks", _lost()),
            ("malloc, during bursts", _malloc()),
            ("GPU (filled on GPU hosts)", _gpu()),
        ],
        traces=False,
    )
