"""The CUDA runtime and NCCL through ctypes, as the tests and the stub engine call them; real libraries would do too."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600
H2D, D2H, D2D, DEFAULT = 1, 2, 3, 4
SPIN, YIELD, BLOCKING = 1, 2, 4
NON_BLOCKING = 1
EVENT_BLOCKING, EVENT_NO_TIMING = 1, 2
BF16, FLOAT32 = 9, 7
_FAT_BINARY_MAGIC = 0x466243B1


class CudaError(Exception):
    """A call failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: error {code}")
        self.function, self.code = function, code


class Dim3(ctypes.Structure):
    """A grid or a block."""

    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class LaunchConfig(ctypes.Structure):
    """``cudaLaunchConfig_t``."""

    _fields_ = (
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", c_size_t),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    )


class _FatBinary(ctypes.Structure):
    _fields_ = (("magic", c_int), ("version", c_int), ("data", c_void_p), ("file", c_void_p))


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * 128),)


@dataclass(frozen=True)
class Kernel:
    """A kernel that was registered, by the address of its host function."""

    host: int
    name: str


BLOCK = Dim3(128, 1, 1)
_ONE = Dim3(1, 1, 1)

#: Only what needs saying: elsewhere the values' own types will do.
_ARGUMENTS: dict[str, Sequence[Any]] = {
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMallocManaged": (POINTER(c_void_p), c_size_t, c_uint),
    "cudaMallocAsync": (POINTER(c_void_p), c_size_t, c_void_p),
    "cudaFreeAsync": (c_void_p, c_void_p),
    "cudaHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaHostRegister": (c_void_p, c_size_t, c_uint),
    "cudaHostUnregister": (c_void_p,),
    "cudaMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "cudaMemcpy": (c_void_p, c_void_p, c_size_t, c_int),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMemset": (c_void_p, c_int, c_size_t),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamQuery": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaEventDestroy": (c_void_p,),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventSynchronize": (c_void_p,),
    "cudaEventQuery": (c_void_p,),
    "cudaEventElapsedTime": (POINTER(ctypes.c_float), c_void_p, c_void_p),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cudaGraphInstantiate": (POINTER(c_void_p), c_void_p, ctypes.c_ulonglong),
    "cudaGraphLaunch": (c_void_p, c_void_p),
    "cudaGraphDestroy": (c_void_p,),
    "cudaGraphExecDestroy": (c_void_p,),
    "cudaLaunchKernel": (c_void_p, Dim3, Dim3, c_void_p, c_size_t, c_void_p),
    "cudaLaunchCooperativeKernel": (c_void_p, Dim3, Dim3, c_void_p, c_size_t, c_void_p),
    "cudaLaunchKernelExC": (POINTER(LaunchConfig), c_void_p, c_void_p),
    "cudaFuncGetName": (POINTER(c_char_p), c_void_p),
    "__cudaRegisterFatBinary": (c_void_p,),
    "__cudaRegisterFunction": (c_void_p, c_void_p, c_char_p, c_char_p, c_int, *[c_void_p] * 5),
}


def _image() -> Any:
    return ctypes.create_string_buffer(b"\x7fELF\x02\x01\x01", 64)


