"""The code of a request, made up: a JSON encoder that blocks an event loop, and its process's threads meanwhile."""

from __future__ import annotations

from typing import Final

from whyspan import codetext
from whyspan.model import CodeFrame, CodeStack, Culprit, Finding, Snapshot, ThreadGroup

LIB: Final = "/usr/lib/python3.11"
SITE: Final = "/srv/venv/lib/python3.11/site-packages"
#: Of the event loop, the innermost first: what leads from a request to its handler in most servers.
SERVER: Final = [
    CodeFrame("run_endpoint_function", f"{SITE}/fastapi/routing.py", 212),
    CodeFrame("get_request_handler.<locals>.app", f"{SITE}/fastapi/routing.py", 301),
    CodeFrame("request_response.<locals>.app.<locals>.app", f"{SITE}/starlette/routing.py", 73),
    CodeFrame("wrap_app_handling_exceptions.<locals>.wrapped_app", f"{SITE}/starlette/_exception_handler.py", 42),
    CodeFrame("Route.handle", f"{SITE}/starlette/routing.py", 288),
    CodeFrame("Router.app", f"{SITE}/starlette/routing.py", 735),
    CodeFrame("ExceptionMiddleware.__call__", f"{SITE}/starlette/middleware/exceptions.py", 62),
    CodeFrame("call_next.<locals>.coro", f"{SITE}/starlette/middleware/base.py", 144),
    CodeFrame("Handle._run", f"{LIB}/asyncio/events.py", 80),
    CodeFrame("BaseEventLoop._run_once", f"{LIB}/asyncio/base_events.py", 1922),
    CodeFrame("BaseEventLoop.run_forever", f"{LIB}/asyncio/base_events.py", 607),
    CodeFrame("Runner.run", f"{LIB}/asyncio/runners.py", 118),
    CodeFrame("run", f"{LIB}/asyncio/runners.py", 190),
    CodeFrame("Server.run", f"{SITE}/uvicorn/server.py", 62),
    CodeFrame("main", f"{SITE}/uvicorn/main.py", 410),
    CodeFrame("<module>", "/srv/venv/bin/uvicorn", 8),
]  # fmt: skip
HANDLER: Final = [CodeFrame("chat", "/srv/app/serve.py", 88), *SERVER]
RENDER: Final = [CodeFrame("render_chat", "/srv/app/serve.py", 212), *HANDLER]
DUMPS: Final = [
    CodeFrame("JSONEncoder.iterencode", f"{LIB}/json/encoder.py", 258),
    CodeFrame("JSONEncoder.encode", f"{LIB}/json/encoder.py", 200),
    CodeFrame("dumps", f"{LIB}/json/__init__.py", 238),
    *RENDER,
]
TEMPLATE: Final = [
    CodeFrame("root", "<template>", 41),
    CodeFrame("Template.render", f"{SITE}/jinja2/environment.py", 1295),
    CodeFrame("apply_chat_template", f"{SITE}/transformers/tokenization_utils_base.py", 1811),
    CodeFrame("render_chat", "/srv/app/serve.py", 207),
    *HANDLER,
]
EMIT: Final = [
    CodeFrame("StreamHandler.flush", f"{LIB}/logging/__init__.py", 1082),
    CodeFrame("StreamHandler.emit", f"{LIB}/logging/__init__.py", 1114),
    CodeFrame("Logger.info", f"{LIB}/logging/__init__.py", 1489),
    CodeFrame("chat", "/srv/app/serve.py", 91),
    *SERVER,
]
C_JSON: Final = [
    "encoder_listencode_dict [_json.cpython-311-x86_64-linux-gnu.so]",
    "PyObject_Vectorcall [python3.11]",
]
DRAIN: Final = [CodeFrame("Sink.drain", "/srv/app/sink.py", 30)]
GGML: Final = ["ggml_vec_dot_q4_K_q8_K [libggml-cpu.so]", "libgomp.so.1+0x1e0a"]
POOL: Final = [
    CodeFrame("_worker", f"{LIB}/concurrent/futures/thread.py", 81),
    CodeFrame("Thread.run", f"{LIB}/threading.py", 982),
]
C_WRITE: Final = ["__write [libc.so.6]", "_Py_write [python3.11]"]
K_WRITE: Final = ["pipe_write", "vfs_write", "ksys_write", "__x64_sys_write", "do_syscall_64"]
CAUSE: Final = "python.loop_blocked"
LOOP, OTHER = 4100, 4123
#: ms from the request's start to the snapshot.
AT_MS: Final = 260


