"""The marker's file, which is an interface: what the agent attaches to must be where it looks."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from tests.build_inproc import build

FUNCTION = "whyspan_mark_v1"
SEMAPHORE = "whyspan_mark_v1_semaphore"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of its own: of the source as it is, and with no uprobe of another test on it."""
    return build(tmp_path_factory.mktemp("marker"))


@pytest.fixture(scope="module")
def marker(built: Path) -> Any:
    """The module of that build."""
    spec = importlib.util.spec_from_file_location("whyspan_inproc._marker", built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def semaphore(built: Path) -> Iterator[ctypes.c_ushort]:
    """The counter that the kernel raises, in this process."""
    counter = ctypes.c_ushort.in_dll(ctypes.CDLL(str(built)), SEMAPHORE)
    yield counter
    counter.value = 0


def symbols(elf: ELFFile) -> dict[str, Any]:
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return {s.name: s.entry for s in table.iter_symbols()}


def test_both_symbols_are_in_the_dynamic_table(built: Path) -> None:
    with built.open("rb") as file:
        found = symbols(ELFFile(file))
    assert found[FUNCTION]["st_info"]["type"] == "STT_FUNC"
    assert found[SEMAPHORE]["st_info"]["type"] == "STT_OBJECT"
    assert found[SEMAPHORE]["st_size"] == 2


def test_semaphore_has_a_place_in_the_file_that_can_be_written(built: Path) -> None:
    with built.open("rb") as file:
        elf = ELFFile(file)
        symbol = symbols(elf)[SEMAPHORE]
        section = elf.get_section(symbol["st_shndx"])
        address = symbol["st_value"]
        loaded = [
            s for s in elf.iter_segments("PT_LOAD") if s["p_vaddr"] <= address < s["p_vaddr"] + s["p_filesz"]
        ]
    assert section["sh_type"] == "SHT_PROGBITS"  # not in .bss: a uprobe counter is a file offset
    assert section["sh_flags"] & SH_FLAGS.SHF_WRITE
    assert len(loaded) == 1 and loaded[0]["p_flags"] & 2


def test_probed_instruction_is_a_nop(built: Path) -> None:
    with built.open("rb") as file:
        elf = ELFFile(file)
        symbol = symbols(elf)[FUNCTION]
        code = elf.get_section(symbol["st_shndx"])
        at = symbol["st_value"] - code["sh_addr"]
        text, machine = code.data()[at : at + 8], elf["e_machine"]
    assert machine not in ("EM_X86_64", "EM_AARCH64") or text.startswith(
        {"EM_X86_64": bytes.fromhex("90 c3"), "EM_AARCH64": bytes.fromhex("1f2003d5 c0035fd6")}[machine]
    )


def test_one_file_serves_every_python(built: Path) -> None:
    assert built.name == "_marker.abi3.so"
    with built.open("rb") as file:
        wanted = {n for n, s in symbols(ELFFile(file)).items() if s["st_shndx"] == "SHN_UNDEF"}
    of_stable_abi = {"_PyArg_ParseTuple_SizeT", "_Py_NoneStruct"}  # Misc/stable_abi.toml
    assert not {n for n in wanted if n.startswith("_Py")} - of_stable_abi


def test_nobody_watches(marker: Any) -> None:
    assert marker.watched() is False
    assert marker.watchers() == 0
    assert marker.mark(1, b"{}") is None


def test_kernels_counter_is_seen(marker: Any, semaphore: ctypes.c_ushort) -> None:
    semaphore.value = 3
    assert marker.watched() is True
    assert marker.watchers() == 3
    marker.mark(23, b"x" * marker.MAX_PAYLOAD)


@pytest.mark.parametrize("watchers", [0, 1])
def test_too_long_is_refused(marker: Any, semaphore: ctypes.c_ushort, watchers: int) -> None:
    semaphore.value = watchers
    with pytest.raises(ValueError, match="8193 bytes; at most 8192"):
        marker.mark(1, b"x" * 8193)


@pytest.mark.parametrize("payload", ["text", None, bytearray(b"x"), memoryview(b"x")])
def test_only_bytes(marker: Any, payload: object) -> None:
    with pytest.raises(TypeError):
        marker.mark(1, payload)


def test_many_threads(marker: Any, semaphore: ctypes.c_ushort) -> None:
    semaphore.value = 1
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(2_003):
                marker.mark(i, b"%d" % i)
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work) for _ in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
