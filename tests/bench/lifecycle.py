"""Start and stop, and kill at random: ``python -m tests.bench.lifecycle [--starts N] [--kills N] [--seed N]`` (root).

Two targets run throughout and have every answer checked (`lifecycle_target`); one of them is confined by seccomp and
must never get a return probe. After each end of the agent nothing of it may be left: see `lifecycle_traces`. Every
other start is stopped when it is ready, the rest at a random moment of the start. A kill (-9) hits one process of the
agent or all, or a burst of malloc, at a random moment of start or run; what is not hit is then stopped in order.
Prints JSON; exit status 1 when anything was left or harmed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tracefs
from tests.bench import lifecycle_traces as traces
from tests.bench.lifecycle_client import Target, targets
from tests.demo.procs import ROOT, favour

#: The kernel frees programs and maps some time after the last descriptor; processes end by a signal of their parent's.
GONE_S = 20.0
RUN_S = 2.0
MOST_LEAKS = 10
#: What is hit, and how often.
HIT = {"collector": 8, "supervisor": 4, "exporter": 3, "all": 3, "burst": 2}
#: What a state folder holds after an orderly end; a killed exporter leaves the rest for the next start.
KEPT = frozenset({"whyspan.db", "exporter.lock", "baseline.json", "collector", "collector/baseline.json"})
LEFT = KEPT | {
    *("exporter.sock", "whyspan.db-wal", "whyspan.db-shm", "whyspan.db-journal"),
    *(".baseline.json", "collector/.baseline.json"),
}
_EVENTS = ("uprobe_events", "kprobe_events")

CONFIG = """\
[targets]
auto = false
match = [{targets}]

[slo]
e2e_ms = 0.000001

[run]
state_dir = "{state}"
"""


class Agent:
    """One ``whyspan run``; *token* is in the environment of all its processes."""

    def __init__(self, folder: Path, token: str) -> None:
        self.log_path = folder / "agent.log"
        argv = [
            sys.executable,
            "-c",
            "from whyspan.cli import main; main()",
            "run",
            "--config",
            "whyspan.toml",
        ]
        env = {**os.environ, "LIFECYCLE": token, "TMPDIR": str(folder / "tmp")}
        self.began = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        favour(self.process)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def ready_s(self) -> float:
        """Wait until its probes are on; return how long that took."""
        wait(lambda: "ready after" in self.log or self.process.poll() is not None, 60, "ready")
        if self.process.poll() is not None:
            raise AssertionError(f"it ended: {self.log[-800:]}")
        return time.monotonic() - self.began

    def stop_s(self) -> float:
        """Stop it in order; return how long that took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        return time.monotonic() - began

    def pids(self, role: str) -> list[int]:
        """Return the processes to hit; nothing where there is none yet."""
        if role in ("supervisor", "all"):
            children = traces.carrying(f"LIFECYCLE={os.environ['LIFECYCLE_TOKEN']}") if role == "all" else []
            return [self.process.pid, *(p for p in children if p != self.process.pid)]
        words = [line.split() for line in self.log.splitlines() if f"{role} started, process" in line]
        return [int(words[-1][-1])] if words else []


def wait(done: Callable[[], Any], cap_s: float, what: str) -> None:
    """Wait until something is so; raises `AssertionError`."""
    end = time.monotonic() + cap_s
    while not done():
        if time.monotonic() > end:
            raise AssertionError(f"not in {cap_s:.0f} s: {what}")
        time.sleep(0.02)


