"""Run folders: what is in them, who may write them, and the settings that reports ask for."""

from torchrex.runs.config import (
    Column,
    ExperimentConfig,
    Outcome,
    RunOptions,
    dumps,
    override,
    to_json,
)
from torchrex.runs.folder import Run, RunFolder, RunResult, RunWriter
from torchrex.runs.script import ScriptConfig, ScriptRun

__all__ = [
    "Column",
    "ExperimentConfig",
    "Outcome",
    "Run",
    "RunFolder",
    "RunOptions",
    "RunResult",
    "RunWriter",
    "ScriptConfig",
    "ScriptRun",
    "dumps",
    "override",
    "to_json",
]
