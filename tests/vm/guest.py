"""Run a command of this tree in a guest with a stock kernel: ``python -m tests.vm.guest --kernel 6.1 -- COMMAND ...``.

For instance (root; the first run fetches the kernel and makes the disk, some minutes)::

    .venv/bin/python -m tests.vm.guest --kernel 6.12 -- \\
        .venv/bin/python -m pytest -v tests/bpf/test_sched.py

The guest has the machine's programs and ``.venv`` on a disk that takes what is written and forgets it
(``rootdisk.py``), the working tree as it is now at the same path, cgroup v2, tracefs, loopback, and root. What the
command prints appears here as it comes. ``$OUT`` in the guest is the folder ``--out`` of the host
(``build/vm/guest-SERIES`` by default): the only place from which anything comes back. The exit status is the
command's; 124 for a guest that ran out of time, 125 for one that could not be started or died. Nothing stays: the
guest is a child of this process and ends with it.

QEMU translates (TCG), some thirty times slower than the host: what a test measures in time means nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.vm.kernels import SERIES, Kernel, KernelsError, kernel
from tests.vm.rootdisk import REPOSITORY, RootDiskError, rootdisk

#: Where the guest sees the folder that is shared with it.
OUT = "/mnt/whyspan"
#: What makes translation slow and is nothing that probes see; a panic ends the guest at once.
_APPEND = "mitigations=off no5lvl nowatchdog apparmor=0 audit=0 random.trust_cpu=on panic=-1 oops=panic"
#: With a thread for each CPU of the guest, QEMU 7.2 now and then ran a breakpoint that the kernel had taken away again
#: while it patched a tracepoint: "Oops: int3" in __hrtimer_run_queues below bpf_raw_tp_link_attach. Others saw the
#: same under TCG only: multipath-tcp/mptcp_net-next#471.
_ACCEL = "-accel tcg,thread=single"
_TREE_WITHOUT = (".git", ".venv", "dist", "build", "*/__pycache__", ".*_cache", ".hypothesis")
_POLL_S = 0.5  # how often new output is looked for


class GuestError(Exception):
    """A guest could not be started, or died; the text says why, in one line."""


class Ended(NamedTuple):
    """How a command in a guest ended."""

    status: int
    boot_s: float  # from the start of QEMU to the command's first line
    ran_s: float  # the command


def lacking() -> str:
    """Why no guest can run here; empty when one can."""
    if os.geteuid() != 0:
        return "needs root: the guest's disk is made by mounting it"
    for tool, package in (
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("busybox", "busybox-static"),
        ("depmod", "kmod"),
    ):
        if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            return f"needs {tool}: `apt-get install {package}`"
    if not _vng().exists():
        return "needs virtme-ng: `make venv` installs it"
    return ""


def _vng() -> Path:
    return Path(sys.executable).with_name("vng")


def _script(command: Sequence[str], env: Mapping[str, str]) -> str:
    """What the guest runs: unpack the tree, run the command, tell its status."""
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
    return f"""exec > {OUT}/output 2>&1 < /dev/null
