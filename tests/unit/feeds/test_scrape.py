"""``/metrics`` of three engines under common names; torn and hostile bodies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.feeds import messages, scrape
from whyspan.feeds.scrape import ScrapeError

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a \\"quoted\\" } name, with=all"} 1e+03
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 320.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 5000.0
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 320.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 4680.0
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 11.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 5.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="m"} 5.0
python_gc_objects_collected_total{generation="0"} 1.0
"""
SGLANG = b"""\
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",pp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1",pp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 4.0
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 30.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 10.0
sglang:generation_tokens_total{model_name="m"} 50.0
sglang:evicted_tokens_total{model_name="m"} 9.0
"""
LLAMA = b"""\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 21
llamacpp:prompt_tokens_seconds 8.1
llamacpp:tokens_predicted_total 42
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""


def test_vllm() -> None:
    g = scrape.parse(VLLM)
    assert g.engine == "vllm"
    assert g.values == {
        "running": 5,
        "waiting": 4,
        "waiting_capacity": 3,
        "waiting_deferred": 1,
        "kv_usage": 0.75,
        "prefix_queries": 1000,
        "prefix_hits": 320,
        "preemptions": 7,
        "prompt_tokens": 5000,
        "prompt_tokens_cached": 320,
        "generation_tokens": 900,
        "drafted": 11,
        "accepted": 5,
    }


def test_sglang() -> None:
    g = scrape.parse(SGLANG)
    assert g.engine == "sglang"
    assert g.values == {
        "running": 3,
        "waiting": 2,
        "kv_usage": 0.5,
        "preemptions": 4,
        "prompt_tokens": 100,
        "prompt_tokens_cached": 40,
        "generation_tokens": 50,
        "evicted_tokens": 9,
    }


def test_llama_cpp() -> None:
    g = scrape.parse(LLAMA)
    assert g.engine == "llama.cpp"
    assert g.values == {"running": 1, "waiting": 2, "prompt_tokens": 21, "generation_tokens": 42}


def test_every_name_is_a_common_one() -> None:
    rules = [rule for names in scrape._RULES.values() for found in names.values() for rule in found]
    assert {rule.to for rule in rules} <= messages.GAUGES
    assert scrape._RULES.keys() == messages.ENGINES


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>vllm: a fast server</html>",
        b"process_cpu_seconds_total 5\n",
        b"vllm:num_requests_running{engine= 5\n",
        b"vllm:num_requests_running five\n",
        b"vllm:num_requests_running \n",
        b"vllm:x 1\n" + b"y" * (scrape.MAX_BODY + 1),
    ],
)
def test_what_is_none(body: bytes) -> None:
    with pytest.raises(ScrapeError):
        scrape.parse(body)


def test_a_value_that_is_no_number_is_left_out() -> None:
    assert scrape.parse(b"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n").values == {}


@given(
    st.lists(st.sampled_from(VLLM.splitlines() + SGLANG.splitlines()), max_size=8),
    st.binary(max_size=30),
    st.integers(0),
)
@settings(max_examples=150)
def test_any_body(lines: list[bytes], junk: bytes, at: int) -> None:
    text = b"\n".join(lines)
    at %= len(text) + 1
    try:
        g = scrape.parse(text[:at] + junk + text[at:])
    except ScrapeError:
        return
    assert g.values.keys() <= messages.GAUGES
