#!/usr/bin/env python3
"""Write the boards, alert rules and provisioning.

``.venv/bin/python dashboards/generate.py [--check] [--runbooks URL]``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from whyspan_dashboards import links
from whyspan_dashboards.files import generated

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Write what differs, or with ``--check`` only say what does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a file is not up to date"
    )
    parser.add_argument(
        "--runbooks", default=links.RUNBOOKS, metavar="URL", help="where docs/runbooks can be read"
    )
    args = parser.parse_args()
    stale = []
    for name, text in generated(args.runbooks.rstrip("/")).items():
        path = HERE / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not args.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{'not up to date' if args.check else 'wrote'}: dashboards/{name}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
