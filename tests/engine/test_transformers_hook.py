"""The hooks of transformers on real models with random weights: what they tell, against what the models did."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from whyspan import marks
from whyspan.marks import CacheChanged, Generated, Hello, Layers

from tests.engine import install

ROOT = Path(__file__).parents[2]
NEW = 23
GENERATE = ("greedy", "batch", "sampled", "beams", "lookup", "static", "chunked", "uncached")


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenarios, in one process of vLLM's environment."""
    out = tmp_path_factory.mktemp("transformers") / "out.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "probes" / "whyspan_inproc"), "HF_HUB_OFFLINE": "1"}
    env["OMP_NUM_THREADS"] = "1"  # in every thread: sums in another order are other tokens
    env.pop("WHYSPAN_LAYERS_EVERY", None)
    script = Path(__file__).with_name("transformers_child.py")
    subprocess.run([str(install.python()), str(script), str(out)], env=env, check=True, timeout=400)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def decoded(sent: Sequence[tuple[int, str]]) -> list[marks.Body]:
    """Decode marks as the agent does; none may fail."""
    now = 1 << 61
    return [marks.decode(kind, p.encode(), ts_ns=now, tid=1, tgid=1).body for kind, p in sent]


def passes(sent: Sequence[tuple[int, str]]) -> list[Generated]:
    return [b for b in decoded(sent) if isinstance(b, Generated) and not b.whole]


def whole(sent: Sequence[tuple[int, str]]) -> list[Generated]:
    return [b for b in decoded(sent) if isinstance(b, Generated) and b.whole]


def changes(sent: Sequence[tuple[int, str]], op: str) -> list[CacheChanged]:
    return [b for b in decoded(sent) if isinstance(b, CacheChanged) and b.op == op]


def test_every_hook_is_in_place(child: dict[str, Any]) -> None:
    assert set(child["states"].values()) == {"on"}
    assert len(child["states"]) == 14
    assert child["dropped"] == {"long": 0, "failed": 0}


def test_the_switch_turns_all_off(child: dict[str, Any]) -> None:
    assert child["off"] == {"untouched": True, "same": True}


@pytest.mark.parametrize("name", GENERATE)
def test_passes_are_what_the_model_saw(child: dict[str, Any], name: str) -> None:
    got = child[name]
    assert got["same"], "generate gives other tokens when watched"
    seen = [(s * n, s * cached, s) for s, n, cached in got["passes"]]
    told = passes(got["marks"])
    assert [(p.tokens, p.cached, p.batch) for p in told] == seen
    (call,) = whole(got["marks"])
    assert call.tokens == sum(p.tokens for p in told)
    assert (call.cached, call.batch) == (0, told[0].batch)
    assert all(json.loads(p).get("begin_ns", 1) > 0 for _, p in got["marks"])


@pytest.mark.parametrize("name", ["greedy", "batch", "sampled", "beams", "static", "uncached"])
def test_one_pass_for_each_token(child: dict[str, Any], name: str) -> None:
    told = passes(child[name]["marks"])
    assert len(told) == NEW
    assert [p.prefill for p in told] == [True] + [False] * (NEW - 1)


def test_a_prefill_in_chunks(child: dict[str, Any]) -> None:
    told = passes(child["chunked"]["marks"])
    assert [(p.tokens, p.prefill) for p in told[:4]] == [(4, True), (4, True), (3, True), (1, False)]


def test_passes_come_in_order_and_inside_the_call(child: dict[str, Any]) -> None:
    sent = [json.loads(p) for kind, p in child["greedy"]["marks"] if kind == 13]
    begins = [p["begin_ns"] for p in sent if not p.get("whole")]
    assert begins == sorted(begins)
    assert sent[-1]["whole"] and sent[-1]["begin_ns"] <= begins[0]


def test_rejected_tokens_are_cropped(child: dict[str, Any]) -> None:
    """The cache of each pass is what the passes and crops before it left."""
    length = 0
    crops = 0
    for body in decoded(child["lookup"]["marks"]):
        if isinstance(body, CacheChanged):
            assert body.op == "cropped" and body.tokens == length - body.removed
            length, crops = body.tokens, crops + 1
        elif isinstance(body, Generated) and not body.whole:
            assert body.cached == length
            length += body.tokens
    assert crops


def test_crop_and_reset(child: dict[str, Any]) -> None:
    got = child["again"]
    assert got["same"]
    first, second = whole(got["marks"])
    assert first.cached == 0
    assert second.cached == 2 * (11 + NEW - 1)  # the last token of the first call is not in the cache
    (crop,) = changes(got["marks"], "cropped")  # a crop of nothing is not told
    assert (crop.tokens, crop.removed) == (2 * got["left"], 2 * 7)
    (reset,) = changes(got["marks"], "reset")
    assert (reset.tokens, reset.removed) == (0, 2 * got["left"])


def test_a_sliding_window_evicts(child: dict[str, Any]) -> None:
    got = child["sliding"]
    assert got["same"]
    gone = changes(got["marks"], "evicted")
    assert sum(c.removed for c in gone) == 2 * got["lost"]
    assert {c.tokens for c in gone} == {2 * got["kept"]}


def test_a_failure_of_ours_reaches_nobody(child: dict[str, Any]) -> None:
    assert child["ours"]["same"]
    assert passes(child["ours"]["marks"]) == []


def test_a_failure_of_theirs_reaches_its_caller(child: dict[str, Any]) -> None:
    got = child["theirs"]
    assert got["reached"]
    assert got["hooks"] == 0, "forward hooks were left on the model"
    assert len(passes(got["marks"])) == 2 and len(whole(got["marks"])) == 1


