"""sched: scheduling and wake-ups of the watched processes."""

from __future__ import annotations

from whyspan_probes.probe import NO_REGISTERS, Cost, Hook, Probe

_IRQ = (
    "sched_hrtimer_enter",
    "sched_hrtimer_exit",
    "sched_hardirq_enter",
    "sched_hardirq_exit",
    "sched_softirq_enter",
    "sched_softirq_exit",
)

PROBE = Probe(
    name="sched",
    title="context switches, wake-ups, throttling, fork, exec, exit",
    hooks=(
        Hook(
            "switch",
            (("sched_switch_tp",), ("sched_switch_tp3",), ("sched_switch_raw",), ("sched_switch_raw3",)),
            lacks={"sched_switch_raw": NO_REGISTERS, "sched_switch_raw3": NO_REGISTERS},
        ),
        Hook(
            "waking",
            (("sched_waking_tp",), ("sched_waking_raw",)),
            lacks={"sched_waking_raw": NO_REGISTERS},
        ),
        Hook(
            "life",
            (
                ("sched_fork_tp", "sched_exec_tp", "sched_exit_tp"),
                ("sched_fork_raw", "sched_exec_raw", "sched_exit_raw"),
            ),
        ),
        Hook("interrupts", (_IRQ, tuple(f"{name}_raw" for name in _IRQ)), required=False),
    ),
    events={
        "sched_switch_out": {
            "aux": "previous state: 0 runnable, 1 sleeping, 2 uninterruptible",
            "next_tid": "thread that got the CPU",
            "next_tgid": "its process",
            "syscall_nr": "system call it blocks in; -1 page fault, -2 not applicable",
            "flags": "1 preempted, 2 throttled, 4 registers valid, 8 in sched_yield",
            "throttled_ns": "throttled time of its run queue so far, ns",
            "arg0": "first argument of the system call",
        },
        "sched_switch_in": {
            "prev_tid": "thread that had the CPU",
            "prev_tgid": "its process",
            "throttled_ns": "throttled time of its run queue so far, ns",
            "prev_state": "state in which that thread left",
            "prev_flags": "its task flags",
        },
        "sched_wake": {
            "aux": "context of the waker: 0 task, 1 hrtimer, 2 softirq, 3 hard interrupt",
            "waker_tid": "thread current at the wake-up",
            "waker_tgid": "its process",
            "waker_nr": "system call it was in, -2 none",
            "softirq_vec": "soft interrupt vector in context 2",
            "target_cpu": "CPU chosen last time",
            "flags": "task flags of the waker",
        },
        "sched_fork": {"child_tid": "new thread", "child_tgid": "its process", "comm": "its name"},
        "sched_exec": {"comm": "new name"},
        "sched_exit": {"aux": "1 the process is gone", "exit_code": "wait status", "comm": "name"},
        "sched_name": {
            "comm": "name of a foreign thread",
            "cgroup_id": "its cgroup (v2)",
            "flags": "its task flags",
            "ppid": "its parent process",
        },
        "sched_stolen": {
            "aux": "vector of the soft interrupt that took time from the running thread",
            "stolen_ns": "about how much: the ticks that fell into it, ns",
            "syscall_nr": "system call that the thread was in, -1 or less: none",
        },
    },
    cost=Cost.IDLE_FREE,
    joins="thread on the request's critical path",
    needs="BTF tracepoints (5.5), or raw tracepoints and a BTF file",
    config={"names": "1 = name foreign threads that ran or woke beside ours"},
)
