"""A real vLLM server on the CPU with random weights: started, pinned so that it is healthy on two CPUs, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.demo.procs import DemoError, pin, spawn
from tests.engine import install

#: A Llama of 4 layers: about 2 ms of one CPU per step. The weights are random; the work is real.
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VOCABULARY = 1024
MAX_TOKENS = 2048
NAME = "whyspan-test"
START_S = 240.0


def write_model(folder: Path) -> Path:
    """Write a model directory: a configuration only, the server makes the weights up."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL, indent=2))
    return folder


def command(model: Path, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the command line of a server (``vllm serve`` needs package metadata that the CPU build lacks)."""
    return [
        *(str(install.python()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", NAME, "--load-format", "dummy"),
        *("--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", str(MAX_TOKENS)),
        *("--block-size", "32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *extra),
    ]


def settings(omp_threads: int = 1) -> dict[str, str]:
    """Return the environment of a server. Two OpenMP threads beside a spinning EngineCore are ill on two CPUs."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VLLM_", "PYTHONPATH"))},
        "OMP_NUM_THREADS": str(omp_threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


class Server:
    """One server: the process of the API, its EngineCore and its worker."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.engine_core = self.worker = 0

    @property
    def pid(self) -> int:
        """The API server's process id."""
        return self.process.pid

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def pids(self) -> list[int]:
        """Return the process ids of all its processes."""
        with suppress(psutil.Error):
            return [self.pid, *(p.pid for p in psutil.Process(self.pid).children(recursive=True))]
        return []

    def wait_ready(self, say: Callable[[str], None] = lambda _: None, timeout_s: float = START_S) -> None:
        """Wait until it answers and has done one completion.

        Raises:
            DemoError: It ended, or is not ready in time.
        """
        began = told = time.monotonic()
        while True:
            if self.process.poll() is not None:
                raise DemoError(f"vLLM ended with {self.process.returncode} before it was ready")
            if self._healthy():
                break
            now = time.monotonic()
            if now - began > timeout_s:
                raise DemoError(f"vLLM is not ready after {timeout_s:.0f} s")
            if now - told > 15:
                told = now
                say(f"vLLM is starting: {now - began:.0f} s")
            time.sleep(0.5)
        self._find()
        self.complete(8, 4)
        say(f"vLLM is ready after {time.monotonic() - began:.0f} s: {self.describe()}")

    def _healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _find(self) -> None:
        for child in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):
                name = child.name()
                if name.startswith("VLLM::EngineCor"):
                    self.engine_core = child.pid
                elif name.startswith("VLLM::Worker"):
                    self.worker = child.pid
        if not (self.engine_core and self.worker):
            raise DemoError("vLLM's EngineCore and worker were not found among its children")

    def describe(self) -> str:
        """Return who is who."""
        return f"API server {self.pid}, EngineCore {self.engine_core}, worker {self.worker}"

    def pin(self, worker: set[int], rest: set[int]) -> None:
        """Give the worker's threads some CPUs and all other threads others."""
        for pid in self.pids():
            pin(pid, worker if pid == self.worker else rest)

    def complete(self, prompt_tokens: int, max_tokens: int, headers: Mapping[str, str] | None = None) -> int:
        """Do one completion that is not streamed; return the HTTP status."""
        body = json.dumps(
            {
                "model": NAME,
                "prompt": list(range(3, 3 + prompt_tokens)),
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        ).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"content-type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as exc:
            return exc.code

    def stop(self) -> None:
        """End all its processes."""
        pids = self.pids()
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in pids:  # a worker may outlive a killed parent
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(
    port: int,
    *,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    omp_threads: int = 1,
    cpus: set[int] | None = None,
    **popen: Any,
) -> Server:
    """Start a server; it is not ready yet.

    Args:
        port: Where it listens, on 127.0.0.1.
        extra: More arguments for vLLM.
        env: More environment.
        omp_threads: OpenMP threads of the worker.
        cpus: Where it may run until it is pinned; default: all.
        popen: More for subprocess.Popen, such as ``stderr`` or ``before_exec``.

    Raises:
        DemoError: vLLM is not installed.
    """
    if not install.installed():
        raise DemoError("vLLM is not installed: `make vllm` does it")
    model = write_model(install.cache() / "models" / "llama-4x256")
    process = spawn(
        command(model, port, extra),
        cpus or os.sched_getaffinity(0),
        deadly=signal.SIGTERM,
        env=settings(omp_threads) | dict(env or {}),
        **popen,
    )
    return Server(process, port)
