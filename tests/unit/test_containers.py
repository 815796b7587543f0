"""Container and pod out of cgroup paths, as runtimes and cgroup drivers really write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.containers import Container, identify, of_paths, short

ID = "40c03570b6f4c30bc8d69923d37ee698f5cfcced92c7b7df1c47f6f7887378a9"
OTHER = "7be92808767a667f35c8505cbf40d14e931ef6db5b0210329cf193b15ba9d605"
UID = "2c48913c-b29f-11e7-9350-020968147796"
UID_ = UID.replace("-", "_")
STATIC = "3d6beaa3004913efb68ce073d73494b0"  # a static pod's uid is a hash
BURST = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"
KUBELET = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice"
USER = "/user.slice/user-1000.slice/user@1000.service"

PATHS = {
    # Docker: cgroupfs and systemd drivers, rootless, its own parent, in Docker
    f"/docker/{ID}": (ID, ""),
    f"/{ID}": (ID, ""),
    f"/system.slice/docker-{ID}.scope": (ID, ""),
    f"/system.slice/docker-{ID}.scope/init.scope": (ID, ""),
    f"{USER}/app.slice/docker-{ID}.scope": (ID, ""),
    f"/ml/inference/{ID}": (ID, ""),
    f"/docker/{OTHER}/docker/{ID}": (ID, ""),
    f"/docker/{ID}/system.slice/ssh.service": (ID, ""),
    # containerd without Kubernetes: ctr, nerdctl
    f"/default/{ID}": (ID, ""),
    f"/system.slice/nerdctl-{ID}.scope": (ID, ""),
    # Kubernetes, cgroupfs driver
    f"/kubepods/burstable/pod{UID}/{ID}": (ID, UID),
    f"/kubepods/besteffort/pod{UID}/{ID}": (ID, UID),
    f"/kubepods/pod{UID}/{ID}": (ID, UID),
    f"/kubepods/besteffort/pod{STATIC}/{ID}": (ID, STATIC),
    f"/kubepods/burstable/pod{UID}/crio-{ID}": (ID, UID),
    # Kubernetes, systemd driver
    f"{BURST}/cri-containerd-{ID}.scope": (ID, UID),
    f"{BURST}/docker-{ID}.scope": (ID, UID),
    f"{BURST}/crio-{ID}.scope": (ID, UID),
    f"{BURST}/crio-{ID}.scope/container": (ID, UID),
    f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope": (ID, UID),
    f"/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-{ID}.scope": (ID, STATIC),
    f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}": (ID, UID),
    f"/kubepods-besteffort-pod{UID_}.slice:cri-containerd:{ID}": (ID, UID),
    # A node that is a container itself (kind), and Kubernetes in a pod
    f"/docker/{OTHER}{KUBELET}/kubelet-kubepods-besteffort-pod{UID_}.slice/cri-containerd-{ID}.scope": (ID, UID),
    f"/system.slice/docker-{OTHER}.scope/kubepods/burstable/pod{UID}/{ID}": (ID, UID),
    # Only the pod is told
    f"/kubepods/burstable/pod{UID}": ("", UID),
    BURST: ("", UID),
    # Podman: systemd and cgroupfs, rootless, in a pod
    f"/machine.slice/libpod-{ID}.scope": (ID, ""),
    f"/machine.slice/libpod-{ID}.scope/container": (ID, ""),
    f"/libpod_parent/libpod-{ID}": (ID, ""),
    f"/libpod_parent/libpod-{ID}/ctr": (ID, ""),
    f"{USER}/user.slice/libpod-{ID}.scope/container": (ID, ""),
    f"{USER}/app.slice/run-r0.scope/libpod-{ID}.scope": (ID, ""),
    f"/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{ID}.scope/container": (ID, ""),
    # Monitors of containers, which are no part of them
    f"/machine.slice/libpod-conmon-{ID}.scope": ("", ""),
    f"{BURST}/crio-conmon-{ID}.scope": ("", UID),
    # LXC and LXD; Proxmox
    "/lxc/web": ("web", ""),
    "/lxc/101/ns/system.slice/cron.service": ("101", ""),
    "/lxc.payload.web": ("web", ""),
    "/lxc.payload.web/system.slice/vllm.service": ("web", ""),
    "/lxc.payload/web/init.scope": ("web", ""),
    "/lxc.monitor.web": ("", ""),
    f"/lxc.payload.web/docker/{ID}": (ID, ""),
    # ECS: on EC2 and on Fargate
    f"/ecs/0123abcd-4567-89ab-cdef-0123456789ab/{ID}": (ID, ""),
    f"/ecs/prod/34dc0b5e626f2c5c4c5170e34b10e765/{ID}": (ID, ""),
    "/ecs/34dc0b5e626f2c5c4c5170e34b10e765/34dc0b5e626f2c5c4c5170e34b10e765-1234567890": (
        "34dc0b5e626f2c5c4c5170e34b10e765-1234567890",
        "",
    ),
    # Seen from a cgroup namespace of one's own, as an agent in a container sees its neighbours
    f"/../{ID}": (ID, ""),
    f"/../../pod{UID}/{ID}": (ID, UID),
    f"/../cri-containerd-{ID}.scope": (ID, ""),
    f"/../crio-{ID}.scope": (ID, ""),
    f"/../../kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope": (ID, UID),
    "/../../../../system.slice/ssh.service": ("", ""),
    # No container
    "": ("", ""),
    "/": ("", ""),
    "/..": ("", ""),
    "/user.slice/user-0.slice/session-3.scope": ("", ""),
    "/system.slice/vllm.service": ("", ""),
    "/system.slice/docker.service": ("", ""),
    "/init.scope": ("", ""),
    "/kubepods.slice": ("", ""),
    f"/system.slice/docker-{ID[:63]}.scope": ("", ""),
    f"/docker/{ID}0": ("", ""),
    f"/docker/{ID.upper()}": ("", ""),
    f"/machine.slice/machine-libpod_pod_{OTHER}.slice": ("", ""),
    f"/system.slice/var-lib-docker-{ID}.mount": ("", ""),
    "/system.slice/podman.service": ("", ""),
    "/system.slice/run-u12.service": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("path", list(PATHS))
def test_paths_as_runtimes_write_them(path: str) -> None:
    assert identify(path) == Container(*PATHS[path])


def test_the_first_telling_path_of_several_counts() -> None:
    assert of_paths(["/", "/user.slice", f"/docker/{ID}", f"/docker/{OTHER}"]) == (ID, "")
    assert of_paths([f"/kubepods/pod{UID}", "/"]) == ("", UID)
    assert of_paths([f"/kubepods/pod{UID}", f"/kubepods/pod{UID}/{ID}"]) == (ID, UID)
    assert of_paths([]) == of_paths(["/", ""]) == ("", "")


def test_short_ids() -> None:
    assert short(ID) == "40c03570b6f4"
    assert short("34dc0b5e626f2c5c4c5170e34b10e765-1234567890") == "34dc0b5e626f"
    assert short("inference-server-7") == "inference-server-7"
    assert short("") == ""


@given(st.text(max_size=300))
def test_any_path_gives_an_answer(path: str) -> None:
    found = identify(path)
    assert len(found.id) <= 64
    assert found.id in path
