"""Finds the endpoints of an engine without configuration: what its processes listen on, and what their options name.

Of a command line only the options named here are read, and nothing of it is logged. An endpoint that a process names is
only ever looked for on this machine: a watched process cannot send us elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from whyspan import listening
from whyspan.feeds.messages import FORWARD_PASS, HEALTH, KV_EVENTS, METRICS
from whyspan.text import clean

_PROC: Final = Path("/proc")
#: The port of an engine's server when none is named.
_DEFAULT_PORT: Final = {"vllm": 8000, "sglang": 30000, "llama.cpp": 8080}
#: SGLang's /health makes a token; its /ping looks at a flag (srt/entrypoints/http_server.py, 0.5.23).
_HEALTH_PATH: Final = {"vllm": "/health", "sglang": "/ping", "llama.cpp": "/health"}
_MAX_RANKS: Final = 16
_MAX_ENDPOINT: Final = 200
_TCP = re.compile(r"^tcp://(\*|\[[0-9a-fA-F:]+\]|[^:/\s]+|::):(\d{1,5})$")
_LOCAL: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
#: Given by setproctitle; such a process has none of its server's options.
_TITLE = re.compile(r"^(VLLM|sglang)::")
#: tempfile's name and the rank: what SGLang makes up for its forward-pass feed (metrics_reporter.py, 0.5.23).
_FPM_SOCKET = re.compile(r"^(/\S{1,180}/tmp[a-z0-9_]{8})\.(\d{1,3})$")
_MAX_UNIX_TABLE: Final = 8 << 20


class Endpoint(NamedTuple):
    """Where a feed is. ``problem`` says why it cannot be had, else it is empty."""

    kind: str
    endpoint: str
    replay: str = ""
    topic: str = ""
    rank: int = 0
    problem: str = ""


def endpoints(tgid: int, engine: str, cmdline: Sequence[str], proc: Path = _PROC) -> list[Endpoint]:
    """Return the feeds of a process.

    Args:
        tgid: The process.
        engine: vllm, sglang or llama.cpp; another has none.
        cmdline: Its arguments.
        proc: For tests.
    """
    if engine not in _DEFAULT_PORT or not cmdline or _TITLE.match(cmdline[0]):
        return []
    out = _http(tgid, engine, cmdline, proc)
    if engine in ("vllm", "sglang"):
        out += _kv(engine, cmdline)
    if engine == "sglang" and flag(cmdline, "enable-forward-pass-metrics"):
        out += _passes(tgid, cmdline, proc)
    return [_reachable(e, tgid, proc) for e in out]


def option(cmdline: Sequence[str], *names: str) -> str:
    """Return the last value of ``--name VALUE`` or ``--name=VALUE``, "-" and "_" being the same; else ""."""
    wanted = {f"--{n}" if len(n) > 2 else f"-{n}" for n in names}
    found = ""
    for n, word in enumerate(cmdline):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in wanted:
            found = value if equals else (cmdline[n + 1] if n + 1 < len(cmdline) else "")
    return found


def flag(cmdline: Sequence[str], name: str) -> bool:
    """Whether ``--name`` is there."""
    return any(word.replace("_", "-") == f"--{name}" for word in cmdline)


def _http(tgid: int, engine: str, cmdline: Sequence[str], proc: Path) -> list[Endpoint]:
    ports = listening.addresses(tgid, proc)
    named = option(cmdline, "port")
    port = int(named) if named.isdigit() else _DEFAULT_PORT[engine]
    if port not in ports:
        # llama_cpp.server and others have their own default; anything but the only port would be a guess.
        if named or len(ports) != 1:
            return []
        port = next(iter(ports))
    if option(cmdline, "ssl-keyfile", "ssl-key-file"):
        problem = "the server speaks TLS: name the feed in the configuration behind a plain port"
        return [Endpoint(kind, f"port {port}", problem=problem) for kind in (METRICS, HEALTH)]
    host = ports[port]
    host = _LOCAL.get(host, f"[{host}]" if ":" in host else host)
    base = f"http://{host}:{port}"
    return [Endpoint(METRICS, f"{base}/metrics"), Endpoint(HEALTH, base + _HEALTH_PATH[engine])]


def _kv(engine: str, cmdline: Sequence[str]) -> list[Endpoint]:
    settings = _kv_settings(cmdline)
    on = settings.get("enable_kv_cache_events") is True if engine == "vllm" else bool(settings)
    publisher = settings.get("publisher", "zmq" if engine == "vllm" else "null")
    if not on or publisher not in ("zmq", None):
        return []
    base = settings.get("endpoint", "tcp://*:5557")
    replay, topic = settings.get("replay_endpoint") or "", settings.get("topic", "")
    if not (isinstance(base, str) and isinstance(replay, str) and isinstance(topic, str)):
        return []
    bind = settings.get("bind")  # SGLang's
    out = []
    for rank in range(_ranks(cmdline)):
        address, problem = _subscribable(base, rank, bind if isinstance(bind, bool) else None)
        again, trouble = _subscribable(replay, rank, True) if replay else ("", "")
        out.append(Endpoint(KV_EVENTS, address, "" if trouble else again, topic[:128], rank, problem))
    return out


def _kv_settings(cmdline: Sequence[str]) -> dict[str, object]:
    """Return the object of ``--kv-events-config``, with its dotted options; empty when there is none."""
    out: dict[str, object] = {}
    text = option(cmdline, "kv-events-config")
    if text:
        try:
            data = json.loads(text[:16384])
        except (ValueError, RecursionError):
            data = None
        if isinstance(data, dict):
            out |= data
    for key in ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic"):
        value = option(cmdline, "kv-events-config." + key.replace("_", "-"))
        if value:
            out[key] = value.lower() == "true" if key.startswith("enable") else value
    return out


def _ranks(cmdline: Sequence[str]) -> int:
    text = option(cmdline, "data-parallel-size", "dp", "dp-size")
    return min(max(int(text), 1), _MAX_RANKS) if text.isdigit() else 1


def _subscribable(endpoint: str, rank: int, bind: bool | None) -> tuple[str, str]:
    """Return where to connect to for what an engine has bound, and why that is not possible, or ""."""
    if len(endpoint) > _MAX_ENDPOINT:
        return clean(endpoint, 60), "an address that is too long"
    if endpoint.startswith("ipc://"):
        return endpoint, "" if endpoint[6:7] in ("/", "@") else "a relative path"
    tcp = _TCP.match(endpoint)
    if tcp is None:
        return clean(
            endpoint, 60
        ), "within the engine's process" if "inproc" in endpoint else "not an address"
    host, port = tcp[1], int(tcp[2])
    if port == 0:
        return endpoint, "a port chosen at run time: name the feed in the configuration"
    local = _LOCAL.get(host)
    if bind is False or (local is None and not bind and "::" not in host):
        return endpoint, "the engine connects there instead of listening: nothing to subscribe to"
    return f"tcp://{local or host}:{port + rank}", ""


def _passes(tgid: int, cmdline: Sequence[str], proc: Path) -> list[Endpoint]:
    named = option(cmdline, "forward-pass-metrics-ipc-name")
    if named:
        return [
            Endpoint(FORWARD_PASS, f"{named[:_MAX_ENDPOINT]}.{r}", rank=r) for r in range(_ranks(cmdline))
        ]
    found = sorted({m for pid in (tgid, *_descendants(tgid, proc)) for m in _pass_sockets(pid, proc)})
    return [Endpoint(FORWARD_PASS, f"ipc://{path}.{rank}", rank=rank) for path, rank in found[:_MAX_RANKS]]


def _pass_sockets(tgid: int, proc: Path) -> Iterator[tuple[str, int]]:
    try:
        with (proc / str(tgid) / "net" / "unix").open("rb") as f:
            table = f.read(_MAX_UNIX_TABLE).decode("utf-8", "replace")
    except OSError:
        return
    named = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and (m := _FPM_SOCKET.match(fields[7])):
            named[f"socket:[{fields[6]}]"] = m[1], int(m[2])
    for link in listening.socket_links(tgid, proc) if named else ():
        if link in named:
            yield named[link]


def _descendants(tgid: int, proc: Path, limit: int = 64) -> list[int]:
    out: list[int] = []
    todo = [tgid]
    while todo and len(out) < limit:
        parent = todo.pop()
        try:
            for task in os.listdir(proc / str(parent) / "task"):
                text = (proc / str(parent) / "task" / task / "children").read_text()
                found = [int(word) for word in text.split() if word.isdigit()]
                out += found
                todo += found
        except OSError:
            continue
    return out[:limit]


def _reachable(e: Endpoint, tgid: int, proc: Path) -> Endpoint:
    """Say of an endpoint in another namespace that it cannot be reached."""
    if e.problem:
        return e
    by_path = e.endpoint.startswith("ipc:///")
    space = "mnt" if by_path else "net"
    if not _same_namespace(tgid, space, proc):
        kind = "mount" if by_path else "network"
        return e._replace(problem=f"not reachable: in another {kind} namespace")
    return e


def _same_namespace(tgid: int, name: str, proc: Path) -> bool:
    try:
        theirs = os.stat(proc / str(tgid) / "ns" / name)
        ours = os.stat(proc / "self" / "ns" / name)
    except OSError:
        return True  # it is gone, or may not be asked; the connection will tell
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
