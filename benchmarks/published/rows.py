"""`Row`, one published run as a question to `phaze.evaluate`, and what all readers of tables build rows with."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phaze.errors import PhazeError
from phaze.hardware import Cluster, InterconnectLevel, PrecisionRecipe, find_accelerator

__all__ = [
    "BF16",
    "BF16_SUMMED",
    "FP16",
    "FSDP",
    "GIB",
    "XLA",
    "Row",
    "built_row",
    "dgx_a100",
    "dgx_h100",
    "even_stages",
    "filled_stages",
    "first_number",
    "gpt",
    "lines_of",
    "mixed",
    "nodes",
    "quantity",
    "schedule_of",
    "unscored",
    "whole",
]

GIB = 2**30
_DIGITS = 9
"""Longer numbers are no count of anything in these tables."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run: its model and strategy, seconds (None: it did not run or nobody wrote it down) and memory.

    `reason` says why it is not scored. Rows of equal `group` differ in strategy only; a row without one is a group of
    its own. `stack` holds what is known to differ from the stack of the chip's calibration, `memory_stack` what is
    taken into account for memory alone. `attention` says how that ran. `split` names a part of a dataset that is
    scored apart, such as its precision. `memory_unknown` says what the table does not tell or the row kept elsewhere,
    where what it held is not known and is not judged. `not_fitted` says why no calibration is fitted to a row that is
    scored.
    """

    dataset: str
    name: str
    split: str = ""
    model: Any = None
    sequence_length: int | None = None
    cluster: Cluster | None = None
    global_batch_size: int = 0
    strategy: dict[str, Any] = field(default_factory=dict)
    recipe: PrecisionRecipe | str = "bf16"
    stack: dict[str, Any] = field(default_factory=dict)
    memory_stack: dict[str, Any] = field(default_factory=dict)
    attention: str = "fused"
    seconds: float | None = None
    memory_bytes: float | None = None
    is_out_of_memory: bool = False
    memory_unknown: str | None = None
    not_fitted: str | None = None
    group: tuple[Any, ...] | None = None
    reason: str | None = None

    @property
    def question(self) -> tuple[Any, ...]:
        """What makes two rows repeats of each other."""
        texts = [str(sorted(values.items())) for values in (self.strategy, self.stack)]
        asked = (self.sequence_length, self.global_batch_size, self.recipe, self.cluster, self.attention)
        return (self.dataset, str(self.model), *asked, *texts)

    @property
    def group_key(self) -> tuple[Any, ...]:
        """The rows that are left out together when one of them is predicted."""
        return (self.dataset, *(self.group or self.question))

    @property
    def chip(self) -> str:
        """The chip's name, or nothing where the row has none."""
        return "" if self.cluster is None else self.cluster.accelerator.name


def mixed(
    name: str,
    compute: str,
    reduction: str,
    *,
    gradient: float,
    parameter: float = 2,
    master: float = 4,
    casts_gathered: bool = False,
) -> PrecisionRecipe:
    """A recipe of mixed precision with Adam."""
    return PrecisionRecipe(
        name=name,
        compute_dtype=compute,
        reduction_dtype=reduction,
        parameter_bytes=parameter,
        gradient_bytes=gradient,
        master_bytes=master,
        state_bytes=8,
        casts_gathered_weights=casts_gathered,
    )


FP16 = mixed("fp16, fp16 gradients", "float16", "float16", gradient=2)
BF16_SUMMED = mixed("bf16, bf16 and fp32 gradients", "bfloat16", "float32", gradient=6)
BF16 = mixed("bf16, bf16 gradients", "bfloat16", "bfloat16", gradient=2)
FSDP = mixed("fp32 masters, bf16 compute", "bfloat16", "float32", gradient=4, casts_gathered=True)
XLA = mixed("fp32 masters, bf16 compute and sums", "bfloat16", "bfloat16", gradient=4, casts_gathered=True)


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, length: int, **others: Any) -> dict[str, Any]:
    """A GPT as Megatron-LM builds it."""
    return {
        "model_type": "megatron-gpt",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
        **others,
    }


