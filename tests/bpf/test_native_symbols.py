"""Native frames of samples and waits: their functions, of files, debug files, perf maps and containers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from whyspan import stacks as core
from whyspan.model import StackFact
from whyspan_probes.registry import Found

from tests.bpf.native_lab import Lab, build, build_id, functions

pytestmark = pytest.mark.bpf

CHAIN = ["lab::Spinner<unsigned long>::turn", "lab_inner", "lab_outer", "main"]
CUT = 64
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native") / "work", "-g")


def in_chain(fact: StackFact) -> bool:
    return functions(fact.native)[:4] == CHAIN


def test_functions_of_a_program_down_to_its_main(probes: dict[str, Found], program: Path) -> None:
    with Lab(probes["samples"], [str(program), "spin"]) as lab:
        lab.watch()
        fact = lab.until(in_chain, "named frames")
        assert all(f.endswith("[work]") for f in fact.native[:4])
        assert not fact.flags & CUT, "what calls main is where the thread begins"
        first = lab.stacks.native.questions
        # Whatever else lies in these functions has its name at once, without another question.
        seen = set(lab.facts)
        new = lab.until(lambda f: f.id not in seen and in_chain(f), "another sample")
        assert new.native[:4] == fact.native[:4]
        assert lab.stacks.native.questions == first
        assert lab.stacks.native.state == "bcc"


def test_functions_that_a_thread_is_blocked_in(probes: dict[str, Found], program: Path) -> None:
    with Lab(probes["waits"], [str(program), "sleep"]) as lab:
        lab.watch()
        fact = lab.until(lambda f: "lab_outer" in functions(f.native), "a named wait")
        # libc has no frame pointers: nanosleep itself is there, and its caller may not be.
        assert functions(fact.native)[-3:-1] == ["lab_outer", "main"]
        assert "nanosleep" in fact.native[0]


def test_a_stripped_program_has_module_and_offset(
    probes: dict[str, Found], program: Path, tmp_path: Path
) -> None:
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", str(stripped), str(program)], check=True)
    with Lab(probes["samples"], [str(stripped), "spin"]) as lab:
        lab.watch()
        symbols = subprocess.run(["nm", str(program)], check=True, capture_output=True, text=True).stdout
        at = {line.split()[2]: int(line.split()[0], 16) for line in symbols.splitlines() if line[0] != " "}
        # Where functions begin is known all the same; in a small program offsets and addresses are the same.
        begins = [f"stripped+0x{at[name]:x}" for name in ("_ZN3lab7SpinnerImE4turnEm", *CHAIN[1:])]
        lab.until(lambda f: f.native[:4] == begins, "where functions begin")


@contextmanager
def debug_file(root: Path, program: Path) -> Iterator[None]:
    """Put the program's symbols where its build id says, below a root."""
    number = build_id(program)
    target = root / "usr/lib/debug/.build-id" / number[:2] / f"{number[2:]}.debug"
    made = (
        next(p for p in [*reversed(target.parents)] if not p.exists())
        if not target.parent.exists()
        else target
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["objcopy", "--only-keep-debug", str(program), str(target)], check=True)
        yield
    finally:
        shutil.rmtree(made) if made.is_dir() else made.unlink()


