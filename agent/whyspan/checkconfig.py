"""Checks a configuration file and does nothing else; ``python -m whyspan.checkconfig [--config FILE]``.

The units run it before they reload, so that a wrong file makes ``systemctl reload`` fail and say why.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from whyspan.config import load_config
from whyspan.errors import WhyspanError


def main() -> int:
    """Return 0 when the configuration can be used; else say why not, and return the error's exit status."""
    parser = argparse.ArgumentParser(prog="whyspan-checkconfig", description=__doc__)
    parser.add_argument("--config", type=Path, default=None)
    try:
        config = load_config(parser.parse_args().config)
        config.socket_path  # noqa: B018  # too long a path
    except WhyspanError as e:
        print(f"<3>{e}" if not sys.stderr.isatty() else str(e), file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
