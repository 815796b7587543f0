"""Reads an engine's ``/metrics`` and maps what it says to names common to all engines. Pure."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from whyspan.marks import Gauges

#: A busy vLLM with many models has 0.5 MB.
MAX_BODY: Final = 4 << 20
_MAX_LINES: Final = 512  # of the ones wanted: several engines, each with its labels


class ScrapeError(ValueError):
    """A body that is no exposition of a known engine; the message never quotes it."""


class _Rule(NamedTuple):
    """The common name, a label that the sample must have, and whether the fullest counts instead of the sum."""

    to: str
    label: tuple[str, str] = ("", "")
    fullest: bool = False


#: By engine and name as exposed. Sources: vllm/v1/metrics/loggers.py (0.32), sglang/srt/observability/
#: metrics_collector.py (0.5.23), tools/server/README.md of llama.cpp.
_RULES: Final[dict[str, dict[str, tuple[_Rule, ...]]]] = {
    "vllm": {
        "vllm:num_requests_running": (_Rule("running"),),
        "vllm:num_requests_waiting": (_Rule("waiting"),),
        "vllm:num_requests_waiting_by_reason": (
            _Rule("waiting_capacity", ("reason", "capacity")),
            _Rule("waiting_deferred", ("reason", "deferred")),
        ),
        "vllm:kv_cache_usage_perc": (_Rule("kv_usage", fullest=True),),
        "vllm:prefix_cache_queries_total": (_Rule("prefix_queries"),),
        "vllm:prefix_cache_hits_total": (_Rule("prefix_hits"),),
        "vllm:num_preemptions_total": (_Rule("preemptions"),),
        "vllm:prompt_tokens_total": (_Rule("prompt_tokens"),),
        "vllm:prompt_tokens_cached_total": (_Rule("prompt_tokens_cached"),),
        "vllm:generation_tokens_total": (_Rule("generation_tokens"),),
        "vllm:spec_decode_num_draft_tokens_total": (_Rule("drafted"),),
        "vllm:spec_decode_num_accepted_tokens_total": (_Rule("accepted"),),
    },
    "sglang": {
        "sglang:num_running_reqs": (_Rule("running"),),
        "sglang:num_queue_reqs": (_Rule("waiting"),),
        "sglang:token_usage": (_Rule("kv_usage", fullest=True),),
        "sglang:num_retracted_requests_total": (_Rule("preemptions"),),
        "sglang:prompt_tokens_total": (_Rule("prompt_tokens"),),
        "sglang:cached_tokens_total": (_Rule("prompt_tokens_cached"),),
        "sglang:generation_tokens_total": (_Rule("generation_tokens"),),
        "sglang:evicted_tokens_total": (_Rule("evicted_tokens"),),
    },
    "llama.cpp": {
        "llamacpp:requests_processing": (_Rule("running"),),
        "llamacpp:requests_deferred": (_Rule("waiting"),),
        "llamacpp:kv_cache_usage_ratio": (_Rule("kv_usage", fullest=True),),  # older builds
        "llamacpp:prompt_tokens_total": (_Rule("prompt_tokens"),),
        "llamacpp:prompt_tokens_cached_total": (_Rule("prompt_tokens_cached"),),
        "llamacpp:tokens_predicted_total": (_Rule("generation_tokens"),),
        "llamacpp:spec_decode_num_draft_tokens_total": (_Rule("drafted"),),
        "llamacpp:spec_decode_num_accepted_tokens_total": (_Rule("accepted"),),
    },
}
_PREFIX = re.compile(rb"^(vllm|sglang|llamacpp):", re.M)
_ENGINE: Final = {b"vllm": "vllm", b"sglang": "sglang", b"llamacpp": "llama.cpp"}
_WANTED: Final = {
    engine: re.compile(
        rb"^(?:" + b"|".join(re.escape(n.encode()) for n in sorted(names, reverse=True)) + rb")[{ \t][^\n]*$",
        re.M,
    )
    for engine, names in _RULES.items()
}


def parse(body: bytes) -> Gauges:
    """Return what an exposition says, under the common names.

    Samples of several engines behind one port are added up, of KV usage the fullest counts. Of SGLang's ranks that all
    say the same of one pool, the first speaks.

    Raises:
        ScrapeError: it is too long, of no known engine, or malformed.
    """
    if len(body) > MAX_BODY:
        raise ScrapeError(f"{len(body)} bytes")
    found = _PREFIX.search(body)
    if found is None:
        raise ScrapeError("no metric of vLLM, SGLang or llama.cpp")
    engine = _ENGINE[found[1]]
    # The parser takes some 20 us per line and a server has a thousand of them: it gets the twenty that count.
    lines = [m[0] for _, m in zip(range(_MAX_LINES), _WANTED[engine].finditer(body), strict=False)]
    values: dict[str, float] = {}
    from prometheus_client.parser import text_string_to_metric_families  # 4 MB that not everybody needs

    try:
        text = b"\n".join(lines).decode("utf-8", "replace") + "\n"
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if any(sample.labels.get(rank, "0") not in ("0", "") for rank in ("tp_rank", "pp_rank")):
                    continue
                for rule in _RULES[engine].get(sample.name, ()):
                    if rule.label[0] and sample.labels.get(rule.label[0]) != rule.label[1]:
                        continue
                    value = float(sample.value)
                    if math.isfinite(value):
                        old = values.get(rule.to, 0.0)
                        values[rule.to] = max(old, value) if rule.fullest else old + value
    # The parser indexes without looking on torn lines.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise ScrapeError(f"not an exposition: {type(e).__name__}") from None
    return Gauges(engine=engine, values=values)
