"""The wheel: one for all Pythons, the .pth beside the package, the entry points, and no dependency."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.unit.inproc.conftest import PACKAGE


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, with the build tools that are here."""
    for tool in ("setuptools", "wheel"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build", "*.egg-info")
    shutil.copytree(PACKAGE, folder / "source", ignore=ignore)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source")], check=True
    )
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


def test_one_wheel_for_every_python(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.startswith("whyspan_inproc-0.1.0-cp39-abi3-linux_")


def test_contents(wheel: zipfile.ZipFile) -> None:
    names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    package = PACKAGE / "whyspan_inproc"
    modules = {f"whyspan_inproc/{f.relative_to(package)}" for f in package.rglob("*.py")}
    extra = {
        "whyspan_inproc.pth",
        *(f"whyspan_inproc/{n}" for n in ("_marker.abi3.so", "py.typed", "_marker.pyi")),
    }
    assert names - {"whyspan_inproc/_marker.c"} == modules | extra


def test_pth_is_one_import_line(wheel: zipfile.ZipFile) -> None:
    text = wheel.read("whyspan_inproc.pth").decode()
    assert text.startswith("import ") and text.count("\n") == 1  # else site takes it for a path


def test_metadata(wheel: zipfile.ZipFile) -> None:
    text = wheel.read("whyspan_inproc-0.1.0.dist-info/METADATA").decode()
    head = text.partition("\n\n")[0].splitlines()
    assert "Requires-Python: >=3.9" in head
    assert not [line for line in head if line.startswith("Requires-Dist")]
    points = wheel.read("whyspan_inproc-0.1.0.dist-info/entry_points.txt").decode()
    assert "[vllm.general_plugins]\nwhyspan = whyspan_inproc.auto:load" in points
    assert "whyspan-instrument = whyspan_inproc.launcher:main" in points


def test_version_is_said_once() -> None:
    from whyspan_inproc import __version__

    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__ and project["dependencies"] == []


def test_sources_are_for_python_39() -> None:
    import ast

    for file in (PACKAGE / "whyspan_inproc").rglob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 9))