def stack(
    cause: str, samples: int, tid: int = LOOP, thread: str = "MainThread", **fields: object
) -> CodeStack:
    """Return a stack of the server's."""
    return CodeStack(cause=cause, tgid=LOOP, tid=tid, thread=thread, samples=samples, **fields)  # type: ignore[arg-type]


def stacks() -> list[CodeStack]:
    """Return samples and waits of three causes, as a finding has them."""
    deeper = [CodeFrame("JSONEncoder.iterencode", f"{LIB}/json/encoder.py", 260), *DUMPS[1:]]
    found = [
        stack(CAUSE, 21, python=DUMPS, native=C_JSON, work="JSON", hint="Try orjson."),
        stack(CAUSE, 9, python=deeper, native=["PyUnicode_New [python3.11]"], work="JSON", hint="Try orjson."),
        stack(CAUSE, 6, python=TEMPLATE, work="chat template"),
        stack(CAUSE, 3, python=RENDER, native=["libtokenizers.so+0x51c20", "(frames missing)"], cut=True),
        stack(CAUSE, 1, python=RENDER, native=["PyObject_Malloc [python3.11]"], kernel=["asm_exc_page_fault"]),
        stack(CAUSE, 2, python=EMIT, native=C_WRITE, kernel=K_WRITE, blocked=True, work="logging"),
        stack("python.gil", 5, OTHER, "log-writer", python=DRAIN, holder=True),
        stack("work.cpu", 4, python=SERVER),
        stack("work.cpu", 2, 4311, "Worker_TP0", native=GGML),
    ]  # fmt: skip
    return sorted(found, key=lambda s: -s.samples)


def groups() -> list[ThreadGroup]:
    """Return the threads of a process whose event loop runs an encoder."""
    wait = ["__futex_abstimed_wait_common [libc.so.6]"]
    return [
        ThreadGroup(state="running", threads=["MainThread"], for_ms=214.0, stalled=True, python=DUMPS, native=C_JSON),
        ThreadGroup(
            state="blocked", syscall="write", threads=["log-writer"], for_ms=38.5, native=C_WRITE, kernel=K_WRITE
        ),
        ThreadGroup(
            state="blocked", syscall="futex", count=31, threads=["pool_0", "pool_1", "pool_2"], for_ms=9100.0,
            python=POOL, native=wait, kernel=["futex_wait_queue"], cut=True,
        ),
        ThreadGroup(state="runnable", threads=["Worker_TP0"]),
    ]  # fmt: skip


def add(finding: Finding) -> Finding:
    """Make a slow finding one of a loop that was blocked, with this code and the verdict that it has of it."""
    v = finding.verdict
    for s in finding.segments:
        if s.cause == v.cause:
            s.cause, s.state, s.detail, s.inferred = CAUSE, "running", "", False
    finding.causes = {CAUSE if cause == v.cause else cause: ms for cause, ms in finding.causes.items()}
    finding.stacks = stacks()
    at_ns = finding.request.start_ns + AT_MS * 1_000_000
    finding.snapshots = [
        Snapshot(at_ns=at_ns, tgid=LOOP, process="uvicorn", groups=groups()),
        Snapshot(at_ns=at_ns + 40_000_000, tgid=4200, process="EngineCore", groups=groups()[1:3], left_out=4),
    ]
    took = finding.wall_ns / 1e6
    v.cause, v.culprit = CAUSE, Culprit(kind="thread", name="MainThread", tgid=LOOP, tid=LOOP)
    v.sentence = (
        f"Took {took:.0f} ms, usually {took - v.excess_ms:.0f} ms; {v.excess_ms:.0f} ms more than usual while the event"
        " loop was blocked: thread MainThread."
    )
    v.evidence, v.fix = (
        ["usually 0.0 ms of it: the median of 120 such requests"],
        "Try a thread or a process for it.",
    )
    codetext.tell(finding)
    return finding
