"""Run something when a module is imported, without importing it oneself."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

Action = Callable[["ModuleType"], None]

_waiting: dict[str, list[Action]] = {}
_finding = threading.local()


def when_imported(name: str, action: Action) -> None:
    """Call ``action`` with the module ``name``: now if it is imported, else right after it has been.

    What ``action`` raises is dropped: an import must not fail for us.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _run(action, module)
        return
    _waiting.setdefault(name, []).append(action)
    if module is not None:  # half imported, by a thread or by whoever called us: its loader is past us
        _late.append(name)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _run(action: Action, module: ModuleType) -> None:
    try:
        action(module)
    except Exception:
        failed.append(module.__name__)
        del failed[:-16]


def _imported(name: str, module: ModuleType) -> None:
    for action in _waiting.pop(name, ()):
        _run(action, module)


def _catch_up() -> None:
    for name in list(_late):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _late.remove(name)
            _imported(name, module)


class _Finder:
    """Stands first in ``sys.meta_path``; lets the others find, and wraps the loader of a module waited for."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _late:
            _catch_up()
        if name not in _waiting or name in getattr(_finding, "names", ()):
            return None
        names = _finding.names = {*getattr(_finding, "names", ()), name}
        try:
            spec = importlib.util.find_spec(name)
        finally:
            names.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """The module's own loader, and then the actions."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _imported(module.__name__, module)


_FINDER = _Finder()
_late: list[str] = []
#: Modules whose actions raised, the last sixteen.
failed: list[str] = []
