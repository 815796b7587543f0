"""The simulated device's memory: limits, fragments, owners, and what memory calls wait for."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.stubs.device import Device
from tests.unit.stubs.child import hear, run, start

MIB = 1 << 20
FAST: dict[str, Any] = {"pin_host_ns": 0, "alloc_host_ns": 0, "free_host_ns": 0, "kernel_ns": 0}
#: 31 granules of 2 MiB.
SMALL: dict[str, Any] = FAST | {"memory_bytes": 62 * MIB}

ALL = """
rt = Runtime(); rt.free(0)
def fill(size):
    held = []
    while True:
        at = c_void_p()
        code = rt.call("cudaMalloc", byref(at), size)
        if code: return held, code
        held.append(at.value)
"""


def test_memory_ends_at_its_limit_and_comes_back() -> None:
    code = """
held, code = fill(2 << 20)
full = rt.memory()
for at in held: rt.free(at)
out([len(held), code, full, rt.memory(), rt.call("cudaGetLastError"), rt.call("cudaGetLastError")])
"""
    with Device(**SMALL) as device:
        assert run(device, ALL + code) == [31, 2, [0, 62 * MIB], [62 * MIB, 62 * MIB], 2, 0]
        assert device.counters()["cuMemAlloc_v2"].errors == 1
        assert device.used_bytes() == 0


def test_the_pool_fragments_but_mapped_memory_does_not() -> None:
    code = """
held, _ = fill(2 << 20)
for at in held[::2]: rt.free(at)
large = rt.call("cudaMalloc", byref(c_void_p()), 4 << 20)
driver = ctypes.CDLL("libcuda.so.1")
handle, at = c_ulonglong(), c_ulonglong()
made = driver.cuMemCreate(byref(handle), ctypes.c_size_t(16 << 20), None, c_ulonglong(0))
driver.cuMemAddressReserve(byref(at), ctypes.c_size_t(16 << 20), ctypes.c_size_t(0), c_ulonglong(0), c_ulonglong(0))
mapped = driver.cuMemMap(at, ctypes.c_size_t(16 << 20), ctypes.c_size_t(0), handle, c_ulonglong(0))
free = rt.memory()[0]
undone = [driver.cuMemUnmap(at, ctypes.c_size_t(16 << 20)), driver.cuMemRelease(handle)]
out([large, made, mapped, free >> 20, undone, rt.memory()[0] >> 20])
"""
    with Device(**SMALL) as device:
        assert run(device, ALL + code) == [2, 0, 0, 16, [0, 0], 32]


def test_memory_of_a_process_that_was_killed_is_free_again() -> None:
    code = "held, _ = fill(2 << 20)\nout(len(held))\nhear()"
    with Device(**SMALL) as device:
        process = start(device, ALL + code)
        assert hear(process) == 31
        assert device.processes() == {process.pid: 62 * MIB}
        process.kill()
        process.communicate()
        assert run(device, ALL + "held, _ = fill(2 << 20)\nout(len(held))") == 31


def test_freeing_waits_for_the_device_and_allocating_does_not() -> None:
    code = """
rt = Runtime(); k = rt.register(["_Z4slowv"])[0]; s = rt.stream(); at = rt.malloc(4096)
rt.launch(k, s)
other = rt.malloc(4096)
before = rt.call("cudaStreamQuery", s)
rt.free(at)
out([before, rt.call("cudaStreamQuery", s)])
"""
    with Device(**FAST) as device:
        device.rules([("slow", 300_000.0)])
        assert run(device, code) == [600, 0]
        assert device.counters()["cuMemFree_v2"].wait_ns >= 100_000_000
        assert device.counters()["cuMemAlloc_v2"].wait_ns < 100_000_000


def test_the_stream_ordered_pool_reuses_and_never_waits() -> None:
    code = """
rt = Runtime(); k = rt.register(["_Z4slowv"])[0]; s = rt.stream()
a = rt.malloc_async(1 << 20, s); rt.launch(k, s); rt.free_async(a, s)
b = rt.malloc_async(1 << 20, s)
out([a == b, rt.call("cudaStreamQuery", s), rt.memory()[0]])
"""
    with Device(**SMALL) as device:
        device.rules([("slow", 10e6)])
        assert run(device, code) == [True, 600, 60 * MIB]


def test_the_pool_gives_way_to_an_allocation() -> None:
    code = """
