"""Every attribute that a metric may have: what it says, and how many values it can take."""

from __future__ import annotations

from typing import Final, NamedTuple


class Attribute(NamedTuple):
    """``values``: all of them, or an example where they are not known beforehand; ``bound``: what keeps them few."""

    description: str
    values: str
    bound: str = ""


ATTRIBUTES: Final[dict[str, Attribute]] = {
    "error.type": Attribute(
        "How a request failed; absent where it did not. A status of 4xx is no failure of the server, but 429 is.",
        "500, 503, 429, client_close, client_reset, timeout, process_exit, engine_exit, ...",
        "statuses of HTTP and ways to end",
    ),
    "gen_ai.request.model": Attribute(
        "The model as the engine serves it, which is what a request has to ask for; absent where it is not known. "
        "Bodies are never read.",
        "facebook/opt-125m",
        "models served",
    ),
    "gen_ai.token.type": Attribute("Whose tokens.", "input, output"),
    "http.response.status_code": Attribute(
        "The status that was sent; 0: none was.", "200, 429, 500, 0", "three digits, else 0"
    ),
    "hw.id": Attribute("The GPU.", "GPU-3f1c...", "GPUs of the host"),
    "hw.gpu.task": Attribute("The kind of work.", "general, encoder, decoder"),
    "otel.metric.overflow": Attribute(
        "Alone on the series that takes everything for which the bound of a metric left no room.", "true"
    ),
    "service.version": Attribute("whyspan's version.", "0.1.0"),
    "whyspan.burst": Attribute("The kind of burst.", "malloc, syscalls"),
    "whyspan.cause": Attribute(
        "A cause (see the list in the README), `unknown` where no rule held, `none` where the request was not slow.",
        "cpu.throttled",
        "causes there are",
    ),
    "whyspan.culprit.kind": Attribute(
        "What it is that did it.", "cgroup, process, thread, cpu, file, peer, request, cache, model"
    ),
    "whyspan.culprit.name": Attribute(
        "Who did it. Of another request nothing but that it was one: see its trace.",
        "backup.service",
        "50 per service",
    ),
    "whyspan.engine.name": Attribute("The inference engine.", "vllm, sglang, llama.cpp, transformers"),
    "whyspan.kernel": Attribute("The kernel's release.", "6.1.0-18-amd64"),
    "whyspan.kind": Attribute("Why it was to be explained.", "slow, failed"),
    "whyspan.outcome": Attribute(
        "How it ended; lost: its end was not seen.", "ok, error, reset, killed, lost"
    ),
    "whyspan.phase": Attribute(
        "Where in the request, as the engine tells; whole: it does not tell.",
        "frontend, handover, queue, prefill, decode, delivery, whole",
    ),
    "whyspan.pressure": Attribute("Whether some or all tasks waited.", "some, full"),
    "whyspan.probe": Attribute("The probe.", "sched", "probes there are"),
    "whyspan.process": Attribute("Which of the agent's processes.", "collector, exporter"),
    "whyspan.queue": Attribute("Where it was lost.", "collector, store"),
    "whyspan.resource": Attribute("What tasks waited for.", "cpu, memory, io"),
    "whyspan.result": Attribute(
        "What became of it.", "sent, failed, dropped; of a burst: done, failed, refused ..."
    ),
    "whyspan.service": Attribute("The service watched.", "chat", "services of the host"),
    "whyspan.signal": Attribute("Of OTLP.", "traces, metrics"),
    "whyspan.size_class": Attribute("Sizes asked of the allocator.", "1-2 KiB", "32 rows of a burst"),
    "whyspan.slo.objective": Attribute(
        "Which objective: the whole request, its first byte, the mean time per chunk, or that it did not fail.",
        "e2e, ttft, inter_token, success",
    ),
    "whyspan.slo.result": Attribute("Whether the request met it.", "good, bad"),
    "whyspan.state": Attribute(
        "Of a probe, or of KV blocks.", "attached, partial, waiting, failed, disabled, shed"
    ),
    "whyspan.template": Attribute(
        "The tag of a prompt's template, of those allowed; other: not allowed; none: without.",
        "rag",
        "`collector.template_allow`, at most 32",
    ),
    "whyspan.thread": Attribute("The name of a thread.", "vllm-worker", "32 rows of a burst"),
}
