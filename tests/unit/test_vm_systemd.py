"""What the guest with a systemd is driven with: the line to its agent, the journal of steps, the newer package."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.vm import systemd_disk
from tests.vm.image_link import AgentLink, GuestError
from tests.vm.systemd_journal import Journal
from tests.vm.systemd_slowing import causes


class FakeAgent(threading.Thread):
    """Answers each request by what *replies* holds for it, in order; SYNC stands for the token asked for."""

    def __init__(self, path: Path, replies: list[list[dict[str, Any]]]) -> None:
        super().__init__(daemon=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._replies = replies
        self.start()

    def run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as requests:
            for replies in self._replies:
                asked = json.loads(requests.readline())
                for reply in replies:
                    answer = {k: asked["arguments"]["id"] if v == "SYNC" else v for k, v in reply.items()}
                    connection.sendall(json.dumps(answer).encode() + b"\n")


def test_answers_to_what_was_asked_before_the_guest_was_up_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    FakeAgent(path, [[{"return": 17}, {"return": 23}, {"return": "SYNC"}], [{"return": {"pid": 5}}]])
    link = AgentLink(path)
    assert link.synchronised()
    assert link.ask("guest-exec") == {"pid": 5}
    link.close()


def test_a_refusal_and_a_closed_line_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    FakeAgent(path, [[{"error": {"desc": "no such command"}}]])
    link = AgentLink(path)
    with pytest.raises(GuestError, match="no such command"):
        link.ask("guest-dance")
    with pytest.raises((GuestError, OSError)):
        link.ask("guest-exec")
    link.close()


def test_nobody_at_the_socket_is_no_sign_of_life(tmp_path: Path) -> None:
    assert not AgentLink(tmp_path / "nothing").synchronised()


def test_a_step_that_fails_is_written_as_failed_and_other_kernels_stay(tmp_path: Path) -> None:
    file = tmp_path / "vm" / "install.json"
    done = Journal("6.1", file)
    with done.step("install", "apt install") as entry:
        entry["output"] = "fine"
    done.passed()
    broken = Journal("6.12", file)
    with pytest.raises(ValueError, match="no"), broken.step("install"):
        raise ValueError("no")
    written = json.loads(file.read_text())
    assert written["6.1"]["passed"]
    assert written["6.1"]["steps"][0]["command"] == "apt install"
    assert not written["6.12"]["passed"]
    step = written["6.12"]["steps"][0]
    assert (step["passed"], step["error"]) == (False, "no")
    assert step["seconds"] >= 0


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_the_newer_package_has_a_higher_version_and_another_configuration(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "etc/whyspan").mkdir(parents=True)
    (tree / "etc/whyspan/whyspan.toml").write_text("[slo]\n")
    (tree / "DEBIAN/control").write_text(
        "Package: whyspan\nVersion: 1.2+deb12\nArchitecture: amd64\nMaintainer: a <a@b.invalid>\nDescription: x\n"
    )
    (tree / "DEBIAN/md5sums").write_text(
        f"{'0' * 32}  etc/whyspan/whyspan.toml\n{'1' * 32}  usr/bin/whyspan\n"
    )
    deb = tmp_path / "whyspan_1.2+deb12_amd64.deb"
    subprocess.run(["dpkg-deb", "-b", str(tree), str(deb)], check=True, capture_output=True)
    version = systemd_disk.newer(deb, tmp_path / "new.deb")
    assert (
        subprocess.run(["dpkg", "--compare-versions", version, "gt", "1.2+deb12"], check=False).returncode
        == 0
    )
    unpacked = tmp_path / "unpacked"
    subprocess.run(["dpkg-deb", "-R", str(tmp_path / "new.deb"), str(unpacked)], check=True)
    assert (unpacked / "etc/whyspan/whyspan.toml").read_text().splitlines()[-1] == systemd_disk.NEWER_LINE
    # The sum of a changed file would be a lie.
    assert "whyspan.toml" not in (unpacked / "DEBIAN/md5sums").read_text()


def test_causes_are_counted_by_verdict() -> None:
    rows = [{"verdict": {"cause": c}} for c in ("cpu.throttled", "cpu.runqueue", "cpu.throttled")]
    assert causes(rows) == {"cpu.throttled": 2, "cpu.runqueue": 1}
