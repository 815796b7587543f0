"""The collector process: holds the probes, runs the core on what they deliver, hands findings to the exporter."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
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
from whyspan_probes.state import HEALTHY, ProbeState

from whyspan import __version__, clock, pressure, selfuse
from whyspan.baseline import Baseline
from whyspan.causes.engine_frozen import frozen_since
from whyspan.config import SUPERVISOR_ENV, Config, load_config
from whyspan.discovery import Discovery
from whyspan.engine import Engine
from whyspan.engines.status import Totals, status
from whyspan.errors import ConfigError, WhyspanError
from whyspan.log import setup
from whyspan.model import Finding
from whyspan.pipeline import observed, reload
from whyspan.pipeline.baselines import load_baseline, save_baseline
from whyspan.pipeline.bursts import Bursts
from whyspan.pipeline.explain_budget import ExplainBudget
from whyspan.pipeline.feeds import Feeds
from whyspan.pipeline.settings import engine_settings, kernel_btf
from whyspan.pipeline.source import LiveSource
from whyspan.recording import Header, Writer
from whyspan.systemd import Notifier

log = logging.getLogger("whyspan.collector")

EXIT_CONFIG, EXIT_PRIVILEGE = 2, 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_STATUS_EVERY_S = 2.0
_MAX_SERVICES = 50
_BASELINE_EVERY_S = 60.0
#: What the service manager is asked for whenever another probe has been attached.
START_S = 60.0
#: A stop is to be over in 5 s: what has not been delivered then is dropped, and the log says how much.
_CLOSE_S, _DELIVER_S = 4.0, 0.5


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


class Stopped(Exception):
    """It is to end before all probes are attached: on a busy host that takes longer than one waits for an end."""


class Collector:
    """One run. ``run`` returns when ``stop`` is called, with everything handed over."""

    def __init__(
        self,
        config: Config,
        on_ready: Callable[[], None] = lambda: None,
        load: Callable[[], Config] = load_config,
        notifier: Notifier | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """*load* reads the configuration again, for a reload; *notifier* leads to the service manager.

        Raises `Stopped` once *stopped* says so while the probes are being attached.
        """
        self._config = config
        self._stopping = self._reload_wanted = False
        self._on_ready, self._load = on_ready, load
        self._notifier = notifier or Notifier({})
        self._stopped = stopped
        self._notifier.extend(START_S, "attaching the probes")
        try:
            make_dir(config.state_dir)
            make_dir(config.collector_dir)
        except OSError as e:
            raise ConfigError(f"run.state_dir: cannot make {config.collector_dir}: {e.strerror}") from e
        self._baseline_path = config.collector_dir / "baseline.json"
        self._baseline = load_baseline(self._baseline_path)
        c = config.collector
        # What cannot be built whole leaves nothing behind: after a reload the process goes on without it.
        with ExitStack() as made:
            self._source = LiveSource(
                discover(),
                Discovery(config.targets, supervisor=supervisor()),
                ring_bytes=c.ring_bytes,
                header_allow=c.header_allow,
                disabled=c.disable_probes,
                kernel=kernel_btf(c.btf),
                stall_ms=c.stall_ms,
                known_frames=c.known_frames,
                progress=self._attached,
            )
            made.callback(self._source.close)
            self._feeds = Feeds(config.feeds)
            made.callback(self._feeds.close)
            self._bursts = Bursts(config.burst, config.collector_dir, c.btf)
            made.callback(self._bursts.close)
            self._client = Client(config.socket_path, capacity=c.queue_findings)
            made.callback(self._client.close, 0.0)
            self._recording = self._open_recording()
            made.pop_all()
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
            overhead=self._overhead_s,
            targets=self._source.watched_cpu_s,
        )
        self._counted: dict[tuple[str, str, str], int] = {}
        self._engine_totals = Totals()
        self._throttling = pressure.Throttling()
        self._received = np.zeros(len(self._source.session.probes), np.int64)  # events, by probe
        self._started_s = time.monotonic()

    def _overhead_s(self) -> float:
        """Return the CPU seconds of this process and of those that it has started."""
        others = (self._feeds.process, self._source.native)
        return time.process_time() + sum(p.cpu_s for p in others)

    def _open_recording(self) -> Writer | None:
        if not self._config.collector.record:
            return None
        header = header_of(self._config, self._client.instance, self._baseline)
        path = Path(self._config.collector.record)
        try:
            return Writer(path, header, self._source.schema)
        except OSError as e:
            raise ConfigError(f"collector.record: cannot write {path}: {e.strerror}") from e

    def _attached(self, state: ProbeState) -> None:
        level = logging.INFO if state.state in HEALTHY else logging.WARNING
        why = f" ({state.reason})" if state.reason else ""
        log.log(level, "probe %s: %s%s", state.name, state.state, why)
        self._notifier.extend(START_S, f"attaching the probes: {state.name}")
        if self._stopped():
            raise Stopped

    def stop(self, *_: object) -> None:
        """Ask the run to end; safe in a signal handler."""
        self._stopping = True
        self._source.interrupt()

    def request_reload(self) -> None:
        """Ask for the configuration to be read again, at the next drain; safe in a signal handler."""
        self._reload_wanted = True

    def run(self) -> Config | None:
        """Drain, explain, hand over. Returns None when stopped, else the configuration to begin anew with."""
        self._on_ready()
        self._notifier.ready(self._line())
        again: Config | None = None
        next_status_s = next_baseline_s = 0.0
        try:
            while not self._stopping:
                behind = self._engine.waiting_count() > 0 and self._budget.has_left()
                self._source.wait(0.0 if behind else self._config.collector.drain_interval_ms / 1000)
                self._step()
                self._show_progress()
                if self._reload_wanted:
                    self._reload_wanted = False
                    again = self._reload()
                    if again is not None:
                        break
                now_s = time.monotonic()
                fresh = self._governor.tick(now_s)
                if fresh:
                    self._source.tell(observed.costs(self._source.session.probes))
                if fresh or now_s >= next_status_s:
                    next_status_s = now_s + _STATUS_EVERY_S
                    self._client.status(self._status())
                    self._notifier.status(self._line())
                if now_s >= next_baseline_s:
                    if next_baseline_s:
                        save_baseline(self._baseline_path, self._engine.baseline)
                    next_baseline_s = now_s + _BASELINE_EVERY_S
            if again is None:
                self._notifier.stopping()
            self._step()
            self._budget.begin()
            self._offer(self._engine.flush(time.monotonic_ns()))
            self._count_requests()
        finally:
            self._close()
        return again

    def _show_progress(self) -> None:
        if self._source.moving():
            self._notifier.alive()

    def _reload(self) -> Config | None:
        """Take over what can be taken over now; return the configuration if everything has to begin anew for it."""
        self._notifier.reloading()
        try:
            config, found = reload.read(self._load, self._config)
        except WhyspanError as e:
            log.error("not reloaded, the old configuration stays: %s", e)
            self._notifier.ready()
            return None
        shed = [p.probe.name for p in self._source.session.probes if p.state.state == "shed"]
        if found.rebuild or (shed and reload.rebudgeted(found)):
            log.info("reloading: %s: all probes are attached anew", found)
            return config
        reload.apply(config, found, self._parts())
        self._config = config
        log.info("reloaded: %s", found)
        self._notifier.ready(self._line())
        return None

    def _parts(self) -> reload.Parts:
        return reload.Parts(
            self._source, self._engine, self._feeds, self._bursts, self._budget, self._governor, self._client
        )

    def _line(self) -> str:
        """Return how things are, in one line for `systemctl status`."""
        watched = list(self._source.discovery.found.values())
        names = ", ".join(sorted({f.service for f in watched})[:8])
        states = [p.state.state for p in self._source.session.probes]
        bad = sum(s not in HEALTHY for s in states)
        link = self._client.stats()
        return (
            f"watching {len(watched)} processes{f' ({names})' if names else ''}; "
            f"{len(states) - bad} of {len(states)} probes in order"
            + ("" if link.connected else "; the exporter is away")
            + (f"; exporter: {link.exporter_state}" if link.exporter_state else "")
        )

    def _after_explanation(self) -> None:
        self._source.relieve()
        self._budget.spent()
        self._show_progress()

    def _step(self) -> None:
        marks = self._feeds.drain(self._source.discovery.found)
        self._bursts.tend(time.monotonic())
        self._source.discovery.helpers = {
            self._feeds.process.tgid,
            self._bursts.tgid,
            self._source.native.tgid,
            self._client.peer,
        }
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
        self._source.look_for_waits(self._engine.serving())
        self._source.snapshots.ask(self._engine.frozen())
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
            "symbols": self._source.native.state,
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
        end_s = time.monotonic() + _CLOSE_S
        save_baseline(self._baseline_path, self._engine.baseline)
        self._governor.close()
        self._bursts.close()
        self._client.status(self._status())
        if self._recording is not None:
            self._recording.close()
        self._feeds.close()
        self._source.close()
        self._client.close(max(_DELIVER_S, end_s - time.monotonic()))


def supervisor() -> int:
    """Return the process id of `whyspan run` if that has started this process, else 0: it may be anybody."""
    named = os.environ.get(SUPERVISOR_ENV, "")
    return os.getppid() if named == str(os.getppid()) else 0


def bound_memory() -> None:
    """Have malloc give batches and indexes back to the kernel when they go, instead of keeping a fragmented heap.

    By default its threshold for doing so rises with what is freed: measured, 20 MB more after three minutes.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    mallopt(_M_TRIM_THRESHOLD, 1 << 20)
    mallopt(_M_ARENA_MAX, 2)


