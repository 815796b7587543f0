"""What the page is looked at with: ``python -m tests.page.tools`` gets it, once per user.

Debian's Chromium, driven by playwright from PyPI (which brings its driver and downloads no browser); axe-core for
contrast and labels, and TypeScript for the types in the modules' comments, from npm with the Node.js of the boards.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from tests.boards import tools
from tests.engine.install import cache

#: Exactly these: what a newer one finds is for whoever makes it newer.
PACKAGES = ("axe-core@4.14.1", "typescript@7.0.2")
_BROWSERS = ("chromium", "chromium-browser")


def folder() -> Path:
    """Return where the tools are."""
    return cache() / "page"


def browser() -> str:
    """Return Chromium's program; empty when there is none."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), "")


def axe() -> Path:
    """Return axe-core's script, which may not be there."""
    return folder() / "node_modules/axe-core/axe.min.js"


def tsc() -> Path:
    """Return TypeScript's compiler, which may not be there."""
    return folder() / "node_modules/.bin/tsc"


def _installed() -> bool:
    """Whether npm has put exactly `PACKAGES` there."""
    return (
        axe().exists() and tsc().exists() and _stamp().exists() and _stamp().read_text() == " ".join(PACKAGES)
    )


def _stamp() -> Path:
    return folder() / "installed"


def lacking() -> str:
    """Why the page cannot be looked at here; empty when it can."""
    missing = [] if browser() else ["Debian's package chromium (`make page`)"]
    missing += [] if importlib.util.find_spec("playwright") else ["playwright (`make venv`)"]
    missing += [] if _installed() and tools.node() else ["axe-core and TypeScript (`make page`)"]
    return f"needs {', '.join(missing)}" if missing else ""


def install() -> None:
    """Get what is missing; another process that does so at the same time is waited for.

    Raises:
        ToolsError: something cannot be had.
    """
    with tools.alone(folder()):
        if not _installed():
            tools.get_node()
            tools.npm(folder(), PACKAGES)
            _stamp().write_text(" ".join(PACKAGES))


def main() -> int:
    """Install; 1 when something cannot be had."""
    try:
        install()
    except tools.ToolsError as e:
        print(f"page: {e}", file=sys.stderr)
        return 1
    print(lacking() or folder())
    return 1 if lacking() else 0


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    sys.exit(main())
