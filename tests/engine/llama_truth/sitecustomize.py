"""The truth about a llama.cpp server, by itself: with this in PYTHONPATH it writes a line per call of llama.cpp.

``WHYSPAN_TRUTH`` names the file. The times lie outside of those that a uprobe sees, by the cost of a call through
ctypes. Standard library only: it runs in llama.cpp's environment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

CALLS = ("llama_decode", "llama_encode", "llama_memory_seq_rm", "llama_memory_clear")


def wrap(module: Any, fd: int) -> None:
    """Put a function around each call that writes what it did."""

    def around(name: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            begin_ns = time.monotonic_ns()
            result = call(*args)
            said = {
                "call": name,
                "begin_ns": begin_ns,
                "end_ns": time.monotonic_ns(),
                "tid": threading.get_native_id(),
                "result": int(result or 0),
                "tokens": args[1].n_tokens if name in CALLS[:2] else 0,
                "arguments": [int(a) for a in args[1:]] if name not in CALLS[:2] else [],
            }
            os.write(fd, json.dumps(said).encode() + b"\n")
            return result

        return counted

    for name in CALLS:
        if hasattr(module, name):
            setattr(module, name, around(name, getattr(module, name)))


class _Finder(MetaPathFinder):
    """Wraps the module once it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "llama_cpp.llama_cpp":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            wrap(module, os.open(os.environ["WHYSPAN_TRUTH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "WHYSPAN_TRUTH" in os.environ:
    sys.meta_path.insert(0, _Finder())