class Life:
    """The process: collectors one after the other, each with its configuration, until a signal ends it."""

    def __init__(self, load: Callable[[], Config], notifier: Notifier) -> None:
        self._load, self._notifier = load, notifier
        self._stopped = threading.Event()
        self._again = False
        self._collector: Collector | None = None

    def stop(self, *_: object) -> None:
        """Handle SIGTERM."""
        # From here on a stop is clean: nothing attached yet, or everything handed over.
        self._stopped.set()
        if self._collector is not None:
            self._collector.stop()

    def reload(self, *_: object) -> None:
        """Handle SIGHUP. What is being attached may go by what was read before: then it is read again."""
        self._again = True
        if self._collector is not None:
            self._collector.request_reload()

    def run(self) -> None:
        """Return when stopped. Raises what `Collector` does when the first one cannot be built."""
        wanted: Config | None = self._load()
        before: Config | None = None
        while wanted is not None and not self._stopped.is_set():
            started_s = time.monotonic()
            self._again = False
            try:
                self._collector = self._built(wanted, started_s)
            except Stopped:
                return
            except (WhyspanError, ProbeFrameworkError, OSError) as e:
                if before is None:
                    raise
                log.error("not reloaded, back to the old configuration: %s", e)
                wanted, before = before, None
                continue
            if self._stopped.is_set():
                self._collector.stop()
            if self._again:
                self._collector.request_reload()
            before, wanted = wanted, self._collector.run()
            self._collector = None
            gc.collect()  # it is in cycles: two windows of events at a time would be twice the memory

    def _built(self, config: Config, started_s: float) -> Collector:
        def ready() -> None:
            log.info("ready after %.2f s", time.monotonic() - started_s)

        return Collector(config, ready, self._load, self._notifier, self._stopped.is_set)


def main() -> int:
    """Run the collector until SIGTERM or SIGINT. Returns an exit status."""
    parser = argparse.ArgumentParser(
        prog="whyspan-collector", description="Internal: started by `whyspan run`, or as a service."
    )
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    setup(arguments.verbose)
    faulthandler.enable()  # the watchdog's SIGABRT: each thread says where it is
    life = Life(lambda: load_config(arguments.config), Notifier())
    signal.signal(signal.SIGTERM, life.stop)
    signal.signal(signal.SIGINT, life.stop)
    signal.signal(signal.SIGHUP, life.reload)
    bound_memory()
    try:
        life.run()
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