class Bench:
    """All cycles in one folder."""

    def __init__(self, folder: Path, free: Target, confined: Target, seed: int) -> None:
        self.folder, self.free, self.confined = folder, free, confined
        self.state, self.tmp = folder / "state", folder / "tmp"
        self.token = f"whyspan-lifecycle-{os.getpid()}"
        os.environ["LIFECYCLE_TOKEN"] = self.token
        self.rng = random.Random(seed)
        self.tmp.mkdir()
        match = ", ".join(f'{{ pid = {t.tgid}, service = "t" }}' for t in (free, confined))
        (folder / "whyspan.toml").write_text(CONFIG.format(targets=match, state=self.state))
        self.leaks: list[str] = []
        self.shown = 0  # of them
        self.ours: set[tuple[str, str]] = set()
        self.start_s = 0.0  # how long one takes here: random moments are in it
        self.hits: Counter[str] = Counter()
        self.starts_s: list[float] = []
        self.stops_s: list[float] = []
        self.rss_kib: dict[str, list[int]] = {"free": [], "confined": []}
        self.hooked = self.return_probes = 0
        self._events = self._probe_events()
        self._fds: dict[str, list[int]] = {"free": [], "confined": []}
        self._shm = set(os.listdir("/dev/shm"))

    def start(self) -> Agent:
        """Start an agent."""
        return Agent(self.folder, self.token)

    def learn(self) -> None:
        """Find out, from an agent that is ready, what its objects are called and what it does to the targets."""
        agent = self.start()
        self.start_s = agent.ready_s()
        self.look(agent)
        kern = traces.kernel()
        mine = traces.reached(traces.held(traces.carrying(f"LIFECYCLE={self.token}")), kern)
        self.ours = {(kind, kern.names[kind, i]) for kind, i in mine if (kind, i) in kern.names}
        agent.stop_s()
        self.check("learning", orderly=True)
        kinds = Counter(kind for kind, _ in mine)
        print(
            f"an agent holds {kinds['prog']} programs, {kinds['map']} maps, {kinds['link']} links", flush=True
        )
        assert kinds["prog"] > 10 and kinds["map"] > 5 and kinds["link"] > 10, kinds

    def look(self, agent: Agent) -> None:
        """Note what is on while the agent is ready: the checks for what is off later have something to find."""
        mine = traces.held(traces.carrying(f"LIFECYCLE={self.token}"))
        probes = [(link, pid) for link, pid in traces.return_probes() if ("link", link) in mine]
        self.return_probes += len(probes)
        if any(pid in (0, self.confined.tgid) for _, pid in probes):
            self.leaks.append(f"a return probe on the confined target: {probes}")
        on = self.free.hooked()
        self.hooked += bool(on)
        if len(on) < 4:
            self.leaks.append(f"ready, but only {on} of the free target are hooked: {agent.log[-300:]}")

    def cycle(self, number: int) -> None:
        """Start and stop: when ready, or at a random moment before."""
        agent = self.start()
        if number % 2 == 0:
            self.starts_s.append(agent.ready_s())
            self.look(agent)
        else:
            time.sleep(self.rng.uniform(0, self.start_s))
        self.stops_s.append(agent.stop_s())
        self._check_end(f"start {number}", agent)

    def kill(self, number: int) -> None:
        """Kill something of it at a random moment, then stop the rest."""
        role = self.rng.choices(list(HIT), list(HIT.values()))[0]
        agent = self.start()
        if role == "burst":
            agent.ready_s()
            self._kill_burst()
        else:
            time.sleep(self.rng.uniform(0, self.start_s + RUN_S))
            for pid in agent.pids(role):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.hits[role] += role != "all" or pid == agent.process.pid
        time.sleep(self.rng.uniform(0, 1.0))  # a restart has begun, or not
        if agent.process.poll() is None:
            agent.stop_s()
        agent.process.wait()
        self.check(f"kill {number} of {role}", orderly=False)

    def _kill_burst(self) -> None:
        argv = [
            sys.executable,
            "-c",
            "from whyspan.cli import main; main()",
            "burst",
            "malloc",
            "--seconds",
            "3",
        ]
        env = {**os.environ, "LIFECYCLE": self.token, "TMPDIR": str(self.tmp)}
        with (self.folder / "burst.log").open("wb") as log:
            burst = subprocess.Popen(
                [*argv, "--force", "--pid", str(self.free.tgid)], env=env, stdout=log, stderr=log
            )
        time.sleep(self.rng.uniform(0, self.start_s + RUN_S))
        burst.kill()
        burst.wait()
        self.hits["burst"] += 1

    def _check_end(self, what: str, agent: Agent) -> None:
        status, log = agent.process.returncode, agent.log
        # Before the supervisor blocks its signals there is nothing to clean up: Python's own death is fine.
        if status != 0 and not (status == -signal.SIGTERM and "started" not in log):
            self.leaks.append(f"{what}: exit status {status}: {log[-300:]}")
        if "Traceback" in log and "started" in log:
            self.leaks.append(f"{what}: a traceback: {log[-600:]}")
        self.check(what, orderly=True)

    def check(self, what: str, *, orderly: bool) -> None:
        """Note what is left of the agent, and how the targets are."""
        end = time.monotonic() + GONE_S
        orphans = traces.orphans(self.ours)
        while (left := self._left(orderly)) or orphans:
            if time.monotonic() > end:
                self.leaks.append(f"{what}: left: {left} {sorted(orphans)[:20]}")
                break
            time.sleep(0.05)
            orphans &= traces.orphans(self.ours)
        for name, target in (("free", self.free), ("confined", self.confined)):
            self.leaks += [f"{what}: the {name} target: {harm}" for harm in target.harm()]
            if target.process.poll() is None:
                self.rss_kib[name].append(target.rss_kib())
                self._fds[name].append(target.fds())
        if len(self.leaks) >= MOST_LEAKS:
            raise AssertionError("\n".join(self.leaks))

    def _left(self, orderly: bool) -> list[str]:
        out = [f"process {pid}" for pid in traces.carrying(f"LIFECYCLE={self.token}")]
        for name, target in (("free", self.free), ("confined", self.confined)):
            if target.process.poll() is None:
                out += [f"{name}: {function} is hooked" for function in target.hooked()]
        if (now := self._probe_events()) != self._events:
            out.append(f"tracefs has {now}, not {self._events}")
        known = KEPT if orderly else LEFT
        names = {str(p.relative_to(self.state)) for p in self.state.rglob("*")}
        out += [f"file {name}" for name in sorted(names - known)]
        out += [f"temporary file {p.name}" for p in self.tmp.iterdir()]
        out += [f"/dev/shm/{n}" for n in sorted(set(os.listdir("/dev/shm")) - self._shm) if "whyspan" in n]
        return out

    @staticmethod
    def _probe_events() -> list[int]:
        """How many probe events tracefs lists, of each kind."""
        out = []
        for name in _EVENTS:
            with contextlib.suppress(OSError):
                out.append(len(Path(tracefs.MOUNT_POINT, name).read_text().splitlines()))
        return out

    def result(self) -> dict[str, Any]:
        """Return all figures."""
        out: dict[str, Any] = {
            "leaks": self.leaks,
            "starts": len(self.stops_s),
            "kills": sum(self.hits.values()),
            "hits": dict(self.hits),
            "answers_verified": {"free": self.free.verified, "confined": self.confined.verified},
            "hooked_when_ready": self.hooked,
            "return_probes_seen": self.return_probes,
        }
        for name, times in (("start_s", self.starts_s), ("stop_s", self.stops_s)):
            if times:
                out |= {
                    f"{name}_median": round(statistics.median(times), 2),
                    f"{name}_max": round(max(times), 2),
                }
        for name, kib in self.rss_kib.items():
            tenth = max(len(kib) // 10, 1)
            first, last = statistics.median(kib[:tenth]), statistics.median(kib[-tenth:])
            out[f"rss_mib_{name}"] = [round(first / 1024, 2), round(last / 1024, 2)]
            out[f"fds_{name}"] = [min(self._fds[name]), max(self._fds[name])]
        return out


def run(folder: Path, starts: int, kills: int, seed: int) -> dict[str, Any]:
    """Do all cycles and return the figures; ``leaks`` is what was left or harmed."""
    with tracefs.mounted(), targets(folder) as (free, confined):
        bench = Bench(folder, free, confined, seed)
        try:
            bench.learn()
            for number in range(starts):
                bench.cycle(number)
                _told("start", number, starts, bench)
            for number in range(kills):
                bench.kill(number)
                _told("kill", number, kills, bench)
        except AssertionError as exc:
            bench.leaks.append(str(exc))
        return bench.result()


def _told(what: str, number: int, of: int, bench: Bench) -> None:
    for leak in bench.leaks[bench.shown :]:
        print(leak, flush=True)
    bench.shown = len(bench.leaks)
    if (number + 1) % 10 == 0:
        print(f"{what} {number + 1}/{of}: {len(bench.leaks)} leaks", flush=True)


def main() -> int:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(prog="tests.bench.lifecycle", description=__doc__.split("\n\n")[0])
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "lifecycle.json")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("this needs root", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="lifecycle-") as folder:
        figures = run(Path(folder), args.starts, args.kills, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    return 1 if figures["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
