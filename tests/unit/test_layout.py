"""The repository's layout: what a stray file would break silently."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["packaging", "dashboards"])
def test_folder_is_no_package(folder: str) -> None:
    # packaging/__init__.py would hide the library `packaging` from pytest and from the build. What makes the boards is
    # a package within their folder, with a name of its own.
    found = {p.parent.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("__init__.py")}
    assert found <= {"dashboards/whyspan_dashboards"}


def test_packaging_library_is_not_ours() -> None:
    import packaging.version

    assert ROOT not in Path(packaging.version.__file__ or "").parents or ".venv" in packaging.version.__file__


def test_pytest_does_not_put_the_root_on_the_path() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "pythonpath" not in options
    assert "--import-mode=importlib" in options["addopts"]


def test_wheel_holds_three_packages_only() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert packages["packages"] == ["agent/whyspan", "probes/whyspan_probes", "exporters/whyspan_exporters"]
    for name in packages["packages"]:
        assert (ROOT / name / "py.typed").exists(), f"{name} has no py.typed"
