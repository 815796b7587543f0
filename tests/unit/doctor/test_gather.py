"""What doctor gathers: of real processes, of files, of a made /proc, of endpoints."""

from __future__ import annotations

import platform
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whyspan.config import Config, Otlp, Prometheus, Run, StoreSection
from whyspan.discovery import Found
from whyspan.doctor import files, host, install, kernel, network, place, privileges, servers, service
from whyspan.doctor.servers import ServerFacts
from whyspan_probes import libraries
from whyspan_probes.features import kernel_version, read_features
from whyspan_probes.kernel_btf import KernelBtf

CHILD = Path(__file__).with_name("child.py")
PYTHON = "/usr/bin/python3"

Look = Callable[..., ServerFacts]


def look_at(tgid: int) -> ServerFacts:
    (found,) = servers.gather([Found(tgid, 1.0, "x", "test")], read_features())
    return found


@pytest.fixture
def child() -> Iterator[Callable[..., tuple[ServerFacts, str]]]:
    """Start the child with words and look into it; returns what was found, and what the child said."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, python: str = sys.executable) -> tuple[ServerFacts, str]:
        process = subprocess.Popen(
            [python, str(CHILD), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said.startswith("no "):
            pytest.skip(said)
        return look_at(process.pid), said

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_plain_python(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, _ = child()
    assert found.looked
    assert found.maps == ""
    assert found.program == files.Program(platform.machine(), False, False)
    assert found.libc.startswith(("glibc 2.", "musl"))
    assert found.python is not None
    assert found.python.version == f"3.{sys.version_info.minor}"
    assert (found.refused, found.tracer, found.uring, found.marker, found.ports) == ("", 0, False, False, ())


@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no Python of the distribution")
def test_debians_python_has_notes(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, _ = child(python=PYTHON)
    with open(PYTHON, "rb") as f:
        has = b"gc__start" in f.read()
    assert found.python is not None
    assert (found.python.collections == "notes") is has


def test_tls_is_found_by_its_functions(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, _ = child("tls")
    # A library of its own, or linked into the interpreter or its module.
    assert found.tls.startswith(("libssl", "_ssl", "libpython", "python"))


def test_a_filtered_one_gets_no_return_probe(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, _ = child("filtered")
    is_new = kernel_version(read_features().kernel) >= (6, 11)
    assert ("seccomp-filtered" in found.refused) is is_new


def test_a_traced_one_has_its_tracer(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, _ = child("traced")
    assert found.tracer > 0
    assert found.tracer_name


def test_a_ring_is_seen(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, _ = child("ring")
    assert found.uring


def test_ports(child: Callable[..., tuple[ServerFacts, str]]) -> None:
    found, said = child("listening")
    assert found.ports == (int(said.split()[0]),)


def test_a_static_program() -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox")
    process = subprocess.Popen([busybox, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a\n")
        process.stdin.flush()
        process.stdout.readline()  # it runs, and is no longer a copy of this process
        found = look_at(process.pid)
        with open(busybox, "rb") as f:
            has_interpreter = b"/ld-linux" in f.read(4096)
        assert found.program.static is not has_interpreter
        assert found.libc == "" or has_interpreter
    finally:
        process.kill()
        process.communicate()


def test_one_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    found = look_at(process.pid)
    assert found.maps == libraries.State.GONE
    assert found.program.machine == ""


def test_of_too_many_the_rest_is_only_named() -> None:
    many = [Found(10_000_000 + n, 1.0, "x", "test") for n in range(servers.MAX_SERVERS + 1)]
    assert [s.looked for s in servers.gather(many, read_features())] == [True] * servers.MAX_SERVERS + [False]


@pytest.mark.parametrize(
    ("cgroup", "runtime"),
    [
        (f"/system.slice/docker-{'a' * 64}.scope", "Docker"),
        (f"/docker/{'a' * 64}", "Docker"),
        (f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{'a' * 64}.scope", "containerd"),
        (f"/kubepods/burstable/pod1/crio-{'a' * 64}", "CRI-O"),
        (f"/machine.slice/libpod-{'a' * 64}.scope", "Podman"),
        (f"/kubepods/burstable/pod1/{'a' * 64}", "Kubernetes"),
        ("/system.slice/chat.service", ""),
    ],
)
def test_runtimes(cgroup: str, runtime: str) -> None:
    assert servers._runtime(cgroup) == runtime


def _elf(machine: int, *segments: tuple[int, bytes]) -> bytes:
    """A 64-bit ELF file with these program headers, each with its bytes."""
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2,
        machine,
        1,
        0,
        64,
        0,
        0,
        64,
        56,
        len(segments),
        64,
        0,
        0,
    )
    at, headers, body = 64 + 56 * len(segments), b"", b""
    for kind, data in segments:
        headers += struct.pack("<IIQQQQQQ", kind, 4, at + len(body), 0, 0, len(data), len(data), 4)
        body += data
    return head + headers + body


_GO_NOTE = struct.pack("<III4s", 4, 4, 4, b"Go\0\0") + b"abcd"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (_elf(62, (3, b"/lib64/ld\0")), files.Program("x86_64", False, False)),
        (_elf(183, (4, _GO_NOTE)), files.Program("aarch64", True, True)),
        (_elf(62), files.Program("x86_64", True, False)),
        (_elf(62, (4, b"\xff" * 40)), files.Program("", False, False)),
        (b"#!/bin/sh\n", files.Program("", False, False)),
        (b"", files.Program("", False, False)),
    ],
)
def test_programs(tmp_path: Path, data: bytes, found: files.Program) -> None:
    path = tmp_path / "program"
    path.write_bytes(data)
    library = libraries.Library(1, str(path), 1, 1, False, "", str(path), libraries.State.OK)
    assert files.program(library) == found
    assert files.python(library) is None
    assert not files.is_tls(library)


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("libc.so.6", b"\0GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\n", "glibc 2.36"),
        ("ld-musl-x86_64.so.1", b"x\x001.2.4\0Version", "musl 1.2.4"),
        ("ld-musl-x86_64.so.1", b"", "musl"),
        ("libc.so.6", b"something else", "libc.so.6"),
    ],
)
def test_c_libraries(tmp_path: Path, name: str, data: bytes, found: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    library = libraries.Library(1, str(path), 1, 1, False, "", str(path), libraries.State.OK)
    assert files.libc(library) == found


@pytest.mark.parametrize(
    ("text", "own"),
    [("         0          0 4294967295\n", False), ("0 1000 1\n", True), ("", False)],
)
def test_user_namespaces(text: str, own: bool) -> None:
    assert privileges._user_namespace(text) is own


@pytest.mark.parametrize(
    ("text", "shifted"),
    [
        ("monotonic           0         0\nboottime            0         0\n", False),
        ("monotonic      172800         0\nboottime            0         0\n", True),
        ("monotonic           0        -5\n", True),
        ("", False),
    ],
)
def test_time_namespaces(text: str, shifted: bool) -> None:
    assert privileges._clock_shifted(text) is shifted


@pytest.mark.parametrize(
    ("text", "profile"),
    [("docker-default (enforce)\n", "docker-default (enforce)"), ("unconfined\n", ""), ("x (complain)", "")],
)
def test_profiles(tmp_path: Path, text: str, profile: str) -> None:
    assert privileges._profile(tmp_path) == ""
    (tmp_path / "current").write_text(text)
    assert privileges._profile(tmp_path) == profile


def _proc(folder: Path, pid: str, status: str) -> Path:
    (folder / pid).mkdir(parents=True)
    (folder / pid / "status").write_text(status)
    return folder


def test_rights(tmp_path: Path) -> None:
    proc = _proc(tmp_path, "9", "CapEff:\t000000c000080004\nNoNewPrivs:\t1\nSeccomp:\t2\n")
    names = frozenset({"CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"})
    assert privileges._rights(9, proc) == privileges.Rights(9, names, True, 2)
    assert privileges._rights(10, proc) is None
    assert privileges._rights(11, _proc(tmp_path, "11", "CapEff:\tjunk\n")) is None


def test_this_host_can_be_looked_at() -> None:
    features = read_features()
    found = kernel.gather(features, KernelBtf.find())
    assert set(found.missing) == {
        "tp_btf",
        "tracepoint",
        "syscalls",
        "fentry",
        "kprobe",
        "uprobe.multi",
        "uprobe",
    }
    assert kernel.checks(found)[0].found == features.kernel
    assert host.gather().cpus_allowed > 0
    assert install.gather().libbpf
    assert privileges.gather(features, True).own.pid == 0


def test_gpus(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("0000:01:00.0", "0x10de", "0x030200"),
        ("0000:02:00.0", "0x1002", "0x120000"),
        ("0000:03:00.0", "0x10de", "0x040300"),  # the sound of a GPU
        ("0000:04:00.0", "0x1a03", "0x030000"),  # a console
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert list(host._gpus(tmp_path)) == ["NVIDIA", "AMD"]
    assert list(host._gpus(tmp_path / "none")) == []


def test_place(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    config = Config(run=Run(state_dir=str(folder)), store=StoreSection(max_mb=16), otlp=Otlp(spool_mb=17))
    before = place.gather(config)
    assert (before.exists, before.makeable, before.store_bytes, before.spool_bytes) == (False, True, -1, 0)
    assert not (tmp_path / "a").exists()
    folder.mkdir(parents=True, mode=0o750)
    (folder / "whyspan.db").write_bytes(b"x" * 1000)
    (folder / "whyspan.db-wal").write_bytes(b"x" * 200)
    (folder / "otlp-spool.db").write_bytes(b"x" * 30)
    after = place.gather(config)
    assert (after.exists, after.writable, after.mode) == (True, True, 0o750)
    assert (after.store_bytes, after.store_max_bytes) == (1200, 16 << 20)
    assert (after.spool_bytes, after.spool_max_bytes) == (30, 17 << 20)
    assert after.free_bytes > 0
    assert place.gather(Config(run=Run(state_dir="/" + "x" * 120))).socket_problem


def test_what_systemctl_shows() -> None:
    shown = (
        "Id=whyspan.service\nActiveState=active\nStatusText=a=b\n\nId=whyspan-exporter.service\nMainPID=3\n"
    )
    units = service.parse(shown)
    assert units["whyspan.service"]["StatusText"] == "a=b"
    assert units["whyspan-exporter.service"]["MainPID"] == "3"
    assert service.parse("") == {}


def test_the_collectors_process() -> None:
    units = {"whyspan.service": {"MainPID": "5"}}
    assert service.ServiceFacts(units, "", {}).collector == 5
    assert service.ServiceFacts(units, "", {"tgid": 6}).collector == 6
    assert service.ServiceFacts({}, "", {"tgid": "x"}).collector == 0


def _config(endpoint: str, certificate: str = "") -> Config:
    otlp = Otlp(endpoint=endpoint, metrics=False, certificate=certificate)
    return Config(otlp=otlp, prometheus=Prometheus(listen="127.0.0.1:9"))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_an_endpoint_that_answers_and_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert network.gather(_config(endpoint), connect=False).answers == {}
        assert network.gather(_config(endpoint), connect=True).answers == {endpoint: ""}
    found = network.gather(_config(endpoint), connect=True)
    assert found.answers == {endpoint: "Connection refused"}
    assert found.prometheus == "127.0.0.1:9"


def test_a_certificate_that_nobody_trusts(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = f"{new} -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    subprocess.run(
        command.split(),
        capture_output=True,
        check=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    pass
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = f"https://localhost:{server.getsockname()[1]}"
        (refused,) = network.gather(_config(endpoint), connect=True).answers.values()
        (trusted,) = network.gather(
            _config(endpoint, certificate=str(certificate)), connect=True
        ).answers.values()
        thread.join()
    assert "its certificate is refused" in refused
    assert trusted == ""


def test_a_wrong_endpoint_is_said() -> None:
    assert "http" in network.gather(_config("ftp://x"), connect=False).problem
