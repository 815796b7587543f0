"""A small server around ``generate``: Starlette, uvicorn, a tiny Llama with random weights in a worker thread.

``whyspan-instrument python transformers_server.py --port 8000``, in an environment with transformers, torch, starlette
and uvicorn. ``POST /generate {"prompt_tokens": 11, "max_new_tokens": 23}`` answers with the number of tokens made
and the seconds it took; ``GET /health`` once the model is there. The work is real, the text is not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Of the server's environment, not of the tests'.
torch: Any = importlib.import_module("torch")
hf: Any = importlib.import_module("transformers")
applications: Any = importlib.import_module("starlette.applications")
responses: Any = importlib.import_module("starlette.responses")
routing: Any = importlib.import_module("starlette.routing")

MAX_TOKENS = 2048


def llama(hidden: int, layers: int) -> Any:
    """Return a Llama of that size; no weights are read from anywhere."""
    torch.manual_seed(7)
    config = hf.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=MAX_TOKENS,
    )
    return hf.LlamaForCausalLM(config).eval()


class Server:
    """The model and the threads that run it."""

    def __init__(self, model: Any, threads: int) -> None:
        self._model = model
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")

    def _generate(self, prompt: int, new: int) -> int:
        ids = torch.randint(3, 1000, (1, prompt))
        made = self._model.generate(
            ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return int(made.shape[1]) - prompt

    async def generate(self, request: Any) -> Any:
        """Do one request in a thread, which has the request's context."""
        asked = await request.json()
        prompt, new = int(asked.get("prompt_tokens", 11)), int(asked.get("max_new_tokens", 23))
        if not (prompt > 0 and new > 0 and prompt + new <= MAX_TOKENS):
            return responses.JSONResponse({"error": f"tokens must be 1 to {MAX_TOKENS}"}, status_code=400)
        began = time.monotonic()
        run = contextvars.copy_context().run
        made = await asyncio.get_running_loop().run_in_executor(self._pool, run, self._generate, prompt, new)
        return responses.JSONResponse({"tokens": made, "seconds": time.monotonic() - began})

    async def health(self, _request: Any) -> Any:
        """Say that the model is there."""
        return responses.PlainTextResponse("ok")

    def app(self) -> Any:
        """Return the ASGI application."""
        routes = [
            routing.Route("/generate", self.generate, methods=["POST"]),
            routing.Route("/health", self.health),
        ]
        return applications.Starlette(routes=routes)


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="requests that are worked on at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    server = Server(llama(args.hidden, args.layers), args.threads)
    uvicorn: Any = importlib.import_module("uvicorn")
    uvicorn.run(server.app(), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
