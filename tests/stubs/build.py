"""Build the stub libraries: ``python -m tests.stubs.build`` prints their folder.

``build/stubs/lib`` has the libraries under the names that the real ones have, ``build/stubs/bin`` the workload
``calls``. Nothing is done while the sources are what they were.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("src")
BUILD = Path(__file__).resolve().parents[2] / "build" / "stubs"
#: The file's name has the driver's version, as installed drivers do.
DRIVER = "580.82.07"
FLAGS = ("-O2", "-g", "-fno-omit-frame-pointer", "-D_GNU_SOURCE", "-std=gnu17", "-Wall", "-Wextra", "-Werror")
SHARED = ("-fPIC", "-shared", "-fvisibility=hidden")

#: File: soname, sources, further flags, other names.
LIBRARIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    f"libcuda.so.{DRIVER}": (
        "libcuda.so.1",
        (
            "stub.c",
            "sim.c",
            "sim_time.c",
            "cuda_device.c",
            "cuda_entry.c",
            "cuda_stream.c",
            "cuda_launch.c",
            "cuda_copy.c",
            "cuda_blocks.c",
            "cuda_memory.c",
            "cuda_mapped.c",
            "cuda_graph.c",
        ),
        ("-pthread",),
        ("libcuda.so.1", "libcuda.so"),
    ),
    "libcudart.so.13": (
        "libcudart.so.13",
        ("stub.c", "cudart.c", "cudart_work.c"),
        ("-pthread", f"-Wl,--version-script={SOURCE / 'cudart.map'}"),
        ("libcudart.so.12", "libcudart.so"),
    ),
    "libnccl.so.2": ("libnccl.so.2", ("stub.c", "nccl.c"), ("-pthread",), ("libnccl.so",)),
    f"libnvidia-ml.so.{DRIVER}": (
        "libnvidia-ml.so.1",
        ("stub.c", "nvml.c", "nvml_use.c", "nvml_health.c"),
        ("-pthread",),
        ("libnvidia-ml.so.1", "libnvidia-ml.so"),
    ),
    "libc10_cuda.so": ("libc10_cuda.so", ("c10_cuda.c",), ("-pthread",), ()),
}
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "calls": (("calls.c",), ("-ldl",)),
    "calls-static": (
        ("calls.c", "stub.c", "cudart.c", "cudart_work.c"),
        ("-DSTATIC_RUNTIME", "-rdynamic", "-pthread", "-ldl"),
    ),
    "layout": (("layout.c",), ()),
}


def _state() -> str:
    state = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(SOURCE.iterdir()):
        state.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return state.hexdigest()


def _compile(target: Path, sources: tuple[str, ...], flags: tuple[str, ...]) -> None:
    made = target.with_name(f".{target.name}.{os.getpid()}")
    command = ["gcc", *FLAGS, "-o", str(made), *(str(SOURCE / name) for name in sources), *flags]
    subprocess.run(command, check=True)
    made.replace(target)  # whole or not at all: a process may be using the old one


def libraries() -> Path:
    """Return the folder of the libraries, built now if the sources changed.

    Raises:
        subprocess.CalledProcessError: they do not compile.
    """
    lib, stamp, wanted = BUILD / "lib", BUILD / "stamp", _state()
    lib.mkdir(parents=True, exist_ok=True)
    (BUILD / "bin").mkdir(exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return lib
        for name, (soname, sources, flags, others) in LIBRARIES.items():
            _compile(lib / name, sources, (*SHARED, f"-Wl,-soname,{soname}", *flags, "-ldl"))
            for other in others:
                (lib / other).unlink(missing_ok=True)
                (lib / other).symlink_to(name)
        for name, (sources, flags) in PROGRAMS.items():
            _compile(BUILD / "bin" / name, sources, flags)
        stamp.write_text(wanted)
    return lib


def program(name: str) -> Path:
    """Return the path of a program that belongs to the stubs."""
    return libraries().parent / "bin" / name


@cache
def layout() -> dict[str, Any]:
    """Return the layout of the simulated device's file, as the C compiler has it (``src/region.h``)."""
    done = subprocess.run([str(program("layout"))], check=True, capture_output=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(libraries())
