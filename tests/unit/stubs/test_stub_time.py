"""When work runs on the simulated device, and how the host waits. Times are the device's own, so they are exact."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stubs.device import Device
from tests.unit.stubs.child import hear, run, start, tell

#: Nothing but kernels takes time, so that sums are whole.
BARE: dict[str, Any] = {"launch_latency_ns": 0, "copy_latency_ns": 0, "lazy_load_ns": 0, "module_load_ns": 0}
MS5: dict[str, Any] = {"kernel_ns": 5_000_000} | BARE

#: `span(f)`: ms on the device between an event before and one after what f enqueues, on the legacy stream's rules.
TIMED = """
rt = Runtime()
k = rt.register(["_Z1kv", "_Z4slowv"])
rt.launch(k[0], 0); rt("cudaDeviceSynchronize")
def timed(stream, enqueue):
    a, b = rt.event(), rt.event()
    rt.record(a, stream); enqueue(); rt.record(b, stream)
    rt("cudaEventSynchronize", b)
    return round(rt.elapsed_ms(a, b), 1)
def begins(*streams):  # events now, one per stream
    events = [rt.event() for _ in streams]
    for e, s in zip(events, streams): rt.record(e, s)
    return events
"""


def test_a_stream_runs_in_order_and_streams_overlap() -> None:
    code = """
s, t = rt.stream(), rt.stream()
start, = begins(s)
rt.launch(k[0], s); rt.launch(k[0], s); rt.launch(k[0], t)
ends = begins(s, t)
rt("cudaDeviceSynchronize")
out([rt.elapsed_ms(start, e) for e in ends])
"""
    with Device(**MS5) as device:
        in_order, overlapping = run(device, TIMED + code)
    assert in_order >= 10.0
    assert overlapping < in_order - 4.0


@pytest.mark.parametrize(("flags", "after"), [(0, True), (1, False)])
def test_the_legacy_stream_waits_for_blocking_streams_only(flags: int, after: bool) -> None:
    code = f"""
s = rt.stream({flags})
rt.launch(k[1], s)
first, = begins(s)
rt.launch(k[0], 0)
second, = begins(0)
rt("cudaDeviceSynchronize")
out(rt.elapsed_ms(first, second))
"""
    with Device(**MS5) as device:
        device.rules([("slow", 300_000.0)])
        later = run(device, TIMED + code)
    assert later == pytest.approx(5.0) if after else later < -50.0


def test_a_stream_waits_for_an_event_of_another() -> None:
    code = """
s, t = rt.stream(), rt.stream()
rt.launch(k[1], s)
e, = begins(s)
rt("cudaStreamWaitEvent", t, e, 0)
rt.launch(k[0], t)
end, = begins(t)
rt("cudaDeviceSynchronize")
out(rt.elapsed_ms(e, end))
"""
    with Device(**MS5) as device:
        device.rules([("slow", 200_000.0)])
        assert run(device, TIMED + code) == pytest.approx(5.0)


def test_rules_blocks_and_clocks_say_how_long_a_kernel_takes() -> None:
    code = """
s = rt.stream()
rt.launch(k[1], s, 1)
out([timed(s, lambda: rt.launch(k[0], s)), timed(s, lambda: rt.launch(k[1], s, 20))])
hear()
out([timed(s, lambda: rt.launch(k[0], s)), timed(s, lambda: rt.launch(k[1], s, 20))])
"""
    with Device(**MS5) as device:
        device.rules([("^_Z4slow", 10_000.0, 500.0)])
        process = start(device, TIMED + code)
        fast = hear(process)
        device.gpu(clock_factor=0.5)
        tell(process)
        slow = hear(process)
        process.communicate()
    # What an event costs the host lies between, if the kernel had not started yet.
    assert fast == [pytest.approx(5.0, abs=0.5), pytest.approx(20.0, abs=0.5)]
    assert slow == [pytest.approx(10.0, abs=0.5), pytest.approx(40.0, abs=0.5)]


@pytest.mark.parametrize(("flags", "sleeps"), [(1, False), (2, None), (4, True)])
def test_blocking_sleeps_and_spinning_does_not(flags: int, sleeps: bool | None) -> None:
    code = f"""
