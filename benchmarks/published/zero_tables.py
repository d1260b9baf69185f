"""Runs with sharded optimizers that are no Megatron: InternEvo on A100s and nanotron on H100s.

- InternEvo (doc/en/train_performance.md of InternLM/InternEvo): ZeRO-1 over `zero1_group` of the data-parallel GPUs,
  which own whole tensors and broadcast them, gradients in bf16, their all-reduce behind the last backward,
  FlashAttention; nodes of 8 A100 with 4 RoCE links of 100 Gb/s. InternLM-7B is a Llama of 32 layers with a hidden size
  of 4096, 11008 in between, 32 heads with biases, one weight for query, key and value, and
  a vocabulary of 103,168; the 20B has 60 layers of 5120, 13824 in between and 40 heads (both from general knowledge).
  The rows on A800s (A100s with 200 GB/s of NVLink) have memory alone; with FSDP they are ZeRO-3.
- nanotron (docs/benchmark_summary.svg): a sequence length of 4096 as its column says, unverified. Seconds follow from
  the MFU against 989 TFLOP/s with the flops that nanotron counts: products of a gated MLP, attention as the full
  square, logits, three times. 1F1B, sums of gradients and reductions in fp32, overlapped, sequences split between
  layers where tp > 1, no recompute, 400 Gb/s a GPU: the defaults of its benchmark script. That also ties embedding and
  head of models with narrow feed-forward layers, and runs collectives of tensor parallelism beside products
  (`tp_linear_async_communication`). Stages are cut by the cost of blocks and head. Memory is read as GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from published.rows import (
    BF16,
    FSDP,
    GIB,
    Row,
    built_row,
    even_stages,
    first_number,
    lines_of,
    mixed,
    nodes,
    quantity,
    schedule_of,
    whole,
)

__all__ = ["read_internevo", "read_nanotron"]


def _internlm(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "internlm2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 103_168,
        "max_position_embeddings": 2048,
        "bias": True,
        "tie_word_embeddings": False,
    }


_INTERNLM = {"InternLM 7B": _internlm(32, 4096, 11008, 32), "InternLM 20B": _internlm(60, 5120, 13824, 40)}


_FLAT_COPIES = mixed("bf16, flat copies of gradients", "bfloat16", "bfloat16", gradient=2, master=10)
"""Besides its master an update holds two flat copies of the gradients of its part, in bf16 and in fp32
(internlm/solver/optimizer/hybrid_zero_optim.py); rows with memory have no time."""


def read_internevo(path: Path) -> Iterator[Row]:
    """InternEvo's tables of InternLM."""
    for number, values in lines_of(path):
        degrees = f"dp {values['dp']}, tp {values['tp']}, ZeRO over {values['zero1_group']}"
        name = f"line {number}: {values['gpus']} GPUs, {degrees}, {values['micro_num']} x {values['micro_bsz']}"
        yield built_row("internevo", name, _internevo_row, name, values)


def _internevo_row(name: str, values: Mapping[str, str]) -> Row:
    keys = ("gpus", "tp", "dp", "pp", "micro_bsz", "micro_num", "seq")
    devices, tp, dp, pp, size, count, length = (whole(values, key) for key in keys)
    model = next((config for known, config in _INTERNLM.items() if values["model"].startswith(known)), None)
    if model is None:
        raise ValueError(f"model is {values['model']!r}, which is not one of {', '.join(_INTERNLM)}")
    shard = dp if values["zero1_group"] == "-1" else min(dp, whole(values, "zero1_group"))
    strategy = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": size,
        "zero": 3 if "fsdp=True" in values["table"] else 1,
        "shard": "all" if shard == dp else shard,
        "recompute": {"yes": "full", "no": "none"}[values["act_ckpt"]],
        "stages": even_stages(model["num_hidden_layers"], pp),
        **schedule_of(pp, 1),
    }
    links = 200e9 if values["gpu"] == "A800" else 300e9
    batch, rate = dp * size * count, quantity(values["tokens_per_s_per_gpu"])
    memory = quantity(values["mem_GB"])
    return Row(
        dataset="internevo",
        name=name,
        model=model,
        sequence_length=length,
        cluster=nodes("a100-80gb", devices, (8, links, 1e-6), outer=(6.25e9, 5e-6)),
        global_batch_size=batch,
        strategy=strategy,
        recipe=BF16 if memory is None else _FLAT_COPIES,
        stack={"hides_reductions": False, "owners_broadcast": True},
        seconds=None if rate is None else batch * length / (rate * devices),
        memory_bytes=None if memory is None else memory * GIB,
        group=(devices, size, count, values["act_ckpt"], tp, values["gpu"]),
    )


