"""Where control groups are: mounts, namespaces, the kernel's ids."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from whyspan import cgroups
from whyspan.cgroups import Mount, ancestors, cpu_mounts, cpu_path_in, folder, mounts, path_of_id, paths_in

HYBRID = """\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid shared:10 - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:11 master:4 - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 /../.. /host/with\\040space rw - cgroup2 cgroup2 rw
broken
35 30 0:31 / /x rw -
"""


def test_mounts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mountinfo"
    path.write_text(HYBRID)
    found = mounts(path)
    assert [(str(m.point), m.root, m.version) for m in found] == [
        ("/sys/fs/cgroup/unified", "/", 2),
        ("/sys/fs/cgroup/memory", "/", 1),
        ("/sys/fs/cgroup/cpu,cpuacct", "/", 1),
        ("/host/with space", "/../..", 2),
    ]
    assert [m.point.name for m in cpu_mounts(found)] == ["cpu,cpuacct", "unified", "with space"]
    assert mounts(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("path", "root", "where"),
    [
        ("/docker/a", "/", "m/docker/a"),
        ("/", "/", "m"),
        ("/docker/a/b", "/docker/a", "m/b"),  # a container's own, bound over the root
        ("/docker/a", "/docker/a", "m"),
        ("/docker/b", "/docker/a", None),
        ("/docker/ab", "/docker/a", None),
        ("/../b", "/", None),  # outside of our namespace, and the mount does not reach there
        ("/../b", "/..", "m/b"),
        ("/../../pod/b", "/../..", "m/pod/b"),
        ("/../../pod/b", "/../../pod", "m/b"),
        ("/own", "/..", None),  # it lies below, but by which name is not told
        ("/a/../../../etc", "/", None),  # no kernel writes this
    ],
)
def test_where_a_path_lies_under_a_mount(path: str, root: str, where: str | None) -> None:
    expected = None if where is None else Path(where)
    assert folder(path, Mount(Path("m"), root, 2, frozenset())) == expected


def test_ancestors_end_at_the_root_that_is_visible() -> None:
    assert ancestors("/a/b") == ["/a/b", "/a", "/"]
    assert ancestors("/") == ["/"]
    assert ancestors("/../../a/b") == ["/../../a/b", "/../../a", "/../.."]
    assert ancestors("") == []
    assert ancestors("//a//b/") == ["/a/b", "/a", "/"]


def test_the_lines_of_a_process() -> None:
    one = "9:name=systemd:/s\n3:memory:/m:with:colons\n2:cpu,cpuacct:/c\n0::/u\n\njunk\n1:x\n"
    assert paths_in(one) == ["/c", "/s", "/m:with:colons", "/u"]
    assert cpu_path_in(one) == "/c"
    assert cpu_path_in("0::/u\n3:memory:/m\n") == "/u"
    assert cpu_path_in("3:memory:/m\n") == cpu_path_in("") == ""
    assert paths_in("") == []


def v2() -> Mount:
    """A version 2 tree that this process may change; skips where there is none."""
    for mount in mounts():
        if mount.version == 2 and os.access(mount.point, os.W_OK) and os.geteuid() == 0:
            return mount
    pytest.skip("needs root and a writable cgroup2 mount")


def test_the_kernels_id_leads_to_the_path() -> None:
    mount = v2()
    name = f"whyspan-test-{os.getpid()}"
    group = mount.point / name / "inner"
    group.mkdir(parents=True)
    try:
        number = group.stat().st_ino
        expected = f"{mount.root.rstrip('/')}/{name}/inner"
        assert path_of_id(number, [mount]) == expected
        # Version 1 has other ids, and a mount that is gone is passed over.
        others = [Mount(Path("/nowhere"), "/", 2, frozenset()), mount._replace(version=1)]
        assert path_of_id(number, others) == ""
        assert path_of_id(number, [*others, mount]) == expected
    finally:
        group.rmdir()
        group.parent.rmdir()
    assert path_of_id(number, [mount]) == ""
    assert path_of_id(2**63 + 5, [mount]) == ""


def test_an_id_that_may_not_be_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups._libc, "open_by_handle_at", lambda *_: -1)
    assert path_of_id(1, [Mount(tmp_path, "/", 2, frozenset())]) == ""


def test_the_host_namespace_cannot_be_joined_without_being_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_INITIAL_NAMESPACE", 7)  # as if /proc showed another's process 2
    monkeypatch.setattr(
        cgroups._libc, "setns", lambda *_: pytest.fail("joined a namespace that is not the host's")
    )
    assert cgroups.join_host_namespace() is False


def test_the_memory_controllers_path_is_its_own() -> None:
    hybrid = "9:name=systemd:/s\n4:memory:/pods/m\n1:cpu,cpuacct:/pods/c\n0::/u\n"
    assert cgroups.memory_path_in(hybrid) == "/pods/m"
    assert cgroups.memory_path_in("0::/user.slice/x\n") == "/user.slice/x"
    assert cgroups.memory_path_in("1:cpu:/c\nrubbish\n") == ""


def test_memory_limits_are_looked_for_in_version_1_first() -> None:
    cpu = Mount(Path("/c"), "/", 1, frozenset({"cpu"}))
    memory = Mount(Path("/m"), "/", 1, frozenset({"memory"}))
    unified = Mount(Path("/u"), "/", 2, frozenset())
    assert cgroups.memory_mounts([cpu, unified, memory]) == [memory, unified]
