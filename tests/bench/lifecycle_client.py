"""Talks to `lifecycle_target` without a pause and checks every byte; knows how the target fares."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import build_inproc
from tests.demo.procs import ROOT

_PAUSE_S = 0.03
_MOST_BYTES = 20_000


def ingredients(folder: Path) -> list[str]:
    """Make what the target needs: certificate, key, the stand-in for libllama, the marker; and its own libssl.

    Hooks at an entry are for whoever maps the file: those of other agents on the host must not be seen in it.
    """
    (libssl,) = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libssl" in line
    }
    shutil.copy(libssl, folder)
    key, certificate, llama = folder / "key.pem", folder / "certificate.pem", folder / "libllama.so"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = [
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-days",
        "2",
    ]
    subprocess.run(["openssl", "req", *made, *subject], check=True, capture_output=True)
    source = ROOT / "tests/bpf/llama_stub.cpp"
    subprocess.run(["g++", str(source), "-DLIBRARY", "-fPIC", "-shared", "-o", str(llama)], check=True)
    (folder / "whyspan_inproc").mkdir(exist_ok=True)
    marker = build_inproc.build(folder / "whyspan_inproc")
    return [str(p) for p in (certificate, key, llama, marker)]


class Target:
    """One target with two clients on it. ``bad``: answers that were wrong, in words; it must stay empty."""

    def __init__(self, parts: list[str], *, confined: bool) -> None:
        argv = [
            sys.executable,
            "-m",
            "tests.bench.lifecycle_target",
            *parts,
            *(["--confined"] if confined else []),
        ]
        env = {**os.environ, "LD_LIBRARY_PATH": str(Path(parts[2]).parent)}
        self.process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        self.confined = confined
        self.bad: list[str] = []
        self.verified = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        assert self.process.stdout is not None
        self._ports = json.loads(self.process.stdout.readline())
        self._context = ssl.create_default_context(cafile=parts[0])
        self._threads = [
            threading.Thread(target=self._talk, args=(tls,), daemon=True) for tls in (False, True)
        ]
        self.usual = self.state()
        for thread in self._threads:
            thread.start()

    @property
    def tgid(self) -> int:
        return self.process.pid

    def state(self) -> dict[str, Any]:
        """Return what it tells of itself: see `lifecycle_target.Work.state`."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports["plain"], timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/state")
            told: dict[str, Any] = json.loads(connection.getresponse().read())
            return told

    def hooked(self) -> list[str]:
        """Return the functions whose entry in its memory is not as it was, and whether its marker is watched."""
        now = self.state()
        changed = [n for n, byte in now["entries"].items() if byte != self.usual["entries"][n]]
        return changed + (["the marker's semaphore"] if now["watchers"] else [])

    def rss_kib(self) -> int:
        """Return its resident memory."""
        status = Path(f"/proc/{self.tgid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def fds(self) -> int:
        """Return how many descriptors it has."""
        return sum(1 for _ in Path(f"/proc/{self.tgid}/fd").iterdir())

    def harm(self) -> list[str]:
        """Return what is wrong with it, if anything."""
        out = list(self.bad)
        status = self.process.poll()
        if status is not None:
            out.append(f"it ended: {signal.Signals(-status).name if status < 0 else status}")
        elif wrong := self.state()["wrong"]:
            out.append(f"{wrong} wrong results of the library")
        return out

    def close(self) -> None:
        """End clients and target."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        self.process.kill()
        self.process.communicate()

    def _talk(self, tls: bool) -> None:
        rng = random.Random(tls)
        try:
            while not self._over.is_set():
                with contextlib.closing(self._connect(tls)) as connection:
                    for _ in range(20):  # then a new one: handshakes are hooked too
                        self._once(connection, rng)
                        if self._over.wait(_PAUSE_S):
                            return
        except (OSError, http.client.HTTPException) as exc:
            if not self._over.is_set():
                self.bad.append(f"{'TLS' if tls else 'plain'}: {type(exc).__name__}: {exc}")

    def _connect(self, tls: bool) -> http.client.HTTPConnection:
        if tls:
            return http.client.HTTPSConnection(
                "127.0.0.1", self._ports["tls"], timeout=60, context=self._context
            )
        return http.client.HTTPConnection("127.0.0.1", self._ports["plain"], timeout=60)

    def _once(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        body = rng.randbytes(rng.randrange(1, _MOST_BYTES))
        connection.request("POST", "/", body)
        got = connection.getresponse().read()
        if got != body[::-1] + hashlib.sha256(body).digest():
            self.bad.append(f"a wrong answer of {len(got)} bytes to {len(body)}")
        with self._lock:
            self.verified += 1


@contextlib.contextmanager
def targets(folder: Path) -> Iterator[tuple[Target, Target]]:
    """A free one and a confined one, warm."""
    parts = ingredients(folder)
    free = Target(parts, confined=False)
    try:
        confined = Target(parts, confined=True)
        try:
            while min(free.verified, confined.verified) < 50 and not (free.bad or confined.bad):
                time.sleep(0.1)
            yield free, confined
        finally:
            confined.close()
    finally:
        free.close()
