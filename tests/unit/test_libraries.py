"""The files a process maps, found again: through namespaces, deleted, replaced, oddly named, or not at all."""

from __future__ import annotations

import ctypes
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whyspan_probes import libraries
from whyspan_probes.libraries import Library, Mapped, State, build_id, distinct, executable, find, mapped

GONE = 2**22 + 17  # above the greatest possible pid
LIBC = Path(next(f.path for f in mapped(os.getpid()).files if re.search(r"/libc[.-]", f.path)))
HOLD = (
    "import ctypes, sys; kept = [ctypes.CDLL(p) for p in sys.argv[1:]]; print('ready', flush=True); input()"
)

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library that nobody else maps."""
    source = next(
        Path(f.path) for f in mapped(os.getpid()).files if re.search(r"/lib(z|m|expat)[.-]", f.path)
    )
    return Path(shutil.copy(source, tmp_path / "libthing.so.1"))


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that has these libraries mapped."""
    children: list[subprocess.Popen[bytes]] = []

    def run(*paths: Path, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [*before, sys.executable, "-c", HOLD, *map(os.fsencode, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def may_follow_mappings() -> bool:
    """Whether this process may open /proc/PID/map_files: CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE."""
    first = os.listdir("/proc/self/map_files")[0]
    try:
        os.stat(f"/proc/self/map_files/{first}")
    except PermissionError:
        return False
    return True


def fake(tmp_path: Path, maps: bytes) -> Path:
    folder = tmp_path / "proc" / str(GONE)
    folder.mkdir(parents=True)
    (folder / "maps").write_bytes(maps)
    return tmp_path / "proc"


def one(found: list[Library]) -> Library:
    (library,) = found
    return library


def test_maps_are_read_whatever_the_names(tmp_path: Path) -> None:
    proc = fake(
        tmp_path,
        b"00400000-00401000 r--p 00000000 fd:00 7                          /opt/a b/server (deleted)\n"
        b"00401000-00402000 r-xp 00001000 fd:00 7                          /opt/a b/server (deleted)\n"
        b"00600000-00601000 rw-p 00000000 00:00 0                          [heap]\n"
        b"7f0000000000-7f0000001000 r--p 00000000 fd:00 8                  /lib/lib\xff\xfe\x0b\xc2\x85.so\n"
        b"7f0000001000-7f0000002000 r-xp 00000000 fd:00 9                  /lib/new\\012line.so\n"
        b"7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n"
        b"7f0000003000-7f0000004000 rw-s 00000000 00:01 3072               /memfd:ring (deleted)\n"
        b"7f0000004000-7f0000005000 r--p 00000000 fd:00 8                  /lib/lib\xff\xfe\x0b\xc2\x85.so\n"
        b"7f0000005000-7f0000006000 r--p 00000000 fd:01 8                  /lib/lib\xff\xfe\x0b\xc2\x85.so\n"
        b"7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0                  [vdso]\n"
        b"ff 7\n",
    )
    odd = os.fsdecode(b"/lib/lib\xff\xfe\x0b\xc2\x85.so")
    assert mapped(GONE, proc) == (
        (
            Mapped("/opt/a b/server", 7, True, True, "00400000-00401000"),
            Mapped(odd, 8, False, False, "7f0000000000-7f0000001000"),
            Mapped("/lib/new\nline.so", 9, False, True, "7f0000001000-7f0000002000"),
            Mapped("/memfd:ring", 3072, True, False, "7f0000003000-7f0000004000"),
            Mapped(odd, 8, False, False, "7f0000005000-7f0000006000"),  # of another file system
        ),
        State.OK,
    )


def test_a_process_that_is_gone_has_a_state() -> None:
    assert mapped(GONE) == ((), State.GONE)
    assert find(GONE, re.compile("libc")) == []
    assert executable(GONE) == Library(GONE, "", 0, 0, False, "", "", State.GONE)


def test_own_libraries_are_found_by_their_files() -> None:
    me = os.getpid()
    libc = one(find(me, re.compile(r"/libc[.-]")))
    info = LIBC.stat()
    assert (libc.device, libc.inode, libc.state) == (info.st_dev, info.st_ino, State.OK)
    assert (libc.tgid, libc.path, libc.name, libc.deleted) == (me, str(LIBC), LIBC.name, False)
    assert os.path.samefile(libc.open_path, LIBC)
    program = executable(me)
    assert os.path.samefile(program.open_path, sys.executable)
    assert program.path == os.path.realpath(sys.executable)


def test_the_build_id_is_the_files(library: Path) -> None:
    ids = set()
    for path in (LIBC, library, Path(sys.executable)):
        done = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=False)
        expected = re.search(r"Build ID: ([0-9a-f]+)", done.stdout)
        if done.returncode or not expected:
            pytest.skip("no readelf here, or a file without build id")
        with path.open("rb") as f:
            assert build_id(f) == expected[1]
        ids.add(expected[1])
    assert len(ids) == 3


def elf(note: bytes, *, phnum: int = 1, filesz: int | None = None) -> bytes:
    """A 64-bit ELF file of one note segment."""
    head = b"\x7fELF\2\1\1" + bytes(9)
    head += (3).to_bytes(2, "little") + (62).to_bytes(2, "little") + (1).to_bytes(4, "little")
    head += bytes(8) + (64).to_bytes(8, "little") + bytes(8) + bytes(4)
    head += b"".join(n.to_bytes(2, "little") for n in (64, 56, phnum, 64, 0, 0))
    size = len(note) if filesz is None else filesz
    segment = (4).to_bytes(4, "little") + (4).to_bytes(4, "little") + (120).to_bytes(8, "little") + bytes(16)
    segment += size.to_bytes(8, "little") * 2 + (4).to_bytes(8, "little")
    return head + segment + note


def note(desc: bytes, claimed: int | None = None) -> bytes:
    size = len(desc) if claimed is None else claimed
    return b"".join(n.to_bytes(4, "little") for n in (4, size, 3)) + b"GNU\0" + desc


def test_a_made_up_file_has_the_id_that_was_put_in() -> None:
    assert build_id(io.BytesIO(elf(note(bytes(range(20)))))) == bytes(range(20)).hex()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF",
        b"#!/bin/sh\n",
        elf(b""),
        elf(note(bytes(20)), phnum=65535),
        elf(note(b"", claimed=2**31), filesz=2**40),
        elf(note(bytes(20)))[:100],
        b"\x7fELF" + bytes(range(256)) * 4,
    ],
)
def test_hostile_bytes_give_no_id_and_no_trouble(data: bytes) -> None:
    read = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal read
            assert size is not None
            read += size
            return super().read(size)

    assert build_id(Counted(data)) == ""
    assert read <= libraries._MAX_ELF_READ


