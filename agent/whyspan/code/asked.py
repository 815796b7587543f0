"""What is asked of the symboliser, and what it answers."""

from __future__ import annotations

import msgspec

from whyspan.code.files import FileId


class Module(msgspec.Struct):
    """A file with places in it that are to be named.

    ``holders`` are processes that map it, each with the name of the mapping in /proc/PID/map_files; ``id`` is the file
    as it was when it was seen, without which ``inode`` has to do. ``offsets`` are in the file; ``vdso``: it is no file,
    and they are in what the kernel maps.
    """

    path: str
    holders: list[tuple[int, str]] = []
    id: FileId | None = None
    inode: int = 0
    offsets: list[int] = []
    vdso: bool = False


class Question(msgspec.Struct):
    """What is asked: places in files, addresses of code that processes made by themselves, kernel, system calls.

    ``parent`` is the process that asks, or 0.
    """

    modules: list[Module] = []
    made: list[tuple[int, list[int]]] = []
    kernel: list[int] = []
    syscalls: list[int] = []
    parent: int = 0


class Line(msgspec.Struct):
    """A line of the answer: what one module, one process's own code, the kernel, or the table of calls has.

    In ``ranges``, a name that begins with ``+`` is the offset at which a function without a name begins.
    """

    by: str = ""
    why: str = ""
    module: int = -1
    made: int = -1
    ranges: list[tuple[int, int, str]] = []
    kernel: dict[str, str] | None = None
    syscalls: dict[str, str] | None = None
    end: bool = False
