"""Run by vLLM's interpreter: its real core and asynchronous scheduler, with a model that makes tokens up.

The CPU backend schedules synchronously only. Here ``EngineCore.step_with_batch_queue`` and ``AsyncScheduler`` run as
on a GPU, two batches in flight; the executor alone is a stand-in, which answers each batch one step later.

``python inproc_async_child.py MODEL OUT``: one JSON object: the marks, and what the scheduler itself counted.
"""

from __future__ import annotations

import importlib
import json
import queue
import sys
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

BLOCKS, BLOCK = 61, 32
REQUESTS, PROMPT, OUTPUT = 11, 300, 97


def config(model: str) -> Any:
    """Return a configuration as for a GPU: asynchronous, two batches in flight."""
    args: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK,
        enforce_eager=True,
    )
    made = args.create_engine_config()
    made.scheduler_config.async_scheduling = True
    made.cache_config.num_gpu_blocks = BLOCKS
    return made


def scheduler(made: Any) -> Any:
    """Return vLLM's asynchronous scheduler over one group of layers."""
    torch: Any = importlib.import_module("torch")
    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    pages = interface.KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )
    manager: Any = importlib.import_module("vllm.v1.structured_output").StructuredOutputManager(made)
    kind: Any = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    return kind(
        vllm_config=made,
        kv_cache_config=pages,
        structured_output_manager=manager,
        block_size=BLOCK,
        log_stats=True,
    )


class Executor:
    """Answers each batch with one token for every request whose prompt is through."""

    def __init__(self) -> None:
        self.sent: deque[Any] = deque()
        self.output: Any = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
        self.step_of: list[int] = []  # what a worker would read off each batch

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Future[Any]:
        assert non_block
        done: Future[Any] = Future()
        if scheduler_output.total_num_scheduled_tokens:
            self.step_of.append(getattr(scheduler_output, "_whyspan_step", 0))
            self.sent.append(scheduler_output)
            done.set_result(None)
        else:
            done.set_result(self.answer([], []))
        return done

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Future[Any]:
        batch = self.sent.pop()
        rows = list(batch.num_scheduled_tokens)
        requests = core.scheduler.requests
        done: Future[Any] = Future()
        done.set_result(self.answer(rows, [[] if requests[r].is_prefill_chunk else [7] for r in rows]))
        return done

    def answer(self, rows: list[str], sampled: list[list[int]]) -> Any:
        return self.output(
            req_ids=rows,
            req_id_to_index={r: i for i, r in enumerate(rows)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def engine(made: Any) -> Any:
    """Return an EngineCore without workers: the attributes that its step reads."""
    kind: Any = importlib.import_module("vllm.v1.engine.core").EngineCore
    made_core = kind.__new__(kind)
    made_core.vllm_config, made_core.log_stats = made, True
    made_core.scheduler = scheduler(made)
    made_core.batch_queue_size, made_core.batch_queue = 2, deque(maxlen=2)
    made_core.is_mm_encoder_only = made_core.is_pooling_model = made_core.check_for_draft_tokens = False
    made_core.async_scheduling = True
    made_core.aborts_queue = queue.Queue()
    made_core.mm_receiver_cache = None
    made_core._weight_version = "default"
    hashing: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    algorithm = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name("sha256")
    hashing.init_none_hash(algorithm)
    made_core.request_block_hasher = hashing.get_request_block_hasher(BLOCK, algorithm)
    return made_core


def request(number: int) -> Any:
    """Return a request as the front end sends it."""
    engine_module: Any = importlib.import_module("vllm.v1.engine")
    sampling: Any = importlib.import_module("vllm.sampling_params")
    params = sampling.SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    return engine_module.EngineCoreRequest(
        request_id=f"r{number}",
        prompt_token_ids=[(i * 7 + number) % 1000 for i in range(PROMPT)],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def main() -> None:
    """Serve all requests; write what was told and what is true."""
    global core
    auto: Any = importlib.import_module("whyspan_inproc.auto")  # on PYTHONPATH
    emit: Any = importlib.import_module("whyspan_inproc.emit")
    sent: list[Any] = []
    emit._mark = lambda kind, payload: sent.append([time.monotonic_ns(), kind, payload.decode()])
    emit._watchers = lambda: 1
    auto.load()
    core = engine(config(sys.argv[1]))
    core.model_executor = Executor()
    preempted: dict[str, int] = {}
    lost: dict[str, int] = {}
    scheduler_class: Any = type(core.scheduler).__mro__[1]
    hooked = scheduler_class._preempt_request

    def count(self: Any, victim: Any, *args: Any, **kwargs: Any) -> Any:
        lost[victim.request_id] = lost.get(victim.request_id, 0) + victim.num_computed_tokens
        result = hooked(self, victim, *args, **kwargs)
        preempted[victim.request_id] = victim.num_preemptions
        return result

    scheduler_class._preempt_request = count
    for number in range(REQUESTS):
        made, wave = core.preprocess_add_request(request(number))
        core.add_request(made, wave)
    tokens: dict[str, int] = {}
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_with_batch_queue()
        for of_client in (outputs or {}).values():
            for one in of_client.outputs:
                tokens[one.request_id] = tokens.get(one.request_id, 0) + len(one.new_token_ids)
    true = {"tokens": tokens, "preempted": preempted, "lost": lost, "steps": core.model_executor.step_of}
    Path(sys.argv[2]).write_text(json.dumps({"sent": sent, "true": true}))


core: Any = None

if __name__ == "__main__":
    main()
