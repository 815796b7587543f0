"""Spans as serialised OTLP requests, by OpenTelemetry's own encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan

#: More than this is cut in two, as long as it can be.
MAX_BYTES: Final = 1 << 20


class Encoded(NamedTuple):
    """One request; ``error`` says why there is none."""

    payload: bytes
    items: int
    error: str = ""


def encode(groups: Sequence[Sequence[ReadableSpan]]) -> Iterator[Encoded]:
    """Yield the spans of *groups*, in order, in as few requests as their size allows; a group is never torn apart."""
    if not groups:
        return
    items = sum(len(group) for group in groups)
    error = ""
    payload = b""
    try:
        payload = encode_spans([span for group in groups for span in group]).SerializeToString()
    except Exception as exc:  # a value that the encoder has no form for: the others are still good
        error = f"{type(exc).__name__}: {exc}"
    if len(groups) > 1 and (error or len(payload) > MAX_BYTES):
        half = len(groups) // 2
        yield from encode(groups[:half])
        yield from encode(groups[half:])
        return
    yield Encoded(payload, items, error)
