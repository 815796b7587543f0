"""Which BTF describes the running kernel: its own, or a file that the user names for a kernel without."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

from whyspan_probes.btf import STRUCT, Btf
from whyspan_probes.errors import BtfFileError

OWN = Path("/sys/kernel/btf/vmlinux")
#: A field of struct pt_regs that only this machine's kernels have.
_REGISTER = {"x86_64": "orig_ax", "aarch64": "syscallno"}
_POINTER_BYTES = 8


class KernelBtf(NamedTuple):
    """``own`` is whether the kernel has BTF itself, without which nothing attaches by ``tp_btf``.

    ``file``, when there is one, says where the kernel keeps its fields, also on a kernel with its own.
    """

    own: bool
    file: Path | None = None

    @classmethod
    def find(cls, file: Path | None = None) -> KernelBtf:
        """Look at the running kernel, and check the file.

        Raises:
            BtfFileError: the file cannot serve.
        """
        if file is not None:
            check_file(file)
        return cls(OWN.exists(), file)

    @property
    def source(self) -> str:
        """Where the layout of the kernel's structures comes from; empty when from nowhere."""
        if self.file is None:
            return str(OWN) if self.own else ""
        return f"{self.file} ({f'instead of {OWN}' if self.own else 'the kernel has none of its own'})"


def check_file(path: Path, machine: str = platform.machine()) -> None:
    """See that a file is the BTF of a kernel of this architecture; not that it is of *this* kernel.

    Raises:
        BtfFileError: it is not.
    """
    try:
        if not path.is_file():
            raise BtfFileError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        path.open("rb").close()
    except OSError as e:
        raise BtfFileError(f"{path}: {e.strerror}") from e
    try:
        btf = Btf.of_file(str(path))
    except OSError as e:
        raise BtfFileError(f"{path}: not BTF, nor an ELF file with a .BTF section") from e
    try:
        if not btf.find("task_struct", STRUCT):
            raise BtfFileError(f"{path}: not a kernel's BTF: no struct task_struct in it")
        registers, expected = btf.members("pt_regs"), _REGISTER.get(machine)
        strange = registers and expected and expected not in registers
        if strange or btf.pointer_bytes() not in (0, _POINTER_BYTES):
            raise BtfFileError(f"{path}: BTF of another architecture than {machine}")
    finally:
        btf.close()