mkdir -p {shlex.quote(str(REPOSITORY))} && cd {shlex.quote(str(REPOSITORY))} || exit 1
tar -x -f /dev/vdb || exit 1
mkdir -m 1777 /srv/tmp && export TMPDIR=/srv/tmp # on the disk, as /tmp is not
export OUT={OUT} HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
{exports}
touch {OUT}/began
{shlex.join(command)}
echo $? > {OUT}/status.tmp
sync
mv {OUT}/status.tmp {OUT}/status
"""


def pack_tree(path: Path) -> None:
    """Write the working tree, as it is now, to a tar file that a guest reads as a disk.

    Raises:
        GuestError: tar failed.
    """
    done = subprocess.run(
        ["tar", "--create", f"--file={path}", f"--directory={REPOSITORY}"]
        + [f"--exclude=./{pattern}" for pattern in _TREE_WITHOUT]
        + [".", "build/vmlinux.h"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode > 1:  # 1: a file changed meanwhile
        raise GuestError(f"tar: {done.stderr.strip()[-200:]}")


def _command(chosen: Kernel, disk: Path, tree: Path, share: Path, *, cpus: int, memory: str) -> list[str]:
    drive = f"-drive file={tree.resolve()},if=none,id=tree,format=raw,readonly=on -device virtio-blk-pci,drive=tree"
    return [
        # Of its own PID namespace, which ends with this process: whatever kills it, no QEMU stays behind.
        *("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child=KILL"),
        *(str(_vng()), "--verbose", "--disable-kvm", "--user", "root", "--force-9p"),
        *("--run", str(chosen.image), "--memory", memory, "--cpus", str(cpus)),
        *("--rw", "--root-disk", str(disk), "--root-dev", "/dev/vda", "--root-fstype", "ext4"),
        *("--rwdir", f"{OUT}={share}", "--append", _APPEND),
        # What is written goes to a temporary file of QEMU, and is gone with it.
        f"--qemu-opts={drive} {_ACCEL} -snapshot",
        *("--", "bash", f"{OUT}/guest.sh"),
    ]


@contextlib.contextmanager
def _process(command: list[str], console: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A guest, in a session of its own; whatever it started has ended when the context does."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
    }
    with (
        console.open("wb") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _why(console: Path) -> str:
    """The line of the console that says most about a guest's death."""
    lines = [line.strip() for line in console.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "panic" in line or "stuck" in line or "rror:" in line]
    return (telling or lines or ["the console said nothing"])[-1][-200:]


def run(
    chosen: Kernel,
    command: Sequence[str],
    out: Path,
    *,
    cpus: int = 2,
    memory: str = "3G",
    timeout_s: float = 1800,
    env: Mapping[str, str] | None = None,
    show: Callable[[str], object] | None = None,
) -> Ended:
    """Run *command* in a guest, from the root of the tree.

    *out* is emptied first; it then holds ``console.log``, ``output`` and what the command writes to ``$OUT``. *show* is
    given the output as it comes.

    Raises:
        GuestError: the guest could not be started, died, or did not end within *timeout_s*.
        KernelsError, RootDiskError: what it needs cannot be had.
    """
    disk = rootdisk()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "guest.sh").write_text(_script(command, env or {}))
    console, output, status = out / "console.log", out / "output", out / "status"
    output.touch()
    began = time.monotonic()
    first = began
    tree = out / "tree.tar"
    pack_tree(tree)
    with (
        output.open(errors="replace") as lines,
        _process(_command(chosen, disk, tree, out.resolve(), cpus=cpus, memory=memory), console) as guest,
    ):
        while guest.poll() is None and not status.exists():
            if first == began and (out / "began").exists():
                first = time.monotonic()
            if time.monotonic() - began > timeout_s:
                raise GuestError(f"the guest ran out of its {timeout_s:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                guest.wait(_POLL_S)
            if show:
                show(lines.read())
        if show:
            show(lines.read())
    tree.unlink()
    if not status.exists():
        raise GuestError(f"the guest died: {_why(console)}")
    return Ended(int(status.read_text()), first - began, time.monotonic() - first)


def main() -> int:
    """Run what the command line says; see the module's text."""
    parser = argparse.ArgumentParser(description="Run a command of this tree in a guest with a stock kernel.")
    parser.add_argument("--kernel", choices=sorted(SERIES), default="6.12")
    parser.add_argument("--out", type=Path, help="folder that the guest sees as $OUT (emptied first)")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--memory", default="3G")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    out = given.out or REPOSITORY / "build/vm" / f"guest-{given.kernel}"
    try:
        reason = lacking()
        if reason:
            raise GuestError(reason)
        ended = run(
            kernel(given.kernel),
            given.command,
            out,
            cpus=given.cpus,
            memory=given.memory,
            timeout_s=given.timeout,
            show=lambda text: print(text, end="", flush=True),
        )
    except (GuestError, KernelsError, RootDiskError) as e:
        print(f"guest: {e}", file=sys.stderr)
        return 124 if "ran out" in str(e) else 125
    print(
        f"guest: up in {ended.boot_s:.0f} s, ran {ended.ran_s:.0f} s, status {ended.status}", file=sys.stderr
    )
    return ended.status


if __name__ == "__main__":
    sys.exit(main())
