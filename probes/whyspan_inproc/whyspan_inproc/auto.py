"""Install every hook there is: each waits until what it hooks is imported. Never raises.

``WHYSPAN_INPROC=0`` in the environment turns all off.
"""

from __future__ import annotations

import importlib
import os

#: Modules of this package with a ``register()`` that may be called any number of times.
HOOKS = ("asgi", "span_processor", "vllm_plugin", "transformers_hook", "torch_layers")
SWITCH = "WHYSPAN_INPROC"

#: Of HOOKS, those whose registration failed, and why.
failed: dict[str, str] = {}


def off() -> bool:
    """Return whether the environment turns everything off."""
    return os.environ.get(SWITCH) == "0"


def load() -> None:
    """Register every hook unless ``off``."""
    if off():
        return
    for name in HOOKS:
        try:
            importlib.import_module(f"whyspan_inproc.{name}").register()
        except Exception as exc:
            failed[name] = type(exc).__name__
