"""The stub of NVML, asked by the real pynvml."""

from __future__ import annotations

import pytest

from tests.stubs.device import Device
from tests.unit.stubs.child import hear, run, start, tell

NVML = """
import pynvml as n
from pynvml import *
def code(f, *a):
    try: f(*a)
    except NVMLError as e: return e.value
    return 0
"""
OPEN = NVML + "nvmlInit(); h = nvmlDeviceGetHandleByIndex(0)\n"


def test_devices_are_found_and_named() -> None:
    code = """
other = nvmlDeviceGetHandleByIndex(1)
uuid, pci = nvmlDeviceGetUUID(other), nvmlDeviceGetPciInfo(other)
same = lambda a: nvmlDeviceGetIndex(a)
out({"count": nvmlDeviceGetCount(), "name": nvmlDeviceGetName(h), "uuid": uuid, "bus": pci.busId,
     "legacy": pci.busIdLegacy, "by_uuid": same(nvmlDeviceGetHandleByUUID(uuid)),
     "by_pci": same(nvmlDeviceGetHandleByPciBusId("0000:42:00.0")), "driver": nvmlSystemGetDriverVersion(),
     "cuda": nvmlSystemGetCudaDriverVersion(), "nvml": nvmlSystemGetNVMLVersion(),
     "none": code(nvmlDeviceGetHandleByIndex, 2), "cc": nvmlDeviceGetCudaComputeCapability(h),
     "text": str(NVMLError(3))})
nvmlShutdown()
"""
    with Device(gpus=2) as device:
        found = run(device, OPEN + code)
    assert found.pop("uuid").startswith("GPU-")
    assert found == {
        "count": 2,
        "name": "NVIDIA H100 80GB HBM3",
        "bus": "00000000:42:00.0",
        "legacy": "0000:42:00.0",
        "by_uuid": 1,
        "by_pci": 1,
        "driver": "580.82.07",
        "cuda": 13000,
        "nvml": "13.580.82.07",
        "none": 2,
        "cc": [9, 0],
        "text": "Not Supported",
    }


def test_nothing_is_told_before_init_and_nothing_without_a_driver() -> None:
    with Device() as device:
        assert run(device, NVML + "n._LoadNvmlLibrary(); out(code(nvmlDeviceGetCount))") == 1
        env = {"LD_LIBRARY_PATH": device.env["LD_LIBRARY_PATH"], "WHYSPAN_STUB_DEVICE": ""}
        assert run(None, NVML + "out(code(nvmlInit))", **env) == 9


def test_memory_and_processes_are_those_of_the_device() -> None:
    worker = "rt = Runtime(); rt.malloc(6 << 20); out(0); hear()"
    code = """
m, v2 = nvmlDeviceGetMemoryInfo(h), nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2)
out({"m": [m.total, m.free, m.used], "v2": [v2.total, v2.free, v2.used, v2.reserved],
     "procs": [[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetComputeRunningProcesses(h)]})
"""
    with Device(memory_bytes=64 << 20) as device:
        assert run(device, OPEN + code)["procs"] == []
        process = start(device, worker)
        hear(process)
        found = run(device, OPEN + code)
        process.communicate("\n")
    mib = 1 << 20
    assert found == {
        "m": [64 * mib, 58 * mib, 6 * mib],
        "v2": [64 * mib, 58 * mib, 6 * mib, 0],
        "procs": [[process.pid, 6 * mib]],
    }


def test_state_follows_control() -> None:
    code = """
IDS = [(138, 2**32 - 1), (138, 3), 143, 9999]
def state():
    return {"sm": nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM), "max": nvmlDeviceGetMaxClockInfo(h, NVML_CLOCK_SM),
     "reasons": nvmlDeviceGetCurrentClocksEventReasons(h), "old": nvmlDeviceGetCurrentClocksThrottleReasons(h),
     "power": nvmlDeviceGetPowerUsage(h), "limit": nvmlDeviceGetEnforcedPowerLimit(h),
     "temperature": nvmlDeviceGetTemperature(h, NVML_TEMPERATURE_GPU),
     "corrected": [nvmlDeviceGetTotalEccErrors(h, 0, c) for c in (0, 1)],
     "uncorrected": [nvmlDeviceGetTotalEccErrors(h, 1, c) for c in (0, 1)],
     "rows": nvmlDeviceGetRemappedRows(h),
     "gen": [nvmlDeviceGetCurrPcieLinkGeneration(h), nvmlDeviceGetMaxPcieLinkGeneration(h)],
     "width": [nvmlDeviceGetCurrPcieLinkWidth(h), nvmlDeviceGetMaxPcieLinkWidth(h)],
     "link": nvmlDeviceGetNvLinkState(h, 3), "errors": nvmlDeviceGetNvLinkErrorCounter(h, 3, 0),
     "fields": [[f.nvmlReturn, f.value.ullVal] for f in nvmlDeviceGetFieldValues(h, IDS)],
     "mig": nvmlDeviceGetMigMode(h), "ecc": nvmlDeviceGetEccMode(h), "util": code(nvmlDeviceGetUtilizationRates, h)}
Runtime().malloc(4096)  # in use: not at the clocks of an idle GPU
out(state()); hear(); out(state())
"""
    with Device() as device:
        process = start(device, OPEN + code)
        before = hear(process)
        device.gpu(
            clock_factor=0.5,
            throttle_reasons=0x40,
            power_mw=123_000,
            temperature_c=91,
            ecc_corrected=(3, 5),
            ecc_uncorrected=(1, 2),
            remapped_uncorrected=4,
            remap_pending=1,
            pcie_gen=3,
            pcie_width=4,
            nvlinks_active=0b0111,
            mig_mode=1,
            ecc_enabled=1,
        )
        device.gpu()["nvlink_errors"][3] = 7
        device.gpu()["nvlink_tx_kib"][:] = 10
        tell(process)
        after = hear(process)
        process.communicate()
    assert (before["sm"], before["reasons"], before["link"], before["util"]) == (1980, 0, 1, 0)
    assert after == {
        "sm": 990,
        "max": 1980,
        "reasons": 0x40,
        "old": 0x40,
        "power": 123_000,
        "limit": 700_000,
        "temperature": 91,
        "corrected": [3, 5],
        "uncorrected": [1, 2],
        "rows": [0, 4, 1, 0],
        "gen": [3, 5],
        "width": [4, 16],
        "link": 0,
        "errors": 7,
        "fields": [[0, 180], [0, 10], [0, 4], [3, 0]],
        "mig": [1, 1],
        "ecc": [1, 1],
        "util": 3,  # not told of a GPU with MIG
    }


