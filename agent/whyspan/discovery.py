"""Finds the processes to watch: known inference servers, and those that the configuration selects."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
from whyspan_probes import libraries

from whyspan import cgroups
from whyspan.config import Target, Targets
from whyspan.listening import listens
from whyspan.text import clean

_MAX_CMDLINE = 4096


class Candidate(NamedTuple):
    """A process as discovery sees it. ``start`` is its start time, which tells a reused pid from the old one."""

    tgid: int
    ppid: int
    start: float
    comm: str
    exe: str
    cmdline: tuple[str, ...]


class Found(NamedTuple):
    """A process to watch, its service, and by which rule it was found."""

    tgid: int
    start: float
    service: str
    rule: str


class Engine(NamedTuple):
    """How a kind of inference server is recognised on its command line."""

    name: str
    pattern: re.Pattern[str]


#: Matched against the command line without its first word's folder, first hit wins.
ENGINES: tuple[Engine, ...] = (
    Engine("vllm", re.compile(r"(^|[ /])vllm( serve|\.entrypoints\.)|-m vllm\b|VLLM::")),
    Engine("sglang", re.compile(r"-m sglang\b|sglang\.launch_server|sglang::|(^|[ /])sglang( serve)")),
    Engine("llama.cpp", re.compile(r"(^|/)llama-server\b|(^|/)llama_cpp\.server|-m llama_cpp\.server")),
    Engine("tgi", re.compile(r"(^|/)text-generation-(launcher|router|server)\b")),
    Engine("ollama", re.compile(r"(^|/)ollama (serve|runner)\b")),
    Engine("transformers", re.compile(r"(^|[ /])transformers serve\b")),
    Engine("uvicorn", re.compile(r"(^|[ /])uvicorn |-m uvicorn\b")),
)

#: A server whose command line says nothing still maps its engine's libraries.
LIBRARIES: tuple[Engine, ...] = (
    Engine("llama.cpp", re.compile(r"/libllama\.so")),
    Engine("vllm", re.compile(r"/vllm/_C\b|/vllm/.*\.abi3\.so")),
    Engine("sglang", re.compile(r"/sgl_kernel/")),
    Engine("torch", re.compile(r"/libtorch_cpu\.so")),
)


def candidate(process: psutil.Process) -> Candidate | None:
    """Read a process; None when it is gone or may not be read."""
    try:
        with process.oneshot():
            cmdline = process.cmdline()
            return Candidate(
                process.pid,
                process.ppid() or 0,
                process.create_time(),
                clean(process.name(), 32),
                Path(cmdline[0]).name if cmdline else "",
                tuple(cmdline),
            )
    except (psutil.Error, OSError, ValueError):
        return None


def _started(tgid: int) -> float:
    """Return when a process started, as `candidate` has it; 0 when it is gone."""
    try:
        return psutil.Process(tgid).create_time()
    except psutil.Error:
        return 0.0


def engine_of(c: Candidate) -> str:
    """Return the engine that a command line names, or an empty string."""
    line = " ".join(c.cmdline)[:_MAX_CMDLINE]
    for engine in ENGINES:
        if engine.pattern.search(line):
            return engine.name
    return ""


def engine_by_library(tgid: int, proc: Path = Path("/proc")) -> str:
    """Return the engine whose libraries the process maps, or an empty string."""
    maps = libraries.mapped(tgid, proc)
    for engine in LIBRARIES:
        if any(engine.pattern.search(file.path) for file in maps.files):
            return engine.name
    return ""


def cgroup_of(tgid: int, proc: Path = Path("/proc")) -> str:
    """Return the process's cgroup: of the CPU controller under v1, else of the unified tree; "" when gone."""
    try:
        return cgroups.cpu_path_in((proc / str(tgid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return ""


def unit_of(cgroup: str) -> str:
    """Return the innermost systemd unit in a cgroup path, or an empty string."""
    units = re.findall(r"/([^/]+\.(?:service|scope))(?=/|$)", cgroup)
    return str(units[-1]) if units else ""


def selects(target: Target, c: Candidate, cgroup: str) -> bool:
    """Whether a process meets every selector of a configured target."""
    return (
        (not target.pid or target.pid == c.tgid)
        and (not target.comm or target.comm in (c.comm, c.exe))
        and (not target.unit or target.unit in (unit_of(cgroup), unit_of(cgroup).removesuffix(".service")))
        and (
            not target.cgroup or cgroup == target.cgroup or cgroup.startswith(target.cgroup.rstrip("/") + "/")
        )
    )


class Discovery:
    """Keeps the set of processes to watch. ``scan`` looks only at processes it has not judged yet."""

    def __init__(
        self,
        targets: Targets,
        by_library: Callable[[int], str] = engine_by_library,
        has_listener: Callable[[int], bool] = listens,
        supervisor: int = 0,
    ) -> None:
        """*supervisor* and its children, and this process, are never watched, whoever their ancestors are."""
        self._targets = targets
        self._own, self._supervisor = os.getpid(), supervisor
        #: Processes of ours that are not the supervisor's children: never watched either.
        self.helpers: set[int] = set()
        self._by_library, self._listens = by_library, has_listener
        self._judged: dict[int, float] = {}  # tgid -> start time
        self._again: dict[int, int] = {}  # young processes get a second look: they exec, map and listen later
        self.found: dict[int, Found] = {}

    def retarget(self, targets: Targets, pids: Iterable[int] | None = None) -> tuple[list[Found], list[int]]:
        """Judge all processes anew. Returns those to watch from now on, or under another name, and those no longer."""
        before = self.found
        self._targets, self.found = targets, {}
        self._judged.clear()
        self._again.clear()
        self.scan(pids)
        new = [f for f in self.found.values() if f.service != getattr(before.get(f.tgid), "service", None)]
        return new, sorted(before.keys() - self.found.keys())

    def ours(self) -> frozenset[int]:
        """Return the agent's own processes: this one, the supervisor, its children and the helpers."""
        own = {self._own, *self.helpers}
        if self._supervisor:
            own.add(self._supervisor)
            try:
                listed = Path(f"/proc/{self._supervisor}/task/{self._supervisor}/children").read_text()
                own.update(int(n) for n in listed.split())
            except (OSError, ValueError):
                pass  # needs CONFIG_PROC_CHILDREN
        return frozenset(own)

    def scan(self, pids: Iterable[int] | None = None) -> tuple[list[Found], list[int]]:
        """Return the processes that are new and those that are gone since the last scan."""
        alive = set(psutil.pids() if pids is None else pids)
        gone = [tgid for tgid in self.found if tgid not in alive]
        for tgid in gone:
            del self.found[tgid]
        new: list[Found] = []
        for tgid in sorted(alive):
            known = self._judged.get(tgid)
            # Judged; of those that are watched the number may have gone to another process since.
            settled = known is not None and tgid not in self._again
            if settled and (tgid not in self.found or _started(tgid) == known):
                continue
            try:
                c = candidate(psutil.Process(tgid))
            except psutil.Error:
                continue
            if c is None:
                continue
            if known is not None and known != c.start:  # another process under the same number
                self._again.pop(tgid, None)
                if self.found.pop(tgid, None):
                    gone.append(tgid)
            elif tgid in self.found and tgid not in self._again:
                continue
            self._judged[tgid] = c.start
            found = self._judge(c)
            if found:
                self._again.pop(tgid, None)
                if tgid not in self.found:
                    self.found[tgid] = found
                    new.append(found)
            else:
                self._count_look(tgid)
        # A number reused by another process to watch is not gone: it is new.
        gone = [tgid for tgid in gone if tgid not in self.found]
        for tgid in [t for t in self._judged if t not in alive]:
            del self._judged[tgid]
            self._again.pop(tgid, None)
        return new, gone

    def recheck(self, tgid: int) -> None:
        """Judge the process anew at the next scan: it has executed another program."""
        self._again[tgid] = 3

    def adopt(self, parent: int, child: int) -> None:
        """Take in a fork: the child serves its parent's service."""
        found = self.found.get(parent)
        if found and child not in self.found:
            start = _started(child)
            if not start:
                return
            self.found[child] = Found(child, start, found.service, f"child of {parent}")
            self._judged[child] = start

    def forget(self, tgid: int) -> None:
        """The process is gone."""
        self.found.pop(tgid, None)
        self._judged.pop(tgid, None)
        self._again.pop(tgid, None)

    def _count_look(self, tgid: int) -> None:
        left = self._again.get(tgid, 3) - 1
        if left > 0:
            self._again[tgid] = left
        else:
            self._again.pop(tgid, None)

    def _judge(self, c: Candidate) -> Found | None:
        if (
            c.tgid == self._own
            or c.tgid in self.helpers
            or (self._supervisor and self._supervisor in (c.tgid, c.ppid))
        ):
            return None
        cgroup = cgroup_of(c.tgid) if self._targets.match else ""
        for target in self._targets.match:
            if selects(target, c, cgroup):
                service = target.service or engine_of(c) or c.comm
                return Found(c.tgid, c.start, clean(service, 64), "configuration")
        parent = self.found.get(c.ppid)
        if parent:
            return Found(c.tgid, c.start, parent.service, f"child of {c.ppid}")
        if not self._targets.auto:
            return None
        engine = engine_of(c)
        if engine:
            return Found(c.tgid, c.start, engine, "command line")
        engine = self._by_library(c.tgid)
        if engine and self._listens(c.tgid):
            return Found(c.tgid, c.start, engine, "libraries and a listening port")
        return None
