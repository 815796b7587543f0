"""``--btf``: which files are taken for a kernel's BTF, and what is said of the others, in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from whyspan import cli
from whyspan_probes import features, kernel_btf
from whyspan_probes.errors import BtfFileError
from whyspan_probes.features import HookTable
from whyspan_probes.kernel_btf import KernelBtf, check_file

from tests.btf_blob import blob, moved

X86 = {"task_struct": ("pid", "tgid"), "pt_regs": ("r15", "orig_ax")}
ARM = {"task_struct": ("pid", "tgid"), "pt_regs": ("sp", "syscallno")}


@pytest.fixture
def write(tmp_path: Path) -> Path:
    """A kernel's BTF of this test's own making, for x86-64."""
    path = tmp_path / "kernel.btf"
    path.write_bytes(blob(X86))
    return path


def test_a_kernels_btf_is_taken(write: Path) -> None:
    check_file(write, "x86_64")
    assert KernelBtf.find(write) == (kernel_btf.OWN.exists(), write)


def test_one_of_another_architecture_is_not(write: Path) -> None:
    with pytest.raises(BtfFileError, match=r"kernel.btf: BTF of another architecture than aarch64$"):
        check_file(write, "aarch64")
    write.write_bytes(blob(ARM))
    check_file(write, "aarch64")
    with pytest.raises(BtfFileError, match="BTF of another architecture than x86_64"):
        check_file(write, "x86_64")
    write.write_bytes(blob(X86, long_bytes=4))  # i386 has the same name for the register
    with pytest.raises(BtfFileError, match="BTF of another architecture"):
        check_file(write, "x86_64")


def test_one_without_registers_may_be_of_any(write: Path) -> None:
    # As `bpftool gen min_core_btf` makes it for programs that read none.
    write.write_bytes(blob({"task_struct": ("pid",)}))
    check_file(write, "x86_64")
    check_file(write, "riscv64")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda p: None, "no such file"),
    "folder": (lambda p: p.mkdir(), "not a file"),
    "pipe": (os.mkfifo, "not a file"),
    "empty": (lambda p: p.touch(), "not BTF, nor an ELF file with a .BTF section"),
    "text": (lambda p: p.write_text("[collector]\n"), "not BTF, nor an ELF file with a .BTF section"),
    "elf": (lambda p: p.symlink_to(Path("/proc/self/exe").resolve()), "not BTF, nor an ELF file"),
    "cut off": (lambda p: p.write_bytes(blob(X86)[:40]), "not BTF, nor an ELF file"),
    "module": (
        lambda p: p.write_bytes(blob({"nf_conn": ("ct",)})),
        "not a kernel's BTF: no struct task_struct",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_what_is_none_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    make, reason = BAD[case]
    path = tmp_path / "file"
    make(path)
    with pytest.raises(BtfFileError) as caught:
        check_file(path)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["record", "doctor"])
def test_the_command_line_says_it_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    monkeypatch.setattr("whyspan_probes.loader.Session", lambda *_, **__: pytest.fail("tried to load"))
    monkeypatch.chdir(tmp_path)
    output = ["-o", str(tmp_path / "rec")] if command == "record" else []
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--btf", "nowhere.btf", *output])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err == f"whyspan: collector.btf: {tmp_path}/nowhere.btf: no such file\n"


def test_run_hands_it_to_the_collector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {}

    def supervise(_path: Path | None, overrides: dict[str, object], **_: object) -> int:
        given.update(overrides)
        return 0

    monkeypatch.setattr("whyspan.pipeline.run.supervise", supervise)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["run", "--btf", "k.btf", "--pid", "1"])
    assert given["collector"] == {"btf": str(tmp_path / "k.btf")}  # the collector has another folder


def test_doctor_says_which_is_used(
    write: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    monkeypatch.setattr(kernel_btf, "_REGISTER", {})

    def btf_check(own: bool, *options: str) -> dict[str, object]:
        found = features.read_features()._replace(btf=own)
        monkeypatch.setattr("whyspan.doctor.report.read_features", lambda: found)
        with pytest.raises(SystemExit):
            cli.main(["doctor", "--no-attach", "--json", *options])
        checks = {c["id"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
        return {k: checks["kernel.btf"][k] for k in ("state", "found")}

    own = "/sys/kernel/btf/vmlinux"
    assert btf_check(True) == {"state": "ok", "found": own}
    assert btf_check(True, "--btf", str(write)) == {"state": "ok", "found": f"{write} (instead of {own})"}
    assert btf_check(False, "--btf", str(write)) == {
        "state": "limited",
        "found": f"{write} (the kernel has none of its own)",
    }
    assert btf_check(False) == {"state": "failed", "found": "none"}


def test_without_its_own_the_typed_hooks_are_known_to_be_missing(
    write: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> None:
        raise OSError(2, "no BTF")

    monkeypatch.setattr("whyspan_probes.btf.Btf.of_kernel", none)
    (tmp_path / "events" / "sched" / "sched_switch").mkdir(parents=True)
    monkeypatch.setattr(features, "tracefs", lambda: str(tmp_path))
    table = HookTable(KernelBtf(own=False, file=write))
    assert table.missing("tp_btf/sched_switch") == "the kernel has no BTF of its own"
    assert table.missing("raw_tp/sched_switch") == ""
    assert table.missing("raw_tp/sched_nap") == "this kernel has no tracepoint sched_nap"
    assert table.missing("tracepoint/sched/sched_switch") == ""
    monkeypatch.setattr(features, "tracefs", lambda: "")
    assert table.missing("raw_tp/sched_nap") == ""  # cannot be known: the attempt tells
    table.close()
    table = HookTable(KernelBtf(own=False))
    for section in ("tp_btf/sched_switch", "raw_tp/sched_switch", "tracepoint/sched/sched_switch"):
        assert table.missing(section) == "no kernel BTF (No such file or directory): name a file by --btf"
    table.close()


def test_the_editor_of_the_bpf_tests_moves_a_field(write: Path) -> None:
    assert moved(blob({"a": ("x", "y")}), "a", "y", "x") != blob({"a": ("x", "y")})
    with pytest.raises(KeyError):
        moved(write.read_bytes(), "task_struct", "pid", "comm")
