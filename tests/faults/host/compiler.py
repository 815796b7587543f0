"""A compiler run inside every request, as a just-in-time compiler does for a shape that it has not seen."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected, Inside

#: By the kernel's short names: the driver, and what it runs.
NAMES = {"cc", "cc1", "gcc", "as", "ld", "collect2"}
_FUNCTION = """\
double f%(n)d(const double *x, int n) {
	double s = %(n)d;
	for (int i = 0; i < n; i++) for (int k = 0; k < 4; k++) s += x[i * 4 + k] * (s - k) / (i + %(n)d.5);
	return s;
}
"""


class Compiler(Inside):
    """Compiles a small file before every request."""

    def __init__(self) -> None:
        self.where = ""
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.out = -1

    def start(self, settings: Mapping[str, Any]) -> None:
        self.where = str(settings["where"])
        self.folder = tempfile.TemporaryDirectory()
        kernel = "".join(_FUNCTION % {"n": n} for n in range(int(settings["functions"])))
        (Path(self.folder.name) / "kernel.c").write_text(kernel)
        self.out = os.open(settings["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def stop(self) -> None:
        os.close(self.out)
        if self.folder is not None:
            self.folder.cleanup()

    def _compile(self) -> None:
        assert self.folder is not None
        name = f"kernel-{os.urandom(4).hex()}.so"
        command = ["cc", "-O3", "-shared", "-fPIC", "-o", name, "kernel.c"]
        subprocess.run(command, cwd=self.folder.name, check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(self.out, f"{used.ru_utime + used.ru_stime:.6f}\n".encode())

    async def on_loop(self) -> None:
        if self.where == "loop":
            self._compile()

    def on_worker(self) -> None:
        if self.where == "worker":
            self._compile()


INSIDE = Compiler()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Compile 6 to 12 functions in every request."""
    where = {THREADED: "worker", VLLM: "loop"}.get(hands.server) or hands.rng.choice(["loop", "worker"])
    out = hands.folder / "compiler"
    functions = hands.rng.randint(6, 12)
    await hands.switch("compiler", {"where": where, "out": str(out), "functions": functions})
    try:

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "process" and culprit["name"] in NAMES

        def bites() -> str:
            used = [float(line) for line in out.read_text().split()]
            if len(used) < 3 or (used[-1] - used[0]) / (len(used) - 1) < 0.03:
                raise DemoError(f"the compiler takes no time: {used}")
            each = (used[-1] - used[0]) / (len(used) - 1)
            return f"{len(used)} compilations on the {where} thread, {each * 1000:.0f} ms of CPU each"

        yield Injected(names, bites)
    finally:
        await hands.switch("compiler", None)


FAULT = Fault("compiler", ("engine.jit_compile",), inject, (HTTP, THREADED, VLLM), per_s=3)
