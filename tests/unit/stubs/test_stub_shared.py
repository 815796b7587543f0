"""Several processes on the simulated device: they share its time, and ranks meet in collectives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stubs.device import Device
from tests.unit.stubs.child import hear, run, start, tell

ELAPSED = """
rt = Runtime(); k = rt.register(["_Z1kv"])[0]; s = rt.stream()
def ms(enqueue):
    a, b = rt.event(), rt.event()
    rt.record(a, s); enqueue(); rt.record(b, s)
    rt("cudaEventSynchronize", b)
    return rt.elapsed_ms(a, b)
rt.launch(k, s); rt.synchronize(s)
"""
QUIET: dict[str, Any] = {"launch_latency_ns": 0, "nccl_ns": 1_000_000, "nccl_bps": 0}


def test_another_process_makes_kernels_longer_as_long_as_it_has_work() -> None:
    other = """
rt = Runtime(); k = rt.register(["_Z4slowv"])[0]; s = rt.stream()
rt.launch(k, s); out(0); hear()
"""
    mine = (
        ELAPSED
        + "out(round(ms(lambda: rt.launch(k, s)), 1)); hear(); out(round(ms(lambda: rt.launch(k, s)), 1))"
    )
    with Device(**(QUIET | {"kernel_ns": 20_000_000})) as device:
        device.rules([("slow", 20e6)])
        process = start(device, mine)
        alone = hear(process)
        hog = start(device, other)
        hear(hog)
        tell(process)
        shared = hear(process)
        process.communicate()
        hog.kill()
        hog.communicate()
        found = run(device, ELAPSED + "out(round(ms(lambda: rt.launch(k, s)), 1))")
    assert [alone, shared, found] == [
        pytest.approx(20.0, abs=1),
        pytest.approx(40.0, abs=1),
        pytest.approx(20.0, abs=1),
    ]


def test_work_on_another_gpu_shares_nothing() -> None:
    other = (
        "rt = Runtime(); k = rt.register(['_Z4slowv'])[0]; s = rt.stream(); rt.launch(k, s); out(0); hear()"
    )
    with Device(gpus=2, **(QUIET | {"kernel_ns": 20_000_000})) as device:
        device.rules([("slow", 20e6)])
        hog = start(device, other, CUDA_VISIBLE_DEVICES="1")
        hear(hog)
        assert run(device, ELAPSED + "out(ms(lambda: rt.launch(k, s)))") == pytest.approx(20.0, abs=1)
        hog.kill()
        hog.communicate()


MEETING = (
    ELAPSED
    + """
unique = bytes.fromhex(os.environ["UNIQUE"]); rank = int(os.environ["RANK"])
nccl = Nccl(unique, 2, rank)
at = rt.malloc(1 << 20)
out("ready"); hear()
"""
)


def _unique() -> str:
    with Device() as device:
        found: str = run(device, "out(unique_id().hex())")
    return found


def test_a_collective_ends_when_the_last_rank_has_entered() -> None:
    early = MEETING + "out(ms(lambda: nccl.all_reduce(at, 1024, s)))"
    late = MEETING + "rt.launch(k, s); out(ms(lambda: nccl.all_reduce(at, 1024, s)))"
    with Device(gpus=2, **(QUIET | {"kernel_ns": 300_000_000})) as device:
        unique = _unique()
        ranks = [
            start(device, code, UNIQUE=unique, RANK=str(i), CUDA_VISIBLE_DEVICES=str(i))
            for i, code in enumerate((early, late))
        ]
        assert [hear(r) for r in ranks] == ["ready", "ready"]
        for r in (ranks[1], ranks[0]):
            tell(r)
        waited, entered_last = [hear(r) for r in ranks]
        for r in ranks:
            r.communicate()
        assert entered_last == pytest.approx(1.0, abs=0.2)
        assert waited > 100.0
        assert device.count("ncclAllReduce") == 2 and int(device.region["collectives"]) == 2
        assert device.count("cuLaunchKernelEx") == 2
        entries = {int(c["tgid"]): int(c["begin_ns"]) for c in device.calls("ncclAllReduce")}
        assert set(entries) == {r.pid for r in ranks}
        assert not any(m["key"] for m in device.region["meetings"])


def test_a_rank_that_waits_for_ever_makes_the_gpu_look_busy() -> None:
    code = MEETING + "nccl.all_reduce(at, 1024, s); out(rt.call('cudaStreamQuery', s)); hear()"
    with Device(gpus=2, **(QUIET | {"kernel_ns": 0})) as device:
        unique = _unique()
        ranks = [
            start(device, code, UNIQUE=unique, RANK=str(i), CUDA_VISIBLE_DEVICES=str(i)) for i in range(2)
        ]
        for r in ranks:
            hear(r)
        tell(ranks[0])
        assert hear(ranks[0]) == 600
        assert max(int(p["spinning"][0]) for p in device.region["procs"]) == 1
        for r in ranks:
            r.kill()
            r.communicate()


def test_a_send_meets_its_receive_whatever_the_order() -> None:
    code = (
        MEETING
        + """
