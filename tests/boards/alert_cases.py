"""For each alert, series under which it fires and series under which it is quiet, in promtool's notation.

Series are at steps of one minute unless a case says otherwise; ``a+bx60`` is a counter. ``summary`` is what a person
reads when it fires.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_H: Final = 'host_name="h1"'
_S: Final = f'{_H}, whyspan_service="chat"'
_SLO: Final = f'whyspan_slo_request_count_total{{{_S}, whyspan_slo_objective="e2e", whyspan_slo_result='
_EXCESS: Final = f"whyspan_cause_excess_time_seconds_total{{{_S}, whyspan_cause="
_UP: Final = f'whyspan_collector_up_ratio{{{_H}, instance="a"}}'


class Case(NamedTuple):
    """What happens to one alert. ``labels``: those of the firing alert beside its own."""

    alert: str
    at: str
    firing: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str]
    summary: str
    step: str = "1m"


def _burn(bad_per_mille: int) -> dict[str, str]:
    return {
        _SLO + '"good"}': f"0+{1000 - bad_per_mille}x4400",
        _SLO + '"bad"}': f"0+{bad_per_mille}x4400",
    }


_SLO_LABELS: Final = {"whyspan_service": "chat", "whyspan_slo_objective": "e2e"}
_SERVICE: Final = {"host_name": "h1", "whyspan_service": "chat"}
_GPU: Final = f'{_H}, hw_id="gpu0"'


def _tail(a: float, b: float, every: float) -> dict[str, str]:
    # Two causes whose shares are a and b of all the time that requests take.
    return {
        _EXCESS + '"cpu.throttled"}': f"0+{a}x60",
        _EXCESS + '"net.dns"}': f"0+{b}x60",
        _EXCESS + '"unknown"}': f"0+{b}x60",
        f'gen_ai_server_request_duration_seconds_sum{{{_S}, gen_ai_request_model="m"}}': f"0+{every}x60",
    }


CASES: Final = (
    Case(
        "WhyspanSloBurnFast",
        "70m",
        _burn(200),
        _burn(100),  # ten times too fast: not for a page at once
        _SLO_LABELS,
        "chat burns its error budget for e2e 20 times too fast (1h and 5m)",
    ),
    Case(
        "WhyspanSloBurnSlow",
        "400m",
        _burn(80),
        _burn(50),
        _SLO_LABELS,
        "chat burns its error budget for e2e 8 times too fast (6h and 30m)",
    ),
    Case(
        "WhyspanSloBurnTicket",
        "4380m",
        _burn(20),
        _burn(8),
        _SLO_LABELS,
        "chat burns its error budget for e2e 2 times too fast (3d and 6h)",
        "15m",  # three days in steps of a minute take promtool a minute
    ),
    Case(
        "WhyspanOneCause",
        "40m",
        _tail(5, 2.5, 100),
        _tail(0.5, 0.1, 100),  # half a percent of the time is lost: no tail to speak of
        {"whyspan_service": "chat", "whyspan_cause": "cpu.throttled"},
        "cpu.throttled is 50% of the time that slow requests of chat lose",
    ),
    Case(
        "WhyspanKvFull",
        "10m",
        {f"whyspan_engine_kv_utilization_ratio{{{_S}}}": "0.95x20"},
        {f"whyspan_engine_kv_utilization_ratio{{{_S}}}": "0.95x6 0.85 0.95x20"},
        _SERVICE,
        "KV pool of chat on h1 is 95% full",
    ),
    Case(
        "WhyspanKvFragmented",
        "12m",
        {f"whyspan_engine_kv_fragmentation_ratio{{{_S}}}": "0.4x20"},
        {f"whyspan_engine_kv_fragmentation_ratio{{{_S}}}": "0.35x20"},
        _SERVICE,
        "40% of the KV blocks given out by chat on h1 hold no token",
    ),
    Case(
        "WhyspanGpuFragmented",
        "12m",
        {f"whyspan_gpu_fragmentation_ratio{{{_GPU}}}": "0.5x20"},
        {f"whyspan_gpu_fragmentation_ratio{{{_GPU}}}": "0.2x20"},
        {"host_name": "h1", "hw_id": "gpu0"},
        "50% of the memory of GPU gpu0 on h1 is in fragments",
    ),
    Case(
        "WhyspanGpuMemoryFull",
        "7m",
        {f"hw_gpu_memory_utilization_ratio{{{_GPU}}}": "0.97x20"},
        {f"hw_gpu_memory_utilization_ratio{{{_GPU}}}": "0.9x20"},
        {"host_name": "h1", "hw_id": "gpu0"},
        "Memory of GPU gpu0 on h1 is 97% full",
    ),
    Case(
        "WhyspanTokenJitter",
        "7m",
        {f"whyspan_request_inter_token_stddev_seconds{{{_S}}}": "0.25x20"},
        {f"whyspan_request_inter_token_stddev_seconds{{{_S}}}": "0.12x20"},
        _SERVICE,
        "Tokens of chat on h1 come unevenly: standard deviation 250ms",
    ),
    Case(
        "WhyspanThrottled",
        "15m",
        {f"whyspan_host_throttled_time_seconds_total{{{_S}}}": "0+6x30"},
        {f"whyspan_host_throttled_time_seconds_total{{{_S}}}": "0+2x30"},
        _SERVICE,
        "chat on h1 is out of CPU quota 10% of the time",
    ),
    Case(
        "WhyspanEventsLost",
        "15m",
        {
            f'whyspan_event_count_total{{{_H}, whyspan_probe="sched"}}': "0+980x30",
            f'whyspan_event_dropped_total{{{_H}, whyspan_probe="sched"}}': "0+20x30",
        },
        {
            f'whyspan_event_count_total{{{_H}, whyspan_probe="sched"}}': "0+98000x30",
            f'whyspan_event_dropped_total{{{_H}, whyspan_probe="sched"}}': "0+20x30",
        },
        {"host_name": "h1", "whyspan_probe": "sched"},
        "Probe sched on h1 loses 2% of its events",
    ),
    Case(
        "WhyspanFindingsLost",
        "15m",
        {f'whyspan_finding_dropped_total{{{_H}, whyspan_queue="store"}}': "0+2x30"},
        {f'whyspan_finding_dropped_total{{{_H}, whyspan_queue="store"}}': "7x30"},
        {"host_name": "h1", "whyspan_queue": "store"},
        "20 findings were lost on h1 in 10 minutes (store)",
    ),
    Case(
        "WhyspanSpoolLost",
        "15m",
        {f'whyspan_spool_lost_total{{{_H}, whyspan_signal="traces"}}': "0+10x30"},
        {f'whyspan_spool_lost_total{{{_H}, whyspan_signal="traces"}}': "0x30"},
        {"host_name": "h1", "whyspan_signal": "traces"},
        "100 of traces were lost on h1 in 10 minutes: the spool is full",
    ),
    Case(
        "WhyspanStoreFailing",
        "7m",
        {f"whyspan_store_ok_ratio{{{_H}}}": "0x20"},
        {f"whyspan_store_ok_ratio{{{_H}}}": "0 0 1x20"},
        {"host_name": "h1"},
        "The local store on h1 cannot be written",
    ),
    Case(
        "WhyspanCollectorDown",
        "5m",
        {_UP: "0x20"},
        {_UP: "1x20"},
        {"host_name": "h1", "instance": "a"},
        "whyspan on h1 runs without its collector",
    ),
    Case(
        "WhyspanAgentDown",
        "30m",
        {_UP: "1x20"},
        {_UP: "1x40"},
        {"host_name": "h1", "instance": "a"},
        "whyspan on h1 has been silent for 10m 0s",
    ),
)
