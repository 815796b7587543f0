#!/usr/bin/env python3
"""Build ``dist/``: the Debian package and the wheels. ``make package`` runs it after ``make build``.

It must be run by the distribution's interpreter (/usr/bin/python3): the package is for that Python only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import environment
import texts
import wheels
from common import PACKAGING, ROOT, BuildError, date_s, project, run

MAINTAINER = "whyspan developers <developers@whyspan.invalid>"


def distribution() -> str:
    """Return what tells packages for several releases apart and sorts as they do: ``+deb12``, ``+ubuntu24.04``."""
    lines = Path("/etc/os-release").read_text().splitlines()
    told = {k: v.strip("\"'") for k, _, v in (line.partition("=") for line in lines)}
    name = {"debian": "deb"}.get(told.get("ID", ""), told.get("ID", "linux"))
    return f"+{name}{told.get('VERSION_ID', '')}"


def python_depends() -> str:
    """Return the dependency on the Python that the modules were compiled for."""
    major, minor = sys.version_info[:2]
    return f"python3 (>= {major}.{minor}~), python3 (<< {major}.{minor + 1}~)"


def configuration(text: str) -> str:
    """Return the configuration that is shipped: the store is where the units keep it, for every user's commands.

    Raises:
        BuildError: the key is not where it is expected.
    """
    key = '\n#state_dir = ""'
    if text.count(key) != 1:
        raise BuildError("packaging/whyspan.toml: run.state_dir is not there once")
    return text.replace(key, '\nstate_dir = "/var/lib/whyspan"')


def fill(work: Path, tools: Path, made: list[Path]) -> Path:
    """Make the folder that debhelper works in, with everything the package holds; return it.

    Raises:
        BuildError: see the steps.
    """
    shutil.rmtree(work, ignore_errors=True)
    tree = work / "tree"
    modules = environment.make(tools, made[0], tree)
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/whyspan").symlink_to("../lib/whyspan/bin/whyspan")
    etc = tree / "etc/whyspan"
    etc.mkdir(parents=True)
    (etc / "whyspan.toml").write_text(configuration((PACKAGING / "whyspan.toml").read_text()))
    share = tree / "usr/share/whyspan"
    share.mkdir(parents=True)
    shutil.copyfile(made[1], share / made[1].name)
    texts.from_commands(tools, modules, tree)
    texts.documents(tree)
    debian = work / "debian"
    shutil.copytree(PACKAGING / "debian", debian)
    for unit in (PACKAGING / "systemd").glob("*.service"):
        name = unit.name if unit.name == "whyspan.service" else f"whyspan.{unit.name}"
        shutil.copyfile(unit, debian / name)
    shutil.copyfile(PACKAGING / "sysusers.d/whyspan.conf", debian / "whyspan.sysusers")
    (debian / "copyright").write_text(texts.copyright_file(modules, MAINTAINER))
    return work


def package(work: Path, version: str, out: Path) -> Path:
    """Have debhelper make the package in *work*; return its path in *out*.

    Raises:
        BuildError: debhelper is not there, or fails.
    """
    if shutil.which("dh") is None:
        raise BuildError("needs debhelper: apt-get install debhelper")
    debian = work / "debian"
    control = debian / "control"
    control.write_text(control.read_text().replace("@PYTHON@", python_depends()))
    (debian / "changelog").write_text(texts.changelog(version, MAINTAINER))
    # Everything bears one date, also what was just written: dpkg-deb takes later dates down to it.
    env = {
        "SOURCE_DATE_EPOCH": str(date_s()),
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "DEB_BUILD_OPTIONS": "parallel=2",
    }
    for path in [*work.rglob("*")]:
        os.utime(path, (date_s(), date_s()), follow_symlinks=False)
    run(["make", "-f", "debian/rules", "binary"], cwd=work, env=env)
    (made,) = work.parent.glob("whyspan_*.deb")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(made, out / made.name))


def main() -> int:
    """Build what is asked for; one line for each file made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go")
    parser.add_argument("--work", type=Path, default=ROOT / "build/package", help="where it is built")
    parser.add_argument(
        "--suffix", default="", help="added to the version: +1 for another build of a release"
    )
    parser.add_argument("--wheels", action="store_true", help="the wheels only")
    arguments = parser.parse_args()
    out, work = arguments.out.resolve(), arguments.work.resolve()
    try:
        os.environ["SOURCE_DATE_EPOCH"] = str(date_s())
        os.umask(0o022)
        tools = wheels.tools(work / "tools", Path("/usr/bin/python3"))
        made = wheels.build(tools, work / "wheels", out)
        if not arguments.wheels:
            version = f"{project()['version']}{distribution()}{arguments.suffix}"
            for old in out.glob(f"whyspan_{version}_*.deb"):
                old.unlink()
            made.append(package(fill(work / "deb/whyspan", tools, made), version, out))
    except BuildError as e:
        print(f"package: {e}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path.stat().st_size / 1e6:7.2f} MB  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
