"""The parts of the hooks of transformers that need no transformers: lengths, shapes, versions that differ."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
from whyspan.marks import CacheChanged, Generated, Hello

from tests.unit.inproc_hooks.conftest import Sent

hook: Any = importlib.import_module("whyspan_inproc.transformers_hook")
generate: Any = importlib.import_module("whyspan_inproc.transformers_hook_generate")
caches: Any = importlib.import_module("whyspan_inproc.transformers_hook_cache")
batch: Any = importlib.import_module("whyspan_inproc.transformers_hook_batch")


class Tensor:
    """A tensor of a shape, or a number on a device."""

    def __init__(self, *shape: int, device: str = "cpu", value: int = 0) -> None:
        self.shape, self.value = shape, value
        self.device = types.SimpleNamespace(type=device)

    def __int__(self) -> int:
        assert self.device.type == "cpu", "waits for the device"
        return self.value


class Layer:
    """A layer of a cache."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Cache:
    """A cache that says its length as it likes."""

    def __init__(self, length: Any, *layers: Layer) -> None:
        self.length, self.layers = length, layers

    def get_seq_length(self) -> Any:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (17, 17),
        (Tensor(value=17), 17),
        (Tensor(value=17, device="cuda"), None),
        (ValueError("linear attention"), 0),
    ],
)
def test_a_length_is_read_without_waiting(length: Any, expected: int | None) -> None:
    assert caches.length(Cache(length)) == expected


def test_a_static_cache_on_a_device_is_counted(sent: Sent) -> None:
    cache = Cache(0, Layer(is_compileable=True))
    watched = caches.Watched()
    assert watched.length(cache) == 0
    watched.passed(cache, 0, 11, 1)
    cache.length = Tensor(value=11, device="cuda")
    assert watched.length(cache) == 11
    watched.passed(cache, 11, 1, 1)
    assert caches.Watched().length(cache) == 12  # another call with it
    token = caches.before(None, (cache,), {})
    caches.after_reset(None, token, None, (cache,), {})
    assert caches.Watched().length(cache) == 0
    assert [b for b in sent.bodies() if isinstance(b, CacheChanged)] == [CacheChanged(op="reset", removed=12)]


def test_what_was_counted_is_forgotten_when_nobody_watched(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(0, Layer(is_compileable=True))
    caches.Watched().passed(cache, 0, 11, 1)
    cache.length = Tensor(device="cuda")
    assert caches.Watched().length(cache) == 11
    monkeypatch.setattr(caches.emit, "session", caches.emit.session + 1)
    assert caches.Watched().length(cache) == 0


@pytest.mark.parametrize(
    ("layer", "keeps"),
    [
        (Layer(is_sliding=True, sliding_window=8), 7),
        (Layer(is_sliding=True, max_cache_len=8, cumulative_length_int=0), 8),
    ],
)
def test_windows(sent: Sent, layer: Layer, keeps: int) -> None:
    cache, watched = Cache(0, Layer(is_sliding=False), layer), caches.Watched()
    for before, positions in ((0, 5), (5, 4), (9, 1)):
        watched.passed(cache, before, positions, 2)
    gone = [(b.tokens, b.removed) for b in sent.bodies() if isinstance(b, CacheChanged)]
    assert gone == [(2 * keeps, 2 * (9 - keeps)), (2 * keeps, 2)]


def test_a_cache_on_the_host_is_told_once(sent: Sent) -> None:
    cache, watched = Cache(0), caches.Watched()
    cache.offloading = True  # type: ignore[attr-defined]
    watched.passed(cache, 0, 5, 2)
    watched.passed(cache, 5, 1, 2)
    assert [b for b in sent.bodies() if isinstance(b, CacheChanged)] == [
        CacheChanged(op="offloaded", tokens=10)
    ]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"input_ids": Tensor(3, 11)}, (3, 11)),
        ({"input_ids": None, "inputs_embeds": Tensor(3, 11, 64)}, (3, 11)),
        ({"decoder_input_ids": Tensor(2, 1), "input_ids": Tensor(2, 9)}, (2, 1)),
        ({"pixels": Tensor(2, 9)}, (1, 0)),
        ({"input_ids": [1, 2]}, (1, 0)),
    ],
)
def test_shapes(inputs: dict[str, Any], expected: tuple[int, int]) -> None:
    assert generate.shape(inputs) == expected


