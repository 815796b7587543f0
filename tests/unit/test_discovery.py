"""Which processes are watched: known servers by command line or libraries, configured ones, and their children."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from whyspan import discovery
from whyspan.config import Target, Targets
from whyspan.discovery import (
    Candidate,
    Discovery,
    Found,
    cgroup_of,
    engine_by_library,
    engine_of,
    selects,
    unit_of,
)
from whyspan.listening import listens

Host = dict[int, Candidate]


def process(tgid: int, *cmdline: str, ppid: int = 1, start: float = 1.0, comm: str = "python3") -> Candidate:
    return Candidate(tgid, ppid, start, comm, Path(cmdline[0]).name if cmdline else "", cmdline)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose processes are those in the dictionary."""
    processes: Host = {}

    def open_process(tgid: int) -> SimpleNamespace:
        if tgid not in processes:
            raise psutil.NoSuchProcess(tgid)
        return SimpleNamespace(pid=tgid, create_time=lambda: processes[tgid].start)

    monkeypatch.setattr(psutil, "Process", open_process)
    monkeypatch.setattr(discovery, "candidate", lambda p: processes.get(p.pid))
    return processes


def scanner(
    *match: Target,
    auto: bool = True,
    library: Callable[[int], str] = lambda _: "",
    listens: Callable[[int], bool] = lambda _: False,
) -> Discovery:
    return Discovery(Targets(auto=auto, match=match), library, listens)


@pytest.mark.parametrize(
    ("cmdline", "engine"),
    [
        ("/opt/venv/bin/python3 /opt/venv/bin/vllm serve facebook/opt-125m --port 8000", "vllm"),
        ("vllm serve x", "vllm"),
        ("python3 -m vllm.entrypoints.openai.api_server --model x", "vllm"),
        ("python -m vllm", "vllm"),
        ("VLLM::EngineCore", "vllm"),
        ("VLLM::Worker_TP0", "vllm"),
        ("python3 -m sglang.launch_server --model-path x", "sglang"),
        ("python3 -m sglang serve", "sglang"),
        ("sglang::scheduler", "sglang"),
        ("/usr/bin/sglang serve --model x", "sglang"),
        ("/usr/local/bin/llama-server -m x.gguf", "llama.cpp"),
        ("./llama-server", "llama.cpp"),
        ("python -m llama_cpp.server --model x", "llama.cpp"),
        ("text-generation-launcher --model-id x", "tgi"),
        ("/usr/bin/text-generation-router", "tgi"),
        ("/usr/bin/python3 /usr/bin/text-generation-server serve x", "tgi"),
        ("/usr/bin/ollama serve", "ollama"),
        ("/usr/bin/ollama runner --model x", "ollama"),
        ("/opt/venv/bin/python /opt/venv/bin/transformers serve", "transformers"),
        ("uvicorn app:app --port 80", "uvicorn"),
        ("/usr/bin/python3 /usr/bin/uvicorn app:app", "uvicorn"),
        ("python -m uvicorn app:app", "uvicorn"),
        # The server proper comes before what serves it.
        ("/bin/uvicorn vllm.entrypoints.openai.api_server:app", "vllm"),
    ],
)
def test_known_servers(cmdline: str, engine: str) -> None:
    assert engine_of(process(1, *cmdline.split())) == engine


@pytest.mark.parametrize(
    "cmdline",
    [
        "",
        "/usr/bin/nginx -g daemon",
        "python3 -m http.server",
        "python3 train.py --model llama",
        "vim vllm.py",
        "my-llama-server-exporter",
        "ollama list",
        "/usr/bin/ollama run x",
        "cat /var/log/uvicorn.log",
        "python3 -m vllmtools",
        "transformers-cli env",
        "tail -f /srv/novllm serve",
    ],
)
def test_others_are_not(cmdline: str) -> None:
    assert engine_of(process(1, *cmdline.split())) == ""


