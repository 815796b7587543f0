"""The collector process: holds the probes, runs the core on what they deliver, hands findings to the exporter."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from whyspan_exporters.client import Client
from whyspan_exporters.sharing import make_dir
from whyspan_probes.errors import ProbeFrameworkError
from whyspan_probes.governor import Budget, Governor
from whyspan_probes.loader import KINDS_PER_PROBE
from whyspan_probes.registry import discover
from whyspan_probes.state import HEALTHY

from whyspan import __version__, clock, pressure, selfuse
from whyspan.baseline import Baseline
from whyspan.causes.engine_frozen import frozen_since
from whyspan.config import Config, load_config
from whyspan.discovery import Discovery
from whyspan.engine import Engine
from whyspan.engines.status import Totals, status
from whyspan.errors import ConfigError, WhyspanError
from whyspan.log import setup
from whyspan.model import Finding
from whyspan.pipeline import observed
from whyspan.pipeline.bursts import Bursts
from whyspan.pipeline.explain_budget import ExplainBudget
from whyspan.pipeline.feeds import Feeds
from whyspan.pipeline.settings import engine_settings, kernel_btf
from whyspan.pipeline.source import LiveSource
from whyspan.recording import Header, Writer

log = logging.getLogger("whyspan.collector")

EXIT_CONFIG, EXIT_PRIVILEGE = 2, 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_STATUS_EVERY_S = 2.0
_MAX_SERVICES = 50
_BASELINE_EVERY_S = 60.0


def header_of(config: Config, instance: str, baseline: Baseline) -> Header:
    """Return a recording's header: what replay needs to come to the same findings."""
    return Header(
        whyspan=__version__,
        kernel=platform.release(),
        unix_offset_ns=clock.offset_ns(),
        instance=instance,
        settings={"slo": msgspec.to_builtins(config.slo), "collector": msgspec.to_builtins(config.collector)},
        baseline=baseline.to_dict(),
    )


def load_baseline(path: Path) -> Baseline:
    """Read the baseline of an earlier run; an empty one, with a line in the log, when it cannot be read."""
    try:
        return Baseline.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return Baseline()
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.warning("baseline %s cannot be read, learning anew: %s", path, e)
        return Baseline()


def save_baseline(path: Path, baseline: Baseline) -> None:
    """Write the baseline so that a crash leaves the old one or the new one. Failure is logged."""
    try:
        # One name: a full disk must not collect leftovers.
        temporary = path.with_name(f".{path.name}")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(baseline.to_dict()))
        temporary.replace(path)
    except OSError as e:
        log.warning("baseline is not saved: %s", e.strerror)