_ARCHITECTURE = re.compile(r"(\d+) layers, (\d+), (\d+) heads, (\d+);.*vocab (\d+)")


def read_nanotron(path: Path) -> Iterator[Row]:
    """The best runs of nanotron's sweep."""
    for number, values in lines_of(path):
        degrees = f"dp {values['dp']} tp {values['tp']} pp {values['pp']} mbs {values['mbs']}"
        name = f"line {number}: {values['model']}, {values['gpus']} GPUs, {degrees}"
        yield built_row("nanotron", name, _nanotron_row, name, values)


_NANOTRON_UNTIED = 10_000
"""Models whose feed-forward layers are narrower share their embedding with the head (scripts/scaling_benchmarks.py)."""


_NANOTRON_STEP_S = 1.1e-4
"""A step of a collective between nodes of nanotron's cluster, beside its bytes. Its authors measured all-reduces of 256
MB on 1, 2, 4, .. 64 nodes at 436, 362, 160, 100, 85, 65 and 33 GB/s (The Ultra-Scale Playbook, section on pipelines);
400 Gb/s a GPU and steps of 110 us take as long within 30 % from 4 nodes on."""


def _balanced_stages(layers: int, block: int, head: int, stages: int) -> tuple[int, ...]:
    """Layers a stage, the embedding first and the head last: a stage is full once it exceeds its part of the cost.

    The costs of a block and of the head are their multiply-accumulates a token (src/nanotron/models/base.py).
    """
    total, cost, sizes = layers * block + head, 0, [1]
    for added in (*[block] * layers, head):
        if len(sizes) < stages and cost > total * len(sizes) / stages:
            sizes.append(0)
        sizes[-1] += 1
        cost += added
    if len(sizes) < stages:
        raise ValueError(f"{layers} blocks fill {len(sizes)} of {stages} stages")
    return tuple(sizes)


def _nanotron_row(name: str, values: Mapping[str, str]) -> Row:
    found = _ARCHITECTURE.match(values["arch"])
    if found is None:
        raise ValueError(f"arch is {values['arch']!r}")
    layers, hidden, heads, wide, vocabulary = (int(text) for text in found.groups())
    devices, dp, tp, pp, size, batch = (
        whole(values, key) for key in ("gpus", "dp", "tp", "pp", "mbs", "gbs_sequences")
    )
    length, mfu, memory = first_number(values["seq"]), quantity(values["mfu_pct"]), quantity(values["mem_GB"])
    block = 4 * hidden**2 + 3 * hidden * wide + 2 * length * hidden
    flops = 6 * batch * length * (layers * block + hidden * vocabulary)
    model = _internlm(layers, hidden, wide, heads) | {"model_type": "llama", "vocab_size": vocabulary}
    model["tie_word_embeddings"] = wide < _NANOTRON_UNTIED
    return Row(
        dataset="nanotron",
        name=name,
        model=model | {"max_position_embeddings": length},
        sequence_length=length,
        cluster=nodes("h100", devices, (8, 450e9, 1e-6), outer=(50e9, _NANOTRON_STEP_S)),
        global_batch_size=batch,
        strategy={
            "dp": dp,
            "tp": tp,
            "pp": pp,
            "micro_batch_size": size,
            "zero": int(values["zero"] or 0),
            "recompute": "none",
            "stages": _balanced_stages(layers, 4 * hidden**2 + 3 * hidden * wide, hidden * vocabulary, pp),
            **schedule_of(pp, 1),
            **({"sequence_parallel": True} if tp > 1 else {}),
        },
        recipe=FSDP,
        stack={"fusion": "none", **({"pipelines_products": True} if tp > 1 else {})},
        seconds=None if mfu is None else flops / (mfu / 100 * 989e12 * devices),
        memory_bytes=None if memory is None else memory * GIB,
        group=(values["model"], devices, batch),
    )
