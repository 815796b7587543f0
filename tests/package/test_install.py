"""The package in a fresh root of Debian without systemd: installed, used, removed and purged by dpkg alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import roots
from tests.package.builds import Built

pytestmark = [pytest.mark.package, pytest.mark.timeout(7200)]

SUITE = "bookworm"
# What makes the users where there is no systemd; no other dependency is missing in the smallest root.
USERS = "systemd-standalone-sysusers"


@pytest.fixture(scope="module")
def fresh(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a root that can be written to, with the package's file in /root."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip(f"{SUITE} has Python 3.11: a package built here is for another")
    try:
        lower = roots.root(SUITE)
    except roots.RootsError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("root")
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir()
    done = subprocess.run(
        ["apt-get", "download", "-q", USERS], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"{USERS} cannot be had: {done.stderr.strip()[-200:]}")
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], check=True)
    try:
        for deb in (*folder.glob("*.deb"), built.deb):
            shutil.copy(deb, root / "root")
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


def inside(root: Path, command: str, status: int = 0) -> str:
    """Run a line of shell in the root and return what it printed."""
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        ["chroot", root, "/usr/bin/env", "-i", path, "HOME=/root", "sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def ours(root: Path) -> list[str]:
    """Return what of whyspan is in the root, but for the package's file."""
    return inside(root, "find / -xdev -iname '*whyspan*' -not -path '/root/*'").split()


def test_installed_used_removed_purged(fresh: Path) -> None:
    assert ours(fresh) == []
    inside(fresh, f"dpkg -i /root/{USERS}_*.deb && dpkg -i /root/whyspan_*.deb")
    assert "(whyspan)" in inside(fresh, "id -nG whyspan | sed 's/.*/(&)/'")
    assert inside(fresh, "id -ng whyspan-export").strip() == "whyspan"
    assert "sched" in inside(fresh, "cd /tmp && whyspan probes")
    assert "/var/lib/whyspan/whyspan.db" in inside(
        fresh, "whyspan slow", status=1
    )  # the shipped configuration is read
    assert inside(fresh, "find /usr/lib/whyspan -name '*.pyc' | head -1")
    assert "multi-user.target.wants" in inside(fresh, "find /etc/systemd -name whyspan.service")
    # The administrator's own; and what the daemon leaves.
    inside(
        fresh,
        "echo '# mine' >> /etc/whyspan/whyspan.toml; mkdir -p /var/lib/whyspan; touch /var/lib/whyspan/spool",
    )
    # Again, as an upgrade is: nothing asked, nothing lost.
    inside(fresh, "dpkg -i /root/whyspan_*.deb < /dev/null")
    assert "# mine" in inside(fresh, "tail -1 /etc/whyspan/whyspan.toml; ls /var/lib/whyspan/spool")
    inside(fresh, "dpkg -r whyspan")
    assert inside(fresh, "ls /usr/lib/whyspan 2>&1", status=2)
    assert "# mine" in inside(fresh, "tail -1 /etc/whyspan/whyspan.toml; ls /var/lib/whyspan/spool")
    inside(fresh, "dpkg -P whyspan")
    assert ours(fresh) == []
    assert inside(fresh, "getent passwd whyspan whyspan-export; getent group whyspan; true") == ""
