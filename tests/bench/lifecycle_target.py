"""A process whose every answer can be checked, doing what probes hook: what `lifecycle` has watched and unwatched.

``python -m tests.bench.lifecycle_target CERTIFICATE KEY LLAMA MARKER [--confined]`` prints its ports as JSON.
``POST /`` answers with the body backwards and its SHA-256, made on another thread out of malloc'd memory, while marks
are told, the stand-in for libllama is called, and garbage is collected. ``GET /state`` tells what its own memory has
at the entries of hooked functions, and how many watch its marker. Confined: a seccomp filter ends it at the system
calls that a return probe or an entry probe may enter the kernel by.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import queue
import ssl
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
#: uretprobe (6.11) and uprobe (6.18), x86-64: arch/x86/entry/syscalls/syscall_64.tbl.
_FORBIDDEN: Final = (335, 336)
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_COLLECT_EVERY = 10
_SPAN_ON = 12  # a kind of mark
_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def confine() -> None:
    """Have this process killed at a forbidden system call, from now on."""
    ld, jeq, ret = 0x20, 0x15, 0x06
    code = [struct.pack("HBBI", ld, 0, 0, 0)]
    for left, number in zip(range(len(_FORBIDDEN), 0, -1), _FORBIDDEN, strict=True):
        code.append(struct.pack("HBBI", jeq, left, 0, number))
    code += [struct.pack("HBBI", ret, 0, 0, _ALLOW), struct.pack("HBBI", ret, 0, 0, _KILL)]
    program = ctypes.create_string_buffer(b"".join(code))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filters, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


class Work:
    """What a request does, on a thread of its own: hooked functions are called from several at once."""

    def __init__(self, llama: str, marker: str) -> None:
        self._llama, self._marker = ctypes.CDLL(llama), ctypes.CDLL(marker)
        self._ssl: Any = ctypes.CDLL("libssl.so.3")
        self._jobs: queue.SimpleQueue[tuple[bytes, queue.SimpleQueue[bytes]]] = queue.SimpleQueue()
        self._done = 0
        self.wrong = 0
        for _ in range(3):
            threading.Thread(target=self._run, daemon=True).start()

    def do(self, body: bytes) -> bytes:
        """Return what the client checks."""
        answer: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._jobs.put((body, answer))
        return answer.get()

    def state(self) -> dict[str, Any]:
        """Return the first byte of hooked functions, in hex, and the marker's semaphore."""
        entries = {
            "llama_encode": self._llama.llama_encode,
            "whyspan_mark_v1": self._marker.whyspan_mark_v1,
            "SSL_read": self._ssl.SSL_read,
            "SSL_do_handshake": self._ssl.SSL_do_handshake,
        }
        at = {n: ctypes.cast(f, ctypes.c_void_p).value or 0 for n, f in entries.items()}
        return {
            "entries": {n: ctypes.string_at(a, 1).hex() for n, a in at.items()},
            "watchers": ctypes.c_ushort.in_dll(self._marker, "whyspan_mark_v1_semaphore").value,
            "wrong": self.wrong,
            "done": self._done,
        }

    def _run(self) -> None:
        while True:
            body, answer = self._jobs.get()
            size = len(body)
            block = _libc.malloc(size + 1)
            ctypes.memmove(block, body[::-1], size)
            text = json.dumps({"id": self._done}).encode()
            self._marker.whyspan_mark_v1(ctypes.c_uint32(_SPAN_ON), ctypes.c_uint32(len(text)), text)
            even = 2 * (size % 1000)
            self.wrong += self._llama.llama_encode(None, even) != even
            self._done += 1
            if self._done % _COLLECT_EVERY == 0:
                gc.collect()
            back = ctypes.string_at(block, size)
            _libc.free(block)
            answer.put(back + hashlib.sha256(body).digest())


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    work: Work

    def do_POST(self) -> None:
        """Answer what can be checked."""
        self._answer(self.work.do(self.rfile.read(int(self.headers["content-length"]))))

    def do_GET(self) -> None:
        """Tell the state."""
        self._answer(json.dumps(self.work.state()).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """Plain, or with TLS in each connection's own thread."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._context = context

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("certificate", "key", "llama", "marker"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--confined", action="store_true")
    args = parser.parse_args()
    if args.confined:
        confine()
    Handler.work = Work(str(args.llama), str(args.marker))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(args.certificate, args.key)
    plain, tls = Server(), Server(context)
    threading.Thread(target=tls.serve_forever, daemon=True).start()
    print(json.dumps({"plain": plain.server_address[1], "tls": tls.server_address[1]}), flush=True)
    plain.serve_forever()


if __name__ == "__main__":
    main()
