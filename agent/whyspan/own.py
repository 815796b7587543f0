"""How this program starts further processes of its own."""

from __future__ import annotations

import sys


def command(module: str) -> list[str]:
    """Return the command that runs *module* with this interpreter.

    The folder that somebody happens to be in is never searched for modules: who owns it would run code as this user.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", module]
