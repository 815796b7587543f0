"""What the plugin wraps, as a vLLM's source has it: ``python -m tests.unit.inproc.signatures PACKAGE > TABLE``.

``PACKAGE`` is the folder of the package ``vllm``, of an installation or of an unpacked wheel. Read, not imported: no
torch is needed, and a version for another machine will do.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from whyspan_inproc.vllm_plugin import core, frontend, stages, worker

HOOKS = [*frontend.HOOKS, *core.HOOKS, *worker.HOOKS, *stages.HOOKS]


def parameters(package: Path, module: str, target: str) -> list[str] | None:
    """Return the names of the parameters of a function or method; None if it is not there."""
    source = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not source.exists():
        return None
    body: list[ast.stmt] = ast.parse(source.read_text()).body
    found: ast.stmt | None = None
    for name in target.split("."):
        found = next(
            (
                s
                for s in reversed(body)  # of overloads the last one is the function
                if isinstance(s, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and s.name == name
            ),
            None,
        )
        if found is None:
            return None
        body = found.body if isinstance(found, ast.ClassDef) else []
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = found.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def table(package: Path) -> dict[str, list[str] | None]:
    """Return the parameters of everything that the plugin wraps, by ``module:target``."""
    return {f"{h.module}:{h.target}": parameters(package, h.module, h.target) for h in HOOKS}


if __name__ == "__main__":
    print(json.dumps(table(Path(sys.argv[1])), indent=1, sort_keys=True))
