"""``whyspan explain --html`` on the command line."""

from __future__ import annotations

from pathlib import Path

from tests.unit.conftest import Run
from tests.unit.viewlab import Written


def test_html(run: Run, small: Written, tmp_path: Path) -> None:
    target = tmp_path / "x.html"
    name = small.hostile[0]
    assert run("explain", name, "--store", small.path, "--html", target) == (0, f"wrote {target}\n", "")
    assert target.read_text().startswith("<!doctype html>")
    # JSON stays alone on standard output.
    status, out, err = run("explain", name, "--store", small.path, "--html", target, "--json")
    assert (status, out[0], err) == (0, "{", f"wrote {target}\n")


def test_html_goes_nowhere(run: Run, small: Written, tmp_path: Path) -> None:
    name = small.hostile[0]
    for target in (tmp_path / "none" / "x.html", Path("/dev/full")):
        status, out, err = run("explain", name, "--store", small.path, "--html", target)
        assert (status, out) == (1, "")
        assert err.startswith(f"whyspan: cannot write {target}: ") and err.count("\n") == 1
    assert run("explain", "none", "--store", small.path, "--html", tmp_path / "x.html")[0] == 1
    assert not (tmp_path / "x.html").exists()