def test_utilisation_is_what_ran() -> None:
    worker = """
rt = Runtime(); k = rt.register(["_Z4slowv"])[0]; s = rt.stream()
rt.launch(k, s); out(0); hear()
"""
    code = """
def activity(seconds):
    a, b = nvmlGpmSampleAlloc(), nvmlGpmSampleAlloc()
    nvmlGpmSampleGet(h, a); time.sleep(seconds); nvmlGpmSampleGet(h, b)
    got = c_nvmlGpmMetricsGet_t(); got.version = NVML_GPM_METRICS_GET_VERSION; got.numMetrics = 3
    got.sample1, got.sample2 = a, b
    for i, m in enumerate((NVML_GPM_METRIC_GRAPHICS_UTIL, NVML_GPM_METRIC_SM_UTIL, 99)): got.metrics[i].metricId = m
    nvmlGpmMetricsGet(got)
    return [[round(m.value), m.nvmlReturn] for m in got.metrics[:3]]
def seen():
    uses = code(nvmlDeviceGetProcessUtilization, h, 0)
    return {"gpu": nvmlDeviceGetUtilizationRates(h).gpu, "uses": uses or
            [[s.pid, s.smUtil] for s in nvmlDeviceGetProcessUtilization(h, 0)],
            "gpm": activity(0.02), "supported": nvmlGpmQueryDeviceSupport(h).isSupportedDevice}
out(seen()); hear(); time.sleep(0.2); out(seen())
"""
    with Device(sm_percent=25) as device:
        device.rules([("slow", 20e6)])
        watcher = start(device, OPEN + code)
        idle = hear(watcher)
        process = start(device, worker)
        hear(process)
        tell(watcher)
        busy = hear(watcher)
        watcher.communicate()
        process.kill()
        process.communicate()
        device.gpu(gpm_supported=0)
        without = run(device, OPEN + "out(code(nvmlGpmSampleGet, h, nvmlGpmSampleAlloc()))")
    assert idle == {"gpu": 0, "uses": 6, "gpm": [[0, 0], [0, 0], [0, 3]], "supported": 1}
    assert busy["gpu"] == 100 and busy["uses"] == [[process.pid, 100]]
    assert busy["gpm"] == [[100, 0], [25, 0], [0, 3]]
    assert without == 3


def test_throughput_of_the_link_is_what_was_copied() -> None:
    code = """
rt = Runtime(); s = rt.stream(); d, p = rt.malloc(4 << 20), rt.host_alloc(4 << 20)
got = 0
while not got:
    for _ in range(64): rt.copy_async(d, p, 4 << 20, H2D, s)
    rt.synchronize(s)
    got = nvmlDeviceGetPcieThroughput(h, NVML_PCIE_UTIL_RX_BYTES)
out([got > 0, nvmlDeviceGetPcieThroughput(h, NVML_PCIE_UTIL_TX_BYTES)])
"""
    with Device() as device:
        assert run(device, OPEN + code) == [True, 0]
        assert int(device.gpu()["copied_bytes"][1]) == 0


def test_an_xid_is_an_event_and_a_line_of_the_log() -> None:
    code = """
events = nvmlEventSetCreate()
unsupported = code(nvmlDeviceRegisterEvents, h, nvmlEventTypeClock, events)
nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, events)
out([unsupported, code(nvmlEventSetWait, events, 10)]); hear()
e = nvmlEventSetWait(events, 10000)
out([nvmlDeviceGetIndex(e.device), e.eventType, e.eventData, code(nvmlEventSetWait, events, 0)])
nvmlEventSetFree(events)
"""
    with Device(gpus=2) as device:
        watcher = start(device, OPEN + code)
        assert hear(watcher) == [3, 10]
        device.xid(48, 1)  # of the other GPU
        line = device.xid(79, pid=4711, name="python3")
        tell(watcher)
        assert hear(watcher) == [0, 8, 79, 10]
        watcher.communicate()
        assert line == "NVRM: Xid (PCI:0000:41:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
        first, second = device.log.read_text().splitlines()
        assert "Xid (PCI:0000:42:00): 48, pid='<unknown>'" in first
        assert second.startswith("3,2,") and second.endswith(f",-;{line}")


@pytest.mark.parametrize("value", [3, 15, 999])
def test_any_function_may_be_unsupported(value: int) -> None:
    with Device() as device:
        device.fail("nvmlDeviceGetPowerUsage", value)
        assert run(device, OPEN + "out(code(nvmlDeviceGetPowerUsage, h))") == value