def nodes(chip: str, devices: int, *inner: tuple[int, float, float], outer: tuple[float, float]) -> Cluster:
    """Devices in groups by size, bandwidth and latency, innermost first; ``outer`` joins what is left."""
    levels = [InterconnectLevel(*level) for level in inner]
    inside = math.prod(level.size for level in levels)
    last = InterconnectLevel(max(1, -(-devices // inside)), *outer)
    return Cluster(find_accelerator(chip), devices, (*levels, last))


def dgx_a100(devices: int, rate_bytes_per_s: float = 25e9, chip: str = "a100-80gb") -> Cluster:
    """Nodes of 8 A100 with NVLink 3 and by default a 200 Gb/s adapter for each of them."""
    return nodes(chip, devices, (8, 300e9, 1e-6), outer=(rate_bytes_per_s, 5e-6))


def dgx_h100(devices: int, rate_bytes_per_s: float = 50e9, chip: str = "h100") -> Cluster:
    """Nodes of 8 H100 with NVLink 4 and by default a 400 Gb/s adapter for each of them."""
    return nodes(chip, devices, (8, 450e9, 1e-6), outer=(rate_bytes_per_s, 5e-6))


def schedule_of(pp: int, chunks: int) -> dict[str, Any]:
    """The schedule of a pipeline as Megatron runs it."""
    name = "none" if pp == 1 else "1f1b" if chunks == 1 else "interleaved-1f1b"
    return {"schedule": name, "chunks": 1 if pp == 1 else chunks}


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks as equal as can be, with the embedding on the first stage and the head on the last."""
    _check_stages(layers, stages)
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def filled_stages(layers: int, stages: int) -> list[int]:
    """As many layers a stage as the fullest needs, from the front; no stage is empty."""
    _check_stages(layers, stages)
    most, sizes = -(-layers // stages), list[int]()
    for stage in range(stages):
        left = layers - sum(sizes) - (stages - stage - 1)
        sizes.append(max(1, min(most, left)))
    return sizes


def _check_stages(layers: int, stages: int) -> None:
    if stages > layers:
        raise ValueError(f"{stages} stages for {layers} layers")


def built_row(dataset: str, name: str, build: Callable[..., Row], *values: Any, **facts: Any) -> Row:
    """The row that ``build`` makes of its values, or the reason why there is none."""
    try:
        row = build(*values, **facts)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, PhazeError) as error:
        kind = f"no {error.args[0]!r} is known" if isinstance(error, KeyError) and error.args else str(error)
        return unscored(dataset, name, f"not readable: {kind}")
    if row.reason is not None or row.cluster is None:
        return row
    degrees = {key: row.strategy.get(key, 1) for key in ("dp", "cp", "tp", "pp")}
    if math.prod(degrees.values()) != row.cluster.device_count:
        product = " x ".join(f"{key} {value}" for key, value in degrees.items())
        return replace(row, reason=f"{product} are not {row.cluster.device_count} devices")
    if row.seconds is None and row.memory_bytes is None and not row.is_out_of_memory:
        return replace(row, reason="neither a time nor memory was written down")
    return row


def unscored(dataset: str, name: str, reason: str) -> Row:
    """A row that cannot be asked."""
    return Row(dataset=dataset, name=name, reason=reason)


def lines_of(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The rows of a file with their line numbers; a column or value that is not there is empty."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            texts = {key: text.strip() for key, text in row.items() if isinstance(text, str)}
            if any(texts.values()):
                yield reader.line_num, defaultdict(str, texts)


def whole(values: Mapping[str, str], key: str, default: int | None = None) -> int:
    """A count of at least 1; cells such as "n/a" count as empty, and an empty one is the default."""
    text = values[key].removesuffix(".0")
    if default is not None and text.lower() in ("", "n/a", "na", "none", "-", "/"):
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) > 0):
        raise ValueError(f"{key} is {values[key]!r}")
    return int(text)


def quantity(text: str) -> float | None:
    """A measured number above 0, or None."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def first_number(text: str) -> int:
    """The whole number that a text begins with."""
    found = re.match(r"\d+", text)
    if found is None or int(found[0]) < 1:
        raise ValueError(f"{text!r} begins with no number")
    return int(found[0])
