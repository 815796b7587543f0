"""A llama model of random weights as a GGUF file: ``PYTHON llama_model.py PATH``, in llama.cpp's environment.

Its vocabulary is the smallest that llama.cpp takes: the three special tokens and one token for each byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

LAYERS, WIDTH, HEADS, FEED_FORWARD, CONTEXT = 4, 256, 4, 688, 4096
SPECIAL = ("<unk>", "<s>", "</s>")
VOCABULARY = len(SPECIAL) + 256


def write(path: Path) -> None:
    """Write the model; the same weights each time."""
    import gguf  # type: ignore[import-not-found,unused-ignore]

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("random")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256))])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(7)

    def weights(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.05).astype(np.float32))

    weights("token_embd.weight", VOCABULARY, WIDTH)
    weights("output.weight", VOCABULARY, WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"blk.{i}.{name}.weight", WIDTH, WIDTH)
        weights(f"blk.{i}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        weights(f"blk.{i}.ffn_up.weight", FEED_FORWARD, WIDTH)
        weights(f"blk.{i}.ffn_down.weight", WIDTH, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
