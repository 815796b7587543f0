"""What is to be hooked is waited for; it is imported as it would have been without us."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from whyspan_inproc import imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the path that is forgotten afterwards."""
    folder = tmp_path / "hooked_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "data.txt").write_text("23")
    (folder / "part.py").write_text("VALUE = 23\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [n for n in sys.modules if n.startswith("hooked_pkg")]:
        del sys.modules[name]


def test_runs_after_the_import_and_only_once(package: Path) -> None:
    seen: list[int] = []
    imports.when_imported("hooked_pkg.part", lambda m: seen.append(m.VALUE))
    assert not seen and "hooked_pkg" not in sys.modules
    importlib.import_module("hooked_pkg")
    assert not seen
    importlib.import_module("hooked_pkg.part")
    assert seen == [23]
    del sys.modules["hooked_pkg.part"]
    importlib.import_module("hooked_pkg.part")
    assert seen == [23]


def test_runs_at_once_if_imported(package: Path) -> None:
    importlib.import_module("hooked_pkg.part")
    seen: list[ModuleType] = []
    imports.when_imported("hooked_pkg.part", seen.append)
    assert seen == [sys.modules["hooked_pkg.part"]]


def test_module_is_as_it_would_be(package: Path) -> None:
    imports.when_imported("hooked_pkg.part", lambda _: None)
    module = importlib.import_module("hooked_pkg.part")
    from importlib.machinery import SourceFileLoader

    assert module.__spec__ is not None
    assert isinstance(module.__spec__.loader, SourceFileLoader)
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__file__ == str(package / "part.py")
    again = importlib.reload(module)
    assert again is module


def test_looking_a_waited_for_module_up_does_not_import_it(package: Path) -> None:
    imports.when_imported("hooked_pkg.part", lambda _: pytest.fail("imported"))
    spec = importlib.util.find_spec("hooked_pkg.part")
    assert spec is not None and spec.origin == str(package / "part.py")
    assert "hooked_pkg.part" not in sys.modules
    imports._waiting.pop("hooked_pkg.part")


def test_action_that_raises_does_not_fail_the_import(package: Path) -> None:
    def broken(_module: ModuleType) -> None:
        raise RuntimeError("mine")

    seen: list[int] = []
    imports.when_imported("hooked_pkg.part", broken)
    imports.when_imported("hooked_pkg.part", lambda m: seen.append(m.VALUE))
    assert importlib.import_module("hooked_pkg.part").VALUE == 23
    assert seen == [23]
    assert imports.failed[-1] == "hooked_pkg.part"


def test_import_that_fails_fails_as_before(package: Path) -> None:
    (package / "part.py").write_text("raise ValueError('theirs')\n")
    imports.when_imported("hooked_pkg.part", lambda _: pytest.fail("not imported"))
    with pytest.raises(ValueError, match="theirs"):
        importlib.import_module("hooked_pkg.part")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_pkg.none")
    (package / "part.py").write_text("VALUE = 24\n")
    imports._waiting.pop("hooked_pkg.part")


def test_half_imported_module_is_hooked_when_it_is_whole(package: Path) -> None:
    seen: list[int] = []
    sys.modules["test_imports_seen"] = ModuleType("test_imports_seen")
    sys.modules["test_imports_seen"].hook = lambda: imports.when_imported(  # type: ignore[attr-defined]
        "hooked_pkg.part", lambda m: seen.append(m.LATER)
    )
    (package / "part.py").write_text("import test_imports_seen\ntest_imports_seen.hook()\nLATER = 29\n")
    try:
        importlib.import_module("hooked_pkg.part")
        importlib.import_module("hooked_pkg.another") if (package / "another.py").exists() else None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("hooked_pkg.yet_another")  # any import will do
    finally:
        del sys.modules["test_imports_seen"]
    assert seen == [29]
