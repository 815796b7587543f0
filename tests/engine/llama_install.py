"""Install llama.cpp's Python server into an environment of its own: ``python -m tests.engine.llama_install``.

It comes as source only and is compiled: 8 minutes on two CPUs, at the lowest priority; 0.4 GB. Needs a C++ compiler.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.engine.install import cache, interpreter

LLAMA, GGUF = "llama-cpp-python[server]==0.3.36", "gguf==0.19.0"
#: Its presence says that the last step is done; the name changes with what is installed.
STAMP = f".whyspan-{LLAMA}-{GGUF}"
#: No tools, no tests, no multi-modal part; code for any x86-64, so that a cached environment runs elsewhere too.
CMAKE = {
    "GGML_NATIVE": "OFF",
    "GGML_LLAMAFILE": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAVA_BUILD": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
}


def environment() -> Path:
    """Return the folder of the virtual environment, whether or not it is there."""
    return cache() / "llama"


def python() -> Path:
    """Return the interpreter of the environment."""
    return environment() / "bin" / "python"


def installed() -> bool:
    """Whether the environment is complete."""
    return (environment() / STAMP).exists() and python().exists()


def install() -> None:
    """Make the environment; another process that does so at the same time is waited for.

    Raises:
        subprocess.CalledProcessError: pip or the compiler failed; its message is on the terminal.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "llama.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed():
            return
        folder, began = environment(), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        print(f"compiling {LLAMA} into {folder}: some minutes, once", flush=True)
        subprocess.run([interpreter(), "-m", "venv", str(folder)], check=True)
        env = {
            **os.environ,
            "CMAKE_ARGS": " ".join(f"-D{k}={v}" for k, v in CMAKE.items()),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        }
        pip = [str(python()), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
        subprocess.run(["nice", "-n", "19", *pip, "install", LLAMA, GGUF], check=True, env=env)
        (folder / STAMP).touch()
        print(f"installed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    install()
