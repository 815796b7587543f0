"""Put first on PYTHONPATH by ``whyspan-instrument``: loads the hooks, then the sitecustomize it stands in front of."""

from __future__ import annotations

import os
import sys


def _load_hooks() -> None:
    """Import whyspan_inproc from beside this file, without putting what lies there on ``sys.path``."""
    from importlib.util import module_from_spec, spec_from_file_location

    if "whyspan_inproc" not in sys.modules:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = spec_from_file_location(
            "whyspan_inproc", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        if spec is None or spec.loader is None:
            return
        module = module_from_spec(spec)
        sys.modules["whyspan_inproc"] = module
        spec.loader.exec_module(module)
    from whyspan_inproc import auto

    auto.load()


def _chain() -> None:
    """Run the sitecustomize that would have run had this one not been found first."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    path = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("WHYSPAN_INPROC") != "0":
    try:
        _load_hooks()
    except Exception:
        pass  # the host's start matters more than ours
_chain()  # outside the guard: what it raises, Python's site module reports as always
