"""The types in the modules' comments hold, says TypeScript. It builds nothing: the modules run as they are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.boards.tools import node
from tests.page import tools

PROJECT = Path(__file__).with_name("tsconfig.json")


def test_types() -> None:
    found = node()
    assert found is not None  # the tier's marker has seen to it
    env = os.environ | {"PATH": f"{found.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [tools.tsc(), "--project", PROJECT, "--pretty", "false"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