rt = Runtime(); s = rt.stream()
for at in [rt.malloc_async(2 << 20, s) for _ in range(31)]: rt.free_async(at, s)
out([rt.memory()[0], rt.call("cudaMalloc", byref(c_void_p()), 60 << 20)])
"""
    with Device(**SMALL) as device:
        assert run(device, code) == [0, 0]


def test_a_spill_succeeds_and_slows_kernels() -> None:
    code = """
rt = Runtime(); k = rt.register(["_Z1kv"])[0]; s = rt.stream(); rt.launch(k, s)
def ms():
    a, b = rt.event(), rt.event()
    rt.record(a, s); rt.launch(k, s); rt.record(b, s); rt("cudaEventSynchronize", b)
    return round(rt.elapsed_ms(a, b))
rt.synchronize(s)
before = ms()
at = rt.malloc(200 << 20)
during = ms()
rt.free(at)
out([before, during, ms()])
"""
    with Device(
        **(SMALL | {"kernel_ns": 10_000_000, "spill": 1, "spill_factor": 4, "launch_latency_ns": 0})
    ) as d:
        assert run(d, code) == [10, 40, 10]


def test_pinning_takes_time_by_size_and_the_driver_s_lock() -> None:
    slow = """
rt = Runtime(); rt.free(0); out(0)
rt.host_alloc(100 << 20)
"""
    quick = "rt = Runtime(); rt.free(0); out(0); hear(); rt.malloc(4096)"
    with Device(**(FAST | {"pin_host_ns_per_mib": 5_000_000})) as device:
        second = start(device, quick)
        hear(second)
        first = start(device, slow)
        hear(first)
        while not int(device.region["driver_lock"]) and first.poll() is None:
            pass
        second.communicate("\n")
        first.communicate()
        found = device.counters()
    assert found["cuMemHostAlloc"].time_ns >= 500_000_000
    assert found["cuMemAlloc_v2"].wait_ns > 0
    assert found["cuMemAlloc_v2"].calls == 1


def test_addresses_say_what_they_are() -> None:
    code = """
rt = Runtime(); driver = ctypes.CDLL("libcuda.so.1")
def kind(at):
    value = c_uint(99)
    code = driver.cuPointerGetAttribute(byref(value), 2, c_ulonglong(at))
    return value.value if not code else -code
plain = create_string_buffer(8192)
device, pinned, managed = rt.malloc(4096), rt.host_alloc(4096), rt.malloc_managed(4096)
page = (addressof(plain) + 4095) // 4096 * 4096
found = [kind(device + 100), kind(pinned + 100), kind(managed), kind(page)]
rt("cudaHostRegister", page, 4096, 0)
again = rt.call("cudaHostRegister", page, 4096, 0)
found += [kind(page), again, rt.call("cudaHostUnregister", page), kind(page)]
out(found)
"""
    with Device(**FAST) as device:
        assert run(device, code) == [2, 1, 2, -1, 1, 712, 0, -1]


def test_a_wrong_handle_is_an_error_and_no_crash() -> None:
    code = """
rt = Runtime(); rt.free(0)
out([rt.call("cudaFree", 0x1234), rt.call("cudaFreeHost", 0x1234), rt.call("cudaMalloc", None, 4),
     rt.call("cudaLaunchKernel", 0x1234, Dim3(1, 1, 1), BLOCK, None, 0, 0)])
"""
    with Device(**FAST) as device:
        assert run(device, code) == [1, 1, 1, 98]


def test_a_program_without_the_driver_is_told() -> None:
    code = (
        "import os; rt = Runtime(os.environ['RT']); n = c_int(); out(rt.call('cudaGetDeviceCount', byref(n)))"
    )
    with Device() as device:
        runtime = device.env["LD_LIBRARY_PATH"].split(":")[0] + "/libcudart.so.13"
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    if "libcuda.so.1" not in found:
        assert run(None, code, RT=runtime, LD_LIBRARY_PATH="/nonexistent") == 35