peer = 1 - rank
nccl("ncclGroupStart")
for what in (("ncclSend", "ncclRecv") if rank else ("ncclRecv", "ncclSend")):
    nccl(what, at, 1024, BF16, peer, nccl.comm, s)
nccl("ncclGroupEnd")
rt.synchronize(s)
out(rt.call("cudaStreamQuery", s))
"""
    )
    with Device(gpus=2, **(QUIET | {"kernel_ns": 0})) as device:
        unique = _unique()
        ranks = [
            start(device, code, UNIQUE=unique, RANK=str(i), CUDA_VISIBLE_DEVICES=str(i)) for i in range(2)
        ]
        for r in ranks:
            hear(r)
        for r in ranks:
            tell(r)
        assert [hear(r) for r in ranks] == [0, 0]
        for r in ranks:
            r.communicate()
        assert device.count("cuLaunchKernelEx") == 2  # a group is one kernel


def test_one_process_has_two_ranks() -> None:
    code = """
rt = Runtime(); lib = load_nccl(); unique = UniqueId(); lib.ncclGetUniqueId(byref(unique))
comms, streams, ats = [c_void_p(), c_void_p()], [], []
lib.ncclGroupStart()
for i in range(2):
    rt("cudaSetDevice", i)
    assert not lib.ncclCommInitRank(byref(comms[i]), 2, unique, i)
    streams.append(rt.stream()); ats.append(rt.malloc(4096))
assert not lib.ncclGroupEnd()
lib.ncclGroupStart()
for i in range(2): assert not lib.ncclAllReduce(ats[i], ats[i], 16, BF16, 0, comms[i], streams[i])
assert not lib.ncclGroupEnd()
for i in range(2):
    rt("cudaSetDevice", i); rt.synchronize(streams[i])
ranks = []
for comm in comms:
    n = c_int(); lib.ncclCommUserRank(comm, byref(n)); ranks.append(n.value)
out(ranks)
"""
    with Device(gpus=2, **QUIET) as device:
        assert run(device, code) == [0, 1]
        assert int(device.region["collectives"]) == 2


def test_a_collective_may_be_captured() -> None:
    code = (
        MEETING
        + """
with rt.capture(s) as made:
    for _ in range(3): nccl.all_reduce(at, 1024, s)
times = [ms(lambda: rt("cudaGraphLaunch", made[0], s)) for _ in range(2)]
out(times)
"""
    )
    with Device(gpus=2, **(QUIET | {"kernel_ns": 0})) as device:
        unique = _unique()
        ranks = [
            start(device, code, UNIQUE=unique, RANK=str(i), CUDA_VISIBLE_DEVICES=str(i)) for i in range(2)
        ]
        for r in ranks:
            hear(r)
        for r in ranks:
            tell(r)
        for r in ranks:
            assert all(t >= 2.9 for t in hear(r))
            r.communicate()
        assert int(device.region["collectives"]) == 12
        assert device.kernels == 2 + 12  # each process ran one before
