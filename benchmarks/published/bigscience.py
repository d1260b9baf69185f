"""BigScience's topology sweep for BLOOM on A100s.

Not in the file: nodes of 8 A100 joined by 4 NVLinks each and 4 Omni-Path links of 100 Gb/s (arXiv:2211.05100, section
3.4). The authors' log of the sweep (train/tr11-176B-ml/chronicles-prequel.md of bigscience-workshop/bigscience) says
that up to its section "Rebalancing layers" gradients are summed in fp16, and from there on in fp32 on top, with
embeddings counted as layers when stages are cut; so also before it where only that makes stages equal. Else they are
filled one after the other with as many blocks as the fullest needs. ZeRO-1. Every launch of a kernel waited for its end
(CUDA_LAUNCH_BLOCKING=1 in train/tr11-176B-ml/tr11-176B-ml.slurm of the same repository, "do not remove"). Sequence
2048, vocabulary 250,880 and full recompute follow from the TFLOP/s in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from published.rows import (
    BF16_SUMMED,
    FP16,
    GIB,
    Row,
    built_row,
    filled_stages,
    gpt,
    lines_of,
    nodes,
    quantity,
    schedule_of,
    unscored,
    whole,
)

__all__ = ["read_bigscience"]


def read_bigscience(path: Path) -> Iterator[Row]:
    """The rows of the sweep."""
    for _, values in lines_of(path):
        name = f"line {values['line']}"
        missing = [key for key in ("hidden", "layers", "heads") if not values[key].isdigit()]
        if missing:
            yield unscored("bigscience", name, f"the file does not say {', '.join(missing)}")
        else:
            yield built_row("bigscience", name, _row, name, values)


def _stages(layers: int, stages: int, is_rebalanced: bool) -> tuple[int, ...]:
    """Layers a stage: with the embedding and the head counted as layers, or on top of the first and the last."""
    if is_rebalanced or (layers % stages and (layers + 2) % stages == 0):
        return tuple(filled_stages(layers + 2, stages))
    sizes = filled_stages(layers, stages)
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def _row(name: str, values: Mapping[str, str]) -> Row:
    keys = ("hidden", "layers", "heads", "dp", "tp", "pp", "mbs", "gbs", "gpus")
    hidden, layers, heads, dp, tp, pp, size, batch, devices = (whole(values, key) for key in keys)
    is_rebalanced = values["section"] == "Rebalancing layers"
    memory = re.fullmatch(r"([\d.]+) ?Gi?B", values["mem"])
    strategy = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": size,
        "zero": int(values["zero"] or 1),
        "recompute": "full",
        "sequence_parallel": False,
        "stages": _stages(layers, pp, is_rebalanced),
        **schedule_of(pp, 1),
    }
    return Row(
        dataset="bigscience",
        name=name,
        model=gpt(hidden, layers, heads, 250880, 2048),
        cluster=nodes("a100-80gb", devices, (8, 100e9, 1e-6), outer=(6.25e9, 5e-6)),
        global_batch_size=batch,
        strategy=strategy,
        recipe=BF16_SUMMED if is_rebalanced else FP16,
        stack={"launches_ahead": False, "hides_reductions": False},
        attention="unfused",
        seconds=quantity(values["sec_per_it"]),
        memory_bytes=float(memory[1]) * GIB if memory else None,
        is_out_of_memory=values["mem"].upper() == "OOM",
        group=(hidden, layers, heads, devices, batch),
    )
