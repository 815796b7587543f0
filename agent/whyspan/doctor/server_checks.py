"""Judges what can be seen of one server."""

from __future__ import annotations

import platform

from whyspan_probes.libraries import State

from whyspan.doctor.check import Check, Subject
from whyspan.doctor.servers import MARKED, ServerFacts


def checks(f: ServerFacts, machine: str = platform.machine()) -> list[Check]:
    """Judge one; of one that was not looked into nothing is said."""
    if not f.looked:
        return [Subject("server.access", "access").unknown("not looked into: there are more than 64 servers")]
    access = _access(f)
    if access.state != "ok":
        return [access]
    out = [access, _program(f, machine), _libc(f), _requests(f), _tls(f), _returns(f)]
    if f.python is not None:
        out.append(_python(f))
    if f.found.service in MARKED or f.marker:
        out.append(_marker(f))
    out += [_tracer(f), _ring(f)]
    return out


def _access(f: ServerFacts) -> Check:
    it = Subject("server.access", "access")
    program = f.libraries[0].state if f.libraries else State.GONE
    if not f.maps and program is State.OK:
        return it.ok("program and libraries can be read")
    if State.GONE in (f.maps, program):
        return it.unknown(str(State.GONE), "run doctor again")
    return it.limited(
        f.maps or str(program),
        "HTTPS, markers, locks, Python's collector and names of files in this server",
        "grant CAP_SYS_PTRACE, and CAP_DAC_READ_SEARCH for files of other users",
    )


def _program(f: ServerFacts, machine: str) -> Check:
    it = Subject("server.program", "program")
    kind = f.program.machine or "not an ELF file that can be read"
    found = f"{kind}, {'static' if f.program.static else 'dynamic'}" + (", Go" if f.program.go else "")
    if f.program.machine.startswith("32-bit"):
        return it.limited(
            found, "what it blocks in: its system calls have other numbers", "run a 64-bit build"
        )
    if f.program.machine not in ("", machine):
        return it.limited(
            f"{found}: an emulator runs it", "its libraries and requests", f"run a build for {machine}"
        )
    return it.ok(found)


def _libc(f: ServerFacts) -> Check:
    it = Subject("server.libc", "C library")
    if f.libc.startswith("glibc"):
        return it.ok(f.libc)
    if f.program.static or f.program.go:
        return it.note("none mapped: in the program, or none; waits in malloc count as lock.contention")
    return it.note(f"{f.libc or 'none found'}: waits in its malloc count as lock.contention")


def _requests(f: ServerFacts) -> Check:
    it = Subject("server.ports", "listens on")
    if f.ports:
        return it.ok(", ".join(map(str, f.ports[:8])) + (", ..." if len(f.ports) > 8 else ""))
    return it.note("no TCP port: it gets requests from another process, or by a Unix socket")


def _tls(f: ServerFacts) -> Check:
    it = Subject("server.tls", "TLS")
    if f.tls:
        return it.ok(f"{f.tls} has OpenSSL's functions")
    if f.program.go:
        return it.note(
            "Go's own: HTTPS is not followed (plain HTTP is)",
            "terminate TLS before it, or add whyspan-inproc",
        )
    return it.note(
        "no OpenSSL mapped: plain HTTP/1.1 is followed; TLS of Go, Rust and Java, and HTTP/2, is not"
    )


def _returns(f: ServerFacts) -> Check:
    it = Subject("server.return_probes", "return probes")
    if not f.wants_returns:
        return it.ok("none needed")
    if not f.refused:
        return it.ok("safe")
    lost = [("HTTPS requests", bool(f.tls)), ("exact ends of llama.cpp's steps", f.llama)]
    lost.append(
        ("exact ends of Python's collections", f.python is not None and f.python.collections == "symbols")
    )
    remedy = "plain HTTP behind a proxy needs none"
    if "seccomp" in f.refused:
        remedy = (
            "run it without a seccomp filter (Docker: --security-opt seccomp=unconfined), or TLS before it"
        )
    elif "shadow stack" in f.refused:
        remedy = "run it with GLIBC_TUNABLES=glibc.cpu.hwcaps=-SHSTK"
    return it.limited(f"refused: {f.refused}", ", ".join(what for what, is_lost in lost if is_lost), remedy)


def _python(f: ServerFacts) -> Check:
    it = Subject("server.python", "Python")
    assert f.python is not None
    version = f.python.version or "3"
    match f.python.collections:
        case "notes":
            return it.ok(f"{version}, collections by its USDT notes")
        case "symbols":
            return it.ok(f"{version}, no USDT notes: collections by its symbols")
    return it.limited(
        f"{version}, without USDT notes and symbols",
        "collections (python.gc)",
        "use a distribution's Python, or one configured --with-dtrace",
    )


def _marker(f: ServerFacts) -> Check:
    it = Subject("server.marker", "marker")
    if f.marker:
        return it.ok("whyspan_inproc is loaded")
    return it.note(
        "none: steps, queues and batches of the engine are seen from outside only",
        "pip install /usr/share/whyspan/whyspan_inproc-*.whl into the server's environment",
    )


def _tracer(f: ServerFacts) -> Check:
    it = Subject("server.traced", "traced")
    if not f.tracer:
        return it.ok("no")
    return it.note(
        f"by {f.tracer_name or 'a process'} ({f.tracer}): its stops will be named observer.tracer",
        "detach it when it is not wanted",
    )


def _ring(f: ServerFacts) -> Check:
    it = Subject("server.io_uring", "io_uring")
    if not f.uring:
        return it.ok("not used")
    return it.limited(
        "it has a ring",
        "what goes through the ring: those sends, receives, reads and writes",
        "turn io_uring off in the server (uvloop and libuv: UV_USE_IO_URING=0)",
    )
