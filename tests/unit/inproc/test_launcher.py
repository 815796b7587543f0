"""``whyspan-instrument`` and the ``.pth`` file, in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whyspan_inproc import __version__, launcher

from tests.unit.inproc.conftest import PACKAGE

LOADED = "import sys; print('whyspan_inproc.auto' in sys.modules)"


def start(
    *args: str, package: Path = PACKAGE, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the launcher; the package is on the launcher's own path only."""
    code = (
        f"import sys; sys.path.insert(0, {str(package)!r})\n"
        "from whyspan_inproc.launcher import main; sys.exit(main())"
    )
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "WHYSPAN_INPROC")}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=base | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_hooks_are_loaded_in_the_command() -> None:
    done = start(sys.executable, "-c", LOADED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_hooks_are_loaded_in_its_children() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOADED!r}], check=True)"
    assert start(sys.executable, "-c", code).stdout == "True\n"


def test_arguments_and_status_are_the_commands() -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(23)"
    done = start("--", sys.executable, "-c", code, "a b", "--help", "")
    assert json.loads(done.stdout) == ["a b", "--help", ""]
    assert done.returncode == 23


def test_path_gets_nothing_but_our_sitecustomize(tmp_path: Path) -> None:
    code = "import json, sys; print(json.dumps(sys.path))"
    env = {"PYTHONPATH": f"{tmp_path}"}
    plain = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    ours = start(sys.executable, "-c", code, env=env)
    assert set(json.loads(ours.stdout)) - set(json.loads(plain.stdout)) == {str(launcher.BOOTSTRAP)}


def test_off(tmp_path: Path) -> None:
    code = LOADED + "; import os; print(os.environ.get('PYTHONPATH'))"
    done = start(sys.executable, "-c", code, env={"WHYSPAN_INPROC": "0"})
    assert done.stdout == "False\nNone\n"


def test_child_can_be_left_out() -> None:
    code = f"""
import os, subprocess, sys
subprocess.run([sys.executable, '-c', {LOADED!r}], env={{**os.environ, 'WHYSPAN_INPROC': '0'}}, check=True)
"""
    assert start(sys.executable, "-c", code).stdout == "False\n"


def test_other_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = __file__\n")
    code = LOADED + "; print(sys.theirs); import sitecustomize; print(sitecustomize.__file__)"
    done = start(sys.executable, "-c", code, env={"PYTHONPATH": str(tmp_path)})
    theirs = str(tmp_path / "sitecustomize.py")
    assert done.stdout.splitlines() == ["True", theirs, theirs]


def test_other_sitecustomize_that_fails_is_reported_as_always(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    done = start(sys.executable, "-c", LOADED, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "RuntimeError: theirs" in done.stderr


@pytest.mark.parametrize("broken", ["auto.py", "__init__.py", "emit.py"])
def test_broken_package_does_not_fail_the_command(tmp_path: Path, broken: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy)
    entry = start(sys.executable, "-c", "print('alive')", package=copy)
    assert entry.stdout == "alive\n"
    (copy / "whyspan_inproc" / broken).write_text("raise RuntimeError('ours')\n")
    path = str(copy / "whyspan_inproc" / "bootstrap")
    done = subprocess.run(
        [sys.executable, "-c", "print('alive')"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_options() -> None:
    assert start("--help").stdout.startswith("usage: whyspan-instrument")
    assert start("--version").stdout == f"whyspan-instrument {__version__}\n"
    for wrong in ((), ("--nonsense",)):
        done = start(*wrong)
        assert done.returncode == 2 and done.stderr.startswith("usage:")


def test_command_that_cannot_be_run(tmp_path: Path) -> None:
    done = start("no-such-command-23")
    assert (done.returncode, done.stderr) == (127, "whyspan-instrument: no-such-command-23: not found\n")
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert start(str(plain)).returncode == 126


def test_environment_is_not_extended_twice() -> None:
    once = launcher.environment({"PYTHONPATH": f"a{os.pathsep}b"})
    assert once["PYTHONPATH"] == os.pathsep.join([str(launcher.BOOTSTRAP), "a", "b"])
    assert launcher.environment(once) == once


@pytest.mark.parametrize(("value", "loaded"), [(None, False), ("0", False), ("", False), ("1", True)])
def test_pth_file(tmp_path: Path, value: str | None, loaded: bool) -> None:
    shutil.copy(PACKAGE / "whyspan_inproc.pth", tmp_path)
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); {LOADED}"
    base = {k: v for k, v in os.environ.items() if k != "WHYSPAN_INPROC"} | {"PYTHONPATH": str(PACKAGE)}
    env = base | ({} if value is None else {"WHYSPAN_INPROC": value})
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (f"{loaded}\n", "")


def test_pth_file_left_behind_is_silent(tmp_path: Path) -> None:
    shutil.copy(PACKAGE / "whyspan_inproc.pth", tmp_path)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); print('alive')"
    base = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**base, "WHYSPAN_INPROC": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("alive\n", "")
