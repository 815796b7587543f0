"""Which HTTP request is in progress, as the application's own frames see it."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest
from whyspan_inproc import asgi

from tests.unit.inproc.conftest import Caught

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def scope(*headers: tuple[bytes, bytes], **more: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "headers": headers,
        "client": ("10.0.0.7", 51_234),
        "server": ("127.0.0.1", 8_000),
        **more,
    }


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN)),
        (f" 00-{TRACE}-{SPAN}-00 ", (TRACE, SPAN)),
        (f"cc-{TRACE}-{SPAN}-01-more", (TRACE, SPAN)),
        (f"ff-{TRACE}-{SPAN}-01", ("", "")),
        (f"00-{TRACE.upper()}-{SPAN}-01", ("", "")),
        (f"00-{'0' * 32}-{SPAN}-01", ("", "")),
        (f"00-{TRACE}-{'0' * 16}-01", ("", "")),
        (f"00-{TRACE}-{SPAN}", ("", "")),
        ("x" * 100_000, ("", "")),
        ("", ("", "")),
    ],
)
def test_traceparent(header: str, found: tuple[str, str]) -> None:
    assert asgi.traceparent(header) == found


def test_all_of_a_request() -> None:
    headers = [
        (b"host", b"h"),
        (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()),
        (b"x-request-id", b"req-23"),
        (b"authorization", b"Bearer secret"),
    ]
    assert asgi.read(scope(*headers)) == asgi.Incoming(TRACE, SPAN, "req-23", 51_234, 8_000)


def test_request_id_is_cleaned_and_bounded() -> None:
    header = (b"x-request-id", b"a\x00\xe4 b" + b"c" * 500)
    found = asgi.read(scope(header)).request_id
    assert found == "ab" + "c" * 126


@pytest.mark.parametrize(
    ("client", "server"), [(None, None), (None, ("/run/sock", None)), ((), ("",)), (("h", None), None)]
)
def test_without_ports(client: Any, server: Any) -> None:
    found = asgi.read(scope(client=client, server=server))
    assert (found.client_port, found.server_port) == (0, 0)


def test_template_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    header = (b"x-prompt-template", b"rag")
    assert asgi.read(scope(header)).template == ""
    monkeypatch.setenv(asgi.TEMPLATES, "chat,rag")
    assert asgi.read(scope(header)).template == "rag"
    assert asgi.read(scope((b"x-prompt-template", b"secret"))).template == ""


def application() -> Any:
    """A module shaped like starlette.applications; the real one is met in tests/engine."""

    class Starlette:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(0)
            send(asgi.current.get())

    module: Any = types.ModuleType("starlette.applications")
    module.Starlette = Starlette
    asgi._HOOK.install(module)
    return module.Starlette()


def test_each_task_has_its_own(caught: Caught) -> None:
    app, seen = application(), list[asgi.Incoming]()

    async def serve() -> None:
        scopes = [scope((b"x-request-id", f"r{i}".encode()), client=("h", i)) for i in range(1, 24)]
        await asyncio.gather(*(asyncio.create_task(app(s, None, seen.append)) for s in scopes))
        await app({"type": "lifespan"}, None, seen.append)

    asyncio.run(serve())
    assert [i.request_id for i in seen] == [f"r{i}" for i in range(1, 24)] + [""]
    assert [i.client_port for i in seen[:-1]] == list(range(1, 24))


def test_nothing_is_read_unwatched(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    caught.watchers = 0
    app, seen = application(), list[asgi.Incoming]()
    monkeypatch.setattr(asgi, "read", pytest.fail)
    asyncio.run(app(scope(), None, seen.append))
    assert seen == [asgi.Incoming()]


def test_scope_that_makes_no_sense_does_not_fail_the_application(caught: Caught) -> None:
    app, seen = application(), list[asgi.Incoming]()
    asyncio.run(app({"type": "http", "headers": 23}, None, seen.append))
    assert seen == [asgi.Incoming()]