def test_threads_with_one_model(child: dict[str, Any]) -> None:
    got = child["threads"]
    assert got["same"] and got["hooks"] == 0
    assert Counter(p.batch for p in passes(got["marks"])) == {s: NEW for s, _ in got["sizes"]}
    ends = {c.batch: c.tokens for c in whole(got["marks"])}
    assert ends == {s: s * (n + NEW - 1) for s, n in got["sizes"]}


def test_compiled_decoding(child: dict[str, Any]) -> None:
    """Passes are timed outside of what is compiled; watching compiles nothing again and leaves no hook."""
    got = child["compile"]
    assert got["same"] and got["recompiled"] == 0 and got["hooks"] == 0
    for sent in (got["marks"], got["first"]):
        told = passes(sent)
        assert [(p.tokens, p.cached) for p in told] == [(11, 0)] + [(1, 11 + i) for i in range(NEW - 1)]
        kinds = [b for b in decoded(sent) if isinstance(b, Layers)]
        assert [b.available for b in kinds] == [True, False]  # the eager prefill; then said once
        assert kinds[1].reason == "compiled"


def test_the_slow_layer_is_the_outlier(child: dict[str, Any]) -> None:
    got = child["layers"]["slow"]
    assert got["same"] and got["hooks"] == 0
    sampled = [b for b in decoded(got["marks"]) if isinstance(b, Layers)]
    assert [b.step for b in sampled] == [1, 6, 11, 16, 21]  # one in five
    for body in sampled:
        assert [(i, kind) for i, kind, _ in body.rows] == [
            (i, kind) for i in range(3) for kind in ("layer", "attention", "mlp")
        ]
        times = {(i, kind): ns for i, kind, ns in body.rows}
        assert times[2, "mlp"] >= 20_000_000  # it sleeps so long
        for i in range(3):
            assert times[i, "layer"] >= times[i, "attention"] + times[i, "mlp"]
    least = {key: min({(i, k): ns for i, k, ns in b.rows}[key] for b in sampled) for key in times}
    assert max((key for key in least if key[1] != "layer"), key=least.__getitem__) == (2, "mlp")


def test_layers_of_a_compiled_model_are_not_available(child: dict[str, Any]) -> None:
    got = child["layers"]["compiled"]
    assert got["same"]
    (body,) = [b for b in decoded(got["marks"]) if isinstance(b, Layers)]
    assert (body.available, body.reason, body.rows) == (False, "compiled", [])
    assert len(passes(got["marks"])) == NEW


def test_experts_are_told_as_such(child: dict[str, Any]) -> None:
    got = child["layers"]["moe"]
    assert got["same"]
    body = next(b for b in decoded(got["marks"]) if isinstance(b, Layers))
    assert {kind for _, kind, _ in body.rows} == {"layer", "attention", "moe"}


@pytest.mark.parametrize("name", ["roomy", "tight", "offload"])
def test_continuous_batching_is_the_managers_own_state(child: dict[str, Any], name: str) -> None:
    got = child["continuous"][name]
    assert got["same"], "other tokens when watched"
    told = passes(got["marks"])
    assert [(p.requests, p.tokens, p.cached, p.batch) for p in told] == [
        (s["requests"], s["tokens"], s["cached"], len(s["requests"])) for s in got["steps"]
    ]
    state = None
    steps = iter(got["steps"])
    bodies = decoded(got["marks"])
    for body, after in zip(bodies, [*bodies[1:], None], strict=True):
        if isinstance(body, CacheChanged) and body.op == "state":
            state = body
        if isinstance(body, Generated) and not body.whole:  # told again only if it changed
            now = after if isinstance(after, CacheChanged) and after.op == "state" else state
            step = next(steps)
            assert isinstance(now, CacheChanged)
            assert (now.used_blocks, now.cached_blocks) == (step["used"], step["kept"])
            assert now.used_blocks + now.free_blocks == step["blocks"]
    assert state is not None and state.used_blocks == 0  # all gave back what they had


@pytest.mark.parametrize("name", ["roomy", "tight", "offload"])
def test_requests_of_continuous_batching(child: dict[str, Any], name: str) -> None:
    got = child["continuous"][name]
    arrived = [b for b in decoded(got["marks"]) if isinstance(b, marks.Arrived)]
    assert sorted(a.request for a in arrived) == sorted(got["made"])
    assert {a.max_tokens for a in arrived} == {NEW}
    ends = {c.requests[0]: c.tokens for c in whole(got["marks"])}
    assert ends == {f"req_{i}": n + NEW - 1 for i, n in enumerate(got["prompts"])}
    hello = next(b for b in decoded(got["marks"]) if isinstance(b, Hello))
    assert hello.state == "ok" and hello.config["num_blocks"] == str(got["steps"][0]["blocks"])


def test_what_the_paged_cache_lacks(child: dict[str, Any]) -> None:
    roomy, tight, offload = (child["continuous"][name] for name in ("roomy", "tight", "offload"))
    for got in (roomy, tight, offload):
        assert len(changes(got["marks"], "denied")) == got["denied"]
        lost = [c.request for c in changes(got["marks"], "evicted") if c.request]
        assert lost == got["lost"]
    assert roomy["denied"] == 0 and tight["denied"] > 0 and tight["lost"]
    out, back = (
        Counter(c.request for c in changes(offload["marks"], op)) for op in ("offloaded", "restored")
    )
    assert out == back and out and not offload["lost"]
