"""reclaim: time in which a watched thread had to free memory, and victims of the OOM killer."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

_STRETCH = {
    "aux": "order of the last allocation; 0x100 the limit is memory.high",
    "begin_ns": "begin of the first of these calls; they end at ts_ns",
    "cgroup_id": "memory cgroup with the least room, by its kernel id; 0 none or not asked",
    "pages": "pages freed",
    "limit_pages": "its limit, pages",
    "busy_us": "time within the calls, us",
    "calls": "calls",
    "throttled_ms": "of that asleep because reclaim was throttled, ms",
}


def _both(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(f"{n}_tp" for n in names), tuple(f"{n}_raw" for n in names)


PROBE = Probe(
    name="reclaim",
    title="direct reclaim, memory-cgroup reclaim, compaction, OOM kills",
    hooks=(
        Hook("direct", _both("reclaim_direct_begin", "reclaim_direct_end")),
        Hook("memcg", _both("reclaim_memcg_begin", "reclaim_memcg_end"), required=False),
        Hook("compaction", _both("reclaim_compact_begin", "reclaim_compact_end"), required=False),
        Hook("throttled", _both("reclaim_throttled"), required=False),
        Hook(
            "oom",
            (
                ("reclaim_victim_tp",),
                ("reclaim_victim_pid_tp",),
                ("reclaim_victim_raw",),
                ("reclaim_victim_pid_raw",),
            ),
            required=False,
            lacks={
                "reclaim_victim_pid_tp": "of a victim only its thread is known",
                "reclaim_victim_pid_raw": "of a victim only its thread is known",
            },
        ),
    ),
    events={
        "direct_reclaim": _STRETCH,
        "memcg_reclaim": _STRETCH,
        "compaction": _STRETCH,
        "oom_victim": {
            "cgroup_id": "memory cgroup at its limit, by its kernel id; 0 the host",
            "limit_pages": "its limit, pages",
            "usage_pages": "its usage, pages",
            "anon_pages": "the victim's anonymous memory, pages",
            "file_pages": "its mapped file pages",
            "shmem_pages": "its shared memory, pages",
            "uid": "its user",
        },
        "oom_name": {
            "comm": "the victim's name",
            "asker_tid": "thread that got no memory",
            "asker_tgid": "its process",
            "score_adj": "the victim's oom_score_adj",
            "swap_pages": "its swapped pages",
        },
    },
    cost=Cost.IDLE_FREE,
    joins="thread on the request's critical path; the victim's process",
    needs="BTF or raw tracepoints; CONFIG_MEMCG for cgroups, CONFIG_COMPACTION for compaction",
    config={
        "least_ns": "time in reclaim that makes a record, ns",
        "gap_ns": "a thread's calls farther apart are not one record, ns",
    },
)
