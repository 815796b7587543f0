"""The stubs count what they execute, exactly, and have the names of the real libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from whyspan_probes import usdt

from tests.stubs import build
from tests.stubs.device import Device
from tests.unit.stubs.child import run

DRIVER = [
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamSynchronize_ptsz",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel",
    "cuLaunchCooperativeKernel_ptsz",
    "cuMemcpy",
    "cuMemcpy_ptds",
    "cuMemcpyAsync",
    "cuMemcpyAsync_ptsz",
    "cuMemcpyHtoD_v2",
    "cuMemcpyHtoD_v2_ptds",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoH_v2_ptds",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoDAsync_v2_ptsz",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoHAsync_v2_ptsz",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8_v2",
    "cuMemsetD8Async",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemAllocAsync_ptsz",
    "cuMemFreeAsync",
    "cuMemCreate",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemHostAlloc",
    "cuMemAllocHost_v2",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemGetInfo_v2",
    "cuPointerGetAttribute",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoad",
    "cuModuleGetFunction",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncGetName",
    "cuFuncSetAttribute",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
    "cuGraphExecUpdate_v2",
    "cuGetProcAddress_v2",
    "cuGetErrorName",
    "cuGetErrorString",
]
RUNTIME = [
    "cudaLaunchKernel",
    "cudaLaunchKernel_ptsz",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "__cudaLaunchKernel",
    "cudaMemcpy",
    "cudaMemcpy_ptds",
    "cudaMemcpyAsync",
    "cudaMemcpyAsync_ptsz",
    "cudaMalloc",
    "cudaFree",
    "cudaMallocAsync",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaSetDeviceFlags",
    "cudaGraphLaunch",
    "cudaStreamBeginCapture",
    "cudaStreamEndCapture",
    "__cudaRegisterFatBinary",
    "__cudaRegisterFunction",
    "__cudaPushCallConfiguration",
    "__cudaPopCallConfiguration",
    "cudaFuncGetName",
]
#: The kinds of `calls` and what one of each executes.
KINDS = {
    "launch": ("cuLaunchKernel",),
    "launch_ptsz": ("cuLaunchKernel_ptsz",),
    "launch_ex": ("cuLaunchKernelEx",),
    "launch_cooperative": ("cuLaunchCooperativeKernel",),
    "graph": ("cuGraphLaunch",),
    "h2d_async": ("cuMemcpyHtoDAsync_v2",),
    "d2h_async": ("cuMemcpyDtoHAsync_v2",),
    "h2d": ("cuMemcpyHtoD_v2",),
    "d2h": ("cuMemcpyDtoH_v2",),
    "d2d_async": ("cuMemcpyDtoDAsync_v2",),
    "memset": ("cuMemsetD8Async",),
    "stream_sync": ("cuStreamSynchronize",),
    "event_sync": ("cuEventSynchronize",),
    "context_sync": ("cuCtxSynchronize",),
    "stream_query": ("cuStreamQuery",),
    "event_record": ("cuEventRecord",),
    "alloc": ("cuMemAlloc_v2", "cuMemFree_v2"),
    "alloc_async": ("cuMemAllocAsync", "cuMemFreeAsync"),
    "host_alloc": ("cuMemHostAlloc", "cuMemFreeHost"),
    "module": ("cuModuleLoadData", "cuModuleUnload"),
    "rt_launch": ("cudaLaunchKernel", "cuLaunchKernel"),
    "rt_stream_sync": ("cudaStreamSynchronize", "cuStreamSynchronize"),
    "rt_copy_async": ("cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2"),
    "rt_copy": ("cudaMemcpy", "cuMemcpyDtoH_v2"),
}
FAST: dict[str, Any] = {
    "pin_host_ns": 0,
    "alloc_host_ns": 0,
    "free_host_ns": 0,
    "module_load_ns": 0,
    "kernel_ns": 0,
}


def calls(device: Device, *arguments: str) -> str:
    argv = [str(build.program("calls")), *arguments]
    return subprocess.run(argv, env=device.env, check=True, capture_output=True, text=True).stdout


def symbols(library: str) -> tuple[str, set[str], set[str]]:
    """Return a library's soname, its functions, and the versions that it defines."""
    with (build.libraries() / library).open("rb") as file:
        elf: Any = ELFFile(file)
        tags = elf.get_section_by_name(".dynamic").iter_tags()
        soname = next(t.soname for t in tags if t.entry.d_tag == "DT_SONAME")
        table = elf.get_section_by_name(".dynsym").iter_symbols()
        names = {s.name for s in table if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["type"] == "STT_FUNC"}
        verdef = elf.get_section_by_name(".gnu.version_d")
        versions = {next(iter(aux)).name for _, aux in verdef.iter_versions()} if verdef else set()
    return soname, names, versions


