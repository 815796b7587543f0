"""Stand-ins for vLLM's scheduler, with the attributes that the plugin reads; the real ones run in tests/engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Status(enum.IntEnum):
    """As vllm.v1.request.RequestStatus."""

    WAITING = enum.auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()


class Named:
    """An enum's member, as far as its name goes."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(eq=False)
class Request:
    request_id: str
    num_prompt_tokens: int = 16
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    is_prefill_chunk: bool = False
    status: Status = Status.WAITING
    lora_request: object = None

    def is_finished(self) -> bool:
        return self.status > Status.PREEMPTED

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens


@dataclass
class Block:
    ref_cnt: int = 0
    block_hash: object = None


@dataclass
class New:
    req_id: str
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


class Output:
    def __init__(self, scheduled: dict[str, int], new: list[New] | None = None, cached: Cached | None = None):
        self.num_scheduled_tokens = scheduled
        self.total_num_scheduled_tokens = sum(scheduled.values())
        self.scheduled_new_reqs = new or []
        self.scheduled_cached_reqs = cached or Cached()


class Queue(list[Request]):
    def peek_request(self) -> Request:
        return self[0]


class Scheduler:
    block_size = 16
    max_num_running_reqs = 8
    max_num_scheduled_tokens = 64

    def __init__(self, blocks: int = 100, **more: Any) -> None:
        self.current_step = 0
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting, self.kv_holding_waiting = Queue(), Queue()
        self.deferred_waiting: set[Request] = set()
        self.num_gpu_blocks = blocks
        self.blocks = [Block() for _ in range(blocks)]
        self.used = 0
        self.pause_state = Named("UNPAUSED")
        self.enable_chunked_prefill = True
        self.kv_cache_groups = [object()]
        # One object stands for all those that hang on vLLM's.
        self.scheduler_config = self.kv_cache_manager = self.kv_cache_config = self.block_pool = self
        for name, value in more.items():
            setattr(self, name, value)

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - self.used

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting) + len(self.kv_holding_waiting)

    def runs(self, *names: str, **more: Any) -> None:
        for name in names:
            self.requests[name] = Request(name, status=Status.RUNNING, **more)
            self.running.append(self.requests[name])

    def waits(self, name: str, **more: Any) -> Request:
        self.requests[name] = Request(name, **more)
        self.waiting.append(self.requests[name])
        return self.requests[name]