def test_a_command_line_of_megabytes_is_bounded() -> None:
    assert engine_of(process(1, "x" * 5_000_000, "vllm", "serve")) == ""


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("/usr/lib/libllama.so.1", "llama.cpp"),
        ("/venv/lib/python3.11/site-packages/vllm/_C.abi3.so", "vllm"),
        ("/venv/site-packages/sgl_kernel/common_ops.so", "sglang"),
        ("/venv/site-packages/torch/lib/libtorch_cpu.so", "torch"),
        ("/usr/lib/libc.so.6", ""),
    ],
)
def test_servers_by_their_libraries(tmp_path: Path, line: str, engine: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text(f"7f00-7f01 r-xp 00000000 08:01 99   {line}\n")
    assert engine_by_library(7, tmp_path) == engine
    assert engine_by_library(8, tmp_path) == ""


def test_a_library_alone_is_not_a_server(host: Host) -> None:
    host[5] = process(5, "python3", "train.py")
    assert scanner(library=lambda _: "torch").scan([5]) == ([], [])
    d = scanner(library=lambda _: "torch", listens=lambda _: True)
    assert d.scan([5])[0] == [Found(5, 1.0, "torch", "libraries and a listening port")]


def test_a_server_is_found_once_and_gone_once(host: Host) -> None:
    host[5] = process(5, "vllm", "serve", "x")
    host[6] = process(6, "nginx")
    d = scanner()
    assert d.scan([5, 6]) == ([Found(5, 1.0, "vllm", "command line")], [])
    assert d.scan([5, 6]) == ([], [])
    del host[5]
    assert d.scan([6]) == ([], [5])
    assert d.scan([6]) == ([], [])
    assert d.found == {}


def test_a_process_that_goes_while_it_is_looked_at(host: Host) -> None:
    d = scanner()
    assert d.scan([5]) == ([], [])
    host[5] = process(5, "vllm", "serve")
    assert [f.tgid for f in d.scan([5])[0]] == [5]


def test_young_processes_are_looked_at_three_times(host: Host) -> None:
    host[5] = process(5, "sh")
    d = scanner()
    d.scan([5])
    host[5] = process(5, "vllm", "serve")  # it has executed the server by now
    assert [f.tgid for f in d.scan([5])[0]] == [5]
    host[6] = process(6, "sh")
    for _ in range(3):
        d.scan([5, 6])
    host[6] = process(6, "vllm", "serve")
    assert d.scan([5, 6]) == ([], [])
    d.recheck(6)
    assert [f.tgid for f in d.scan([5, 6])[0]] == [6]


def test_a_number_reused_by_another_program_is_gone(host: Host) -> None:
    host[5] = process(5, "vllm", "serve", start=1.0)
    d = scanner()
    d.scan([5])
    for _ in range(5):
        d.scan([5])
    host[5] = process(5, "nginx", start=2.0)
    assert d.scan([5]) == ([], [5])
    assert d.found == {}


def test_a_number_reused_by_another_server_is_new_and_stays_watched(host: Host) -> None:
    host[5] = process(5, "vllm", "serve", start=1.0)
    d = scanner()
    d.scan([5])
    host[5] = process(5, "/usr/bin/ollama", "serve", start=2.0)
    # Listed as gone too, it would be unwatched right after it was watched.
    assert d.scan([5]) == ([Found(5, 2.0, "ollama", "command line")], [])
    assert d.found[5].service == "ollama"


def test_a_number_reused_while_it_was_young(host: Host) -> None:
    host[5] = process(5, "sh", start=1.0)
    d = scanner()
    d.scan([5])
    host[5] = process(5, "vllm", "serve", start=2.0)
    assert d.scan([5])[0] == [Found(5, 2.0, "vllm", "command line")]


def test_a_number_reused_after_it_was_gone(host: Host) -> None:
    host[5] = process(5, "nginx", start=1.0)
    d = scanner()
    for _ in range(5):
        d.scan([5])
    d.scan([])
    host[5] = process(5, "vllm", "serve", start=2.0)
    assert [f.tgid for f in d.scan([5])[0]] == [5]


def test_children_serve_their_parents_service(host: Host) -> None:
    host[5] = process(5, "vllm", "serve")
    host[6] = process(6, "python3", "-c", "spawn_main", ppid=5)
    host[7] = process(7, "python3", "-c", "spawn_main", ppid=6)
    host[8] = process(8, "nginx", ppid=1)
    new, _ = scanner().scan([5, 6, 7, 8])
    assert [(f.tgid, f.service, f.rule) for f in new] == [
        (5, "vllm", "command line"),
        (6, "vllm", "child of 5"),
        (7, "vllm", "child of 6"),
    ]


def test_forks_are_adopted(host: Host) -> None:
    host[5] = process(5, "vllm", "serve")
    host[9] = process(9, "vllm", "serve", ppid=5, start=4.0)
    d = scanner()
    d.scan([5])
    d.adopt(5, 9)
    assert d.found[9] == Found(9, 4.0, "vllm", "child of 5")
    assert d.scan([5, 9]) == ([], [])
    d.adopt(1234, 5678)  # of a process that is not ours
    d.adopt(5, 10)  # gone already
    assert set(d.found) == {5, 9}
    del host[5]
    assert d.scan([9]) == ([], [5])  # orphans stay
    d.forget(9)
    assert d.found == {}
    assert d.scan([9])[0] == [Found(9, 4.0, "vllm", "command line")]


def test_auto_off_watches_only_what_is_named(host: Host) -> None:
    host[5] = process(5, "vllm", "serve")
    host[6] = process(6, "nginx", comm="nginx")
    host[7] = process(7, "nginx", ppid=6, comm="nginx")
    new, _ = scanner(Target(pid=6), auto=False).scan([5, 6, 7])
    assert new == [Found(6, 1.0, "nginx", "configuration"), Found(7, 1.0, "nginx", "child of 6")]


def test_the_service_name_is_the_targets_else_the_engines_else_the_programs(host: Host) -> None:
    host[5] = process(5, "vllm", "serve")
    host[6] = process(6, "myserver", comm="my\x1b[31m")
    host[7] = process(7, "other")
    named = (Target(pid=5), Target(pid=6), Target(pid=7, service="chat\x07"))
    assert [f.service for f in scanner(*named).scan([5, 6, 7])[0]] == ["vllm", "my\\x1b[31m", "chat\\x07"]


CGROUP = "/system.slice/vllm@0.service/worker"


@pytest.mark.parametrize(
    ("target", "selected"),
    [
        (Target(pid=5), True),
        (Target(pid=6), False),
        (Target(comm="python3"), True),
        (Target(comm="serve.sh"), True),  # the executable's name
        (Target(comm="python"), False),
        (Target(unit="vllm@0.service"), True),
        (Target(unit="vllm@0"), True),
        (Target(unit="vllm"), False),
        (Target(cgroup=CGROUP), True),
        (Target(cgroup="/system.slice/vllm@0.service"), True),
        (Target(cgroup="/system.slice/vllm@0.service/"), True),
        (Target(cgroup="/system.slice/vllm@0"), False),  # no parent, only a prefix
        (Target(cgroup="/"), True),
        (Target(pid=5, comm="python3", unit="vllm@0", cgroup="/system.slice"), True),
        (Target(pid=5, comm="nginx"), False),
        (Target(comm="python3", unit="other"), False),
    ],
)
def test_a_target_selects_by_all_that_it_names(target: Target, selected: bool) -> None:
    assert selects(target, process(5, "/opt/serve.sh", "x"), CGROUP) is selected


def test_a_target_by_cgroup_is_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host[5], host[6] = process(5, "a"), process(6, "b")
    monkeypatch.setattr(discovery, "cgroup_of", lambda tgid: f"/box/{tgid}")
    assert [f.tgid for f in scanner(Target(cgroup="/box/6")).scan([5, 6])[0]] == [6]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/a.service\n", "/system.slice/a.service"),
        ("0::/\n", "/"),
        ("4:cpu,cpuacct:/v1\n3:cpuset:/set\n0::/two\n", "/v1"),
        ("4:cpuacct,cpu:/v1\n0::/two\n", "/v1"),
        ("9:cpuacct:/a\n3:cpuset:/set\n1:name=systemd:/s\n0::/two\n", "/two"),
        ("0::/two\n4:cpu:/v1\n", "/v1"),
        ("0::/a:b/c\n", "/a:b/c"),
        ("1:name=systemd:/s\n", ""),
        ("garbage\n", ""),
        ("", ""),
    ],
)
def test_cgroup_of(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_text(text)
    assert cgroup_of(5, tmp_path) == expected
    assert cgroup_of(6, tmp_path) == ""


def test_a_cgroup_may_have_any_bytes_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_bytes(b"0::/a\xff/b\n")
    assert cgroup_of(5, tmp_path) == "/a\ufffd/b"


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/vllm.service", "vllm.service"),
        ("/system.slice/vllm@0.service/sub", "vllm@0.service"),
        ("/system.slice/docker-abc.scope", "docker-abc.scope"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/chat.service", "chat.service"),
        ("/system.slice", ""),
        ("/a.serviceable/x", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_unit_of(cgroup: str, unit: str) -> None:
    assert unit_of(cgroup) == unit


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line is llama.cpp's."""
    child = subprocess.Popen(["/opt/bin/llama-server", "300"], executable="/bin/sleep")
    yield child
    child.kill()
    child.wait()


def test_a_real_process(server: subprocess.Popen[bytes]) -> None:
    c = discovery.candidate(psutil.Process(server.pid))
    assert c is not None
    assert (c.tgid, c.exe, c.cmdline) == (server.pid, "llama-server", ("/opt/bin/llama-server", "300"))
    d = Discovery(Targets())
    new, _ = d.scan([server.pid])
    assert [(f.service, f.rule) for f in new] == [("llama.cpp", "command line")]
    assert not listens(server.pid)
    server.kill()
    server.wait()
    assert d.scan([]) == ([], [server.pid])


def test_the_whole_host_is_scanned_without_trouble(server: subprocess.Popen[bytes]) -> None:
    new, gone = Discovery(Targets(match=(Target(pid=server.pid, service="mine"),), auto=False)).scan()
    assert [(f.tgid, f.service) for f in new] == [(server.pid, "mine")]
    assert gone == []


def test_the_agent_never_watches_itself() -> None:
    target = Target(comm=psutil.Process().name(), service="everything")
    d = Discovery(Targets(auto=False, match=(target,)), supervisor=os.getppid())
    d.scan([os.getpid()])
    assert d.found == {}
    watched = Discovery(Targets(auto=False, match=(target,)))
    watched._own = 0
    watched.scan([os.getpid()])
    assert set(watched.found) == {os.getpid()}


def test_other_targets(host: Host) -> None:
    for tgid, comm in ((10, "a"), (20, "b"), (30, "c")):
        host[tgid] = process(tgid, f"/bin/{comm}", comm=comm)
    host[31] = process(31, "/bin/x", ppid=30, comm="x")
    d = scanner(Target(comm="a", service="one"), Target(comm="b", service="two"), auto=False)
    assert [f.tgid for f in d.scan(host)[0]] == [10, 20]
    targets = Targets(
        auto=False, match=(Target(comm="a", service="one"), Target(comm="c"), Target(comm="b", service="2"))
    )
    new, gone = d.retarget(targets, host)
    # The first stays as it was; the second has another name; the third is new, and its child with it.
    assert [(f.tgid, f.service) for f in new] == [(20, "2"), (30, "c"), (31, "c")]
    assert gone == []
    new, gone = d.retarget(Targets(auto=False, match=(Target(comm="a", service="one"),)), host)
    assert (new, gone) == ([], [20, 30, 31])
    assert sorted(d.found) == [10]
