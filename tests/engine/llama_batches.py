"""Calls llama.cpp in ways that its server does not, each said before it is made: ``PYTHON llama_batches.py MODEL``.

Runs in llama.cpp's environment. Waits for a line on standard input after it has mapped the libraries and made its
context; writes one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def batch_of(lib: Any, rows: list[tuple[int, int, bool]]) -> Any:
    """Return a batch of (sequence, position, whether its logits are asked for)."""
    batch = lib.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (sequence, position, output) in enumerate(rows):
        batch.token[i] = 3 + i % 200
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = output
    return batch


def main() -> None:
    """Make the calls."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]
    from llama_cpp import llama_cpp as lib

    lib.llama_backend_init()
    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, None)
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, 512, 8
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = True
    context = lib.llama_init_from_model(model, params)
    memory = lib.llama_get_memory(context)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    sys.stdin.readline()
    # By batch: what is to be seen of it.
    batches: dict[str, list[tuple[int, int, bool]]] = {
        "prefill": [(0, i, i == 30) for i in range(31)],
        "prefill of three": [(1 + i % 3, i // 3, i >= 20) for i in range(23)],
        "decode of four": [(0, 31, True), (1, 8, True), (2, 8, True), (3, 7, True)],
        "long": [(5, 0, True), (6, 0, True), *((7, i, i == 98) for i in range(99))],
    }
    results = {}
    for name, rows in batches.items():
        batch = batch_of(lib, rows)
        results[name] = int(lib.llama_decode(context, batch))
        lib.llama_get_logits_ith(context, -1)
        lib.llama_batch_free(batch)
    # Arrays left out: llama.cpp fills them in.
    tokens = (lib.llama_token * 5)(3, 4, 5, 6, 7)
    results["plain"] = int(lib.llama_decode(context, lib.llama_batch_get_one(tokens, 5)))
    too_many = batch_of(lib, [(0, 100 + i, False) for i in range(3)])
    too_many.n_tokens = 0
    results["empty"] = int(lib.llama_decode(context, too_many))
    lib.llama_memory_seq_cp(memory, 0, 4, 2, 11)
    lib.llama_memory_seq_rm(memory, 0, 7, -1)
    lib.llama_memory_seq_add(memory, 1, 3, 5, 17)
    lib.llama_memory_seq_div(memory, 2, 0, -1, 2)
    lib.llama_memory_seq_keep(memory, 3)
    lib.llama_memory_clear(memory, True)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