def test_symbols_lie_in_a_file_named_by_the_build_id(probes: dict[str, Found], tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", "-g", "-DOTHER")
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", str(stripped), str(whole)], check=True)
    with debug_file(Path("/"), whole), Lab(probes["samples"], [str(stripped), "spin"]) as lab:
        lab.watch()
        fact = lab.until(in_chain, "named frames")
        assert fact.native[1] == "lab_inner [stripped]"


def test_a_process_in_a_root_of_its_own(probes: dict[str, Found], tmp_path: Path) -> None:
    """Its program, and its debug file, are where only it has them."""
    whole = build(tmp_path / "whole", "-g", "-static")
    root = tmp_path / "root"
    (root / "srv").mkdir(parents=True)
    subprocess.run(["strip", "-o", str(root / "srv/server"), str(whole)], check=True)
    with (
        debug_file(root, whole),
        Lab(
            probes["samples"],
            *[
                [
                    "unshare",
                    "--pid",
                    "--mount",
                    "--fork",
                    "--kill-child",
                    "chroot",
                    str(root),
                    "/srv/server",
                    "spin",
                ]
            ],
        ) as lab,
    ):
        (child,) = psutil.Process(lab.process.pid).children()
        lab.watch(child.pid)
        fact = lab.until(in_chain, "named frames")
        assert fact.native[1] == "lab_inner [server]"


JIT = """
import ctypes, mmap, os, sys
# push rbp; mov rbp, rsp; loop: dec rdi; jnz loop; pop rbp; ret
CODE = bytes.fromhex("554889e5 48ffcf 75fb 5d c3")
area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
area.write(CODE)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
own = int(open("/proc/self/status").read().partition("NSpid:")[2].split("\\n")[0].split()[-1])
with open(f"/tmp/perf-{own}.map", "w") as f:
    f.write(f"{address:x} {len(CODE):x} old name\\n0 0 nothing\\n{address:x} {len(CODE):x} jit\\x1b[31m loop\\n")
run = ctypes.CFUNCTYPE(None, ctypes.c_ulong)(address)
def made_code():
    run(100_000_000)
print("ready", flush=True)
try:
    while not os.path.exists(f"/tmp/perf-{own}.end"):
        made_code()
finally:
    os.unlink(f"/tmp/perf-{own}.map")
"""


def test_code_made_by_a_process_is_named_by_its_perf_map(probes: dict[str, Found]) -> None:
    with Lab(probes["samples"], [PYTHON, "-c", JIT]) as lab:
        try:
            lab.watch()
            fact = lab.until(lambda f: bool(f.python) and any("jit" in n for n in f.native), "named code")
            assert fact.native[0] == "jit\\x1b[31m loop [(anonymous)]"
            assert fact.python[0].function == "made_code"
            # Between it and Python are libffi and the interpreter; whether they are found depends on frame pointers.
            assert core.places(fact)[0] == fact.native[0]
        finally:
            Path(f"/tmp/perf-{lab.tgid}.map").unlink(missing_ok=True)


def test_a_perf_map_that_is_not_the_processs_own_is_not_read(
    probes: dict[str, Found], tmp_path: Path
) -> None:
    """A link that leads elsewhere: to a file of somebody else's."""
    script = JIT.replace(
        'with open(f"/tmp/perf-{own}.map", "w")',
        f'os.symlink("{tmp_path}/map", f"/tmp/perf-{{own}}.map")\nwith open("{tmp_path}/map", "w")',
    )
    with Lab(probes["samples"], [PYTHON, "-c", script]) as lab:
        try:
            lab.watch()
            answered = lab.stacks.native._made_until_s
            lab.until(lambda f: bool(f.native) and ("made", lab.tgid) in answered, "an answer")
            named = [n for f in lab.look().values() for n in f.native if "jit" in n]
            assert named == []
        finally:
            Path(f"/tmp/perf-{lab.tgid}.map").unlink(missing_ok=True)


IN_C = {
    "json": (
        "import json\nvalue = [{'key': 'x' * 50, 'n': [1.5] * 50}] * 5000\n",
        "json.dumps(value)",
        "_json.",
    ),
    "zlib": ("import os, zlib\nvalue = os.urandom(1 << 22)\n", "zlib.compress(value, 9)", "libz.so"),
    "hashlib": ("import hashlib\nvalue = bytes(1 << 26)\n", "hashlib.sha256(value)", "libcrypto.so"),
}


@pytest.mark.parametrize("what", IN_C)
def test_c_code_stands_above_the_frame_of_python_that_called_it(probes: dict[str, Found], what: str) -> None:
    prepare, call, module = IN_C[what]
    script = f"{prepare}def render_chat():\n    return {call}\nprint('ready', flush=True)\nwhile True: render_chat()\n"
    with Lab(probes["samples"], [sys.executable if what == "json" else PYTHON, "-c", script]) as lab:
        lab.watch()
        fact = lab.until(lambda f: any(module in frame for frame in core.places(f)), f"frames in {module}")
        assert "render_chat" in [f.function for f in fact.python]
        shown = core.places(fact)
        assert not any("_PyEval_EvalFrameDefault" in frame for frame in shown)
        if what != "json":
            assert fact.python[0].function == "render_chat"