def test_a_pass_left_by_an_exception_is_not_told(sent: Sent) -> None:
    frame = generate.Frame(object(), 11)
    frame.begin({"input_ids": Tensor(1, 11)})
    frame.begin({"input_ids": Tensor(1, 1), "past_key_values": Cache(11)})
    frame.end()
    frame.end()
    (one,) = [b for b in sent.bodies() if isinstance(b, Generated)]
    assert (one.tokens, one.cached, one.prefill) == (1, 11, False)


def fresh() -> list[Any]:
    """Hooks that wrap nothing yet."""
    return [
        type(h)(
            *(h.role, h.module, h.target, " ".join(h.params)),
            before=h.before,
            after=h.after,
            replace=h.replace,
        )
        for h in hook.HOOKS
    ]


def test_another_version_is_degraded_not_broken(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate`` has lost a parameter, ``crop`` is gone, ``reset`` is as we know it."""

    class Mixin:
        def generate(self, prompt: int) -> int:
            return prompt + 1

    class TheirCache:
        def reset(self) -> str:
            return "theirs"

    hooks = fresh()
    monkeypatch.setattr(hook, "HOOKS", hooks)
    for one in hooks:
        if one.module.endswith("cache_utils"):
            one._imported(types.SimpleNamespace(Cache=TheirCache))
        elif one.module == "transformers.generation.utils":
            one._imported(types.SimpleNamespace(GenerationMixin=Mixin))
    states = {h.target: h.state for h in hooks if h.state != "waiting"}
    assert states == {"GenerationMixin.generate": "missing", "Cache.crop": "missing", "Cache.reset": "on"}
    assert Mixin().generate(3) == 4
    assert TheirCache().reset() == "theirs"  # and has nothing of what ``before`` looks for
    hook.emit.emit(hook.kinds.HELLO, hook.hello(object()))
    hello = next(b for b in sent.bodies() if isinstance(b, Hello))
    assert (hello.state, hello.missing) == ("degraded", ["GenerationMixin.generate", "Cache.crop"])


def test_a_hook_that_keeps_failing_is_switched_off(sent: Sent) -> None:
    calls = 0

    def broken(*_: Any) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError

    class Theirs:
        def work(self, x: int) -> int:
            if x == 13:
                raise OSError
            return x

    ending = hook.Ending("generate", "m", "Theirs.work", "x", before=broken, after=broken)
    ending.install(types.SimpleNamespace(Theirs=Theirs))
    with pytest.raises(OSError):
        Theirs().work(13)
    assert [Theirs().work(i) for i in range(12)] == list(range(12))
    assert ending.state == "off"
    before = calls
    Theirs().work(1)
    assert calls == before


def test_models_are_described_without_paths() -> None:
    config = types.SimpleNamespace(
        name_or_path="/srv/models/secret-project/llama-8b/", _attn_implementation="sdpa"
    )
    model = types.SimpleNamespace(config=config, dtype="torch.bfloat16")
    assert hook.describe(model) == {
        "name": "llama-8b",
        "architecture": "SimpleNamespace",
        "dtype": "bfloat16",
        "attention": "sdpa",
    }


def future(request: str, length: int, offset: int, new: bool = True) -> Any:
    state = types.SimpleNamespace(request_id=request, position_offset=offset, is_cpu_offloaded=False)
    return types.SimpleNamespace(state=state, query_length=length, has_new_token=new)


@pytest.mark.parametrize(
    ("scheduled", "prefill"),
    [
        ([future("a", 1, 7), future("b", 1, 9)], False),
        ([future("a", 1, 7), future("b", 5, 0)], True),
        ([future("a", 1, 0)], True),  # a prompt of one token
        ([future("a", 1, 7, new=False)], True),  # one token of a prompt that goes on
    ],
)
def test_batches(scheduled: list[Any], prefill: bool) -> None:
    made = batch.Batch(scheduled)
    assert made.requests == [f.state.request_id for f in scheduled]
    assert made.tokens == sum(f.query_length for f in scheduled)
    assert made.cached == sum(f.state.position_offset for f in scheduled)
    assert made.prefill is prefill
