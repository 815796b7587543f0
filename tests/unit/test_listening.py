"""Whether a process listens: by the tables of its own network namespace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan.listening import listens

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = "   {n}: 0100007F:1F40 00000000:0000 {st} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0\n"
SERVE = "import socket; s = socket.create_server(('', 0)); print('ready', flush=True); input()"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A fake /proc with one process that holds sockets 100 and 200."""
    folder = tmp_path / "7"
    (folder / "net").mkdir(parents=True)
    (folder / "fd").mkdir()
    for fd, target in enumerate(["/dev/null", "socket:[100]", "pipe:[300]", "socket:[200]"]):
        (folder / "fd" / str(fd)).symlink_to(target)
    return tmp_path


def table(proc: Path, name: str, *rows: tuple[str, int]) -> None:
    text = HEAD + "".join(ROW.format(n=n, st=st, inode=inode) for n, (st, inode) in enumerate(rows))
    (proc / "7" / "net" / name).write_text(text)


def test_a_socket_of_the_process_in_the_state_listen(proc: Path) -> None:
    assert not listens(7, proc)  # no table at all
    table(proc, "tcp", ("01", 100), ("0A", 300), ("0A", 999))
    assert not listens(7, proc)  # established; a pipe's number; somebody else's
    table(proc, "tcp6", ("0A", 200))
    assert listens(7, proc)
    table(proc, "tcp6")
    table(proc, "tcp", ("0A", 100))
    assert listens(7, proc)


def test_torn_tables_and_gone_processes(proc: Path) -> None:
    (proc / "7" / "net" / "tcp").write_text("")
    (proc / "7" / "net" / "tcp6").write_bytes(b"\xff\n\n  0: 1 2 0A\n")
    assert not listens(7, proc)
    assert not listens(8, proc)
    table(proc, "tcp", ("0A", 100))
    shutil.rmtree(proc / "7" / "fd")
    assert not listens(7, proc)


@pytest.fixture(params=["here", "elsewhere"])
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    """A listening process, in our network namespace or in one of its own."""
    before = [] if request.param == "here" else ["unshare", "--net"]
    if before and os.geteuid() != 0:
        pytest.skip("needs root: makes a network namespace")
    child = subprocess.Popen(
        [*before, sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    yield child.pid
    child.kill()
    child.communicate()


def test_a_real_server(server: int) -> None:
    assert listens(server)


def test_this_process() -> None:
    assert not listens(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as s:
        assert listens(os.getpid())
        with socket.create_connection(s.getsockname()):
            pass
    assert not listens(os.getpid())
