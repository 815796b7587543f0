"""Board 4, *KV cache*: pool, blocks, fragmentation, preemptions, prefix hits, and what they cost requests."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from whyspan_dashboards import board, links
from whyspan_dashboards import names as n
from whyspan_dashboards.panels import Look, Query, above, below, lines, traces

UID = "whyspan-kv"
_S = n.SERVICE
_BY = "host_name, whyspan_service, whyspan_engine_name"
_LEGEND = "{{host_name}} {{whyspan_service}}"


def _engine(counter: str, by: str = _BY) -> str:
    return n.rate(f"whyspan_engine_{counter}_total", _S, by)


def _pool() -> list[object]:
    return [
        lines(
            Look(
                "KV pool in use",
                "Above 90% for five minutes alerts: the scheduler begins to queue and preempt.",
                "percentunit",
                "kv-usage",
                most=1,
                steps=above(0.8, n.KV_FULL),
                more=[links.TO_SERVICE, links.TO_HOST],
            ),
            Query(f"max by ({_BY}) ({n.KV}{{{_S}}})", _LEGEND),
        ),
        lines(
            Look(
                "Blocks",
                "Used; cached: free, but with a prefix that can be found; free.",
                "none",
                "kv#blocks",
            ),
            Query(f"sum by (whyspan_state) (whyspan_engine_kv_blocks{{{_S}}})", "{{whyspan_state}}"),
            stacked=True,
        ),
        lines(
            Look(
                "Fragmentation",
                "Share of the blocks given to sequences that no token fills. Above 35% alerts.",
                "percentunit",
                "fragmentation",
                most=1,
                steps=above(0.25, n.FRAGMENTED),
                more=[links.TO_SERVICE],
            ),
            Query(f"max by ({_BY}) ({n.FRAGMENTATION}{{{_S}}})", _LEGEND),
        ),
    ]


def _use() -> list[object]:
    return [
        lines(
            Look(
                "Prefix cache hits",
                "Of the tokens of prompts queued, those found in the cache.",
                "percentunit",
                "kv#prefix-hits",
                most=1,
                steps=below(0.05, 0.2),
            ),
            Query(f"{_engine('token_cached')} / {_engine('token_prompt')}", _LEGEND),
        ),
        lines(
            Look("Preemptions", "Sequences per second that lost their blocks.", "none", "kv#preemptions"),
            Query(_engine("preemption_count"), _LEGEND),
        ),
        lines(
            Look(
                "Computed twice",
                "Of the tokens computed, those that a preemption had thrown away.",
                "percentunit",
                "kv#preemptions",
                steps=above(0.01, 0.05),
            ),
            Query(f"{_engine('token_recomputed')} / {_engine('token_computed')}", _LEGEND),
        ),
        lines(
            Look(
                "Blocks evicted", "Cached blocks per second that others overwrote.", "none", "kv#prefix-hits"
            ),
            Query(_engine("kv_evicted"), _LEGEND),
        ),
        lines(
            Look("Waiting and running", "Sequences.", "none", "service#queue"),
            Query(
                f"sum by (whyspan_service) (whyspan_engine_sequence_waiting{{{_S}}})",
                "waiting {{whyspan_service}}",
            ),
            Query(
                f"sum by (whyspan_service) (whyspan_engine_sequence_running{{{_S}}})",
                "running {{whyspan_service}}",
            ),
        ),
        lines(
            Look(
                "Frozen engines",
                "Engine cores that have work and make no progress.",
                "none",
                "kv#frozen",
                steps=((None, "green"), (1, "red")),
            ),
            Query(f"sum by ({_BY}) (whyspan_engine_frozen{{{_S}}})", _LEGEND),
        ),
    ]


def _cost() -> list[object]:
    causes = f'{_S}, whyspan_cause=~"engine[.](kv_.*|prefix_miss|queueing)"'
    return [
        lines(
            Look(
                "Time lost to the KV cache",
                "Seconds that requests lost per second to preemption, transfer, missed prefixes and the queue.",
                "s",
                "kv#time-lost",
                span=12,
            ),
            Query(n.rate(n.EXCESS, causes, "whyspan_cause"), "{{whyspan_cause}}", exemplar=True),
            stacked=True,
        ),
        traces(
            Look(
                "Preempted requests", "The newest; a click opens the trace.", "ms", "kv#preemptions", span=12
            ),
            '{ name = "whyspan.request" && resource.service.name =~ "$service" && resource.host.name =~ "$host" '
            "&& span.whyspan.engine.preemptions > 0 } | select(span.whyspan.verdict, span.whyspan.sentence, "
            "span.whyspan.engine.preemptions, span.whyspan.engine.recomputed_tokens)",
        ),
    ]


def make() -> Dashboard:
    """Return the board."""
    return board.make(
        UID,
        "KV cache",
        "Whether the KV cache is full, torn, or thrown away, and what requests lose by it.",
        [board.choice(*board.HOST), board.choice(*board.SERVICE)],
        [("Pool", _pool()), ("Use", _use()), ("Cost", _cost())],
    )
