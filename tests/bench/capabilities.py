"""What the collector can do with each capability left out: the table in SECURITY.md. Root, some three minutes.

``python -m tests.bench.capabilities`` runs collector and exporter as a plain user beside a server of root's in a mount
namespace of its own, and prints what differs from a collector that has everything.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from whyspan.systemd import parse

from tests import tracefs

ROOT: Final = Path(__file__).resolve().parents[2]
#: As in the unit; the numbers are those of linux/capability.h, since Debian 12's setpriv does not know all names.
CAPABILITIES: Final = {
    "CAP_BPF": 39,
    "CAP_PERFMON": 38,
    "CAP_SYS_PTRACE": 19,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_CHECKPOINT_RESTORE": 40,
    "CAP_SYSLOG": 34,
    "CAP_SYS_ADMIN": 21,
}
#: A user and a group that nobody is. Both processes are this user: the exporter lets in its own, root, and the one of
#: the package, which a host without it does not have.
COLLECTOR = GROUP = 64123
WHYSPAN: Final = str(Path(sys.executable).with_name("whyspan"))
REQUESTS: Final = 40
_READY_S: Final = 60.0
_SERVER: Final = """
import gc, http.server, os, ssl, sys
sys.path.insert(0, sys.argv[2])
from whyspan_inproc import _marker
os.unlink(_marker.__file__)  # as an upgrade does: only its mapping still leads to it
heap = [[n] for n in range(200_000)]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        gc.collect()
        body = b"x" * 100
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
_CONFIG: Final = """
[targets]
auto = false
match = [{{ pid = {pid}, service = "served" }}]
[slo]
e2e_ms = 0.001
[collector]
explain_per_s = 1000
budget_core_ratio = 1.0
[run]
state_dir = "{state}"
"""


def privileges(uid: int, held: Sequence[str]) -> list[str]:
    """Return the beginning of a command that runs the rest as *uid* with these capabilities and no others."""
    some = ",".join(["-all", *(f"+cap_{CAPABILITIES[name]}" for name in held)])
    groups = [f"--reuid={uid}", f"--regid={GROUP}", "--clear-groups", "--no-new-privs"]
    return ["setpriv", *groups, f"--bounding-set={some}", f"--inh-caps={some}", f"--ambient-caps={some}"]


def certificate(folder: Path) -> Path:
    """Make a certificate for 127.0.0.1, with its key in the same file."""
    path = folder / "server.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-days", "2", "-nodes", "-newkey", "rsa:2048"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "crt")]
    words = ["openssl", "req", "-x509", *subject, *files]
    subprocess.run(words, check=True, capture_output=True)
    path.write_bytes((folder / "key").read_bytes() + (folder / "crt").read_bytes())
    return path


