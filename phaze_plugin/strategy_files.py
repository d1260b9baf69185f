"""Strategies as other tools write them: a torchtitan job, Megatron-LM's arguments, a DeepSpeed or Accelerate config.

`read_strategy_file` gives what `phaze.evaluate` takes as ``strategy=``, and the batch where the file names one. Keys
that say nothing about how a batch is divided are passed over.
"""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze.errors import FormatError
from phaze.file_reading import read_text

__all__ = ["StrategyFile", "read_strategy_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFile:
    """What a file says: the tool that it is for, the keys of a strategy, and the global batch where it has one."""

    tool: str
    strategy: Mapping[str, object]
    global_batch_size: int | None


_DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""What a config of DeepSpeed that says how a batch is divided has at least one of."""


def read_strategy_file(path: str | os.PathLike[str], devices: int) -> StrategyFile:
    """Read a job of torchtitan (.toml), a config of DeepSpeed (.json) or Accelerate (.yaml), or Megatron-LM arguments.

    `devices` settles degrees that a tool leaves to the number of devices. Raises FormatError for any other file.
    """
    file = Path(path)
    text = read_text(file, "a strategy")
    try:
        if file.suffix == ".toml":
            return _torchtitan(tomllib.loads(text), devices)
        if file.suffix == ".json" and _DEEPSPEED_KEYS & (config := _mapping(json.loads(text))).keys():
            return _deepspeed(config, devices)
        if file.suffix in (".yaml", ".yml"):
            return _accelerate(_yaml(text, file))
        if "--" in text:
            return _megatron(shlex.split(text.replace("\\\n", " "), comments=True), devices)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    raise FormatError(
        f"{file} is no strategy that Phaze reads; expected a torchtitan job (.toml), a DeepSpeed config (.json), an "
        "Accelerate config (.yaml) or a file with Megatron-LM's arguments."
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _settled(strategy: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in strategy.items() if value is not None}


def _torchtitan(job: Mapping[str, Any], devices: int) -> StrategyFile:
    degrees, training = _mapping(job.get("parallelism")), _mapping(job.get("training"))
    tp, pp = (int(degrees.get(f"{name}_parallel_degree", 1)) for name in ("tensor", "pipeline"))
    copies, shards = (
        int(degrees.get(f"data_parallel_{name}_degree", fixed)) for name, fixed in (("replicate", 1), ("shard", -1))
    )
    shards = devices // (tp * pp * copies) if shards < 0 else shards
    local = training.get("local_batch_size", training.get("batch_size"))
    checkpoint = _mapping(job.get("activation_checkpoint"))
    schedule = str(degrees.get("pipeline_parallel_schedule", "1F1B")).lower() if pp > 1 else None
    dp = copies * shards
    batch = training.get("global_batch_size", -1)
    return StrategyFile(
        tool="torchtitan",
        strategy=_settled(
            {
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "zero": 0 if shards == 1 else 2 if degrees.get("fsdp_reshard_after_forward") == "never" else 3,
                "micro_batch_size": int(degrees.get("pipeline_parallel_microbatch_size", 1)) if pp > 1 else local,
                "schedule": {"interleaved1f1b": "interleaved-1f1b", "1f1b": "1f1b", "gpipe": "gpipe"}.get(
                    schedule or ""
                ),
                "recompute": {"full": "full", "none": "none", "selective": "products"}.get(
                    str(checkpoint.get("mode", "none"))
                ),
            }
        ),
        global_batch_size=int(batch) if batch > 0 else None if local is None else dp * int(local),
    )


def _deepspeed(config: Mapping[str, Any], devices: int) -> StrategyFile:
    batch, micro = (_number(config.get(key)) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    return StrategyFile(
        tool="deepspeed",
        strategy=_settled(
            {
                "dp": devices,
                "tp": 1,
                "pp": 1,
                "zero": int(_mapping(config.get("zero_optimization")).get("stage", 0)),
                "micro_batch_size": micro,
            }
        ),
        global_batch_size=batch,
    )


def _number(value: object) -> int | None:
    """A number, or None for what DeepSpeed fills in itself ("auto")."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_FSDP_ZERO = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0}
"""What Accelerate's sharding strategies, by name or number, are as ZeRO stages."""


def _accelerate(config: Mapping[str, Any]) -> StrategyFile:
    deepspeed, fsdp = _mapping(config.get("deepspeed_config")), _mapping(config.get("fsdp_config"))
    zero: int | None = 0
    if deepspeed:
        zero = int(deepspeed.get("zero_stage", 0))
    elif fsdp:
        zero = _FSDP_ZERO.get(str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper(), 3)
    recompute = "full" if fsdp.get("fsdp_activation_checkpointing") in (True, "true") else None
    degrees = {"dp": int(config["num_processes"]) if "num_processes" in config else None, "tp": 1, "pp": 1}
    return StrategyFile(
        tool="accelerate",
        strategy=_settled({**degrees, "zero": zero, "recompute": recompute}),
        global_batch_size=None,
    )


def _yaml(text: str, file: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise FormatError(f"reading {file} needs PyYAML, which Accelerate brings; install it.") from error
    try:
        return _mapping(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise FormatError(f"{file} is no YAML: {error}.") from error


def _megatron(words: list[str], devices: int) -> StrategyFile:
    """Arguments of Megatron-LM, wherever they stand in a script."""
    options: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value or ("" if after.startswith("--") else after)
    tp, pp = (int(options.get(f"--{kind}-model-parallel-size", 1)) for kind in ("tensor", "pipeline"))
    layers, each = options.get("--num-layers"), options.get("--num-layers-per-virtual-pipeline-stage")
    chunks = int(layers) // pp // int(each) if layers and each else None
    granularity = options.get("--recompute-granularity") or (
        "selective" if "--recompute-activations" in options else "none"
    )
    batch = options.get("--global-batch-size")
    return StrategyFile(
        tool="megatron-lm",
        strategy=_settled(
            {
                "dp": devices // (tp * pp),
                "tp": tp,
                "pp": pp,
                "zero": 1 if "--use-distributed-optimizer" in options else 0,
                "micro_batch_size": int(options.get("--micro-batch-size", 1)),
                "schedule": None if pp == 1 else "interleaved-1f1b" if chunks else "1f1b",
                "chunks": chunks,
                "recompute": granularity,
                "sequence_parallel": "--sequence-parallel" in options if tp > 1 else None,
            }
        ),
        global_batch_size=int(batch) if batch else None,
    )
