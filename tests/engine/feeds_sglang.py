"""SGLang's message classes: two files of its wheel, kept in the cache. The whole of it needs a GPU."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.engine import install

SGLANG = "sglang==0.5.23"
FILES = (
    "sglang/srt/disaggregation/kv_events.py",
    "sglang/srt/observability/forward_pass_metrics.py",
)


def folder() -> Path:
    """Return the folder that holds the files, whether or not they are there."""
    return install.cache() / "sglang" / SGLANG


def ensure() -> Path:
    """Return the folder, with the files; another process that fetches them at the same time is waited for.

    Raises:
        subprocess.CalledProcessError: the wheel cannot be had.
    """
    install.cache().mkdir(parents=True, exist_ok=True)
    with (install.cache() / "sglang.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all((folder() / name).exists() for name in FILES):
            return folder()
        with tempfile.TemporaryDirectory() as scratch:
            # 39 MB. The tags are named, so that any Python can fetch it; nothing of it is installed or run.
            wanted = (
                "--python-version=3.11",
                "--abi=cp311",
                "--platform=manylinux_2_34_x86_64",
                "--only-binary=:all:",
            )
            pip = (
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--quiet",
                "download",
                "--no-deps",
            )
            subprocess.run([*pip, *wanted, "--dest", scratch, SGLANG], check=True, timeout=300)
            (wheel,) = Path(scratch).glob("*.whl")
            shutil.rmtree(folder(), ignore_errors=True)
            with zipfile.ZipFile(wheel) as z:
                for name in FILES:
                    z.extract(name, folder())
    return folder()