def test_a_deleted_library_is_the_one_that_is_mapped(library: Path, start: Start) -> None:
    child = start(library)
    wanted = library.stat()
    with library.open("rb") as f:
        wanted_id = build_id(f)
    os.link(library, library.with_name("another"))  # the file lives on, its name does not
    library.unlink()
    found = one(find(child.pid, re.compile("libthing")))
    if may_follow_mappings():
        assert (found.state, found.deleted, found.path) == (State.OK, True, str(library))
        assert (found.device, found.inode, found.build_id) == (wanted.st_dev, wanted.st_ino, wanted_id)
    else:
        assert (found.state, found.deleted) == (State.MISSING, True)
    shutil.copy(LIBC, library)  # an upgrade: another file under the same name
    found = one(find(child.pid, re.compile("libthing")))
    if may_follow_mappings():
        assert (found.inode, found.build_id) == (wanted.st_ino, wanted_id)
    else:
        assert found.state is State.CHANGED


def test_without_the_privilege_the_path_is_tried(
    library: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def refuse(path: str, *args: object, **kwargs: object) -> os.stat_result:
        if "map_files" in str(path):
            raise PermissionError(1, "Operation not permitted")
        return real(path)

    child = start(library)
    monkeypatch.setattr(os, "stat", refuse)
    found = one(find(child.pid, re.compile("libthing")))
    assert (found.state, found.inode) == (State.OK, real(library).st_ino)
    assert found.open_path == f"/proc/{child.pid}/root{library}"
    library.rename(library.with_name("elsewhere"))
    shutil.copy(LIBC, library)
    found = one(find(child.pid, re.compile("elsewhere")))  # maps follows the rename
    assert found.state is State.OK
    library.with_name("elsewhere").unlink()
    assert one(find(child.pid, re.compile("elsewhere"))).state is State.MISSING


@pytest.mark.parametrize(
    "name", ["lib thing.so", "libnew\nline.so", "libü\x1b[31m.so", "libx.so (deleted)", "lib\\012.so"]
)
def test_odd_names_are_opened(name: str, library: Path, start: Start) -> None:
    odd = library.with_name(name)
    library.rename(odd)
    child = start(odd)
    (found,) = (f for f in find(child.pid, re.compile("/lib")) if f.inode == odd.stat().st_ino)
    assert (found.state, found.deleted, found.path) == (State.OK, False, str(odd).replace("\\012", "\n"))
    assert os.path.samefile(found.open_path, odd)


def test_bytes_that_are_no_text(library: Path, start: Start) -> None:
    odd = Path(os.fsdecode(os.fsencode(library.parent) + b"/lib\xff.so"))
    library.rename(odd)
    child = start(odd)
    found = one(find(child.pid, re.compile("lib\udcff")))
    assert (found.state, found.inode, found.path) == (State.OK, odd.stat().st_ino, str(odd))


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = fake(tmp_path, b"00400000-00401000 r--p 00000000 fd:00 7 /dev/nvidia0\n")
    folder = proc / str(GONE) / "map_files"
    folder.mkdir()
    os.mkfifo(folder / "00400000-00401000")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert one(find(GONE, re.compile("nvidia"), proc)).state is State.NO_FILE


def test_an_end_in_between_is_a_state(library: Path, start: Start) -> None:
    child = start(library)
    maps = mapped(child.pid)
    child.kill()
    child.wait()
    found = one(find(child.pid, re.compile("libthing"), maps=maps))
    assert (found.state, found.path, found.open_path) == (State.GONE, str(library), "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives up its privileges")
def test_without_privilege_it_is_said() -> None:
    def drop() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)

    read, write = os.pipe()
    child = os.fork()
    if not child:  # its own memory is closed to nobody else: look at our parent, which is root
        try:
            drop()
            parent = os.getppid()
            states = [mapped(parent).state, executable(parent).state]
            os.write(write, "|".join(states).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 200).decode() == "not permitted|not permitted"
    os.close(read)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a mount namespace")