class Collector:
    """One run. ``run`` returns when ``stop`` is called, with everything handed over."""

    def __init__(self, config: Config, on_ready: Callable[[], None] = lambda: None) -> None:
        self._config = config
        self._stopping = False
        self._on_ready = on_ready
        make_dir(config.state_dir)
        self._baseline_path = config.state_dir / "baseline.json"
        self._baseline = load_baseline(self._baseline_path)
        c = config.collector
        self._source = LiveSource(
            discover(),
            Discovery(config.targets, supervisor=os.getppid()),
            ring_bytes=c.ring_bytes,
            header_allow=c.header_allow,
            disabled=c.disable_probes,
            kernel=kernel_btf(c.btf),
            progress=lambda s: log.log(
                logging.INFO if s.state in HEALTHY else logging.WARNING,
                "probe %s: %s%s",
                s.name,
                s.state,
                f" ({s.reason})" if s.reason else "",
            ),
        )
        self._feeds = Feeds(config.feeds)
        self._bursts = Bursts(config.burst, config.state_dir, c.btf)
        self._client = Client(config.socket_path, capacity=c.queue_findings)
        self._budget = ExplainBudget(c.explain_core_ratio)
        self._engine = Engine(
            self._source.schema,
            engine_settings(config.slo, c, self._client.instance),
            self._baseline,
            self._after_explanation,
            self._budget.allows,
        )
        self._governor = Governor(
            self._source.session,
            Budget(c.budget_core_ratio, c.budget_target_ratio),
            overhead=lambda: time.process_time() + self._feeds.process.cpu_s,
            targets=self._source.watched_cpu_s,
        )
        self._recording = self._open_recording()
        self._counted: dict[tuple[str, str, str], int] = {}
        self._engine_totals = Totals()
        self._throttling = pressure.Throttling()
        self._received = np.zeros(len(self._source.session.probes), np.int64)  # events, by probe
        self._started_s = time.monotonic()

    def _open_recording(self) -> Writer | None:
        if not self._config.collector.record:
            return None
        header = header_of(self._config, self._client.instance, self._baseline)
        path = Path(self._config.collector.record)
        try:
            return Writer(path, header, self._source.schema)
        except OSError as e:
            raise ConfigError(f"collector.record: cannot write {path}: {e.strerror}") from e

    def stop(self, *_: object) -> None:
        """Ask the run to end; safe in a signal handler."""
        self._stopping = True
        self._source.interrupt()

    def run(self) -> None:
        """Drain, explain, hand over, until stopped."""
        interval_s = self._config.collector.drain_interval_ms / 1000
        self._on_ready()
        next_status_s = next_baseline_s = 0.0
        try:
            while not self._stopping:
                behind = self._engine.waiting_count() > 0 and self._budget.has_left()
                self._source.wait(0.0 if behind else interval_s)
                self._step()
                now_s = time.monotonic()
                fresh = self._governor.tick(now_s)
                if fresh:
                    self._source.tell(observed.costs(self._source.session.probes))
                if fresh or now_s >= next_status_s:
                    next_status_s = now_s + _STATUS_EVERY_S
                    self._client.status(self._status())
                if now_s >= next_baseline_s:
                    if next_baseline_s:
                        save_baseline(self._baseline_path, self._engine.baseline)
                    next_baseline_s = now_s + _BASELINE_EVERY_S
            self._step()
            self._budget.begin()
            self._offer(self._engine.flush(time.monotonic_ns()))
            self._count_requests()
        finally:
            self._close()

    def _after_explanation(self) -> None:
        self._source.relieve()
        self._budget.spent()

    def _step(self) -> None:
        marks = self._feeds.drain(self._source.discovery.found)
        self._bursts.tend(time.monotonic())
        self._source.discovery.helpers = {self._feeds.process.tgid, self._bursts.tgid}
        batch = self._source.drain()
        batch.marks = sorted([*batch.marks, *marks], key=lambda m: m.ts_ns)
        batch.lost |= self._feeds.new_losses()
        kinds = batch.events["kind"] // KINDS_PER_PROBE
        self._received += np.bincount(kinds, minlength=len(self._received))[: len(self._received)]
        if self._recording is not None:
            try:
                self._recording.add(batch)
            except OSError as e:
                log.error("recording stopped: %s; what was written stays readable", e.strerror)
                self._recording.close()
                self._recording = None
        self._budget.begin()
        self._offer(self._engine.feed(batch))
        self._source.look_for_waits(self._engine.open_count() > 0)
        self._count_requests()
        totals = self._engine_totals.update(self._engine.engines, self._engine.facts, batch.now_ns)
        for (name, service, label), n in totals.items():
            self._client.count(name, n, service=service, label=label)
        for (kind, result), n in self._bursts.new_counts().items():
            self._client.count("bursts", n, service=kind, label=result)
        for name, n in batch.lost.items():
            self._client.count("lost_events", n, label=name)

    def _offer(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._client.offer(finding)
            self._bursts.consider(finding, self._source.discovery.found, time.monotonic())

    def _count_requests(self) -> None:
        for key, total in (*self._engine.counts.items(), *self._engine.tally.counts.items()):
            before = self._counted.get(key, 0)
            if total > before:
                self._client.count(key[0], total - before, service=key[1], label=key[2])
                self._counted[key] = total

    def _count_throttling(self) -> None:
        watched = self._source.discovery.found.values()
        groups = [(f.service, self._engine.facts.cgroup(f.tgid)) for f in watched]
        for service, us in self._throttling.look(groups).items():
            self._client.count("throttled_us", us, service=service)

    def _status(self) -> dict[str, Any]:
        link = self._client.stats()
        self._count_throttling()
        return {
            "probes": [
                msgspec.to_builtins(p.state) | {"events": int(n)}
                for p, n in zip(self._source.session.probes, self._received, strict=True)
            ],
            "watched": [
                {"tgid": f.tgid, "service": f.service, "rule": f.rule}
                for f in list(self._source.discovery.found.values())[:200]
            ],
            "watched_by_service": dict(
                Counter(f.service for f in self._source.discovery.found.values()).most_common(_MAX_SERVICES)
            ),
            "feeds": self._feeds.states(),
            "bursts": self._bursts.state(time.monotonic()),
            "engines": status(self._engine.engines, self._engine.facts, time.monotonic_ns(), frozen_since),
            "open_requests": self._engine.open_count(),
            "events": int(self._received.sum()),
            "agent_core_ratio": self._governor.agent_cores,
            "bpf_core_ratio": self._governor.bpf_cores,
            "target_cores": self._governor.target_cores,
            "findings_dropped": link.dropped,
            "findings_pending": link.pending,
            "cpu_s": selfuse.cpu_s(),
            "rss_bytes": selfuse.rss_bytes(),
            "uptime_s": time.monotonic() - self._started_s,
            "tgid": os.getpid(),
            **self._engine.tally.state(time.monotonic_ns()),
            **pressure.state(self._throttling),
        }

    def _close(self) -> None:
        save_baseline(self._baseline_path, self._engine.baseline)
        self._governor.close()
        self._bursts.close()
        self._client.status(self._status())
        if self._recording is not None:
            self._recording.close()
        self._feeds.close()
        self._source.close()
        self._client.close()


def bound_memory() -> None:
    """Have malloc give batches and indexes back to the kernel when they go, instead of keeping a fragmented heap.

    By default its threshold for doing so rises with what is freed: measured, 20 MB more after three minutes.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    mallopt(_M_TRIM_THRESHOLD, 1 << 20)
    mallopt(_M_ARENA_MAX, 2)


def main() -> int:
    """Run the collector until SIGTERM or SIGINT. Returns an exit status."""
    parser = argparse.ArgumentParser(
        prog="whyspan-collector", description="Internal: started by `whyspan run`."
    )
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    setup(arguments.verbose)
    # From here on a stop is clean: nothing attached yet, or everything handed over.
    stopped = threading.Event()
    collector: Collector | None = None

    def stop(*_: object) -> None:
        stopped.set()
        if collector is not None:
            collector.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    bound_memory()
    try:
        started = time.monotonic()
        collector = Collector(
            load_config(arguments.config),
            lambda: log.info("ready after %.2f s", time.monotonic() - started),
        )
        if stopped.is_set():
            collector.stop()
        collector.run()
    except WhyspanError as e:
        log.error("%s", e)
        return EXIT_CONFIG if e.exit_code == EXIT_CONFIG else 1
    except ProbeFrameworkError as e:
        log.error("%s", e)
        return EXIT_PRIVILEGE
    except PermissionError as e:
        log.error("not permitted: %s; the collector needs root, or CAP_BPF and CAP_PERFMON", e)
        return EXIT_PRIVILEGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
