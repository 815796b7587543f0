"""llama: steps, graphs and cache operations of llama.cpp."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Probe, UserHook

_LLAMA, _GGML = r"/libllama\.so(\.\d+)*$", r"/libggml[^/]*\.so(\.\d+)*$"
_STEPS = {"llama_decode": 0, "llama_encode": 1}
_RESULTS = ("logits", "logits_ith", "embeddings", "embeddings_ith", "embeddings_seq")
#: In the order of ``enum memory_op``; the names changed in 2025-03 (llama_kv_self_*) and 2025-06 (llama_memory_*).
_MEMORY = ("seq_rm", "seq_cp", "clear", "seq_keep", "seq_add", "seq_div")
_GRAPHS = {"ggml_backend_sched_graph_compute_async": 0, "ggml_graph_compute": 1}
_BATCH = {
    "context": "which llama_context, opaque",
    "tokens": "tokens of the batch",
    "sequences": "different sequences among the tokens looked at",
    "call": "0 llama_decode, 1 llama_encode",
    "position": "of the first token in its sequence, -1 left to llama.cpp",
    "outputs": "tokens looked at whose logits are asked for",
    "looked_at": "tokens looked at: the first 31 and the last",
}


def _both(name: str) -> tuple[str, str]:
    return f"{name}_multi", f"{name}_perf"


PROBE = Probe(
    name="llama",
    title="steps of llama.cpp",
    hooks=(),
    user_hooks=(
        # The returns first: of a step whose entry is hooked before its return is, the end is inferred.
        UserHook("step_end", _LLAMA, _STEPS, _both("llama_step_return")),
        UserHook("step", _LLAMA, _STEPS, _both("llama_step_entry")),
        UserHook("results", _LLAMA, {f"llama_get_{n}": 0 for n in _RESULTS}, _both("llama_results")),
        UserHook(
            "memory",
            _LLAMA,
            {
                f"llama_{api}_{op}": i
                for api in ("memory", "kv_self", "kv_cache")
                for i, op in enumerate(_MEMORY)
            },
            _both("llama_memory_entry"),
        ),
        UserHook(
            "graph_end", _GGML, _GRAPHS, _both("llama_graph_return"), thrown_to=tuple(_STEPS), required=False
        ),
        UserHook("graph", _GGML, _GRAPHS, _both("llama_graph_entry"), required=False),
    ),
    events={
        "llama_step": {
            "aux": "result as a signed number, 0 done; 0x80000000 its end is inferred from what came next",
            "begin_ns": "when it was called",
            **_BATCH,
        },
        "llama_step_start": _BATCH,
        "llama_memory": {
            "aux": "0 rm, 1 cp, 2 clear, 3 keep, 4 add, 5 div",
            "context": "which memory, or llama_context in versions before 2025-06, opaque",
            "sequence": "-1 all",
            "other": "sequence copied to, -1 none",
            "from": "first position, -1 the first",
            "to": "position after the last, -1 the end",
            "delta": "shift of positions, or their divisor",
        },
        "llama_graph": {
            "aux": "status as a signed number, 0 done",
            "begin_ns": "when it was called",
            "by": "0 scheduler of backends, 1 CPU backend (within the former)",
        },
    },
    cost=Cost.PER_UNIT,
    joins="thread on the critical path",
    needs="uprobe.multi (6.6) or perf uprobes (CAP_SYS_ADMIN); bpf cookies (5.15)",
    shed=4,
    config={"graphs": "1 = report graphs", "memory": "1 = report memory functions"},
)
