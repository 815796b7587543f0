"""vLLM's pool of KV blocks: how many are used, free, free but still holding a prefix; and evictions."""

from __future__ import annotations

from typing import Any

from whyspan_inproc.hooks import Hook

_ROLE = "core"
#: A larger pool is not counted once when watching begins (60 ns a block); its ``kv_cached`` stays 0.
_MAX_COUNTED = 200_000

_evicted = 0
_cached: int | None = None  # free blocks that hold a prefix; None: not counted yet


def forget() -> None:
    """Watching began: what was followed before is out of date."""
    global _evicted, _cached
    _evicted, _cached = 0, None


def state(scheduler: Any) -> dict[str, int]:
    """Return the pool's fields of a ``Step``; the evictions are those since the last call."""
    global _evicted, _cached
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    if _cached is None:
        blocks = pool.blocks if len(pool.blocks) <= _MAX_COUNTED else ()
        _cached = sum(1 for b in blocks if not b.ref_cnt and b.block_hash is not None)
    fields = {
        "kv_used": pool.num_gpu_blocks - 1 - free,  # one is vLLM's null block, never given out
        "kv_free": free,
        "kv_cached": min(max(_cached, 0), free),
        "evicted": _evicted,
    }
    _evicted = 0
    return fields


def _evict(_hook: Hook, _token: Any, result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    global _evicted, _cached
    if result:
        _evicted += 1
        if _cached is not None and not args[1].ref_cnt:
            _cached -= 1


def _freed(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    global _cached
    if _cached is not None:
        _cached += sum(1 for b in args[1] if b.block_hash is not None)


def _reused(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    global _cached
    if _cached is not None and args[1].block_hash is not None:
        _cached -= 1


def _reset(_hook: Hook, _token: Any, result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    global _cached
    if result:
        _cached = None


_POOL = "vllm.v1.core.block_pool"
_QUEUE = "vllm.v1.core.kv_cache_utils"

HOOKS = [
    Hook(_ROLE, _POOL, "BlockPool._maybe_evict_cached_block", "self block", after=_evict),
    Hook(_ROLE, _POOL, "BlockPool.reset_prefix_cache", "self", after=_reset),
    # Cached blocks that are freed go to the queue's end; those hit again are taken out of its middle.
    Hook(_ROLE, _QUEUE, "FreeKVCacheBlockQueue.append_n", "self blocks", before=_freed),
    Hook(_ROLE, _QUEUE, "FreeKVCacheBlockQueue.remove", "self block", before=_reused),
]
