"""Facts of a host on which everything is fine; tests spoil one at a time."""

from __future__ import annotations

from pathlib import Path

from whyspan.discovery import Found
from whyspan.doctor import files
from whyspan.doctor.host import HostFacts
from whyspan.doctor.install import InstallFacts
from whyspan.doctor.kernel import KernelFacts
from whyspan.doctor.network import NetworkFacts
from whyspan.doctor.place import PlaceFacts
from whyspan.doctor.privileges import BITS, PrivilegeFacts, Rights
from whyspan.doctor.servers import ServerFacts
from whyspan.doctor.service import UNITS, ServiceFacts
from whyspan_probes.features import Features
from whyspan_probes.libraries import Library, State

KINDS = ("tp_btf", "tracepoint", "syscalls", "fentry", "kprobe", "uprobe.multi", "uprobe")
FEATURES = Features("6.12.0", True, "none", "/sys/kernel/tracing", frozenset(BITS))
KERNEL = KernelFacts(
    FEATURES, "/sys/kernel/btf/vmlinux", True, "x86_64", dict.fromkeys(KINDS, ""), True, "quiet"
)
OWN = Rights(0, frozenset(BITS), False, 0)
PRIVILEGES = PrivilegeFacts("6.12.0", OWN, OWN._replace(pid=9), False, True, True, False, True, True, "")
INSTALL = InstallFacts("1.6", "", (), "", True, "3.11.2", "0.1.0")
HOST = HostFacts(frozenset({2}), frozenset({"cpu", "memory"}), 8, 8, 64_000, "tsc", True, ())
MB = 1 << 20
PLACE = PlaceFacts(
    Path("/var/lib/whyspan"),
    True,
    True,
    True,
    0o750,
    "whyspan",
    True,
    Path("/var/lib/whyspan/whyspan.db"),
    100 * MB,
    512 * MB,
    True,
    0,
    256 * MB,
    10_000 * MB,
    "",
)
UNIT = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "Result": "success",
    "NRestarts": "0",
    "StatusText": "16 probes attached",
    "MainPID": "9",
}
SERVICE = ServiceFacts(dict.fromkeys(UNITS, UNIT), "", {"tgid": 9, "probes": [], "watched": []})
NETWORK = NetworkFacts("", (("traces", "http://c:4317"),), {"http://c:4317": ""}, "127.0.0.1:9464", "")


def library(path: str, state: State = State.OK) -> Library:
    """A file of process 7."""
    return Library(7, path, 1, hash(path) & 0xFFFF, False, "ab" * 20, path, state)


SERVER = ServerFacts(
    Found(7, 1.0, "vllm", "command line"),
    looked=True,
    libraries=(library("/usr/bin/python3.11"),),
    program=files.Program("x86_64", False, False),
    libc="glibc 2.36",
    tls="libssl.so.3",
    python=files.Python("3.11", "notes"),
    marker=True,
    ports=(8000,),
)