def test_every_kind_of_call_is_counted_exactly() -> None:
    with Device(**FAST) as device:
        calls(device, "launch=1")  # what setting up takes, and one of them
        before = device.counters()
        kernels = device.kernels
        text = calls(device)
        found = device.counters()
        done = {kind: int(n) for kind, n, _ in (line.split() for line in text.splitlines())}
        expected: dict[str, int] = {}
        for kind, n in done.items():
            for function in KINDS[kind]:
                expected[function] = expected.get(function, 0) + n
        assert set(done) == set(KINDS)
        for function, n in expected.items():
            had = before[function].calls if function in before else 0
            set_up = had - (function == "cuLaunchKernel")  # done again by the second process
            assert found[function].calls - had == n + set_up, function
        launched = sum(
            done[k] for k in ("launch", "launch_ptsz", "launch_ex", "launch_cooperative", "rt_launch")
        )
        assert device.kernels - kernels == launched + 50 * done["graph"]
        assert device.graph_kernels == 50 * done["graph"]


def test_a_program_may_have_the_runtime_inside() -> None:
    with Device(**FAST) as device:
        argv = [str(build.program("calls-static")), "rt_launch=101", "rt_copy=7"]
        subprocess.run(argv, env=device.env, check=True, stdout=subprocess.DEVNULL)
        found = device.counters()
        assert (found["cudaLaunchKernel"].calls, found["cudaMemcpy"].calls) == (101, 7)
        assert found["cuLaunchKernel"].calls == 101 + 50
    with build.program("calls-static").open("rb") as file:
        elf: Any = ELFFile(file)
        names = {s.name for s in elf.get_section_by_name(".symtab").iter_symbols()}
        needed = {
            t.needed for t in elf.get_section_by_name(".dynamic").iter_tags() if t.entry.d_tag == "DT_NEEDED"
        }
    assert "cudaLaunchKernel" in names and not any("cuda" in n for n in needed)


def test_copies_are_counted_by_direction_memory_and_mode() -> None:
    with Device(**FAST) as device:
        calls(
            device, "h2d=211", "d2h=223", "h2d_async=1031", "d2h_async=1033", "d2d_async=7", "rt_copy_async=5"
        )
        found = {key: (c.number, c.bytes) for key, c in device.copies().items()}
    assert found == {
        ("h2d", "pageable", "sync"): (211, 211 * 256),
        ("d2h", "pageable", "sync"): (223, 223 * 256),
        ("h2d", "pinned", "async"): (1036, 1036 * 256),
        ("d2h", "pinned", "async"): (1033, 1033 * 256),
        ("d2d", "pageable", "async"): (7, 7 * 256),
    }


def test_the_ring_holds_the_last_calls_and_agrees_with_the_counters() -> None:
    with Device(ring=1024, **FAST) as device:
        calls(device, "stream_query=101", "launch=103")
        rows = device.calls("cuStreamQuery")
        counter = device.counters()["cuStreamQuery"]
        assert len(rows) == counter.calls == 101
        assert int(np.sum(rows["end_ns"] - rows["begin_ns"])) == counter.time_ns
        assert np.all(rows["begin_ns"][1:] >= rows["end_ns"][:-1])
        assert len(set(rows["tid"])) == 1 and np.all(rows["tid"] == rows["tgid"])
        calls(device, "stream_query=1500")
        rows = device.calls()
        assert len(rows) == 1024
        assert int(rows["seq"][-1] - rows["seq"][0]) == 1023
        assert device.count("cuStreamQuery") == 1601