rt = Runtime()
rt("cudaSetDeviceFlags", {flags})
k = rt.register(["_Z1kv"])
s = rt.stream()
rt.launch(k[0], s); rt.synchronize(s)
begin, cpu, had = time.monotonic_ns(), time.thread_time_ns(), switches()
rt.launch(k[0], s); rt.synchronize(s)
out([time.monotonic_ns() - begin, time.thread_time_ns() - cpu, switches() - had])
"""
    with Device(**(BARE | {"kernel_ns": 50_000_000})) as device:
        wall, cpu, switched = run(device, code)
        row = device.calls("cuStreamSynchronize")[-1]
        counter = device.counters()["cuStreamSynchronize"]
    assert wall >= 50_000_000
    assert int(row["end_ns"] - row["begin_ns"]) >= 45_000_000
    assert counter.wait_ns <= counter.time_ns
    if sleeps is not None:
        assert (switched > 0) == sleeps
    if sleeps:
        assert cpu < 25_000_000


def test_an_event_may_block_where_the_context_spins() -> None:
    code = """
s = rt.stream()
plain, blocking = rt.event(), rt.event(EVENT_BLOCKING)
def wait(e):
    rt.launch(k[0], s); rt.record(e, s)
    had = switches(); rt("cudaEventSynchronize", e)
    return switches() - had
out([wait(plain), wait(blocking)])
"""
    with Device(**(BARE | {"kernel_ns": 30_000_000})) as device:
        plain, blocking = run(device, TIMED + code)
    assert plain == 0 and blocking > 0


#: A copy behind a long kernel: is the stream done when the call returns?
COPY = """
s = rt.stream()
device = rt.malloc(1 << 20)
pageable, pinned = create_string_buffer(1 << 20), rt.host_alloc(1 << 20)
host = {"pageable": addressof(pageable), "pinned": pinned}[MEMORY]
def ready(): return rt.call("cudaStreamQuery", s) == 0
rt.launch(k[1], s)
"""


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_only_a_copy_to_pageable_memory_waits_although_it_is_asynchronous(memory: str) -> None:
    code = f"MEMORY = {memory!r}\n" + COPY + "rt.copy_async(host, device, 1 << 20, D2H, s); out(ready())"
    with Device(**BARE) as device:
        device.rules([("slow", 100_000.0 if memory == "pageable" else 10e6)])
        assert run(device, TIMED + code) == (memory == "pageable")
        assert device.copies() == {("d2h", memory, "async"): (1, 1 << 20)}


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_a_copy_to_the_device_is_staged_or_not_and_does_not_wait(memory: str) -> None:
    code = f"MEMORY = {memory!r}\n" + COPY + "rt.copy_async(device, host, 1 << 20, H2D, s); out(ready())"
    # Staging of a MiB at 10 MB/s takes the host 105 ms.
    with Device(**(BARE | {"pageable_bps": 10_000_000})) as device:
        device.rules([("slow", 10e6)])
        assert run(device, TIMED + code) is False
        time_ns = device.counters()["cuMemcpyHtoDAsync_v2"].time_ns
    assert (time_ns >= 100_000_000) == (memory == "pageable")


def test_a_synchronous_copy_waits_for_the_legacy_stream() -> None:
    code = "d = rt.malloc(4096); h = create_string_buffer(4); rt.launch(k[0], 0); rt.copy(addressof(h), d, 4, D2H)"
    with Device(**(BARE | {"kernel_ns": 20_000_000})) as device:
        run(device, TIMED + code)
        counter = device.counters()["cuMemcpyDtoH_v2"]
    assert counter.wait_ns >= 18_000_000


def test_bandwidth_and_the_link_s_width_say_how_long_a_copy_takes() -> None:
    code = """
