"""Sampled layers: which modules, which passes, and that a pass that is not sampled is left alone."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
from whyspan.marks import Layers

from tests.unit.inproc_hooks import fake
from tests.unit.inproc_hooks.conftest import Sent
from tests.unit.inproc_hooks.fake import FakeCuda

layers: Any = importlib.import_module("whyspan_inproc.torch_layers")
find: Any = importlib.import_module("whyspan_inproc.torch_layers_find")


@pytest.fixture(autouse=True)
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "EVERY", 3)


def run(model: fake.Module, step: int = 0, **more: Any) -> int:
    """Do one pass; return the hooks that were on the model during it."""
    sample = layers.begin(model, step, **more)
    count = model.hooks()
    model()
    if sample is not None:
        layers.end(sample)
    return count


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 0), ("0", 0), ("7", 7), ("-3", 0), ("often", 0), ("", 0)]
)
def test_every(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int) -> None:
    if value is None:
        monkeypatch.delenv("WHYSPAN_LAYERS_EVERY", raising=False)
    else:
        monkeypatch.setenv("WHYSPAN_LAYERS_EVERY", value)
    assert layers.every() == expected


def test_layers_and_their_blocks_are_found() -> None:
    parts = find.find(fake.model(2))
    assert [(p.layer, p.kind) for p in parts] == [
        (i, kind) for i in range(2) for kind in ("layer", "attention", "mlp")
    ]


def test_the_largest_list_is_that_of_the_decoder() -> None:
    vision = fake.listed(**{str(i): fake.Layer(attn=fake.Attention(2)) for i in range(9)})
    both = fake.Module(tower=fake.Module(layers=vision), text=fake.model(2))
    assert {p.layer for p in find.find(both)} == {0, 1}
    assert find.find(fake.Module(text=fake.Module(9), more=fake.Module(9))) == []


def test_lists_of_other_things_are_not_layers() -> None:
    heads = fake.listed(a=fake.Dense(10_000), b=fake.Attention(10_000))  # neither name nor equal classes
    assert {p.layer for p in find.find(fake.Module(heads=heads, text=fake.model(2)))} == {0, 1}


def test_experts() -> None:
    blocks = {
        "0": fake.Layer(attention=fake.Attention(2), feed_forward=fake.SparseMoeBlock(2)),
        "1": fake.Layer(attn=fake.Attention(2), mlp=fake.Dense(experts=fake.listed(a=fake.Dense(2)))),
        "2": fake.Layer(attn=fake.Attention(2), block_sparse_moe=fake.Dense(2)),
        "3": fake.Layer(attn=fake.Attention(2), mlp=fake.Dense(2)),
    }
    parts = find.find(fake.Module(h=fake.listed(**blocks)))
    assert [p.kind for p in parts if p.kind not in ("layer", "attention")] == ["moe", "moe", "moe", "mlp"]
    assert sum(p.kind == "attention" for p in parts) == 4


def test_layers_of_another_worker_keep_their_numbers() -> None:
    blocks: dict[str, fake.Module] = {str(i): fake.PPMissingLayer() for i in range(2)}
    blocks |= {str(i): fake.Layer(self_attn=fake.Attention(2)) for i in (2, 3)}
    parts = find.find(fake.Module(layers=fake.listed(**blocks)))
    assert {p.layer for p in parts} == {2, 3}


@pytest.mark.parametrize(
    ("name", "value"), [("_compiled_call_impl", object()), ("do_not_compile", False), ("forward", None)]
)
def test_compiled(name: str, value: Any) -> None:
    model = fake.model()
    assert find.compiled(model) == ""
    model.do_not_compile = True  # type: ignore[attr-defined]
    assert find.compiled(model) == ""
    if name == "forward":

        def value() -> None: ...

        value._torchdynamo_orig_callable = model.forward
    setattr(next(iter(model)), name, value)
    assert find.compiled(model) == "compiled"


def test_an_optimised_module_is_compiled() -> None:
    wrapper = type("OptimizedModule", (fake.Module,), {})(inner=fake.model())
    assert find.compiled(wrapper) == "compiled"


def test_one_pass_in_three_is_sampled(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()
    assert [run(model, step) for step in range(7)] == [18, 0, 0, 18, 0, 0, 18]
    assert model.hooks() == 0
    bodies = [b for b in sent.bodies() if isinstance(b, Layers)]
    assert [b.step for b in bodies] == [0, 3, 6]
    assert [(i, k) for i, k, _ in bodies[0].rows] == [
        (i, k) for i in range(3) for k in ("layer", "attention", "mlp")
    ]


def test_nothing_without_a_watcher(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()
    sent.watching = 0
    assert [run(model) for _ in range(5)] == [0] * 5
    sent.watching = 1
    assert run(model) == 18  # the first that is watched


def test_off(sent: Sent, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "EVERY", 0)
    assert run(fake.model()) == 0 and layers.install(fake.model()) is None and not sent


def test_what_is_not_available_is_said_once(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()
    model._compiled_call_impl = object()  # type: ignore[attr-defined]
    assert [run(model) for _ in range(9)] == [0] * 9
    assert [(b.available, b.reason) for b in sent.bodies() if isinstance(b, Layers)] == [(False, "compiled")]
    layers._again()  # somebody else watches
    for _ in range(3):
        run(model)
    assert [b.reason for b in sent.bodies() if isinstance(b, Layers)] == ["compiled"]


def test_a_model_without_layers_says_so(sent: Sent, cuda: FakeCuda) -> None:
    run(fake.Module(9))
    assert [b.reason for b in sent.bodies() if isinstance(b, Layers)] == ["no decoder layers found"]


def test_the_callers_reason_stands(sent: Sent, cuda: FakeCuda) -> None:
    assert run(fake.model(), reason="captured in a graph") == 0
    assert [b.reason for b in sent.bodies() if isinstance(b, Layers)] == ["captured in a graph"]


def test_layers_that_are_never_called(sent: Sent, cuda: FakeCuda) -> None:
    """One empty pass is a step without work; after three in a row, something else runs the layers."""
    model = fake.model()
    model.forward = lambda: None  # type: ignore[method-assign]
    for _ in range(4):
        run(model)
    assert not sent
    for _ in range(3):
        run(model)
    assert [b.reason for b in sent.bodies() if isinstance(b, Layers)] == ["layers not called"]


def test_a_pass_that_fails_leaves_no_hook(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()

    def fails() -> None:
        raise OSError

    inner = next(iter(model))
    inner.work = fails
    with pytest.raises(OSError), layers.around(model, 1):
        model()
    assert model.hooks() == 0


def test_a_pass_left_without_an_end_is_tidied_up_by_the_next_sample(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()
    assert layers.begin(model) is not None
    assert [run(model) for _ in range(3)] == [18, 18, 18]  # left on: its owner never came back
    assert model.hooks() == 0


def test_other_threads_with_the_model_are_not_measured(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()
    with layers.around(model):
        thread = threading.Thread(target=model)
        thread.start()
        thread.join()
        model()
    (body,) = [b for b in sent.bodies() if isinstance(b, Layers)]
    assert len(body.rows) == 9


def test_a_large_model_needs_more_marks(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model(200)
    run(model, 7)
    assert max(len(p) for _, p in sent) <= 8192
    bodies = [b for b in sent.bodies() if isinstance(b, Layers)]
    assert len(bodies) == 3 and len({(b.begin_ns, b.step) for b in bodies}) == 1
    assert [row[0] for b in bodies for row in b.rows] == [i for i in range(200) for _ in range(3)]


def test_rows_fit_at_their_longest(sent: Sent) -> None:
    layers.tell_rows(10**18, 10**9, [(511, "attention", 10**10 - 1)] * 256)
    assert len(sent) == 1 and len(sent[0][1]) <= 8192


def test_a_devices_events_are_read_at_the_next_sample(sent: Sent, cuda: FakeCuda) -> None:
    cuda.initialised, cuda.done = True, 0
    model = fake.model(device="cuda")
    for step in range(3):
        run(model, step)
    assert not sent
    cuda.done = cuda.now
    run(model, 3)
    (body,) = [b for b in sent.bodies() if isinstance(b, Layers)]
    assert body.step == 0
    # one tick of 1 ms at each event: a layer's own begin, its blocks' four, its end
    assert [ns for _, kind, ns in body.rows if kind == "layer"] == [5_000_000] * 3
    for step in range(4, 7):  # the device never gets to those of pass 3: dropped, not waited for
        run(model, step)
    assert not sent


def test_a_capture_is_not_disturbed(sent: Sent, cuda: FakeCuda) -> None:
    cuda.initialised = cuda.capturing = True
    model = fake.model(device="cuda")
    assert run(model) == 0 and cuda.now == 0
    assert [b.reason for b in sent.bodies() if isinstance(b, Layers)] == ["captured in a graph"]


def test_a_capture_that_begins_within_a_pass(sent: Sent, cuda: FakeCuda) -> None:
    cuda.initialised = True
    model = fake.model(device="cuda")
    with layers.around(model):
        cuda.capturing = True
        model()
    assert cuda.now == 0
    assert [b.reason for b in sent.bodies() if isinstance(b, Layers)] == ["captured in a graph"]


def test_a_hook_does_nothing_while_dynamo_traces(sent: Sent, cuda: FakeCuda) -> None:
    model = fake.model()
    cuda.compiling = True
    run(model)
    assert not sent
