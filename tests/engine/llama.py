"""A real llama.cpp server (``python -m llama_cpp.server``) on a model of random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.demo.procs import spawn, stop, wait_http
from tests.engine import llama_install
from tests.engine.install import cache

HERE = Path(__file__).parent
BATCH = 128
START_S = 90.0


class Truth(NamedTuple):
    """One call of llama.cpp as the server's own process saw it; see ``llama_truth``."""

    call: str
    begin_ns: int
    end_ns: int
    tid: int
    result: int
    tokens: int
    arguments: list[int]


class Answer(NamedTuple):
    """A completion as its client saw it."""

    begin_ns: int
    end_ns: int
    prompt_tokens: int
    completion_tokens: int


def model() -> Path:
    """Return the model's file, made now if it is not there."""
    path = cache() / "models" / "llama-4x256.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [str(llama_install.python()), str(HERE / "llama_model.py"), str(made)], check=True, timeout=60
        )
        made.replace(path)
    return path


#: Arguments: the environment's folder, then a command. In mount and PID namespaces of its own it is under INSIDE,
#: and not where it is outside.
ENTER = """\
set -e
environment="$1"; shift
mount -t tmpfs tmpfs /mnt
mkdir /mnt/engine
mount --bind "$environment" /mnt/engine
mount -t tmpfs tmpfs "$environment"
mount -t proc proc /proc
exec "$@"
"""
INSIDE = Path("/mnt/engine")


def command(port: int, python: Path | None = None, extra: Sequence[str] = ()) -> list[str]:
    """Return the command line of a server: one thread computes, so that two CPUs are enough."""
    return [
        *(str(python or llama_install.python()), "-m", "llama_cpp.server", "--model", str(model())),
        *("--n_ctx", "2048", "--n_batch", str(BATCH), "--n_threads", "1", "--n_threads_batch", "1"),
        *("--host", "127.0.0.1", "--port", str(port), "--verbose", "False", *extra),
    ]


def settings(truth: Path) -> dict[str, str]:
    """Return the environment of a server that writes the truth to a file."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHONPATH"))}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE / "llama_truth"),
        "WHYSPAN_TRUTH": str(truth),
    }


class Server:
    """A server; ready when made. ``tgid`` is its process, as the host numbers it."""

    def __init__(self, folder: Path, port: int, *, boxed: bool = False, cpus: set[int] | None = None) -> None:
        """Start it; *folder* gets its log and the truth. *boxed*: in PID and mount namespaces of its own."""
        self.port, self._truth = port, folder / "truth"
        self._truth.touch()
        argv = command(port, INSIDE / "bin/python" if boxed else None)
        if boxed:
            enter = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
            argv = [*enter, str(llama_install.environment()), *argv]
        with (folder / "llama.log").open("wb") as log:
            self.process = spawn(
                argv,
                cpus or os.sched_getaffinity(0),
                deadly=signal.SIGKILL,
                env=settings(self._truth),
                stdout=log,
                stderr=log,
            )
        self.tgid = self.process.pid
        try:
            wait_http(f"http://127.0.0.1:{port}/v1/models", self.process, START_S)
        except BaseException:
            stop(self.process)
            raise
        if boxed:
            (inner,) = psutil.Process(self.process.pid).children()
            self.tgid = inner.pid

    def complete(self, prompt: str, tokens: int) -> Answer:
        """Do one completion of so many tokens, or a few more: a character begun is completed."""
        return complete(self.port, prompt, tokens)

    def truth(self) -> list[Truth]:
        """Return all calls so far."""
        return [Truth(**json.loads(line)) for line in self._truth.read_text().splitlines()]

    def stop(self) -> None:
        """End it."""
        stop(self.process)


def complete(port: int, prompt: str, tokens: int) -> Answer:
    """Do one completion at a port of this network namespace."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "logit_bias": {"2": -100},
    }  # 2 would end it
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    begin_ns = time.monotonic_ns()
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.loads(answer.read())["usage"]
    return Answer(begin_ns, time.monotonic_ns(), usage["prompt_tokens"], usage["completion_tokens"])
