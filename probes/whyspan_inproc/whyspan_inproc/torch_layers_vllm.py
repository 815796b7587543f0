"""Sampled layers of vLLM's workers: called by the plugin's hook of ``execute_model``."""

from __future__ import annotations

from typing import Any

from whyspan_inproc import torch_layers


def begin(worker: Any, output: Any, step: int) -> torch_layers.Sample | None:
    """Begin a worker's part of a step; None where it is not sampled, which is the rule. Never raises."""
    if not torch_layers.EVERY:
        return None
    try:
        if not output.total_num_scheduled_tokens:
            return None  # no forward pass
        return torch_layers.begin(worker.model_runner.get_model(), step)
    except Exception:
        return None


def end(sample: torch_layers.Sample | None) -> None:
    """End it."""
    if sample is not None:
        torch_layers.end(sample)
