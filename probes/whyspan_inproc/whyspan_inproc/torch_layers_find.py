"""Find the decoder layers of a model and their blocks, and whether they run as Python calls at all."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

#: Names under which models keep their decoder layers (Hugging Face and vLLM model files).
LISTS: Final = frozenset({"layers", "h", "blocks", "block", "decoder_layers"})
ATTENTION: Final = (
    *("self_attn", "self_attention", "attn", "attention", "linear_attn", "mixer", "mamba", "temporal_block"),
)
MLP: Final = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "mlp_block", "feedforward", "ff")
#: Layers of one model; the rest are left out.
MAX_LAYERS: Final = 512


class Part(NamedTuple):
    """A module that is timed: ``kind`` is layer, attention, mlp or moe."""

    layer: int
    kind: str
    module: Any


def find(model: Any) -> list[Part]:
    """Return the decoder layers with their blocks, each layer before its blocks; empty where none are found.

    The list of layers is the one with the most parameters among those of a usual name or of equal classes.
    """
    best: list[tuple[int, Any]] = []
    most = 0
    for name, module in model.named_modules():
        if type(module).__name__ not in ("ModuleList", "Sequential"):
            continue
        layers = [(i, m) for i, m in enumerate(module) if type(m).__name__ != "PPMissingLayer"]  # of vLLM
        equal = len(layers) > 1 and len({type(m) for _, m in layers}) == 1
        if not layers or not (equal or name.rpartition(".")[2] in LISTS):
            continue
        size = sum(p.numel() for _, layer in layers for p in layer.parameters())
        if size > most:
            best, most = layers, size
    parts: list[Part] = []
    for i, layer in best[:MAX_LAYERS]:
        parts.append(Part(i, "layer", layer))
        parts += _blocks(i, layer)
    return parts


def _blocks(index: int, layer: Any) -> list[Part]:
    children = dict(layer.named_children())
    parts: list[Part] = []
    attention = next((children[n] for n in ATTENTION if n in children), None)
    if attention is not None:
        parts.append(Part(index, "attention", attention))
    name = next((n for n in MLP if n in children), None)
    if name is not None:
        parts.append(Part(index, "moe" if _is_moe(name, children[name]) else "mlp", children[name]))
    return parts


def _is_moe(name: str, block: Any) -> bool:
    words = f"{name} {type(block).__name__}".lower()
    return "moe" in words or "sparse" in words or any(n == "experts" for n, _ in block.named_children())


def compiled(model: Any) -> str:
    """Return why layers of a model cannot be timed one by one; empty where they can.

    Knows of ``torch.compile(module)``, ``module.compile()``, a compiled ``forward``, TorchScript, and of vLLM's
    ``support_torch_compile``, which sets ``do_not_compile``.
    """
    kinds = set()
    for module in model.modules():  # thousands: attributes that are not there are slow to look up in a module
        own = module.__dict__
        if own.get("_compiled_call_impl") is not None or own.get("do_not_compile", True) is False:
            return "compiled"
        if hasattr(own.get("forward"), "_torchdynamo_orig_callable"):
            return "compiled"
        kinds.add(type(module))
    for kind in kinds:
        if kind.__name__ == "OptimizedModule" or hasattr(
            getattr(kind, "forward", None), "_torchdynamo_orig_callable"
        ):
            return "compiled"
        if kind.__module__.startswith("torch.jit"):
            return "scripted"
    return ""
