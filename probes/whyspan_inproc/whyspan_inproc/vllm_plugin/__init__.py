"""The hooks of vLLM's V1 engine, as of 0.32 and 0.33: front end, engine core, workers.

One process may play several roles (vLLM without multiprocessing plays all). A role is known when the class that
plays it is made; its ``Hello`` goes out then and to each new watcher.
"""

from __future__ import annotations

from whyspan_inproc.imports import when_imported
from whyspan_inproc.vllm_plugin import core, frontend, roles, stages, worker
from whyspan_inproc.vllm_plugin.roles import HOOKS

_registered = False


def register() -> None:
    """Have every hook in place once vLLM imports what it wraps."""
    global _registered
    if _registered:
        return
    _registered = True
    HOOKS.extend([*frontend.HOOKS, *core.HOOKS, *worker.HOOKS, *stages.HOOKS])
    roles.start()
    for hook in HOOKS:
        hook.wait()
    when_imported("torch._dynamo.callback", stages.follow_compilation)
