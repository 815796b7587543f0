"""Inference engines: their requests, steps and KV cache, put together from marks. Pure, like all of the core."""

from __future__ import annotations

from whyspan.engines.records import Client, Execution, Instance, Job, StageRun, StepRun
from whyspan.engines.table import EngineTable
from whyspan.engines.view import EngineView

__all__ = ["Client", "EngineTable", "EngineView", "Execution", "Instance", "Job", "StageRun", "StepRun"]
