"""A guest with the image as its disk: commands run in it through QEMU's guest agent, on a virtio-serial port.

The guest is emulated (TCG): it needs no KVM, and is many times slower than the machine. So it boots once per image
and kernel; the state after that boot is kept beside the image, and every guest goes on from there, in seconds. What it
writes to its disk is gone with it.
"""

from __future__ import annotations

import base64
import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.vm.image_link import AgentLink, GuestError
from tests.vm.systemd_image import Image
from tests.vm.systemd_qemu import Qemu, booted, data_disk, go_on, wait_up

#: Each look costs an emulated processor some: the longer something runs, the fewer.
_POLL_S, _POLL_MOST_S, _POLL_RATIO = 0.2, 3.0, 0.05


class CommandError(Exception):
    """A command in the guest failed; the text has its output."""


class PatchingError(GuestError):
    """The guest died of a fault of the emulation: see `Qemu.hit_by_patching`."""


class Done(NamedTuple):
    """What a command came to; *seconds* by the host's clock."""

    status: int
    output: str
    seconds: float


class Guest:
    """One running guest. A context manager: it is killed at the end, there is nothing in it to keep."""

    def __init__(self, image: Image, kernel: str, *, console: Path, data: Path | None = None) -> None:
        """Describe it. *console* gets what the kernel prints; *data*: a disk (`data_disk`), as /dev/vdb."""
        self._kernel, self._image, self._console, self._data = kernel, image, console, data
        self._stack = contextlib.ExitStack()
        self._qemu: Qemu
        self._link: AgentLink

    def __enter__(self) -> Self:
        """Start it, and return when it takes commands.

        Raises:
            GuestError: it does not.
        """
        with contextlib.ExitStack() as stack:
            state, disk = booted(self._image, self._kernel)
            data = self._data or stack.enter_context(data_disk(None))
            self._qemu = Qemu(self._image, self._kernel, f"snapshot=on,file={disk}", data, self._console)
            stack.callback(self._qemu.end)
            self._qemu.start("-incoming", f"exec:cat {state}")
            go_on(self._qemu)
            self._link = stack.enter_context(contextlib.closing(AgentLink(self._qemu.agent)))
            wait_up(self._qemu, self._link)
            # It still has the time of its boot, and what it saw of its other disk then.
            self.run(f"date -s @{time.time():.0f} && blockdev --flushbufs /dev/vdb")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it."""
        self._stack.close()

    def run(self, command: str, *, timeout_s: float = 1800.0, check: bool = True) -> Done:
        """Run a command of the shell in the guest, as root; return its status and output (both streams).

        Raises:
            CommandError: it failed and *check* is set, or ran too long.
            GuestError: the guest ended.
        """
        began_s = time.monotonic()
        argv = ["-c", f"exec 2>&1\n{command}"]
        pid = self._ask("guest-exec", **{"path": "/bin/bash", "arg": argv, "capture-output": True})["pid"]
        while True:
            state = self._ask("guest-exec-status", pid=pid)
            seconds = time.monotonic() - began_s
            if state["exited"]:
                break
            if seconds > timeout_s:
                raise CommandError(f"{command}: still running after {timeout_s:.0f} s")
            time.sleep(_pause_s(seconds))
        output = base64.b64decode(state.get("out-data", "")).decode(errors="replace").strip()
        done = Done(state.get("exitcode", 128 + state.get("signal", 0)), output, seconds)
        if check and done.status:
            raise CommandError(f"{command}: exit status {done.status}\n{output[-4000:]}")
        return done

    def until(self, command: str, *, timeout_s: float = 1800.0) -> Done:
        """Run a command again and again until it succeeds; return its last run with the time of all.

        Raises:
            CommandError: it did not in time; the text has its last output.
        """
        began_s = time.monotonic()
        while (done := self.run(command, check=False)).status:
            if time.monotonic() - began_s > timeout_s:
                raise CommandError(f"{command}: not within {timeout_s:.0f} s\n{done.output[-4000:]}")
            time.sleep(_pause_s(time.monotonic() - began_s))
        return done._replace(seconds=time.monotonic() - began_s)

    def _ask(self, name: str, **arguments: Any) -> Any:
        try:
            return self._link.ask(name, **arguments)
        except (OSError, GuestError) as e:
            if self._qemu.hit_by_patching():
                raise PatchingError(f"{name}: {e}: {self._qemu.last_words()}") from None
            self._qemu.check_alive()
            raise GuestError(f"{name}: {e}: {self._qemu.last_words()}") from None


def _pause_s(elapsed_s: float) -> float:
    return min(_POLL_MOST_S, max(_POLL_S, _POLL_RATIO * elapsed_s))
