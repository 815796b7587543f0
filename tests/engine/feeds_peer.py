"""An engine's own publishers, without the engine: ``python -P feeds_peer.py vllm|sglang [FOLDER]``.

Runs in vLLM's environment. Its classes and publishers are those of the package (of SGLang, of two of its files in
FOLDER: the whole of it needs a GPU). Commands come as JSON lines on the standard input, one answer line for each.

The standard library and what vLLM's environment has; nothing of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

#: A prompt's token ids, as no other number in a message is.
CANARY = [777_000_000 + 7 * n for n in range(64)]


def load(engine: str, folder: str) -> tuple[Any, Any]:
    """Return the modules of KV events and, of SGLang, of forward passes."""
    if engine == "vllm":
        return importlib.import_module("vllm.distributed.kv_events"), None
    # What these two import of the rest is used by a running scheduler only.
    for name, attribute in (("runtime_context", "get_parallel"), ("utils.network", "NetworkAddress")):
        stub = types.ModuleType(f"sglang.srt.{name}")
        setattr(stub, attribute, None)
        sys.modules[stub.__name__] = stub
    files = Path(folder) / "sglang" / "srt"
    return (
        by_path("kv_events", files / "disaggregation" / "kv_events.py"),
        by_path("forward_pass_metrics", files / "observability" / "forward_pass_metrics.py"),
    )


def by_path(name: str, path: Path) -> Any:
    """Import one file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Peer:
    """The publishers of one engine."""

    def __init__(self, engine: str, folder: str) -> None:
        self.engine = engine
        self.kv, self.passes = load(engine, folder)
        self.publisher: Any = None
        self.pass_publisher: Any = None

    def events(self, hashes: list[Any], size: int = 16) -> Any:
        """Return a batch that stores these blocks, removes the first, and clears."""
        stored: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": CANARY[: size * len(hashes)],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
        }
        if self.engine == "vllm":
            stored |= {"lora_name": None, "extra_keys": [None] * len(hashes), "group_idx": 0}
            stored |= {"kv_cache_spec_kind": "full_attention", "session_id": "s"}
        else:
            stored |= {"session_id": "s", "cache_salt": "salt"}
        events = [self.kv.BlockStored(**stored), self.kv.BlockRemoved(block_hashes=hashes[:1], medium="GPU")]
        return self.kv.KVEventBatch(ts=1000.5, events=[*events, self.kv.AllBlocksCleared()])

    def forward(self, tokens: int) -> Any:
        """Return a pass of SGLang."""
        p = self.passes
        return p.ForwardPassMetrics(
            worker_id="w",
            dp_rank=1,
            counter_id=5,
            wall_time=0.0125,
            scheduled_requests=p.ScheduledRequestMetrics(2, tokens, 1.5, 64, 3, 900, 2.5),
            queued_requests=p.QueuedRequestMetrics(4, 2000, 0.5, 1, 50, 0.0),
        )

    def answer(self, c: dict[str, Any]) -> Any:
        """Do one command."""
        import msgspec

        encode = msgspec.msgpack.Encoder().encode
        if c["do"] == "encode":
            hashes = [bytes.fromhex(h) if isinstance(h, str) else h for h in c["hashes"]]
            return encode(self.events(hashes)).hex()
        if c["do"] == "encode_pass":
            body = self.passes.ForwardPassMetrics() if c.get("idle") else self.forward(c["tokens"])
            return self.passes.encode(body).hex()
        if c["do"] == "open":
            self.publisher = self.kv.ZmqEventPublisher(
                0, endpoint=c["endpoint"], replay_endpoint=c["replay"], topic=c.get("topic", "")
            )
            self.publisher._pub = Leaky(self.publisher._pub)
        elif c["do"] == "publish":
            self.publisher._pub.leaking = c.get("leak", False)
            for n in range(c["count"]):
                self.publisher.publish(self.events([c["first"] + 2 * n, c["first"] + 2 * n + 1]))
            # The queue counts a batch as done when it has been sent and kept for replay.
            self.publisher._event_queue.join()
        elif c["do"] == "open_passes":
            self.pass_publisher = self.passes._FpmPublisherThread(c["endpoint"], "w", 0)
        elif c["do"] == "publish_passes":
            for n in range(c["count"]):
                self.pass_publisher.publish(self.forward(n))
            self.pass_publisher.set_idle(True)
        return "done"


class Leaky:
    """A PUB socket that loses messages on demand, as one at its high-water mark does."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.leaking = socket, False

    def send_multipart(self, frames: Any) -> None:
        """Send or lose."""
        if not self.leaking:
            self.socket.send_multipart(frames)


def main() -> None:
    """Answer commands until the input ends."""
    peer = Peer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
