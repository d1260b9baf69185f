"""Runs of Megatron-LM on A100s from two papers, and of Megatron-DeepSpeed from vTrain's ground truth.

- SC'21 (Narayanan et al., arXiv:2104.04473): gradients are summed and reduced in fp16 behind the last backward, the
  optimizer is not sharded.
- Korthikanti et al. (arXiv:2205.05198): the same, one pipeline.
- vTrain (VIA-Research/vTrain): fp16. The file says full recompute of all; on single nodes there was none: from a hidden
  size of 1024 to one of 2048 a layer takes so little longer that products with recompute would run at 297 TFLOP/s of
  312 and all else for nothing, and layers of large microbatches take 3/4 of what they would. Its models have a
  vocabulary of 50257. On single nodes it is not padded: with tp 1 a sample's head and loss take 4.4 ms at a hidden size
  of 1024, with tp 2, whose parts are multiples of eight, 0.9 ms. On many nodes it is padded, to a multiple of 128 x tp,
  as Megatron does unless it is told otherwise: with slow heads the last of 16 stages would hold up the others, and runs
  with tp 1 are predicted 10 % too slow, those with tp 8 the more so the more stages they have. ZeRO is not stated, so
  that none is assumed. "gradient_bucket False" means that reductions begin behind the last backward. Nodes have 800
  Gb/s in vTrain's own configurations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from published.rows import FP16, Row, built_row, dgx_a100, even_stages, gpt, lines_of, quantity, schedule_of, whole

__all__ = ["read_korthikanti", "read_sc21", "read_vtrain"]

MEGATRON_2021 = {"hides_reductions": False}
"""What Megatron-LM of 2021 and 2022 does otherwise than today's: gradients are reduced when all of them are there."""


def read_sc21(path: Path) -> Iterator[Row]:
    """Table 1 of SC'21."""
    for _, values in lines_of(path):
        name = values["model"]
        strategy = {"recompute": values["recompute"] or "full", "sequence_parallel": False}
        facts = {"strategy": strategy, "seconds": quantity(values["iter_time_s_from_agg"])}
        yield built_row("sc21", name, _table_row, values, "sc21", name, **facts)


def read_korthikanti(path: Path) -> Iterator[Row]:
    """Table 5 of Korthikanti et al., two rows a line."""
    kinds = (("full", False, "iter_s_full_recompute"), ("selective", True, "iter_s_selective_seqpar"))
    for _, values in lines_of(path):
        for recompute, is_split, column in kinds:
            strategy = {"recompute": recompute, "sequence_parallel": is_split}
            name = f"{values['model']} {recompute}"
            group = (values["model"], values["gpus"])
            facts = {"strategy": strategy, "seconds": quantity(values[column]), "group": group}
            yield built_row("korthikanti", name, _table_row, values, "korthikanti", name, **facts)


def _table_row(values: Mapping[str, str], dataset: str, name: str, **others: Any) -> Row:
    layers, hidden, heads, length = (whole(values, key) for key in ("layers", "hidden", "heads", "seq"))
    tp, pp, dp, devices = (whole(values, key) for key in ("tp", "pp", "dp", "gpus"))
    batch = whole(values, "global_batch")
    chunks = next((whole(values, key) for key in ("interleave_chunks", "interleave") if values[key]), 1)
    strategy = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": whole(values, "micro_batch"),
        "zero": 0,
        "stages": even_stages(layers, pp * chunks),
        **schedule_of(pp, chunks),
        **others.pop("strategy"),
    }
    if tp == 1:
        strategy.pop("sequence_parallel")
    return Row(
        dataset=dataset,
        name=name,
        model=gpt(hidden, layers, heads, whole(values, "vocab"), length),
        cluster=dgx_a100(devices),
        global_batch_size=batch,
        strategy=strategy,
        recipe=FP16,
        stack=MEGATRON_2021,
        attention="unfused",
        **others,
    )


def read_vtrain(path: Path) -> Iterator[Row]:
    """vTrain's ground truth; single nodes and many are scored apart."""
    for number, values in lines_of(path):
        degrees = f"tp {values['tp']} dp {values['dp']} pp {values['pp']} mbs {values['micro_batch']}"
        sizes = f"{values['gpus']} GPUs, {values['layers']} x {values['hidden']}"
        name = f"line {number}: {sizes}, batch {values['global_batch']}, {degrees}"
        yield built_row("vtrain", name, _vtrain_row, name, values)


_VTRAIN_VOCABULARY = 50257
"""The vocabulary of vTrain's models, of which each of the tp devices holds a whole part (src/model/gpt_modeling.py)."""
_MEGATRON_PADDING = 128
"""Megatron's ``--make-vocab-size-divisible-by``: what each device's part of a padded vocabulary is a multiple of."""


def _vtrain_vocabulary(tp: int, is_padded: bool) -> int:
    """The vocabulary that tp devices hold together: with what pads it, or without what is left over."""
    part = _MEGATRON_PADDING * tp
    return -(-_VTRAIN_VOCABULARY // part) * part if is_padded else _VTRAIN_VOCABULARY // tp * tp


def _vtrain_row(name: str, values: Mapping[str, str]) -> Row:
    keys = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
    devices, batch, size, hidden, heads, layers, length, tp, dp, pp = (whole(values, key) for key in keys)
    if values["recompute"] not in ("full", "none", "selective"):
        raise ValueError(f"recompute is {values['recompute']!r}")
    if values["gpu"] != "A100-80GB":
        raise ValueError(f"gpu is {values['gpu']!r}")
    strategy: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": size,
        "zero": 0,
        "recompute": "none" if values["set"] == "single" else values["recompute"],
        "stages": even_stages(layers, pp),
        **schedule_of(pp, 1),
        **({"sequence_parallel": False} if tp > 1 else {}),
    }
    milliseconds = quantity(values["step_ms"])
    return Row(
        dataset="vtrain",
        split=values["set"],
        name=name,
        model=gpt(hidden, layers, heads, _vtrain_vocabulary(tp, values["set"] == "multi"), length),
        cluster=dgx_a100(devices, 12.5e9),
        global_batch_size=batch,
        strategy=strategy,
        recipe=FP16,
        stack=MEGATRON_2021 if values["gradient_bucket"] != "True" else {},
        attention="unfused",
        seconds=None if milliseconds is None else milliseconds / 1e3,
        group=(values["set"], devices, batch, hidden, layers, heads, length),
    )
