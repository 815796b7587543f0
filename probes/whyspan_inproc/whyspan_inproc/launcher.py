"""``whyspan-instrument COMMAND ...``: run a command with the hooks loaded in it and in its children."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from whyspan_inproc import __version__
from whyspan_inproc.auto import SWITCH

USAGE = """\
usage: whyspan-instrument COMMAND [ARGUMENT ...]

Runs COMMAND so that every Python process it starts tells whyspan's agent what it does, for as long as the agent
watches; without an agent nothing happens.

  whyspan-instrument python server.py --port 8000
  whyspan-instrument vllm serve MODEL

options:
  --help, -h     show this help
  --version      show the version

environment:
  WHYSPAN_INPROC=0   nothing is loaded at all
  WHYSPAN_INPROC=1   the same as whyspan-instrument, where this package is installed in the server's environment
"""
#: What a shell says for a command that cannot be run, and for one that is not found.
_CANNOT, _NOT_FOUND = 126, 127
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"


def environment(base: dict[str, str]) -> dict[str, str]:
    """Return ``base`` with our ``sitecustomize`` first on PYTHONPATH; as it is if it turns us off."""
    if base.get(SWITCH) == "0":
        return base
    entries = [e for e in base.get("PYTHONPATH", "").split(os.pathsep) if e and e != str(BOOTSTRAP)]
    return {**base, "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *entries])}


def main(argv: list[str] | None = None) -> int:
    """Become the command; return an exit status only if that is not possible."""
    args = sys.argv[1:] if argv is None else argv
    if args[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    if args[:1] == ["--version"]:
        print(f"whyspan-instrument {__version__}")
        return 0
    if args[:1] == ["--"]:
        args = args[1:]
    if not args or args[0].startswith("-"):
        print(USAGE, end="", file=sys.stderr)
        return 2
    sys.stdout.flush()
    try:
        os.execvpe(args[0], args, environment(dict(os.environ)))
    except FileNotFoundError:
        print(f"whyspan-instrument: {args[0]}: not found", file=sys.stderr)
        return _NOT_FOUND
    except OSError as exc:
        print(f"whyspan-instrument: {args[0]}: {exc.strerror}", file=sys.stderr)
        return _CANNOT


if __name__ == "__main__":
    sys.exit(main())
