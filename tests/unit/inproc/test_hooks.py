"""A wrapper is invisible to the host: same result, same exceptions, whatever ours does."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
from whyspan_inproc import hooks
from whyspan_inproc.hooks import Hook

from tests.unit.inproc.conftest import Caught


def module_with_engine() -> Any:
    class Engine:
        def add(self, request: str, priority: int = 0, *, name: str = "") -> str:
            """Adds."""
            if request == "bad":
                raise KeyError("theirs")
            return f"{request}/{priority}/{name}"

    module: Any = types.ModuleType("engine")
    module.Engine = Engine
    return module


def installed(module: Any, **options: Any) -> Hook:
    hook = Hook("core", "engine", "Engine.add", "self request", **options)
    hook.install(module)
    return hook


def test_before_and_after_see_the_call(caught: Caught) -> None:
    module, seen = module_with_engine(), list[Any]()

    def before(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str:
        seen.append(("before", args[1]))
        return "token"

    def after(hook: Hook, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((token, result, hook.argument(args, kwargs, "priority", 7)))

    hook = installed(module, before=before, after=after)
    assert hook.state == "on"
    assert module.Engine().add("a", 2, name="n") == "a/2/n"
    assert module.Engine().add("b", priority=3) == "b/3/"
    assert module.Engine().add("c") == "c/0/"
    assert seen == [
        *(("before", "a"), ("token", "a/2/n", 2)),
        *(("before", "b"), ("token", "b/3/", 3)),
        *(("before", "c"), ("token", "c/0/", 7)),
    ]


def test_looks_like_the_original() -> None:
    module = module_with_engine()
    original = module.Engine.add
    installed(module)
    assert inspect.signature(module.Engine.add) == inspect.signature(original)
    assert module.Engine.add.__doc__ == "Adds." and module.Engine.add.__name__ == "add"


def test_nothing_of_ours_runs_unwatched(caught: Caught) -> None:
    caught.watchers = 0
    module = module_with_engine()
    installed(module, before=lambda *_: pytest.fail("ran"), after=lambda *_: pytest.fail("ran"))
    assert module.Engine().add("a") == "a/0/"


def test_set_up_runs_unwatched(caught: Caught) -> None:
    caught.watchers = 0
    module, seen = module_with_engine(), list[str]()
    installed(module, before=lambda _h, args, _k: seen.append(args[1]), always=True)
    module.Engine().add("a")
    assert seen == ["a"]


def test_failures_are_swallowed_counted_and_end_the_hook(caught: Caught) -> None:
    module, calls = module_with_engine(), list[int]()

    def broken(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("ours")

    hook = installed(module, before=broken)
    for _ in range(hooks.LIMIT + 5):
        assert module.Engine().add("a") == "a/0/"
    assert hook.state == "off"
    assert hook.failures == len(calls) == hooks.LIMIT


def test_theirs_are_not_touched(caught: Caught) -> None:
    module = module_with_engine()
    hook = installed(module, after=lambda *_: pytest.fail("ran"))
    with pytest.raises(KeyError, match="theirs"):
        module.Engine().add("bad")
    assert hook.failures == 0


def test_result_is_replaced_only_by_one_that_was_made(caught: Caught) -> None:
    module, broken = module_with_engine(), list[int]()

    def after(_h: Hook, _t: Any, result: str, _a: tuple[Any, ...], _k: dict[str, Any]) -> str:
        if broken:
            raise RuntimeError("ours")
        return result.upper()

    installed(module, after=after, replace=True)
    assert module.Engine().add("a") == "A/0/"
    broken.append(1)
    assert module.Engine().add("a") == "a/0/"


@pytest.mark.parametrize(
    ("target", "params"),
    [
        ("Engine.gone", "self"),
        ("Gone.add", "self"),
        ("Engine.add", "self request deadline"),
        ("Engine.__class__", "self"),
    ],
)
def test_what_is_not_as_known_is_missing(target: str, params: str) -> None:
    module = module_with_engine()
    original = module.Engine.add
    hook = Hook("core", "engine", target, params)
    hook.install(module)
    assert hook.state == "missing"
    assert module.Engine.add is original


def test_two_hooks_on_one_method(caught: Caught) -> None:
    module, seen = module_with_engine(), list[str]()
    for name in ("inner", "outer"):
        installed(module, before=lambda _h, _a, _k, name=name: seen.append(name))
    module.Engine().add("a")
    assert seen == ["outer", "inner"]


def test_method_of_a_parent_is_not_copied() -> None:
    module = module_with_engine()

    class Special(module.Engine):  # type: ignore[misc, name-defined]
        pass

    module.Special = Special
    hook = Hook("core", "engine", "Special.add", "self request")
    hook.install(module)
    assert hook.state == "missing" and "add" not in vars(Special)
