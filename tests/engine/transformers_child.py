"""Run by vLLM's interpreter: transformers with tiny random models, hooked, and what it does by its own account.

``python transformers_child.py OUT``: one JSON object, by scenario: the marks as they would be sent (kind, payload)
and what is true. The marks are caught where they would go to the C function; all else is as in a server.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

auto: Any = importlib.import_module("whyspan_inproc.auto")  # on PYTHONPATH
emit: Any = importlib.import_module("whyspan_inproc.emit")
torch_layers: Any = importlib.import_module("whyspan_inproc.torch_layers")
torch: Any = importlib.import_module("torch")
hf: Any = importlib.import_module("transformers")
generation: Any = importlib.import_module("transformers.generation.utils")
compiling: Any = importlib.import_module("transformers.generation.configuration_utils")
batching: Any = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
requests: Any = importlib.import_module("transformers.generation.continuous_batching.requests")

NEW = 23
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}

marks: list[tuple[int, str]] = []
watching = False


def _caught(kind: int, payload: bytes) -> None:
    marks.append((kind, payload.decode("ascii")))


emit._mark = _caught
emit._watchers = lambda: int(watching)


class Recording(hf.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that notes of each forward pass its shape and the length of its cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ids, cache = kwargs["input_ids"], kwargs.get("past_key_values")
        before = int(cache.get_seq_length()) if cache is not None else 0
        self.seen.append([ids.shape[0], ids.shape[1], before])
        return super().forward(*args, **kwargs)


def llama(cls: Any = Recording) -> Any:
    torch.manual_seed(7)
    model = cls(hf.LlamaConfig(**SIZES)).eval()
    model.seen = []
    return model


def prompt(sequences: int, positions: int) -> Any:
    torch.manual_seed(11)
    return torch.randint(3, 100, (sequences, positions))


def watched(call: Callable[[], Any]) -> tuple[Any, list[tuple[int, str]]]:
    """Run with a watcher; return the result and the marks."""
    global watching
    marks.clear()
    watching = True
    try:
        return call(), list(marks)
    finally:
        watching = False


def scenario(call: Callable[[], Any], model: Any = None, **truth: Any) -> tuple[Any, dict[str, Any]]:
    """Run unwatched, then watched; return the watched result and what there is to say."""
    plain = call()
    if model is not None:
        model.seen.clear()
    result, sent = watched(call)
    same = torch.equal(plain, result) if torch.is_tensor(plain) else plain == result
    return result, {"marks": sent, "same": same, "passes": list(getattr(model, "seen", [])), **truth}


def generate(model: Any, ids: Any, **more: Any) -> Any:
    torch.manual_seed(5)  # of sampling
    return model.generate(ids, **{"max_new_tokens": NEW, **GREEDY, **more})


def decoding() -> dict[str, Any]:
    model, found = llama(), {}
    kinds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("greedy", prompt(1, 11), {"max_new_tokens": NEW}),
        ("batch", prompt(3, 11), {}),
        ("sampled", prompt(2, 5), {"do_sample": True}),
        ("beams", prompt(2, 7), {"num_beams": 3}),
        ("lookup", prompt(1, 40), {"prompt_lookup_num_tokens": 4}),
        ("static", prompt(2, 7), {"cache_implementation": "static"}),
        ("chunked", prompt(1, 11), {"prefill_chunk_size": 4}),
        ("uncached", prompt(1, 5), {"use_cache": False}),
    )
    for name, ids, more in kinds:
        _, found[name] = scenario(functools.partial(generate, model, ids, **more), model)
    return found


def caches() -> dict[str, Any]:
    model, ids = llama(), prompt(2, 11)
    found: dict[str, Any] = {}

    def again() -> Any:
        cache = hf.DynamicCache(config=model.config)
        first = generate(model, ids, past_key_values=cache)
        second = generate(model, torch.cat([first, ids], dim=1), past_key_values=cache)
        cache.crop(-7)
        left = cache.get_seq_length()
        cache.crop(0)
        cache.reset()
        found["left"] = left
        return second

    _, found["again"] = scenario(again, model)
    found["again"]["left"] = found.pop("left")

    torch.manual_seed(7)
    sliding = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=8)).eval()
    held: list[Any] = []

    def slide() -> Any:
        held.append(hf.DynamicCache(config=sliding.config))
        return generate(sliding, ids, past_key_values=held[-1])

    _, found["sliding"] = scenario(slide)
    layer = held[-1].layers[0]
    found["sliding"] |= {"kept": layer.keys.shape[-2], "lost": layer.get_seq_length() - layer.keys.shape[-2]}
    return found


def failures() -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, ids = llama(), prompt(1, 11)
    right = generate(model, ids)

    hooks: Any = importlib.import_module("whyspan_inproc.transformers_hook_generate")
    real = hooks.shape

    def broken(_kwargs: Any) -> Any:
        raise RuntimeError("of ours")

    hooks.shape = broken
    try:
        result, sent = watched(lambda: generate(model, ids))
    finally:
        hooks.shape = real
    found["ours"] = {"marks": sent, "same": torch.equal(right, result)}

    class Theirs(Exception):
        pass

    calls = 0
    forward = model.model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Theirs
        return forward(*args, **kwargs)

    def attempt() -> bool:
        model.model.forward = failing
        try:
            generate(model, ids)
        except Theirs:
            return True
        finally:
            del model.model.forward
        return False

    reached, sent = watched(attempt)
    found["theirs"] = {"marks": sent, "reached": reached, "hooks": _hooks_on(model)}
    return found


def _hooks_on(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def threads() -> dict[str, Any]:
    model = llama()
    sizes = [(1, 5), (2, 7), (3, 11)]
    results: dict[int, Any] = {}
    prompts = [prompt(*size) for size in sizes]  # here: the generator of random numbers is the process's
    right = [generate(model, ids) for ids in prompts]

    def one(i: int) -> None:
        results[i] = generate(model, prompts[i])

    def all_of_them() -> None:
        running = [threading.Thread(target=one, args=(i,)) for i in range(len(sizes))]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    _, sent = watched(all_of_them)
    same = all(torch.equal(results[i], right[i]) for i in range(len(sizes)))
    return {"marks": sent, "same": same, "hooks": _hooks_on(model), "sizes": sizes}


def compiled() -> dict[str, Any]:
    counted = 0

    def backend(graph: Any, _inputs: Any, **_options: Any) -> Any:
        nonlocal counted
        counted += 1
        return graph.forward

    config = compiling.CompileConfig(backend=backend, fullgraph=True)
    config._compile_all_devices = True
    model, ids = llama(hf.LlamaForCausalLM), prompt(1, 11)
    more = {"cache_implementation": "static", "compile_config": config}
    right = generate(model, ids, **more)
    before = counted
    torch_layers.EVERY = 5
    try:
        result, sent = watched(lambda: generate(model, ids, **more))
        stays = counted - before
        fresh = llama(hf.LlamaForCausalLM)  # compiled while watched, with the layers asked for
        first, first_sent = watched(lambda: generate(fresh, ids, **more))
    finally:
        torch_layers.EVERY = 0
    return {
        "marks": sent,
        "same": torch.equal(right, result) and torch.equal(right, first),
        "recompiled": stays,
        "first": first_sent,
        "hooks": _hooks_on(model) + _hooks_on(fresh),
    }


def layers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch_layers.EVERY = 5
    try:
        model, ids = llama(), prompt(1, 11)
        slow = model.model.layers[2].mlp
        forward = slow.forward

        def sleepy(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.02)
            return forward(*args, **kwargs)

        slow.forward = sleepy
        _, found["slow"] = scenario(lambda: generate(model, ids), model)
        found["slow"]["hooks"] = _hooks_on(model)

        model = llama(hf.LlamaForCausalLM)
        model.forward = torch.compile(model.forward, backend="eager")
        _, found["compiled"] = scenario(lambda: generate(model, ids))

        config = hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        torch.manual_seed(7)
        model = hf.MixtralForCausalLM(config).eval()
        _, found["moe"] = scenario(lambda: generate(model, ids))
    finally:
        torch_layers.EVERY = 0
    return found


class Account:
    """What continuous batching does, by its own objects: noted beneath the hooks."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.steps: list[dict[str, Any]] = []
        self.lost: list[str] = []
        self.denied = 0

    def install(self) -> None:
        """Put the notes in place, before any hook."""
        self._put(batching.ContinuousBatchProcessor, "_generation_step", self._step)
        self._put(requests.RequestState, "create_equivalent_initial_request", self._reset)
        self._put(batching.PagedAttentionCache, "can_store_request_tokens", self._store)

    @staticmethod
    def _put(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = owner.__dict__[name]

        @functools.wraps(original)
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            note(result, this, *args, **kwargs)
            return result

        setattr(owner, name, call)

    def _step(self, _result: Any, processor: Any, _model: Any) -> None:
        io, cache = processor.inputs_and_outputs, processor.cache
        states = [f.state for f in io.requests_in_batch]
        lengths = [f.query_length for f in io.requests_in_batch]
        (allocator,) = cache.cache_allocators.values()
        referenced = {b for table in allocator.block_table.values() for b in table}
        self.steps.append(
            {
                "requests": [s.request_id for s in states],
                "tokens": sum(lengths),
                "cached": sum(s.position_offset for s in states) - sum(lengths),
                "used": len(referenced),
                "blocks": allocator.num_blocks,
                "kept": len(allocator.ledger.cached_blocks),
            }
        )

    def _reset(self, _result: Any, state: Any) -> None:
        self.lost.append(state.request_id)

    def _store(self, result: Any, _cache: Any, _state: Any, _length: int, dry_run: bool = False) -> None:
        self.denied += not result and not dry_run


def continuous(account: Account) -> dict[str, Any]:
    found: dict[str, Any] = {}
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return empty(*args, **kwargs)  # pinned memory, for the host's copy, needs an accelerator

    torch.empty = unpinned
    model = llama(hf.LlamaForCausalLM)
    wanted = hf.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    inputs = [[3 + i] * n for i, n in enumerate((29, 11, 17, 13, 7))]
    for name, more in (
        ("roomy", {"num_blocks": 128}),
        ("tight", {"num_blocks": 16}),
        ("offload", {"num_blocks": 16, "cpu_offload_space": 0.01}),
    ):
        config = hf.ContinuousBatchingConfig(page_size=4, max_batch_tokens=16, **more)

        def run(config: Any = config) -> Any:
            out = model.generate_batch(inputs, generation_config=wanted, continuous_batching_config=config)
            return {k: [v.generated_tokens, v.error] for k, v in out.items()}

        plain = run()
        account.clear()
        result, sent = watched(run)
        found[name] = {
            "marks": sent,
            "same": plain == result,
            "made": {k: len(v[0]) for k, v in result.items()},
            "prompts": [len(i) for i in inputs],
            "steps": list(account.steps),
            "lost": list(account.lost),
            "denied": account.denied,
        }
    torch.empty = empty
    return found


def main(out: Path) -> None:
    torch.set_num_threads(1)
    account = Account()
    account.install()
    original = generation.GenerationMixin.generate
    os.environ["WHYSPAN_INPROC"] = "0"
    auto.load()
    untouched = generation.GenerationMixin.generate is original
    bare = generate(llama(), prompt(1, 11))
    del os.environ["WHYSPAN_INPROC"]
    auto.load()
    found = {
        "off": {"untouched": untouched, "same": torch.equal(bare, generate(llama(), prompt(1, 11)))},
        "states": {
            h.target: h.state for h in importlib.import_module("whyspan_inproc.transformers_hook").HOOKS
        },
        **decoding(),
        **caches(),
        **failures(),
        "threads": threads(),
        "compile": compiled(),
        "layers": layers(),
        "continuous": continuous(account),
        "dropped": emit.dropped,
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
