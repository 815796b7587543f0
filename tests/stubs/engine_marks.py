"""What the stub engine marks through ``whyspan_inproc``: one process is front end, core and worker at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyspan_inproc import emit as marker
from whyspan_inproc import kinds

now_ns = marker.now_ns


def hello(role: str, rank: int, ranks: int, max_batch: int) -> None:
    """Say who this is, now and to each new watcher."""
    body = {
        "engine": "stub",
        "version": "1",
        "role": role,
        "rank": rank,
        "config": {"max_num_seqs": str(max_batch), "tensor_parallel_size": str(ranks)},
        "model": {"name": "stub-16l", "dtype": "bfloat16"},
    }
    marker.on_watch(lambda: marker.emit(kinds.HELLO, body))
    marker.emit(kinds.HELLO, body)


def arrived(scope: dict[str, Any], number: int, prompt: int, max_tokens: int, begin_ns: int) -> None:
    """A request came, was made into tokens and was handed to the engine."""
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    request, parts = f"cmpl-{number}", headers.get("traceparent", "").split("-")
    body = {
        "request": request,
        "client_port": scope["client"][1],
        "server_port": scope["server"][1],
        "max_tokens": max_tokens,
    }
    if len(parts) == 4:
        body |= {"trace_id": parts[1], "span_id": parts[2]}
    marker.emit(kinds.ARRIVED, body)
    marker.emit(kinds.TOKENISED, {"request": request, "begin_ns": begin_ns, "prompt_tokens": prompt})
    marker.emit(kinds.ENQUEUED, {"request": request, "engine_id": f"{request}-0", "number": number})


def queued(number: int, prompt: int) -> None:
    """The core has it in its queue."""
    body = {"engine_id": f"cmpl-{number}-0", "number": number, "prompt_tokens": prompt}
    marker.emit(kinds.QUEUED, body)


def step(
    number: int, begin_ns: int, decodes: Sequence[int], prompts: Sequence[tuple[int, int]], waiting: int
) -> None:
    """A batch was made up: requests that get a token, and (request, prompt tokens)."""
    body = {
        "step": number,
        "begin_ns": begin_ns,
        "end_ns": now_ns(),
        "decodes": list(decodes),
        "others": [[request, tokens, 0, 0, 0, 0, False, 0] for request, tokens in prompts],
        "running": len(decodes) + len(prompts),
        "waiting": waiting,
    }
    marker.emit(kinds.STEP, body)


def executed(number: int, begin_ns: int, tokens: int, requests: int, graph: bool) -> None:
    """This rank ran its part."""
    body = {
        "step": number,
        "begin_ns": begin_ns,
        "tokens": tokens,
        "requests": requests,
        "graph": "full" if graph else "none",
    }
    marker.emit(kinds.EXECUTED, body)


def step_done(number: int, times: tuple[int, int, int], tokens: int, finished: Sequence[int]) -> None:
    """The core has the step's tokens: when it sent the batch off, began to wait, had them. Who is done."""
    sent_ns, wait_ns, got_ns = times
    body = {
        "step": number,
        "sent_ns": sent_ns,
        "wait_ns": wait_ns,
        "got_ns": got_ns,
        "tokens": tokens,
        "finished": [[request, "length"] for request in finished],
    }
    marker.emit(kinds.STEP_DONE, body)


def output(begin_ns: int, request: int, finished: bool) -> None:
    """The front end has a token."""
    body = {"begin_ns": begin_ns, "requests": [request], "finished": [request] if finished else []}
    marker.emit(kinds.OUTPUT, body)
