"""The Debian package: what is in it, what it says, and that the same tree makes the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from whyspan.config import load_config

from tests.package.builds import ROOT, Built

pytestmark = [pytest.mark.package, pytest.mark.timeout(7200)]


def said(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    said("dpkg-deb", "-R", built.deb, folder)
    return folder


def modules(folder: Path) -> Path:
    (found,) = (folder / "usr/lib/whyspan/lib").glob("python3.*/site-packages")
    return found


def test_the_same_tree_gives_the_same_bytes_in_any_folder(built: Built, elsewhere: Built) -> None:
    assert built.tree != elsewhere.tree
    for one, other in zip(built.files, elsewhere.files, strict=True):
        assert one.name == other.name
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()


def test_nothing_in_it_names_the_folder_it_was_built_in(built: Built, unpacked: Path) -> None:
    place = os.fsencode(built.tree)
    files = [p for p in unpacked.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(files) > 1000
    assert [p for p in files if place in p.read_bytes()] == []


def test_lintian_finds_nothing_that_is_not_explained(built: Built) -> None:
    done = subprocess.run(
        ["lintian", "--fail-on", "error,warning", "--tag-display-limit", "0", built.deb],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    # An override that overrides nothing hides the next real finding.
    assert "unused-override" not in done.stdout


def test_every_override_has_its_reason() -> None:
    lines = (ROOT / "packaging/debian/whyspan.lintian-overrides").read_text().splitlines()
    explained = False
    for line in lines:
        if line.startswith("#"):
            explained = True
        elif not line.strip():
            explained = False
        else:
            assert explained, line


def test_all_objects_are_there_and_load_nothing_else(unpacked: Path) -> None:
    probes = ROOT / "probes/whyspan_probes"
    wanted = {p.relative_to(probes).with_suffix(".o") for p in probes.rglob("*.bpf.c")}
    there = modules(unpacked) / "whyspan_probes"
    assert {p.relative_to(there) for p in there.rglob("*.bpf.o")} == wanted
    assert not [p for p in unpacked.rglob("*") if p.name in ("tests", "__pycache__", "direct_url.json")]
    assert not (modules(unpacked) / "llvmlite").exists()


def test_it_is_for_one_python_and_says_so(built: Built, unpacked: Path) -> None:
    depends = said("dpkg-deb", "-f", built.deb, "Depends")
    minor = int(modules(unpacked).parent.name.removeprefix("python3."))
    assert f"python3 (>= 3.{minor}~), python3 (<< 3.{minor + 1}~)" in depends
    assert os.readlink(unpacked / "usr/lib/whyspan/bin/python") == f"../../../bin/python3.{minor}"
    assert "libc6" in depends  # what compiled modules need is known, not guessed
    assert said("dpkg-deb", "-f", built.deb, "Recommends").strip() == "python3-bpfcc"


def test_the_private_environment_runs_where_it_lies(unpacked: Path) -> None:
    # Its own interpreter, and none of this checkout's: the commands that a first look takes.
    python = unpacked / "usr/lib/whyspan/bin/python"
    assert (python.parent / "whyspan").read_text().startswith("#!/usr/lib/whyspan/bin/python -I\n")
    python.unlink()
    python.symlink_to(f"/usr/bin/{modules(unpacked).parent.name}")
    where = said(python, "-I", "-c", "import whyspan, numpy, grpc; print(whyspan.__file__, numpy.__file__)")
    assert all(name.startswith(str(unpacked)) for name in where.split())
    code = "from whyspan.cli import main; main(['probes'])"
    assert "sched" in said(python, "-I", "-c", code)


def test_the_configuration_is_a_conffile_and_is_right(unpacked: Path) -> None:
    assert (unpacked / "DEBIAN/conffiles").read_text().split() == ["/etc/whyspan/whyspan.toml"]
    config = load_config(unpacked / "etc/whyspan/whyspan.toml", {})
    assert config.state_dir == Path("/var/lib/whyspan")


def test_units_and_users(unpacked: Path) -> None:
    (units,) = [
        p for p in (unpacked / "lib/systemd/system", unpacked / "usr/lib/systemd/system") if p.exists()
    ]
    assert {p.name for p in units.iterdir()} == {
        p.name for p in (ROOT / "packaging/systemd").glob("*.service")
    }
    assert (unpacked / "usr/lib/sysusers.d/whyspan.conf").exists()
    scripts = {
        name: (unpacked / "DEBIAN" / name).read_text() for name in ("postinst", "preinst", "prerm", "postrm")
    }
    assert "deb-systemd-invoke start" in scripts["postinst"]
    assert "deb-systemd-helper enable" in scripts["postinst"]
    assert "deb-systemd-invoke stop" in scripts["preinst"]
    assert "deb-systemd-invoke stop" in scripts["prerm"]
    # Compiled before it is started.
    assert scripts["postinst"].index("compileall") < scripts["postinst"].index("deb-systemd-invoke start")
    for name in scripts:
        said("sh", "-n", unpacked / "DEBIAN" / name)


def test_manual_and_completions_know_every_command(unpacked: Path) -> None:
    from whyspan.cli import group

    pages = {p.name for p in (unpacked / "usr/share/man/man1").iterdir()}
    names = group.list_commands(None)  # type: ignore[arg-type]
    assert {"whyspan.1.gz", *(f"whyspan-{name}.1.gz" for name in names)} <= pages
    for place in (
        "bash-completion/completions/whyspan",
        "zsh/vendor-completions/_whyspan",
        "fish/vendor_completions.d/whyspan.fish",
    ):
        assert "_WHYSPAN_COMPLETE" in (unpacked / "usr/share" / place).read_text()
    said("bash", "-n", unpacked / "usr/share/bash-completion/completions/whyspan")


def test_every_library_in_it_is_in_the_copyright(unpacked: Path) -> None:
    text = (unpacked / "usr/share/doc/whyspan/copyright").read_text()
    bundled = [p.name for p in modules(unpacked).glob("*.dist-info") if not p.name.startswith("whyspan")]
    assert len(bundled) > 30
    assert [name for name in bundled if f"site-packages/{name}/" not in text] == []


def test_wheels(built: Built) -> None:
    assert built.wheel.name.startswith("whyspan-") and "-py3-none-manylinux_2_17_" in built.wheel.name
    assert "-cp39-abi3-" in built.inproc.name
    names = set(zipfile.ZipFile(built.wheel).namelist())
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {
        "whyspan",
        "whyspan_probes",
        "whyspan_exporters",
    }
    inproc = set(zipfile.ZipFile(built.inproc).namelist())
    assert {"whyspan_inproc.pth", "whyspan_inproc/_marker.abi3.so"} <= inproc
    assert not [n for n in names | inproc if "test" in n.split("/")[-1]]
