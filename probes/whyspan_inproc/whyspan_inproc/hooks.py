"""Wrap a method of somebody else's class so that nothing of ours can reach the caller.

A wrapper asks first whether anybody watches. What ours raises is counted; after ``LIMIT`` failures the hook is
off for good. A class or method that is not there, or takes other arguments than we know, is a *missing* hook:
reported, never an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whyspan_inproc import emit
from whyspan_inproc.imports import when_imported

if TYPE_CHECKING:
    from types import ModuleType

#: Failures of one hook before it is switched off.
LIMIT = 20

Before = Callable[["Hook", "tuple[Any, ...]", "dict[str, Any]"], Any]
After = Callable[["Hook", Any, Any, "tuple[Any, ...]", "dict[str, Any]"], Any]


class Hook:
    """One method of theirs. ``before`` and ``after`` see its arguments, ``self`` first; ``after`` also the token
    that ``before`` returned, and the result.

    ``replace``: ``after`` returns what the caller gets. ``coroutine``: ``before``, the only one then, runs when the
    coroutine does, in its context. ``always``: runs unwatched too (set-up, not traffic). ``optional``: not missed
    where it does not exist.
    """

    def __init__(
        self,
        role: str,
        module: str,
        target: str,
        params: str,
        *,
        before: Before | None = None,
        after: After | None = None,
        replace: bool = False,
        coroutine: bool = False,
        always: bool = False,
        optional: bool = False,
    ) -> None:
        self.role, self.module, self.target = role, module, target
        self.params = tuple(params.split())
        self.before, self.after, self.replace, self.coroutine = before, after, replace, coroutine
        self.always, self.optional = always, optional
        self.state = "waiting"  # waiting, on, missing, off
        self.failures = 0
        self._position: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Hook {self.module}.{self.target} {self.state}>"

    def argument(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
        """Return the argument ``name`` of a call, however it was passed."""
        if name in kwargs:
            return kwargs[name]
        at = self._position.get(name, len(args))
        return args[at] if at < len(args) else default

    def wait(self) -> None:
        """Wrap the method once its module is imported, or now; whatever is wrong with it makes it missing."""
        when_imported(self.module, self._imported)

    def _imported(self, module: ModuleType) -> None:
        try:
            self.install(module)
        except Exception:
            self.state = "missing"

    def install(self, module: ModuleType) -> None:
        """Wrap the method in ``module``, or be missing."""
        *path, name = self.target.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        original = vars(owner).get(name) if owner is not None else None
        if not callable(original):
            self.state = "missing"
            return
        names = list(inspect.signature(original).parameters)
        if not set(self.params) <= set(names):
            self.state = "missing"
            return
        self._position = {n: i for i, n in enumerate(names)}
        setattr(owner, name, self._awaiter(original) if self.coroutine else self._wrapper(original))
        self.state = "on"

    def failed(self) -> None:
        """Count a failure of ours; be off after too many."""
        self.failures += 1
        if self.failures >= LIMIT and self.state == "on":
            self.state = "off"
            emit.changed()

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after, replace, always, watched = (
            self.before,
            self.after,
            self.replace,
            self.always,
            emit.watched,
        )

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not (always or watched()) or self.state == "off":
                return original(*args, **kwargs)
            token = None
            if before is not None:
                try:
                    token = before(self, args, kwargs)
                except Exception:
                    self.failed()
            result = original(*args, **kwargs)
            if after is not None:
                try:
                    ours = after(self, token, result, args, kwargs)
                    if replace:
                        return ours
                except Exception:
                    self.failed()
            return result

        return wrapper

    def _awaiter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, watched = self.before, emit.watched

        # An ASGI application's own parameters: uvicorn calls it without any, and takes it for a factory if that
        # is no TypeError.
        @functools.wraps(original)
        async def wrapper(this: Any, scope: Any, receive: Any, send: Any) -> Any:
            if before is not None and watched() and self.state != "off":
                try:
                    before(self, (this, scope, receive, send), {})
                except Exception:
                    self.failed()
            return await original(this, scope, receive, send)

        return wrapper
