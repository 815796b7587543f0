"""What the kernel has for hooks at functions: fentry, kprobes and the functions of system calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from whyspan_probes import features
from whyspan_probes.btf import FUNC
from whyspan_probes.features import HookTable
from whyspan_probes.kernel_btf import KernelBtf

NO_KPROBES = "this kernel has no kprobes (CONFIG_KPROBE_EVENTS)"
NO_FENTRY = "this kernel has no fentry (CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS)"
OWN = KernelBtf(own=True)
ENTRIES = ("fentry", "fexit")
PROBES = ("kprobe", "kretprobe")
CALLS = ("ksyscall", "kretsyscall")
MULTI = ("kprobe.multi", "kretprobe.multi")


class FakeBtf:
    """A kernel's BTF with these functions, and enumerations given later."""

    def __init__(self, *functions: str) -> None:
        self.functions = functions
        self.enums: dict[str, dict[str, int]] = {}

    def enum(self, name: str) -> dict[str, int]:
        return self.enums.get(name, {})

    def find(self, name: str, kind: int) -> int:
        return int(kind == FUNC and name in self.functions)

    def close(self) -> None:
        pass


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An x86-64 machine with perf's kprobes and without tracefs, until the test says otherwise."""
    perf = tmp_path / "type"
    perf.touch()
    monkeypatch.setattr(features, "_PERF_KPROBE", perf)
    monkeypatch.setattr(features, "tracefs", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return monkeypatch


def table(kernel: pytest.MonkeyPatch, *functions: str, own: KernelBtf = OWN) -> HookTable:
    kernel.setattr("whyspan_probes.btf.Btf.of_kernel", lambda: FakeBtf(*functions))
    return HookTable(own)


@pytest.mark.parametrize("kind", [*ENTRIES, *PROBES])
def test_a_function_is_there_or_not(kernel: pytest.MonkeyPatch, kind: str) -> None:
    hooks = table(kernel, "register_ftrace_direct", "inet_recvmsg")
    assert hooks.missing(f"{kind}/inet_recvmsg") == ""
    assert hooks.missing(f"{kind}/inet_sendpage") == "this kernel has no function inet_sendpage"


@pytest.mark.parametrize("kind", ENTRIES)
def test_trampolines_need_direct_calls_and_the_kernels_own_btf(
    kernel: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    assert table(kernel, "inet_recvmsg").missing(f"{kind}/inet_recvmsg") == NO_FENTRY
    borrowed = KernelBtf(own=False, file=tmp_path)
    hooks = table(kernel, "register_ftrace_direct", "inet_recvmsg", own=borrowed)
    assert hooks.missing(f"{kind}/inet_recvmsg") == "the kernel has no BTF of its own"
    assert hooks.missing("kprobe/inet_recvmsg") == ""


@pytest.mark.parametrize("kind", [*PROBES, *CALLS])
def test_kprobes_are_had_from_perf_or_from_tracefs(
    kernel: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    hooks = table(kernel, "read", "__x64_sys_read")
    assert hooks.missing(f"{kind}/read") == ""
    kernel.setattr(features, "_PERF_KPROBE", tmp_path / "none")
    assert hooks.missing(f"{kind}/read") == NO_KPROBES
    kernel.setattr(features, "tracefs", lambda: str(tmp_path))
    assert hooks.missing(f"{kind}/read") == NO_KPROBES
    (tmp_path / "kprobe_events").touch()
    assert hooks.missing(f"{kind}/read") == ""


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(("machine", "prefix"), [("x86_64", "__x64_sys_"), ("aarch64", "__arm64_sys_")])
def test_system_calls_have_names_by_machine(
    kernel: pytest.MonkeyPatch, kind: str, machine: str, prefix: str
) -> None:
    kernel.setattr("platform.machine", lambda: machine)
    hooks = table(kernel, "write", f"{prefix}read")
    assert hooks.missing(f"{kind}/read") == ""
    assert hooks.missing(f"{kind}/write") == f"this kernel has no function {prefix}write"


@pytest.mark.parametrize("kind", MULTI)
def test_many_kprobes_by_one_link_need_fprobe(kernel: pytest.MonkeyPatch, kind: str) -> None:
    assert table(kernel, "register_fprobe_ips").missing(f"{kind}/malloc") == ""
    assert table(kernel, "inet_recvmsg").missing(f"{kind}/malloc") == "this kernel has no kprobe.multi links"


@pytest.mark.parametrize(
    ("helpers", "parameters", "samples", "walks"),
    [
        ((), False, False, False),  # before 5.17
        (("loop",), False, True, False),
        (("loop", "copy_from_user_task"), False, True, False),
        (("loop", "copy_from_user_task"), True, True, True),  # since 6.1
    ],
)
def test_samplers_and_walks_need_a_kernel_that_has_what_they_call(
    kernel: pytest.MonkeyPatch, helpers: tuple[str, ...], parameters: bool, samples: bool, walks: bool
) -> None:
    btf = FakeBtf()
    btf.enums = {"bpf_func_id": {f"BPF_FUNC_{name}": n for n, name in enumerate(helpers)}}
    if parameters:
        btf.enums["bpf_iter_task_type"] = {"BPF_TASK_ITER_ALL": 0}
    kernel.setattr("whyspan_probes.btf.Btf.of_kernel", lambda: btf)
    hooks = HookTable(OWN)
    assert hooks.missing("perf_event") == ("" if samples else "this kernel has no bpf_loop")
    lacking = "this kernel has no iterators over the threads of one process"
    assert hooks.missing("iter.s/task") == ("" if walks else lacking)


def test_what_the_kernel_refused_once_is_not_tried_again(kernel: pytest.MonkeyPatch) -> None:
    hooks = table(kernel, "register_ftrace_direct", "inet_recvmsg")
    hooks.refuse("fexit/inet_recvmsg", "this kernel refuses such programs")
    assert hooks.missing("fexit/inet_recvmsg") == "this kernel refuses such programs"
    assert hooks.missing("fentry/inet_recvmsg") == ""
