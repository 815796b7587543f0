"""What can be seen of each server found: its program, C library, TLS, Python, marker, and what is in the way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan_probes import libraries
from whyspan_probes.features import Features
from whyspan_probes.libraries import Library, State
from whyspan_probes.safety import moves_stacks, refuse_user_probe

from whyspan import hostfacts, listening
from whyspan.discovery import Found
from whyspan.doctor import files
from whyspan.text import clean

_PROC = Path("/proc")
MAX_SERVERS: Final = 64  # of more, the others are only named
_MAX_FDS: Final = 4096
#: Interpreter, C library, threads, TLS and device: by base name, whatever the version.
_OF_INTEREST = re.compile(
    r"/(libc[-.]|ld-musl-|(libpython3|libuv|libgomp|libomp|libiomp5|libssl|libcuda|libcudart|libnccl|libtorch_cpu"
    r"|libtorch_cuda|libllama|libggml|_ssl|_greenlet|_marker)[-.\d])[^/]*$"
)
_LIBC = re.compile(r"/(libc\.so\.6|libc-2\.\d+\.so|ld-musl-[^/]*\.so\.1|libc\.musl-[^/]*)$")
_MARKER = re.compile(r"/whyspan_inproc/_marker[^/]*\.so$")
_URING = "anon_inode:[io_uring]"
#: Engines whose marks there are hooks for in whyspan-inproc.
MARKED: Final = frozenset({"vllm", "sglang", "transformers", "torch", "uvicorn"})
#: By the beginning of a cgroup's last folders.
_RUNTIMES: Final = (
    ("docker", "Docker"),
    ("cri-containerd", "containerd"),
    ("crio", "CRI-O"),
    ("libpod", "Podman"),
    ("lxc", "LXC"),
    ("kubepods", "Kubernetes"),
)


class ServerFacts(NamedTuple):
    """One process. ``looked`` False: there were too many. ``refused`` is why it gets no return probe, or empty."""

    found: Found
    vpid: int = 0
    container_id: str = ""
    pod_uid: str = ""
    runtime: str = ""
    looked: bool = False
    maps: str = ""
    libraries: tuple[Library, ...] = ()
    program: files.Program = files.Program("", False, False)
    libc: str = ""
    tls: str = ""
    python: files.Python | None = None
    llama: bool = False
    marker: bool = False
    refused: str = ""
    tracer: int = 0
    tracer_name: str = ""
    uring: bool = False
    ports: tuple[int, ...] = ()

    @property
    def wants_returns(self) -> bool:
        """Whether anything in it is seen by return probes."""
        by_symbols = self.python is not None and self.python.collections == "symbols"
        return bool(self.tls) or self.llama or by_symbols


def gather(found: Iterable[Found], features: Features, proc: Path = _PROC) -> list[ServerFacts]:
    """Look at the servers found, each file of theirs once."""
    seen = _Files()
    return [_server(f, number < MAX_SERVERS, features, seen, proc) for number, f in enumerate(found)]


class _Files:
    """What is known of files by device and inode: servers of one kind share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], Any] = {}

    def ask(self, question: Any, library: Library) -> Any:
        key = question.__name__, library.device, library.inode
        if key not in self._known:
            self._known[key] = question(library)
        return self._known[key]


def _server(found: Found, look: bool, features: Features, seen: _Files, proc: Path) -> ServerFacts:
    fact = hostfacts.process_fact(found.tgid, found.service, proc)
    server = ServerFacts(
        found,
        fact.vpid if fact else 0,
        fact.container_id if fact else "",
        fact.pod_uid if fact else "",
        _runtime(fact.cgroup) if fact else "",
    )
    if not look:
        return server
    maps = libraries.mapped(found.tgid, proc)
    executable = libraries.executable(found.tgid, proc)
    mapped = tuple(libraries.find(found.tgid, _OF_INTEREST, proc, maps))
    there = [lib for lib in (executable, *mapped) if lib.state is State.OK]
    tls = [lib for lib in there if seen.ask(files.is_tls, lib)]
    pythons = [p for lib in there if (p := seen.ask(files.python, lib))]
    status = _status(found.tgid, proc)
    tracer = int(status.get("TracerPid", "0") or 0)
    return server._replace(
        looked=True,
        maps=str(maps.state),
        libraries=(executable, *mapped),
        program=seen.ask(files.program, executable) if executable.state is State.OK else server.program,
        libc=next((seen.ask(files.libc, lib) for lib in there if _LIBC.search(lib.path)), ""),
        tls=next((lib.name for lib in tls), ""),
        python=pythons[0] if pythons else None,
        llama=any(lib.name.startswith("libllama") for lib in mapped),
        marker=any(_MARKER.search(lib.path) for lib in mapped),
        refused=_refused(found.tgid, features, proc),
        tracer=tracer,
        tracer_name=_text(proc / str(tracer) / "comm") if tracer else "",
        uring=_has_ring(found.tgid, proc),
        ports=tuple(sorted(listening.addresses(found.tgid, proc))),
    )


def _refused(tgid: int, features: Features, proc: Path) -> str:
    why = refuse_user_probe("uretprobe", tgid, features.kernel, lockdown=features.lockdown, proc=proc)
    if why:
        return why
    mover = moves_stacks(tgid, proc)
    return f"{mover} moves stacks about" if mover else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _status(tgid: int, proc: Path) -> dict[str, str]:
    lines = _text(proc / str(tgid) / "status").splitlines()
    return {k: v.strip() for k, _, v in (line.partition(":") for line in lines)}


def _has_ring(tgid: int, proc: Path) -> bool:
    for number, link in enumerate(listening.socket_links(tgid, proc)):
        if link == _URING:
            return True
        if number >= _MAX_FDS:
            break
    return False


def _runtime(cgroup: str) -> str:
    return next(
        (
            name
            for part, name in _RUNTIMES
            if f"/{part}" in cgroup or f":{part}" in cgroup or f"{part}-" in cgroup
        ),
        "",
    )


def row(f: ServerFacts) -> dict[str, Any]:
    """Return what ``doctor --json`` has of a server, without its checks."""
    return {
        "tgid": f.found.tgid,
        "service": f.found.service,
        "rule": f.found.rule,
        "vpid": f.vpid,
        "container_id": f.container_id,
        "pod_uid": f.pod_uid,
        "runtime": f.runtime,
        "ports": list(f.ports),
        "maps": f.maps,
        "libraries": [_library(lib) for lib in f.libraries if lib.path],
    }


def _library(library: Library) -> dict[str, Any]:
    return {
        "path": clean(library.path, 512),
        "build_id": library.build_id,
        "deleted": library.deleted,
        "state": str(library.state),
    }
