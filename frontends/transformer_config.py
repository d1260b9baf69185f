"""Hugging Face configs into graphs: a `config.json` (as a dict, a path or a built-in name), without any framework."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phaze.errors import FormatError, ImportModelError, UnknownNameError
from phaze.frontends.families import FAMILIES, Fields
from phaze.frontends.named_models import NAMED_CONFIGS
from phaze.ir import DType, Graph, GraphBuilder

__all__ = ["graph_from_config", "read_config"]

CONFIG_FILE = "config.json"


def graph_from_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    sequence_length: int | None = None,
    micro_batch_size: int = 1,
    name: str | None = None,
) -> Graph:
    """The training graph (forward, loss, backward by rule) of a model given by its config.

    `config` is a dict with a `model_type`, a path to a config.json or its folder, or a built-in name.
    """
    values = config if isinstance(config, Mapping) else read_config(config)
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise ImportModelError(f"the config has no model_type; expected one of {', '.join(sorted(FAMILIES))}.")
    if kind not in FAMILIES:
        raise UnknownNameError("model_type", kind, FAMILIES)
    title = name or (str(config) if not isinstance(config, Mapping) else kind)
    builder = GraphBuilder(title, micro_batch_size=micro_batch_size, dtype=DType.BFLOAT16)
    loss = FAMILIES[kind](Fields(values, f"the {kind} config", sequence_length), builder)
    return builder.build((loss,), (f"imported from a {kind} config",)).with_backward()


def read_config(source: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The config of a built-in name, a config.json or a folder that holds one."""
    if isinstance(source, str) and source in NAMED_CONFIGS:
        return NAMED_CONFIGS[source]
    path = Path(source)
    path = path / CONFIG_FILE if path.is_dir() else path
    if not path.is_file():
        raise UnknownNameError("model", str(source), NAMED_CONFIGS)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}); expected a Hugging Face config.json.") from error
    if not isinstance(values, dict):
        raise FormatError(f"{path} holds no JSON object; expected a Hugging Face config.json.")
    return values