def serve(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start the server; a module that it maps lies on a file system that only it sees."""
    hidden = folder / "hidden"
    hidden.mkdir()
    package = ROOT / "probes/whyspan_inproc/whyspan_inproc"
    program = folder / "server.py"
    program.write_text(_SERVER)
    script = 'mount -t tmpfs tmpfs "$1" && cp -r "$2" "$1" && shift 2 && exec "$@"'
    command = ["/usr/bin/python3", str(program), str(certificate(folder)), str(hidden)]
    words = ["unshare", "--mount", "sh", "-c", script, "sh", str(hidden), str(package), *command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def ask(port: int) -> None:
    """Send the requests, on one connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain) as sock,
        sock.makefile("rb") as answers,
    ):
        for _ in range(REQUESTS):
            sock.sendall(b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n")
            length = 0
            while (line := answers.readline().strip()) or not length:
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            answers.read(length)


class Service:
    """One of the two processes, and what it tells its manager."""

    def __init__(self, module: str, uid: int, held: Sequence[str], config: Path) -> None:
        """Start it."""
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind("")
        address = "@" + self._manager.getsockname()[1:].decode()
        env = {
            "PATH": os.environ["PATH"],
            "NOTIFY_SOCKET": address,
            "HOME": "/",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = [sys.executable, "-P", "-m", module, "--config", str(config)]
        self._said = config.with_name(f"{module}.log")
        with self._said.open("wb") as log:
            self.process = subprocess.Popen([*privileges(uid, held), *words], env=env, stderr=log, cwd="/")

    def ready(self) -> bool:
        """Wait for it; False when it ends instead."""
        end_s = time.monotonic() + _READY_S
        self._manager.settimeout(0.5)
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                if parse(self._manager.recv(4096)).get("READY") == "1":
                    return True
            except TimeoutError:
                continue
        return False

    def stop(self) -> tuple[int, str]:
        """End it, and return its status and its log."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        self._manager.close()
        return self.process.returncode, self._said.read_text()


def facts(state: Path) -> dict[str, Any]:
    """Return what the collector's newest status says, one line per fact."""
    done = subprocess.run(
        [WHYSPAN, "probes", "--json", "--store", str(state / "whyspan.db")],
        capture_output=True,
        text=True,
        check=True,
    )
    status = json.loads(done.stdout)["status"]
    out: dict[str, Any] = {}
    for probe in status.get("probes", ()):
        out[f"probe {probe['name']}"] = f"{probe['state']} {probe['reason']}".strip()
        for name, hook in probe["hooks"].items():
            out[f"hook {probe['name']}.{name}"] = ", ".join(hook["used"]) or "none"
        for file in probe["files"]:
            path = re.sub(r"/tmp/[^/]*/", "", file["path"])
            out[f"file {probe['name']}.{file['hook']} {path}"] = f"{file['state']} {file['reason']}".strip()
        if probe["events"]:
            out[f"events of {probe['name']}"] = "some"
    out["cost of the probes"] = "measured" if status.get("bpf_core_ratio") else "not measured"
    out["watched"] = len(status.get("watched", ()))
    return out


def findings(state: Path) -> dict[str, Any]:
    """Return how many requests were explained, and by what."""
    words = ["slow", "--all", "--limit", "1000", "--json", "--store", str(state / "whyspan.db")]
    done = subprocess.run([WHYSPAN, *words], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout or "[]")
    with_cause = sum(f["verdict"]["cause"] == "python.gc_pause" for f in found)
    return {
        "requests explained": "all" if len(found) >= REQUESTS else len(found),
        "blamed on gc": with_cause > 0,
    }


def burst(tgid: int, held: Sequence[str]) -> dict[str, Any]:
    """Return whether a burst can be had, and whether it names functions."""
    words = [WHYSPAN, "burst", "malloc", "--pid", str(tgid)]
    done = subprocess.run(
        [*privileges(COLLECTOR, held), *words, "--seconds", "0.5", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode:
        return {"burst": done.stderr.strip().splitlines()[-1:]}
    return {"burst": "yes", "kernel functions named": "[unknown]" not in done.stdout}


def measure(folder: Path, tgid: int, port: int, held: Sequence[str]) -> dict[str, Any]:
    """Run both processes once, the collector with these capabilities."""
    state = folder / "state"
    own = state / "collector"
    own.mkdir(parents=True)
    os.chown(state, COLLECTOR, GROUP)
    os.chown(own, COLLECTOR, GROUP)
    for path in (folder, state, own):
        path.chmod(0o755 if path == folder else 0o750)
    config = folder / "whyspan.toml"
    config.write_text(_CONFIG.format(pid=tgid, state=state))
    exporter = Service("whyspan_exporters.exporter", COLLECTOR, [], config)
    assert exporter.ready(), exporter.stop()
    collector = Service("whyspan.pipeline.collector", COLLECTOR, held, config)
    out: dict[str, Any] = {}
    try:
        out["ready"] = collector.ready()
        if out["ready"]:
            time.sleep(3)  # user hooks; the governor's window of a second
            ask(port)
            time.sleep(4)
            out |= facts(state) | findings(state)
    finally:
        code, log = collector.stop()
        exporter.stop()
    out["exit status"] = code
    log = "\n".join(line for line in log.splitlines() if "service manager is not told" not in line)
    said = {
        re.sub(r"^\S+ \S+ ", "", line)
        for line in log.splitlines()
        if " WARNING " in line or " ERROR " in line
    }
    for line in sorted(said):
        out[f"log: {line}"] = "said"
    return out | burst(tgid, held)


def main() -> None:
    """Print the differences, and write everything to ``build/bench/capabilities.json``."""
    results: dict[str, dict[str, Any]] = {}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-sys-admin", action="store_true", help="Leave it out always: it implies others.")
    parser.add_argument("--only", nargs="*", choices=CAPABILITIES, help="Leave out only these in turn.")
    arguments = parser.parse_args()
    no_admin = arguments.no_sys_admin
    everything = [name for name in CAPABILITIES if not (no_admin and name == "CAP_SYS_ADMIN")]
    with tracefs.mounted(), tempfile.TemporaryDirectory(dir="/tmp") as top:
        Path(top).chmod(0o755)
        server, port = serve(Path(top))
        try:
            for left_out in ("", *(everything if arguments.only is None else arguments.only)):
                held = [name for name in everything if name != left_out]
                folder = Path(top, left_out or "all")
                folder.mkdir()
                found = results[left_out] = measure(folder, server.pid, port, held)
                print(f"without {left_out or 'nothing'}:", flush=True)
                for key in sorted(results[""].keys() | found.keys()):
                    now, then = found.get(key), results[""].get(key)
                    if now != then or not left_out:
                        print(f"  {key}: {now}" + (f" (was: {then})" if left_out else ""), flush=True)
        finally:
            server.kill()
            server.wait()
    path = ROOT / f"build/bench/capabilities{'-no-sys-admin' if no_admin else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"kernel": os.uname().release, "without": results}, indent=1))


if __name__ == "__main__":
    main()