def test_a_file_that_only_another_mount_namespace_has(library: Path, start: Start, tmp_path: Path) -> None:
    hidden = tmp_path / "inside"
    hidden.mkdir()
    script = f'mount -t tmpfs none "{hidden}" && cp "{library}" "{hidden}/libinner.so" && exec "$@"'
    child = start(hidden / "libinner.so", before=("unshare", "--mount", "sh", "-c", script, "sh"))
    assert not (hidden / "libinner.so").exists()
    found = one(find(child.pid, re.compile("libinner")))
    assert found.state is State.OK
    inside = os.stat(f"/proc/{child.pid}/root{hidden}/libinner.so")
    assert (found.device, found.inode) == (inside.st_dev, inside.st_ino)
    assert found.device != library.stat().st_dev
    with library.open("rb") as f:
        assert found.build_id == build_id(f) != ""


def test_processes_that_share_a_file_are_one_group(library: Path, start: Start) -> None:
    first, second = start(library), start(library)
    other = library.with_name("libthing.so.2")
    shutil.copy(library, other)
    third = start(other)
    gone = Library(GONE, "/x", 0, 0, False, "", "", State.GONE)
    found = [one(find(c.pid, re.compile("libthing"))) for c in (first, second, third)]
    groups = distinct([*found, gone])
    assert sorted([lib.tgid for lib in g] for g in groups.values()) == sorted(
        [[first.pid, second.pid], [third.pid]]
    )
    assert set(groups) == {(p.stat().st_dev, p.stat().st_ino) for p in (library, other)}


def test_a_library_mapped_under_two_names_is_one_file(library: Path, start: Start) -> None:
    link = library.with_name("libthing-link.so")
    os.link(library, link)
    child = start(library, link)
    assert one(find(child.pid, re.compile("libthing"))).inode == library.stat().st_ino


def test_this_test_maps_what_it_thinks(library: Path) -> None:
    assert not find(os.getpid(), re.compile("libthing"))
    kept = ctypes.CDLL(str(library))
    assert kept
    assert one(find(os.getpid(), re.compile("libthing"))).state is State.OK
