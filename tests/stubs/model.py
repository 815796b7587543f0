"""The GPU side of the stub engine: what one step enqueues, with kernels named like those of a real model."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.stubs.cuda import D2H, EVENT_NO_TIMING, H2D, OUT_OF_MEMORY, CudaError, Kernel, Nccl, Runtime

LAYERS = 16
HIDDEN = 4096
PROMPT_TOKENS_PER_BLOCK = 16
#: What a framework spends on the host for each launch outside a graph.
DISPATCH_S = 20e-6
#: Buffers that a prompt needs for a while.
TEMPORARIES = 40
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)

ATTENTION = (
    "_ZN5flash24flash_fwd_splitkv_kernelI23Flash_fwd_kernel_traitsILi128ELi64ELi128ELi4ELb0ELb0EN7cutlass10bfloat16_tE"
    "19Flash_kernel_traitsILi128ELi64ELi128ELi4ES3_EELb0ELb0ELb0ELb0ELb1ELb1ELb0ELb0EEEv16Flash_fwd_params"
)
GEMM = "nvjet_tst_128x64_64x8_2x1_v_bz_TNN"
NORM = "_ZN4vllm15rms_norm_kernelIN3c108BFloat16EEEvPT_PKS3_S6_fii"
ROPE = "_ZN4vllm23rotary_embedding_kernelIN3c108BFloat16ELb1EEEvPKlPT_S6_PKS5_illiii"
ACT = "_ZN4vllm18act_and_mul_kernelIN3c108BFloat16EXadL_ZNS_11silu_kernelIS2_EET_RKS4_EELb1EEEvPS4_PKS4_i"
CACHE = (
    "_ZN4vllm30reshape_and_cache_flash_kernelI13__nv_bfloat16S1_LNS_18Fp8KVCacheDataTypeE0EEEvPKT_S5_PT0_S7_"
    "PKlllliiiPKfSA_"
)
SOFTMAX = "_ZN2at6native12_GLOBAL__N_119cunn_SoftMaxForwardILi4EfffNS1_22SoftMaxForwardEpilogueEEEvPT2_PKT0_i"
ARGMAX = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_9ArgMaxOpsIfEEjlLi4EEEEEvT1_"
FILL = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
LONG = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
NAMES = (ATTENTION, GEMM, NORM, ROPE, ACT, CACHE, SOFTMAX, ARGMAX, FILL, LONG)
#: (pattern, us, us per block) for ``Device.rules``: a step of one sequence takes 1.4 ms.
RULES = (
    ("flash_fwd", 12.0, 0.3),
    ("nvjet", 14.0, 1.0),
    ("rms_norm", 3.0, 0.02),
    ("rotary", 3.0, 0.02),
    ("act_and_mul", 3.0, 0.02),
    ("reshape_and_cache", 3.0, 0.02),
    ("SoftMaxForward", 10.0, 0.1),
    ("ArgMaxOps", 8.0, 0.1),
    ("FillFunctor", 2.0, 0.0),
    ("sm90_xmma", 0.0, 1.0),  # as many microseconds as blocks
)
_FORWARD = (NORM, GEMM, ROPE, CACHE, ATTENTION, GEMM, "", NORM, GEMM, ACT, GEMM, "")  # "": all-reduce


@dataclass
class Faults:
    """What is wrong with the engine at the moment; 0 is healthy. Per step, unless it says otherwise."""

    items: int = 0  # while sampling, so often a value is fetched to pageable memory, as `.item()` does
    pageable_kib: int = 0  # inputs copied synchronously from pageable memory
    churn: int = 0  # pairs of cudaMalloc and cudaFree
    churn_mib: int = 8
    pin_mib: int = 0  # host memory pinned and freed
    graph_up_to: int = GRAPH_SIZES[-1]  # larger batches run without a graph
    cpu_ms: float = 0.0  # Python's work before the launches
    straggler_ms: float = 0.0  # rank 1 begins so much later
    load_kernels: int = 0  # per prompt: a module of so many kernels is loaded and compiled
    capture: bool = False  # per prompt: a graph is captured and instantiated
    temporary_mib: int = 0  # per prompt: buffers from the caching allocator, so much together
    temporary_shifts: bool = False  # of other sizes every time: what is cached does not fit
    long_us: int = 0  # one kernel of the step's own
    tiny: int = 0  # so many tiny kernels, launched asynchronously
    offload_mib: float = 0.0  # weights or KV from pinned host memory
    pooled: int = 0  # pairs of stream-ordered allocations
    spill_mib: int = 0  # once: memory beyond the device's


class OutOfMemory(Exception):
    """The allocator gave up; the request fails."""


class Model:
    """One rank's share of a model on one GPU."""

    def __init__(
        self, nccl: Callable[[], Nccl] | None = None, *, flags: int = 0, memory: int = 8 << 30
    ) -> None:
        self.rt = rt = Runtime()
        if flags:
            rt("cudaSetDeviceFlags", flags)
        rt.free(0)
        self.kernels = {k.name: k for k in rt.register(NAMES)}
        self.stream = rt.stream()
        self.done = rt.event(EVENT_NO_TIMING)
        self.weights = rt.malloc(memory)
        self.inputs = rt.malloc(64 << 20)
        self.tokens = rt.malloc(4096)
        self.pinned = rt.host_alloc(1 << 20)
        self.offloaded = 0
        self.pageable = ctypes.create_string_buffer(16 << 20)
        self.nccl = nccl() if nccl else None
        self.allocator = ctypes.CDLL("libc10_cuda.so")
        self.allocator.c10_cuda_malloc.restype = ctypes.c_void_p
        self.allocator.c10_cuda_malloc.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.allocator.c10_cuda_free.argtypes = (ctypes.c_void_p,)
        self.temporary = 0
        self.modules = 0
        self.spilled: list[int] = []
        self.graphs: dict[int, int] = {}
        for size in GRAPH_SIZES:
            self.graphs[size] = self._capture(size)

    def _capture(self, size: int) -> int:
        with self.rt.capture(self.stream) as made:
            self._forward(size)
        return made[0]

    def _forward(self, blocks: int, eager: bool = False) -> None:
        """Enqueue a forward pass; ``eager``: with what a framework does on the host for each launch."""
        launch, stream, kernels = self.rt.launch, self.stream, self.kernels
        for _ in range(LAYERS):
            for name in _FORWARD:
                if not name:
                    if self.nccl:
                        self.nccl.all_reduce(self.inputs, blocks * HIDDEN, stream)
                    continue
                if eager:
                    _busy(DISPATCH_S)
                launch(kernels[name], stream, blocks)
        for name in (GEMM, SOFTMAX, ARGMAX):
            launch(kernels[name], stream, blocks)

    def item(self) -> None:
        """Fetch a value as ``tensor.item()`` does: a copy to pageable memory, and a wait for the stream."""
        self.rt.copy_async(ctypes.addressof(self.pageable), self.tokens, 4, D2H, self.stream)
        self.rt.synchronize(self.stream)

    def step(self, batch: int, prompts: list[int], faults: Faults) -> bool:
        """Enqueue a step of ``batch`` sequences, of which some have a prompt of so many tokens; return if as a graph.

        Raises:
            OutOfMemory: a temporary buffer cannot be had.
        """
        rt, stream = self.rt, self.stream
        for offset in (0, 4096, 8192):  # token ids, positions, block table
            rt.copy_async(self.inputs + offset, self.pinned + offset, 8 * batch, H2D, stream)
        if faults.pageable_kib:
            rt.copy(self.inputs, ctypes.addressof(self.pageable), faults.pageable_kib << 10, H2D)
        if faults.offload_mib:
            self._offload(round(faults.offload_mib * (1 << 20)))
        self._memory(faults)
        if prompts:
            self._first(faults)
        blocks = batch + sum(prompts) // PROMPT_TOKENS_PER_BLOCK
        size = next((s for s in GRAPH_SIZES if s >= batch), 0)
        if faults.cpu_ms:
            _busy(faults.cpu_ms / 1e3)
        graph = bool(size) and not prompts and batch <= faults.graph_up_to
        if not graph:
            self._forward(blocks, eager=True)
        else:
            rt("cudaGraphLaunch", self.graphs[size], stream)
        for _ in range(faults.items):
            rt.launch(self.kernels[FILL], stream)
            self.item()
        for _ in range(faults.tiny):
            rt.launch(self.kernels[FILL], stream)
        if faults.long_us:
            rt.launch(self.kernels[LONG], stream, faults.long_us)
        rt.copy_async(self.pinned + 65536, self.tokens, 8 * batch, D2H, stream)
        rt.record(self.done, stream)
        return graph

    def wait(self) -> None:
        """Wait for the step's tokens."""
        self.rt("cudaEventSynchronize", self.done)

    def _offload(self, size: int) -> None:
        if not self.offloaded:
            self.offloaded = self.rt.host_alloc(64 << 20)
        self.rt.copy_async(self.inputs, self.offloaded, min(size, 64 << 20), H2D, self.stream)

    def _memory(self, faults: Faults) -> None:
        rt = self.rt
        for _ in range(faults.churn):
            rt.free(rt.malloc(faults.churn_mib << 20))
        for _ in range(faults.pooled):
            rt.free_async(rt.malloc_async(1 << 20, self.stream), self.stream)
        if faults.pin_mib:
            rt("cudaFreeHost", rt.host_alloc(faults.pin_mib << 20))
        if faults.spill_mib and not self.spilled:
            self.spilled.append(rt.malloc(faults.spill_mib << 20))
        elif self.spilled and not faults.spill_mib:
            rt.free(self.spilled.pop())

    def _first(self, faults: Faults) -> None:
        """What a new prompt's shape costs once."""
        if faults.load_kernels:
            self.modules += 1
            names = [f"triton_poi_fused_add_mul_{self.modules}_{i}" for i in range(faults.load_kernels)]
            for kernel in self.rt.register(names, ptx(names)):
                self.rt.launch(kernel, self.stream)
        if faults.capture:
            self.rt("cudaGraphExecDestroy", self._capture(3))
        if faults.temporary_mib:
            self._temporary(faults)
        elif self.temporary:
            self.temporary = 0
            self.allocator.c10_cuda_empty_cache()

    def _temporary(self, faults: Faults) -> None:
        self.temporary += faults.temporary_shifts or not self.temporary
        held: list[int] = []
        for i in range(TEMPORARIES):
            size = (faults.temporary_mib << 20) // TEMPORARIES + (
                (self.temporary % 4 * TEMPORARIES + i) << 21
            )
            at = self.allocator.c10_cuda_malloc(size, 0, self.stream)
            if not at:
                break
            held.append(at)
        for at in held:
            self.allocator.c10_cuda_free(at)
        if len(held) < TEMPORARIES:
            raise OutOfMemory(f"tried to allocate {size >> 20} MiB")


def ptx(names: list[str]) -> bytes:
    """Return a module in PTX that has kernels of these names."""
    head = ".version 8.4\n.target sm_90a\n.address_size 64\n"
    return (head + "".join(f".visible .entry {name}()\n{{\n\tret;\n}}\n" for name in names)).encode() + b"\0"


def kernel_launches() -> int:
    """Return how many kernels a forward pass of one rank without collectives has."""
    return LAYERS * sum(1 for name in _FORWARD if name) + 3


def _busy(seconds: float) -> None:
    """Python code that runs for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


__all__ = ["OUT_OF_MEMORY", "CudaError", "Faults", "Kernel", "Model", "OutOfMemory", "kernel_launches", "ptx"]
