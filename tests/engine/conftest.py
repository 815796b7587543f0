"""One vLLM server for all tests of the tier, pinned as it is healthy on two CPUs, and a receiver of its spans."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tracefs
from tests.bench.ports import free_port
from tests.conftest import lacking
from tests.demo.procs import python
from tests.engine import vllm
from tests.unit.receivers import GrpcReceiver

WORKER_CPU, OTHER_CPU = 1, 0
# The receiver's threads live in this process, which forks: gRPC's handlers at fork would end the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"


@pytest.fixture(scope="session", autouse=True)
def traced() -> Iterator[None]:
    """Tracefs, while the tests run."""
    if lacking("engine"):
        yield
        return
    with tracefs.mounted():
        yield


@pytest.fixture(scope="session")
def receiver() -> Iterator[GrpcReceiver]:
    """A gRPC server that keeps every span."""
    server = GrpcReceiver()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server(receiver: GrpcReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm.Server]:
    """A vLLM that is ready, and sends its own ``llm_request`` spans to the receiver."""
    with Started(tmp_path_factory.mktemp("vllm"), receiver) as running:
        yield running


class Started:
    """A vLLM server of one's own, for a test that kills it."""

    def __init__(self, folder: Path, receiver: GrpcReceiver, *extra: str) -> None:
        self._log = (folder / "vllm.log").open("wb")
        self._server = vllm.start(
            free_port(),
            extra=["--otlp-traces-endpoint", receiver.endpoint, *extra],
            env={
                "OTEL_SERVICE_NAME": "vllm-itself",
                "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
                "OTEL_BSP_SCHEDULE_DELAY": "500",
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> vllm.Server:
        try:
            self._server.wait_ready(lambda line: print(line, flush=True))
        except BaseException:
            self._server.stop()
            raise
        self._server.pin({WORKER_CPU}, {OTHER_CPU})
        return self._server

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._log.close()


def load(server: vllm.Server, out: Path, *args: object) -> list[dict[str, Any]]:
    """Run the load generator to its end; return the client's record of every request."""
    base = ("--port", server.port, "--out", out, "--api", "vllm", "--model", vllm.NAME)
    subprocess.run(python("tests.demo.load", *base, *args), check=True, timeout=240)
    return [json.loads(line) for line in out.read_text().splitlines()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder belongs to the tier ``engine``."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))
