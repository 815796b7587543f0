"""futex: which lock a sleeping thread waits for."""

from __future__ import annotations

from whyspan_probes.probe import NO_REGISTERS, Cost, Hook, Probe

PROBE = Probe(
    name="futex",
    title="locks that sleeping threads wait for",
    hooks=(
        Hook(
            "switch",
            (("futex_switch_tp",), ("futex_switch_tp3",), ("futex_switch_raw",), ("futex_switch_raw3",)),
            lacks={"futex_switch_raw": NO_REGISTERS, "futex_switch_raw3": NO_REGISTERS},
        ),
        Hook("mmap_lock", (("futex_contention_tp",), ("futex_contention_raw",)), required=False),
    ),
    events={
        "futex_wait": {
            "aux": "operation without its flags | 256 with a time-out",
            "uaddr": "address of the futex",
            "ip": "instruction pointer in the process",
            "val": "value that is expected there",
            "owner": "the word where a pthread mutex has its owner, 0 not read",
        },
        "futex_from": {
            "aux": "number of words",
            "word0": "words of the stack that may be return addresses of another library, the innermost first",
            "word1": "the next",
            "word2": "the next",
            "word3": "the next",
        },
        "mmap_lock_wait": {
            "aux": "1 to read, 2 to write",
            "owner_tid": "thread that has it to write, or had it last to read",
            "owner_tgid": "its process",
            "key": "opaque key of the lock",
        },
    },
    cost=Cost.IDLE_FREE,
    joins="thread that has the lock, on the critical path",
    needs="BTF tracepoints (5.5), or raw tracepoints and a BTF file; contention_begin (5.19) for the mmap_lock",
    shed=22,
    config={"from": "1 = words of the stack of a thread that waits for a mutex"},
)
