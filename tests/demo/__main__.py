"""Run the demo: inject four faults, and hold the agent's verdicts against the client's clock."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from rich.console import Console

from tests import tracefs
from tests.demo import page, report, truth
from tests.demo.agent import Agent
from tests.demo.cgroups import CpuGroup
from tests.demo.engines import DemoServer, Engine, Vllm, cpu_of
from tests.demo.faults import CLEANUP, FAULTS, Fault, World
from tests.demo.procs import ROOT, DemoError, python, spawn, stop

F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)
PIPE_BYTES = 4096
CALIBRATE_REQUESTS = 40
SLOWED_WANTED = 34
GAP_S = 3.0
CLIENT_CPU = 0


class Demo:
    """One run. ``console`` gets a line per change of state."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.directory = ROOT / "build" / ("demo" if args.engine == "demo" else f"demo-{args.engine}")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.server_cpu = max(os.sched_getaffinity(0))
        # Nothing of ours but the server and the hog runs on its CPU.
        os.sched_setaffinity(0, {CLIENT_CPU})
        self.client_file = self.directory / "client.jsonl"
        self.engine: Engine = (
            Vllm(self.directory) if args.engine == "vllm" else DemoServer(args.loop, args.tokens)
        )
        self.rate = args.rate or self.engine.rate
        self.agent: Agent | None = None
        self.windows: list[truth.Window] = []
        self.culprits: dict[str, set[int]] = {}

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.started:6.1f} s[/]  {text}", highlight=False)

    def sent(self) -> list[truth.Sent]:
        return truth.read_sent(self.client_file)

    def start_world(self) -> tuple[World, subprocess.Popen[bytes]]:
        """The log reader, the server in its group on the last CPU, the load on the first."""
        CLEANUP.enter_context(tracefs.mounted())
        groups = [CpuGroup(name) for name in ("server", "hog")]
        for group in groups:
            CLEANUP.callback(group.remove)
        read_fd, write_fd = os.pipe()
        fcntl.fcntl(write_fd, F_SETPIPE_SZ, PIPE_BYTES)
        inode = os.fstat(write_fd).st_ino
        log = self.directory / "server.log"
        reader = spawn(
            python(
                *("tests.demo.reader", "--pipe-fd", read_fd, "--out", log),
                *("--pause-s", self.engine.log_pause_s, "--period-s", self.engine.log_period_s),
            ),
            CLIENT_CPU,
            pass_fds=[read_fd],
        )
        CLEANUP.callback(stop, reader)
        port = _free_port()
        CLEANUP.callback(self.engine.stop)
        self.engine.start(
            port, cpu=self.server_cpu, rest=CLIENT_CPU, join=groups[0].join, log_fd=write_fd, say=self.say
        )
        os.close(read_fd)
        os.close(write_fd)
        self.client_file.unlink(missing_ok=True)
        load_args = ("--port", port, "--rate", self.rate, "--out", self.client_file)
        load = spawn(python("tests.demo.load", *load_args, *self.engine.load_args), CLIENT_CPU)
        CLEANUP.callback(stop, load)
        return World(self.engine, reader, groups[0], groups[1], self.server_cpu, inode, 0.0), load

    def wait(self, done: Callable[[], bool], cap_s: float, world: World) -> None:
        """Poll until ``done`` or ``cap_s``, and stop at once if something that must live has died."""
        end = time.monotonic() + cap_s
        while not done() and time.monotonic() < end:
            world.engine.check()
            if world.reader.poll() is not None:
                raise DemoError("the reader of the server's log died")
            if self.agent:
                self.agent.check_alive()
            time.sleep(0.25)

    def calibrate(self, world: World) -> World:
        """Healthy requests before the agent: the objective, and the CPU that the server uses."""
        self.wait(lambda: len(self.sent()) >= 8, 20, world)
        cpu_before, begin = cpu_of(world.engine), time.monotonic_ns()
        goal = len(self.sent()) + CALIBRATE_REQUESTS
        self.wait(lambda: len(self.sent()) >= goal, 30, world)
        usual_cpu = (cpu_of(world.engine) - cpu_before) / (time.monotonic_ns() - begin)
        healthy = [s.latency_ns for s in self.sent() if s.start_ns >= begin]
        if len(healthy) < CALIBRATE_REQUESTS // 2:
            raise DemoError("too few requests were answered while calibrating")
        p50, p99 = (truth.percentile(healthy, ratio) / 1e6 for ratio in (0.5, 0.99))
        self.objective_ms = int(p99 * 1.15) + 5
        self.say(
            f"healthy without the agent: P50 {p50:.1f} ms, P99 {p99:.1f} ms, "
            f"server {usual_cpu:.1%} of a CPU; objective {self.objective_ms} ms"
        )
        return World(**{**vars(world), "usual_cpu": usual_cpu})

    def inject(self, fault: Fault, world: World) -> None:
        """One fault, on until enough requests *that have ended* were slowed, or the cap."""
        limit_ns = self.objective_ms * 1_000_000
        begin_ns = time.monotonic_ns()

        def window(off_ns: int) -> truth.Window:
            return truth.Window(fault.id, begin_ns, on_ns, off_ns, off_ns)

        with fault.inject(world) as injected:
            on_ns = time.monotonic_ns()
            self.say(f"[bold]{fault.id}[/] on: {fault.title}")
            self.culprits[fault.id] = injected.culprits

            def enough() -> bool:
                group = truth.started_in(self.sent(), window(time.monotonic_ns()))
                return sum(s.latency_ns > limit_ns for s in group) >= SLOWED_WANTED

            self.wait(enough, self.engine.fault_cap_s, world)
            evidence = injected.check()
            off_ns = time.monotonic_ns()
        end_ns = time.monotonic_ns()
        self.windows.append(truth.Window(fault.id, begin_ns, on_ns, off_ns, end_ns))
        self.say(f"[bold]{fault.id}[/] off after {(off_ns - on_ns) / 1e9:.1f} s: {evidence}")

    def run(self) -> int:
        world, load = self.start_world()
        self.say(
            f"{self.engine.name} server on CPU {self.server_cpu} (pid {self.engine.pid}), "
            f"load {self.rate:g} requests/s"
        )
        world = self.calibrate(world)
        if not self.args.no_agent:
            self.agent = Agent(self.directory, self.engine, self.objective_ms)
            self.agent.start(CLIENT_CPU)
            CLEANUP.callback(self.agent.stop)
            self.agent.wait_ready(30.0)
            self.say("the agent watches")
        not_before_ns = time.monotonic_ns()
        goal = len(self.sent()) + self.engine.baseline_requests
        self.wait(lambda: len(self.sent()) >= goal, 40, world)
        self.say(f"baseline: {self.engine.baseline_requests} healthy requests")
        for fault in FAULTS:
            if self.args.only in (None, fault.id):
                self.inject(fault, world)
                self.wait(lambda: False, GAP_S, world)
        stop(load, 10)
        judged = truth.judge(self.sent(), self.windows, not_before_ns)
        return self.finish(judged, world)

    def finish(self, judged: truth.Truth, world: World) -> int:
        """Ask the agent, score, print, write result.json."""
        rows: report.Rows = {}
        if self.agent:
            self.say("waiting for the agent to settle")
            ids = {s.trace_id for group in (judged.healthy, *judged.members.values()) for s in group}
            rows = self.agent.wait_for(ids, 15.0)
        scores = [s for s in report.score(judged, rows, world, self.culprits) if s.id in self.culprits]
        alarms = report.false_alarms(judged, rows)
        if self.agent:
            for item in scores:
                if item.sample:
                    self.console.print(f"\n[bold]$ whyspan explain {item.sample}[/]   # {item.id}")
                    self.console.print(self.agent.explain(item.sample), markup=False, highlight=False)
        seconds = time.monotonic() - self.started
        with_agent = self.agent is not None
        report.print_table(self.console, scores, judged, len(alarms), with_agent)
        report.write_result(self.directory / "result.json", scores, len(judged.healthy), len(alarms), seconds)
        if self.agent:
            path = page.write(
                self.directory,
                scores,
                judged,
                engine=self.engine.name,
                alarms=len(alarms),
                agent=self.agent,
            )
            self.console.print(f"report page: {path}", markup=False, highlight=False)
        ok = report.passed(scores, len(judged.healthy), len(alarms), with_agent)
        self.console.print(
            f"{'[green]passed' if ok else '[red]failed'}[/] in {seconds:.0f} s", highlight=False
        )
        return 0 if ok else 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _only_one() -> None:
    """Hold a name that the kernel frees when we end: two demos would share CPUs, cgroups and files.

    Raises:
        DemoError: another demo runs on this machine.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind("\0whyspan-demo")
    except OSError as exc:
        raise DemoError("another demo is running on this machine; wait for its end") from exc
    CLEANUP.callback(lock.close)


def _become_root(argv: list[str]) -> None:
    """Cgroups, pinning of others and BPF need root; ask sudo only when we are not."""
    if os.geteuid() != 0:
        os.execvp("sudo", ["sudo", "-E", sys.executable, "-m", "tests.demo", *argv])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument(
        "--no-agent", action="store_true", help="report only what the client saw (to tune faults)"
    )
    parser.add_argument("--only", choices=[f.id for f in FAULTS], help="inject this fault only")
    parser.add_argument("--engine", choices=["demo", "vllm"], default="demo", help="the server under test")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests per second; default: the engine's own"
    )
    parser.add_argument("--tokens", type=int, default=12, help="tokens per request")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    args = parser.parse_args()
    os.chdir(ROOT)
    _become_root(sys.argv[1:])
    console = Console(width=None if sys.stdout.isatty() else 130, soft_wrap=True)
    # SIGTERM unwinds like Ctrl-C, so that every fault is undone.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    with CLEANUP:
        try:
            _only_one()
            return Demo(args, console).run()
        except DemoError as exc:
            console.print(str(exc), style="red", markup=False, highlight=False)
            return 2
        except KeyboardInterrupt:
            console.print("interrupted; undoing everything")
            return 130


if __name__ == "__main__":
    sys.exit(main())