s = rt.stream(); d, h = rt.malloc(1 << 20), rt.host_alloc(1 << 20)
out(timed(s, lambda: rt.copy_async(d, h, 1 << 20, H2D, s)))
"""
    with Device(**(BARE | {"h2d_bps": 100 << 20})) as device:
        assert run(device, TIMED + code) == pytest.approx(10.0, abs=0.5)
        device.gpu(pcie_width=8)
        assert run(device, TIMED + code) == pytest.approx(20.0, abs=0.5)
        device.gpu(pcie_gen=4)
        assert run(device, TIMED + code) == pytest.approx(40.0, abs=0.5)


def test_a_launch_waits_when_the_queue_is_full() -> None:
    code = "s = rt.stream()\nfor _ in range(12): rt.launch(k[0], s)"
    with Device(**(MS5 | {"launch_queue": 8})) as device:
        run(device, TIMED + code)
        waited = device.counters()["cuLaunchKernel"].wait_ns
    assert waited >= 15_000_000


def test_a_graph_is_one_launch() -> None:
    code = """
s, t = rt.stream(), rt.stream()
e, f = rt.event(), rt.event()
with rt.capture(s) as made:
    for _ in range(7): rt.launch(k[0], s)
    rt.record(e, s); rt("cudaStreamWaitEvent", t, e, 0)
    rt.launch(k[0], t)  # joined the capture
    rt.record(f, t); rt("cudaStreamWaitEvent", s, f, 0)
out(timed(s, lambda: rt("cudaGraphLaunch", made[0], s)))
"""
    with Device(**MS5) as device:
        assert run(device, TIMED + code) == pytest.approx(40.0, abs=0.5)
        found = device.counters()
        assert found["cudaGraphLaunch"].calls == found["cuGraphLaunch"].calls == 1
        assert (device.kernels, device.graph_kernels) == (9, 8)


def test_nothing_synchronises_in_a_capture() -> None:
    code = """
s = rt.stream(); at = rt.malloc(4096)
rt("cudaStreamBeginCapture", s, 0)
codes = [rt.call("cudaStreamSynchronize", s), rt.call("cudaDeviceSynchronize"), rt.call("cudaFree", at)]
out(codes + [rt.call("cudaStreamEndCapture", s, byref(c_void_p()))])
"""
    with Device(**MS5) as device:
        assert run(device, TIMED + code) == [900, 900, 900, 901]


def test_a_kernel_is_loaded_at_its_first_use_and_compiled_if_it_is_text() -> None:
    code = """
from tests.stubs.model import ptx
rt = Runtime()
names = ["k1", "k2"]
a = rt.register(names, ptx(names)); s = rt.stream()
for _ in range(3):
    for k in a: rt.launch(k, s)
missing = rt.register(["k3"], ptx(names))[0]
out(rt.call("cudaLaunchKernel", missing.host, Dim3(1, 1, 1), BLOCK, None, 0, s))
"""
    slow: dict[str, Any] = {
        "module_load_ns": 2_000_000,
        "jit_ns_per_kernel": 20_000_000,
        "lazy_load_ns": 1_000_000,
    }
    with Device(**(MS5 | slow)) as device:
        assert run(device, code) == 500  # no such kernel
        found = device.counters()
        rows = device.calls("cuLaunchKernel")
    took = sorted(int(r["end_ns"] - r["begin_ns"]) for r in rows)
    assert found["cuLibraryLoadData"].calls == 2 and found["cuLibraryLoadData"].time_ns >= 4_000_000
    assert len(took) == 6 and took[-2] >= 21_000_000


def test_handles_of_a_thread_s_own_stream_are_taken() -> None:
    code = """
out([timed(2, lambda: rt.launch(k[0], 2)), rt.call("cudaStreamSynchronize_ptsz", None)])
"""
    with Device(**MS5) as device:
        assert run(device, TIMED + code) == [pytest.approx(5.0, abs=0.5), 0]
        assert device.count("cuStreamSynchronize_ptsz") == 1