def test_many_threads_and_processes_count_together() -> None:
    with Device(**FAST) as device:
        argv = [str(build.program("calls")), "stream_query=20011", "launch=5003"]
        running = [subprocess.Popen(argv, env=device.env, stdout=subprocess.DEVNULL) for _ in range(3)]
        assert [p.wait() for p in running] == [0, 0, 0]
        assert device.count("cuStreamQuery") == 3 * 20011
        assert device.count("cuLaunchKernel") == 3 * (5003 + 50)
        assert device.kernels == 3 * 5003
        assert device.processes() == {}


def test_a_call_may_be_made_to_fail_so_many_times() -> None:
    code = (
        "rt = Runtime(); rt.free(0); out([rt.call('cudaMalloc', byref(c_void_p()), 4096) for _ in range(4)])"
    )
    with Device() as device:
        device.fail("cuMemAlloc_v2", 2, times=2)
        assert run(device, code) == [2, 2, 0, 0]
        assert device.counters()["cuMemAlloc_v2"].errors == 2
        device.heal()
        device.fail("cudaMalloc", 46)
        assert run(device, code) == [46] * 4
        assert device.counters()["cuMemAlloc_v2"].calls == 4


def test_without_a_device_there_is_none() -> None:
    code = """
rt = Runtime()
n = c_int()
driver = ctypes.CDLL("libcuda.so.1")
out([driver.cuInit(0), rt.call("cudaGetDeviceCount", byref(n)), ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()])
"""
    path = str(build.libraries())
    assert run(None, code, LD_LIBRARY_PATH=path, WHYSPAN_STUB_DEVICE="/nonexistent") == [100, 100, 9]


@pytest.mark.parametrize(
    ("library", "soname", "wanted"),
    [
        ("libcuda.so.1", "libcuda.so.1", DRIVER),
        ("libcudart.so.13", "libcudart.so.13", RUNTIME),
        ("libnccl.so.2", "libnccl.so.2", ["ncclAllReduce", "pncclAllReduce", "ncclSend", "ncclGroupEnd"]),
        ("libnvidia-ml.so.1", "libnvidia-ml.so.1", ["nvmlInitWithFlags", "nvmlDeviceGetUtilizationRates"]),
    ],
)
def test_names_are_those_of_the_real_library(library: str, soname: str, wanted: list[str]) -> None:
    found, names, versions = symbols(library)
    assert found == soname
    assert set(wanted) <= names
    assert ("libcudart.so.13" in versions) == (library == "libcudart.so.13")


def test_the_driver_s_file_is_named_by_its_version() -> None:
    assert Path(build.libraries() / "libcuda.so.1").resolve().name == f"libcuda.so.{build.DRIVER}"


def test_the_allocator_has_pytorch_s_notes() -> None:
    with (build.libraries() / "libc10_cuda.so").open("rb") as file:
        notes = {n.name: n for n in usdt.find(file.fileno(), {"pytorch:malloc", "pytorch:free"})}
    assert set(notes) == {"pytorch:malloc", "pytorch:free"}
    assert all(n.semaphore and usdt.argument(n.arguments) for n in notes.values())


def test_the_allocator_retries_without_its_cache() -> None:
    code = """
lib = ctypes.CDLL("libc10_cuda.so")
lib.c10_cuda_malloc.restype = c_void_p
lib.c10_cuda_malloc.argtypes = (ctypes.c_size_t, c_int, c_void_p)
lib.c10_cuda_free.argtypes = (c_void_p,)
a = lib.c10_cuda_malloc(48 << 20, 0, None)
lib.c10_cuda_free(a)
b = lib.c10_cuda_malloc(48 << 20, 0, None)
lib.c10_cuda_free(b)
c = lib.c10_cuda_malloc(40 << 20, 0, None)
d = lib.c10_cuda_malloc(40 << 20, 0, None)
stats = (c_ulonglong * 4)()
lib.c10_cuda_stats(stats)
out([a == b, bool(c), d, list(stats)])
"""
    with Device(memory_bytes=64 << 20) as device:
        found = run(device, code)
        assert found == [True, True, None, [2, 1, 40 << 20, 40 << 20]]
        assert device.counters()["cudaMalloc"].errors == 3
