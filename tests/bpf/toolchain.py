"""Compiles a probe that a test invents, with the Makefile's own flags and steps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.bpf.child import ROOT

#: GNU make prints what it would use; nothing here repeats a flag.
_PRINT = "--eval=show-bpf:; @echo '$(CLANG)|$(BPF_CFLAGS)|$(BPFTOOL)|$(LLVM_STRIP)'"


def build(folder: Path, name: str, source: str, declaration: str = "") -> Path:
    """Write ``<name>.bpf.c`` (and ``<name>.py``) to *folder*, build ``<name>.bpf.o`` there, return its path."""
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    shown = subprocess.run(
        ["make", "-s", "-C", str(ROOT), _PRINT, "show-bpf"],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    ).stdout
    clang, flags, bpftool, strip = shown.strip().splitlines()[-1].split("|")
    code, first, final = (folder / f"{name}{suffix}" for suffix in (".bpf.c", ".clang.o", ".bpf.o"))
    code.write_text(source)
    if declaration:
        (folder / f"{name}.py").write_text(declaration)
    steps: list[list[str]] = [
        [clang, *flags.split(), "-c", str(code), "-o", str(first)],
        [bpftool, "gen", "object", str(final), str(first)],
        [strip, "-g", str(final)],
    ]
    for step in steps:
        done = subprocess.run(step, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{step[0]}: {done.stderr}"
    first.unlink()
    return final
