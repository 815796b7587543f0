"""Alert rules, once: `prometheus_rules` and `grafana_rules` write them for each.

A rule is a value, a comparison and a figure, so that both can be checked: the value must give series on a healthy
system, and the comparison must hold in the firing case of its test only.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from whyspan_dashboards import names as n

GROUP: Final = "whyspan"
INTERVAL_S: Final = 60
_SLO: Final = "whyspan_service, whyspan_slo_objective"
_ENGINE: Final = "host_name, whyspan_service"


class Alert(NamedTuple):
    """One rule. ``summary`` is a template that Prometheus and Grafana read alike (``.Labels``); VALUE is the value."""

    name: str
    value: str
    op: Literal[">", "<"]
    limit: float
    for_: str
    severity: Literal["page", "ticket"]
    summary: str
    text: str
    page: str
    board: str
    form: str = "humanize"  # the template function for the value


def _burn(long: str, short: str) -> str:
    # The smaller of two windows' burn rates: both must be above the limit.
    def rate(window: str) -> str:
        bad = f'sum by ({_SLO}) (rate({n.SLO}{{whyspan_slo_result="bad"}}[{window}]))'
        every = f"sum by ({_SLO}) (rate({n.SLO}[{window}]))"
        # Where nothing was bad there is no such series: 0 of all.
        return f"(({bad} or {every} * 0) / {every} / {n.ERROR_BUDGET})"

    return f"({rate(short)} <= {rate(long)}) or {rate(long)}"


def _slo(
    name: str, windows: tuple[str, str], limit: float, for_: str, severity: Literal["page", "ticket"]
) -> Alert:
    long, short = windows
    return Alert(
        name,
        _burn(long, short),
        ">",
        limit,
        for_,
        severity,
        "{{ .Labels.whyspan_service }} burns its error budget for {{ .Labels.whyspan_slo_objective }} "
        f"VALUE times too fast ({long} and {short})",
        "More requests miss the objective than 1% allows, over a long and a short window.",
        "slo-burn",
        "whyspan-tail",
    )


def _one_cause() -> str:
    by_cause = f'sum by (whyspan_service, whyspan_cause) (rate({n.EXCESS}{{whyspan_cause!="unknown"}}[10m]))'
    tail = f"sum by (whyspan_service) (rate({n.EXCESS}[10m]))"
    every = f"sum by (whyspan_service) (rate({n.DURATION}_sum[10m]))"
    return (
        f"{by_cause} / on (whyspan_service) group_left {tail}"
        f" and on (whyspan_service) {tail} > {n.TAIL_SHARE} * {every}"
    )


def _lost_events() -> str:
    by = "host_name, whyspan_probe"
    dropped = f"sum by ({by}) (rate({n.EVENTS_DROPPED}[5m]))"
    return f"{dropped} / (sum by ({by}) (rate({n.EVENTS}[5m])) + {dropped} > 0)"


ALERTS: Final = (
    _slo("WhyspanSloBurnFast", ("1h", "5m"), n.BURN_FAST, "2m", "page"),
    _slo("WhyspanSloBurnSlow", ("6h", "30m"), n.BURN_SLOW, "15m", "page"),
    _slo("WhyspanSloBurnTicket", ("3d", "6h"), n.BURN_TICKET, "1h", "ticket"),
    Alert(
        "WhyspanOneCause",
        _one_cause(),
        ">",
        n.CAUSE_SHARE,
        "10m",
        "ticket",
        "{{ .Labels.whyspan_cause }} is VALUE of the time that slow requests of {{ .Labels.whyspan_service }} lose",
        "One cause has more than 30% of the tail, and the tail is more than 1% of all the time that requests take.",
        "one-cause",
        "whyspan-tail",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanKvFull",
        f"max by ({_ENGINE}) ({n.KV})",
        ">",
        n.KV_FULL,
        "5m",
        "ticket",
        "KV pool of {{ .Labels.whyspan_service }} on {{ .Labels.host_name }} is VALUE full",
        "The scheduler queues or preempts requests when no block is free.",
        "kv-usage",
        "whyspan-kv",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanKvFragmented",
        f"max by ({_ENGINE}) ({n.FRAGMENTATION})",
        ">",
        n.FRAGMENTED,
        "10m",
        "ticket",
        "VALUE of the KV blocks given out by {{ .Labels.whyspan_service }} on {{ .Labels.host_name }} hold no token",
        "Blocks are held but not filled: the pool is smaller than it looks.",
        "fragmentation",
        "whyspan-kv",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanGpuFragmented",
        f"max by (host_name, hw_id) ({n.GPU_FRAGMENTATION})",
        ">",
        n.FRAGMENTED,
        "10m",
        "ticket",
        "VALUE of the memory of GPU {{ .Labels.hw_id }} on {{ .Labels.host_name }} is in fragments",
        "The allocator holds memory that it cannot give out in one piece.",
        "fragmentation",
        "whyspan-host",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanGpuMemoryFull",
        f"max by (host_name, hw_id) ({n.GPU_MEMORY})",
        ">",
        n.GPU_MEMORY_FULL,
        "5m",
        "ticket",
        "Memory of GPU {{ .Labels.hw_id }} on {{ .Labels.host_name }} is VALUE full",
        "The next allocation may fail or wait for one to be freed.",
        "gpu",
        "whyspan-host",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanTokenJitter",
        f"max by ({_ENGINE}) ({n.STDDEV})",
        ">",
        n.STDDEV_S,
        "5m",
        "ticket",
        "Tokens of {{ .Labels.whyspan_service }} on {{ .Labels.host_name }} come unevenly: standard deviation VALUE",
        "The time between tokens varies by more than 120 ms: streams stutter.",
        "token-jitter",
        "whyspan-service",
        "humanizeDuration",
    ),
    Alert(
        "WhyspanThrottled",
        f"sum by ({_ENGINE}) (rate({n.THROTTLED}[5m]))",
        ">",
        n.THROTTLED_SHARE,
        "5m",
        "ticket",
        "{{ .Labels.whyspan_service }} on {{ .Labels.host_name }} is out of CPU quota VALUE of the time",
        "A watched process, or a sidecar in its control group, used up the group's quota: everything in it stands "
        "still until the next period.",
        "throttled",
        "whyspan-host",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanEventsLost",
        _lost_events(),
        ">",
        n.EVENTS_LOST_SHARE,
        "5m",
        "ticket",
        "Probe {{ .Labels.whyspan_probe }} on {{ .Labels.host_name }} loses VALUE of its events",
        "Verdicts of that time are less sure; each says so in its lost events.",
        "evidence-losses",
        "whyspan-agent",
        "humanizePercentage",
    ),
    Alert(
        "WhyspanFindingsLost",
        f"sum by (host_name, whyspan_queue) (increase({n.FINDINGS_DROPPED}[10m]))",
        ">",
        0,
        "0s",
        "ticket",
        "VALUE findings were lost on {{ .Labels.host_name }} in 10 minutes ({{ .Labels.whyspan_queue }})",
        "A queue between collector, exporter and store was full.",
        "evidence-losses",
        "whyspan-agent",
    ),
    Alert(
        "WhyspanSpoolLost",
        f"sum by (host_name, whyspan_signal) (increase({n.SPOOL_LOST}[10m]))",
        ">",
        0,
        "0s",
        "ticket",
        "VALUE of {{ .Labels.whyspan_signal }} were lost on {{ .Labels.host_name }} in 10 minutes: the spool is full",
        "The OTLP endpoint was away, or refused, for longer than the spool can hold.",
        "evidence-losses",
        "whyspan-agent",
    ),
    Alert(
        "WhyspanStoreFailing",
        f"min by (host_name) ({n.STORE_OK})",
        "<",
        1,
        "5m",
        "ticket",
        "The local store on {{ .Labels.host_name }} cannot be written",
        "Findings are kept in memory and go out by OTLP, but `whyspan slow` shows nothing new.",
        "evidence-losses",
        "whyspan-agent",
    ),
    Alert(
        "WhyspanCollectorDown",
        f"max by (host_name, instance) ({n.UP})",
        "<",
        1,
        "2m",
        "page",
        "whyspan on {{ .Labels.host_name }} runs without its collector",
        "The exporter lives, but nothing is observed.",
        "agent-down",
        "whyspan-agent",
    ),
    Alert(
        "WhyspanAgentDown",
        f"time() - max by (host_name, instance) (max_over_time(timestamp({n.UP})[6h:1m]))",
        ">",
        300,
        "2m",
        "page",
        "whyspan on {{ .Labels.host_name }} has been silent for VALUE",
        "It reported within the last six hours and does not now.",
        "agent-down",
        "whyspan-agent",
        "humanizeDuration",
    ),
)
