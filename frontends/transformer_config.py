"""The frontend for model configs and built-in names: a Hugging Face `config.json` into a graph, without a framework."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from phaze.errors import FormatError, ImportModelError
from phaze.file_access import read_document
from phaze.frontends.families import fields_of, write_model
from phaze.frontends.families.parameter_count import count_parameters
from phaze.frontends.named_models import NAMED_CONFIGS, OTHER_NAMES
from phaze.hooks import hookimpl
from phaze.interfaces import Frontend, ModelFactory, ModelFacts
from phaze.ir import DType, Graph, GraphBuilder

__all__ = ["NamedModel", "TransformerConfigFrontend", "graph_from_config", "phaze_frontends", "phaze_named_models"]

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class TransformerConfigFrontend:
    """Takes a config as a dict, an object with `to_dict` and `model_type`, or a path to a config.json or its folder."""

    name: str = "transformer-config"
    libraries: tuple[str, ...] = ()
    options: tuple[str, ...] = ("sequence_length", "micro_batch_size")

    def accepts(self, model: object) -> bool:
        """Whether this is a config, or a JSON file or folder that may hold one."""
        if isinstance(model, Mapping):
            return "model_type" in model
        if isinstance(model, str | os.PathLike):
            path = Path(model)
            return os.path.isfile(path / CONFIG_FILE) or (path.suffix == ".json" and os.path.isfile(path))
        return isinstance(getattr(model, "model_type", None), str) and callable(getattr(model, "to_dict", None))

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The training graph; raises ImportModelError where the config lacks a field or names an unknown family."""
        if inputs is not None:
            raise ImportModelError("a config describes its own inputs; pass sequence_length instead of inputs.")
        values, name = _read(model)
        length, size = options.get("sequence_length"), options.get("micro_batch_size", 1)
        for option, value in (("sequence_length", length or 1), ("micro_batch_size", size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ImportModelError(f"{option} is {value!r}; expected a positive integer.")
        return graph_from_config(
            values, name=name, sequence_length=cast(int | None, length), micro_batch_size=cast(int, size)
        )


def graph_from_config(
    config: Mapping[str, object], *, name: str, sequence_length: int | None = None, micro_batch_size: int = 1
) -> Graph:
    """The training graph (forward, loss, backward by rule) of a model given by its config, a dict with a model_type."""
    return _forward_graph(config, name, sequence_length, micro_batch_size).with_backward()


def _forward_graph(
    config: Mapping[str, object], name: str, sequence_length: int | None, micro_batch_size: int = 1
) -> Graph:
    """Forward and loss of a model given by its config."""
    fields = fields_of(config, sequence_length)
    builder = GraphBuilder(name, micro_batch_size=micro_batch_size, dtype=DType.BFLOAT16)
    loss = write_model(fields, builder)
    kind, outer = fields.text("model_type", ""), config.get("model_type")
    if kind != outer:
        builder.notes.append(f"only the language model of the {outer} config, its text_config, is imported")
    return builder.build((loss,), (f"imported from a {kind} config",))


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A built-in name: a factory of its graph that can also say the model's size without building it."""

    name: str
    config: Mapping[str, object]
    also_called: tuple[str, ...] = ()

    def __call__(self, *, sequence_length: int | None = None) -> Graph:
        """The model's graph at this sequence length, or at its own."""
        return graph_from_config(self.config, name=self.name, sequence_length=sequence_length)

    def forward(self, *, sequence_length: int | None = None) -> Graph:
        """The same without its backward."""
        return _forward_graph(self.config, self.name, sequence_length)

    def facts(self) -> ModelFacts:
        """The model's family and size."""
        count = count_parameters(self.config)
        family = str(self.config["model_type"])
        return ModelFacts(family, count.total, count.active, count.sequence_length)


@hookimpl
def phaze_frontends() -> tuple[Frontend, ...]:
    """The frontend for configs."""
    return (TransformerConfigFrontend(),)


@hookimpl
def phaze_named_models() -> dict[str, ModelFactory]:
    """The built-in names."""
    return {name: NamedModel(name, config, OTHER_NAMES.get(name, ())) for name, config in NAMED_CONFIGS.items()}


def _read(model: object) -> tuple[Mapping[str, object], str]:
    if isinstance(model, Mapping):
        return model, str(model.get("model_type"))
    if not isinstance(model, str | os.PathLike):
        values: Mapping[str, object] = model.to_dict()  # type: ignore[attr-defined]
        return values, str(values.get("model_type"))
    path = Path(model)
    name = path.name if path.is_dir() else path.parent.name if path.name == CONFIG_FILE else path.stem
    return _read_file(path / CONFIG_FILE if path.is_dir() else path), name


def _read_file(path: Path) -> Mapping[str, object]:
    values = read_document(path, "a Hugging Face config.json", is_foreign=True)
    if not isinstance(values, dict):
        raise FormatError(f"{path} holds no JSON object; expected a Hugging Face config.json.")
    return values
