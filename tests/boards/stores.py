"""A real Prometheus that scrapes, and a real VictoriaMetrics that takes OTLP; both answer PromQL."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.bench.ports import free_port
from tests.boards import tools
from tests.demo.procs import cpu_ns, favour, spawn, stop, wait_http

_TIMEOUT_S = 60.0

Labels = dict[str, str]


class QueryError(Exception):
    """A store did not take a query; the text is what it said."""


class Store:
    """One store with its data in a folder."""

    name = ""
    health = ""

    def __init__(self, folder: Path, cpus: set[int]) -> None:
        """Start nothing yet; *cpus* are those that it may use."""
        self.folder, self._cpus, self.port = folder, cpus, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def argv(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def start(self) -> Self:
        """Start it and wait until it answers."""
        with (self.folder / "log").open("wb") as log:
            self._process = spawn(self.argv(), self._cpus, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_http(f"{self.url}{self.health}", self._process, _TIMEOUT_S)
        return self

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            stop(self._process, 10)

    def favour(self) -> None:
        """Let it have the CPU when it wants it, whatever runs beside."""
        assert self._process is not None
        favour(self._process)

    def cpu_s(self) -> float:
        """Return the CPU time that it has used, in s."""
        assert self._process is not None
        return cpu_ns(self._process.pid) / 1e9

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **parameters: object) -> Any:
        """Return the data of an answer of the API.

        Raises:
            QueryError: it was refused.
        """
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self.url}{path}", data, timeout=_TIMEOUT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as exc:
            raise QueryError(exc.read().decode(errors="replace")[:500]) from exc

    def query(self, text: str, at_s: float) -> list[Labels]:
        """Return the labels of the series that *text* gives at a time."""
        found = self.get("/api/v1/query", query=text, time=at_s, **self.extra())["result"]
        return [dict(series["metric"]) for series in found]

    def query_range(self, text: str, start_s: float, end_s: float, step_s: float) -> int:
        """Return how many series a range query gives."""
        found = self.get(
            "/api/v1/query_range", query=text, start=start_s, end=end_s, step=step_s, **self.extra()
        )
        return len(found["result"])

    def extra(self) -> dict[str, object]:
        """Return parameters that this store needs for an honest answer."""
        return {}


class Prometheus(Store):
    """Debian's, which scrapes *targets* each second; its configuration has the shipped one's relabelling."""

    name, health = "prometheus", "/-/ready"

    def __init__(
        self, folder: Path, cpus: set[int], relabel: list[Any], targets: tuple[str, ...] = ()
    ) -> None:
        """*relabel* is what a scrape job of the shipped configuration has."""
        super().__init__(folder, cpus)
        self._config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {
                    "job_name": "whyspan",
                    "static_configs": [{"targets": list(targets)}],
                    "relabel_configs": relabel,
                }
            ],
        }

    def argv(self) -> list[str]:
        config = self.folder / "prometheus.yml"
        config.write_text(json.dumps(self._config))  # JSON is YAML
        return [
            str(tools.program("prometheus")),
            f"--config.file={config}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            "--storage.tsdb.retention.time=10d",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--enable-feature=exemplar-storage",
        ]

    def exemplars(self, text: str, start_s: float, end_s: float) -> list[Labels]:
        """Return the labels of the exemplars behind the series that *text* reads."""
        found = self.get("/api/v1/query_exemplars", query=text, start=start_s, end=end_s)
        return [dict(e["labels"]) for series in found for e in series["exemplars"]]


class Victoria(Store):
    """Debian's VictoriaMetrics, named as Prometheus names."""

    name, health = "victoriametrics", "/health"

    def argv(self) -> list[str]:
        return [
            str(tools.program("victoria-metrics")),
            f"-storageDataPath={self.folder / 'data'}",
            f"-httpListenAddr=127.0.0.1:{self.port}",
            "-opentelemetry.usePrometheusNaming",
            "-retentionPeriod=10d",
            # Else the newest half minute is hidden.
            "-search.latencyOffset=0s",
        ]

    @property
    def otlp(self) -> str:
        """Where it takes metrics by OTLP over HTTP."""
        return f"{self.url}/opentelemetry/v1/metrics"

    def query(self, text: str, at_s: float) -> list[Labels]:
        with urllib.request.urlopen(f"{self.url}/internal/force_flush", timeout=_TIMEOUT_S):
            pass
        return super().query(text, at_s)

    def extra(self) -> dict[str, object]:
        return {"nocache": 1}