class Runtime:
    """``libcudart``. Methods raise ``CudaError``; ``call`` returns the code."""

    def __init__(self, library: str = "libcudart.so.13") -> None:
        self.library = ctypes.CDLL(library)
        for name, arguments in _ARGUMENTS.items():
            getattr(self.library, name).argtypes = arguments
        getattr(self.library, "__cudaRegisterFatBinary").restype = c_void_p
        self._kept: list[Any] = []  # what the library has addresses of

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function; return its error code."""
        return int(getattr(self.library, function)(*arguments))

    def __call__(self, function: str, *arguments: Any) -> None:
        code = getattr(self.library, function)(*arguments)
        if code:
            raise CudaError(function, int(code))

    def _made(self, function: str, *arguments: Any) -> int:
        out = c_void_p()
        self(function, byref(out), *arguments)
        return out.value or 0

    # -- memory ---------------------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        return self._made("cudaMalloc", size)

    def free(self, at: int) -> None:
        self("cudaFree", at)

    def malloc_managed(self, size: int) -> int:
        return self._made("cudaMallocManaged", size, 1)

    def malloc_async(self, size: int, stream: int) -> int:
        return self._made("cudaMallocAsync", size, stream)

    def free_async(self, at: int, stream: int) -> None:
        self("cudaFreeAsync", at, stream)

    def host_alloc(self, size: int) -> int:
        return self._made("cudaHostAlloc", size, 0)

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""
        unused, total = c_size_t(), c_size_t()
        self("cudaMemGetInfo", byref(unused), byref(total))
        return unused.value, total.value

    def copy(self, to: int, origin: int, size: int, kind: int) -> None:
        self("cudaMemcpy", to, origin, size, kind)

    def copy_async(self, to: int, origin: int, size: int, kind: int, stream: int) -> None:
        self("cudaMemcpyAsync", to, origin, size, kind, stream)

    # -- streams, events, graphs ----------------------------------------------------------------------------------

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self._made("cudaStreamCreateWithFlags", flags)

    def synchronize(self, stream: int) -> None:
        self("cudaStreamSynchronize", stream)

    def event(self, flags: int = 0) -> int:
        return self._made("cudaEventCreateWithFlags", flags)

    def record(self, event: int, stream: int) -> None:
        self("cudaEventRecord", event, stream)

    def elapsed_ms(self, begin: int, end: int) -> float:
        out = ctypes.c_float()
        self("cudaEventElapsedTime", byref(out), begin, end)
        return out.value

    @contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """Capture what is enqueued; the list holds the executable graph afterwards."""
        out: list[int] = []
        self("cudaStreamBeginCapture", stream, 0)
        yield out
        graph = self._made_last("cudaStreamEndCapture", stream)
        out.append(self._made("cudaGraphInstantiate", graph, 0))
        self("cudaGraphDestroy", graph)

    def _made_last(self, function: str, *arguments: Any) -> int:
        out = c_void_p()
        self(function, *arguments, byref(out))
        return out.value or 0

    # -- kernels --------------------------------------------------------------------------------------------------

    def register(self, names: Sequence[str], image: bytes | None = None) -> list[Kernel]:
        """Register kernels as the host code of one translation unit does; names are as mangled in the image."""
        data = ctypes.create_string_buffer(image) if image else _image()
        wrapper = _FatBinary(_FAT_BINARY_MAGIC, 1, ctypes.addressof(data), None)
        handle = getattr(self.library, "__cudaRegisterFatBinary")(ctypes.addressof(wrapper))
        hosts = ctypes.create_string_buffer(16 * len(names))
        self._kept += [data, wrapper, hosts]
        kernels = []
        for i, name in enumerate(names):
            kernel = Kernel(ctypes.addressof(hosts) + 16 * i, name)
            encoded = name.encode()
            getattr(self.library, "__cudaRegisterFunction")(
                handle, kernel.host, encoded, encoded, -1, None, None, None, None, None
            )
            kernels.append(kernel)
        return kernels

    def launch(self, kernel: Kernel, stream: int, blocks: int = 1) -> None:
        grid = _ONE if blocks == 1 else Dim3(blocks, 1, 1)
        self("cudaLaunchKernel", kernel.host, grid, BLOCK, None, 0, stream)

    def launch_ex(self, kernel: Kernel, stream: int, blocks: int = 1) -> None:
        config = LaunchConfig(Dim3(blocks, 1, 1), BLOCK, 0, stream, None, 0)
        self("cudaLaunchKernelExC", byref(config), kernel.host, None)

    def launch_cooperative(self, kernel: Kernel, stream: int) -> None:
        self("cudaLaunchCooperativeKernel", kernel.host, _ONE, BLOCK, None, 0, stream)


class Nccl:
    """``libnccl``, one communicator."""

    def __init__(self, unique: bytes, ranks: int, rank: int, library: str = "libnccl.so.2") -> None:
        self.library = load_nccl(library)
        self.comm = c_void_p()
        self("ncclCommInitRank", byref(self.comm), ranks, UniqueId.from_buffer_copy(unique), rank)

    def __call__(self, function: str, *arguments: Any) -> None:
        code = getattr(self.library, function)(*arguments)
        if code:
            raise CudaError(function, int(code))

    def all_reduce(self, at: int, count: int, stream: int, kind: int = BF16) -> None:
        self("ncclAllReduce", at, at, count, kind, 0, self.comm, stream)

    def all_gather(self, origin: int, to: int, count: int, stream: int, kind: int = BF16) -> None:
        self("ncclAllGather", origin, to, count, kind, self.comm, stream)

    def send(self, at: int, count: int, peer: int, stream: int, kind: int = BF16) -> None:
        self("ncclSend", at, count, kind, peer, self.comm, stream)

    def receive(self, at: int, count: int, peer: int, stream: int, kind: int = BF16) -> None:
        self("ncclRecv", at, count, kind, peer, self.comm, stream)


def load_nccl(library: str = "libnccl.so.2") -> Any:
    """Return the library with its arguments' types."""
    loaded = ctypes.CDLL(library)
    loaded.ncclCommInitRank.argtypes = (POINTER(c_void_p), c_int, UniqueId, c_int)
    loaded.ncclAllReduce.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    loaded.ncclAllGather.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p)
    loaded.ncclReduceScatter.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    loaded.ncclBroadcast.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    loaded.ncclSend.argtypes = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    loaded.ncclRecv.argtypes = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    return loaded


def unique_id(library: str = "libnccl.so.2") -> bytes:
    """Return a new id of a communicator, for all its ranks."""
    out = UniqueId()
    code = load_nccl(library).ncclGetUniqueId(byref(out))
    if code:
        raise CudaError("ncclGetUniqueId", int(code))
    return bytes(out)
