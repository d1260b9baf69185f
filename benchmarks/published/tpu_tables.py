"""MaxText on TPUs: the tables as first published, and Google's recipes.

- MaxText's tables: fully sharded inside of a slice, copies between slices (hybrid sharding). Seconds are derived with
  the flop formula that held when the figures were published, as the file's column says. Gradients are summed in the
  type that products compute in, that of the cast weights. Attention as the file says: products on v4 and v5e, a kernel
  on v5p. A batch per device counts for each of the tensor-parallel devices, over which activations between layers are
  split, too. Between slices 50 Gb/s a chip are assumed.
- Google's recipes: what a remat policy offloads to the host is priced as kept on the device, because the traffic to the
  host runs beside the passes; memory of these runs is therefore not compared. Policies are read by what they keep;
  those that keep a set which is no recompute mode are listed. tpu7x has two devices a chip, and "device" counts them.
  fsdp_transpose shards along another dimension and is counted as sharding. Rows whose tokens are no multiple of their
  batch are listed, and so is int8, which is no precision here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phaze.hardware import Cluster, parse_cluster
from published.rows import XLA, Row, built_row, gpt, lines_of, quantity, schedule_of, unscored, whole

__all__ = ["read_maxtext", "read_tpu_recipes"]

_CHIPS = {"TPU v4": "tpuv4", "TPU v5e": "tpuv5e", "TPU v5p": "tpuv5p", "TPU v6e": "tpuv6e", "TPU7x Ironwood": "tpu7x"}
_SLICES = {
    ("tpuv4", 64): "4x4x4",
    ("tpuv4", 192): "4x6x8",
    ("tpuv5e", 256): "16x16",
    ("tpuv5p", 64): "4x4x4",
    ("tpuv5p", 128): "4x4x8",
    ("tpuv5p", 256): "4x8x8",
    ("tpuv5p", 512): "8x8x8",
    ("tpuv5p", 1024): "8x8x16",
    ("tpuv5p", 2048): "8x16x16",
    ("tpuv6e", 8): "2x4",
    ("tpuv6e", 64): "8x8",
    ("tpuv6e", 128): "8x16",
    ("tpuv6e", 256): "16x16",
}
"""The torus of a slice of so many chips; others get the most even one."""


def _slices(chip: str, devices: int, slices: int) -> Cluster:
    inside = devices // slices
    torus = _SLICES.get((chip, inside), f"ici{inside}")
    return parse_cluster(f"{chip}:{devices}@{torus}" + ("+dcn50" if slices > 1 else ""))


def read_maxtext(path: Path) -> Iterator[Row]:
    """MaxText's tables of v4, v5e and v5p."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['hw']} {values['model']} {values['chips']}"
        yield built_row("maxtext", name, _maxtext_row, name, values)


def _maxtext_row(name: str, values: Mapping[str, str]) -> Row:
    names = ("chips", "slices", "ici_fsdp", "ici_tensor", "per_device_batch", "seq", "emb", "layers", "heads", "mlp")
    devices, slices, fsdp, tp, size, length, hidden, layers, heads, wide = (whole(values, key) for key in names)
    chip, copies = _CHIPS[values["hw"]], devices // (fsdp * tp)
    model = gpt(hidden, layers, heads, whole(values, "vocab"), length, ffn_hidden_size=wide)
    model |= {"kv_channels": whole(values, "head_dim", 256), "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return Row(
        dataset="maxtext",
        split=chip,
        name=name,
        model=model,
        cluster=_slices(chip, devices, slices),
        global_batch_size=devices * size,
        strategy={
            "dp": fsdp * copies,
            "shard": "all" if copies == 1 else fsdp,
            "tp": tp,
            "pp": 1,
            "micro_batch_size": size * tp,
            "zero": 3,
            "recompute": values["remat"],
            **schedule_of(1, 1),
            **({"sequence_parallel": True} if tp > 1 else {}),
        },
        recipe=XLA,
        attention="fused" if values["attention"].startswith("flash") else "unfused",
        seconds=quantity(values["step_s"]),
        group=(values["hw"], values["model"], devices, size),
    )


_MODELS = {
    "gpt3-175b": "gpt3-175b",
    "gemma3-12b": "gemma3-12b",
    "llama2-70b": "llama2-70b",
    "llama3.1-8b": "llama3.1-8b",
    "llama3.1-70b": "llama3.1-70b",
    "llama3.1-405b": "llama3.1-405b",
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "deepseek3-671b": "deepseek-v3",
    "deepseek3-671b-2dfsdp": "deepseek-v3",
    "gpt-oss-120b": "gpt-oss-120b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
}
_HEADS = frozenset({"query_proj", "key_proj", "value_proj"})
_KEPT = {
    frozenset[str](): "full",
    _HEADS: "qkv",
    _HEADS | {"out_proj"}: "projections",
    frozenset({"out_proj"}): "out",
}
"""The mode that keeps these results beside what enters a layer."""
_PRODUCTS = {"bf16": "", "fp8_full": "fp8"}


def _kept_mode(values: Mapping[str, str]) -> str:
    """The recompute mode of a remat policy and its details."""
    policy, detail = values["remat_policy"].lower(), values["remat_detail"]
    if policy == "full":
        return "full"
    if policy == "qkv_proj_offloaded":
        return "qkv"
    if policy == "custom" and detail.startswith("{"):
        places: dict[str, str] = json.loads(detail)
        kept = frozenset(name for name, place in places.items() if place != "remat") - {"decoder_layer_input"}
        if kept in _KEPT:
            return _KEPT[kept]
        raise ValueError(f"keeping {', '.join(sorted(kept))} is no recompute mode")
    if re.fullmatch(r"offload decoder_layer_input, out, q, k, v proj", detail):
        return "projections"
    raise ValueError(f"remat policy {policy!r} with {detail!r} is not read")


def _offloads(values: Mapping[str, str]) -> bool:
    """Whether a remat policy moves some of what it keeps to the host."""
    return "offload" in values["remat_policy"].lower() or "offload" in values["remat_detail"].lower()


def read_tpu_recipes(path: Path) -> Iterator[Row]:
    """Google's recipes for v5p, v6e and tpu7x."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['hw']} {values['workload']} {values['chips']} {values['quantization']}"
        if values["model_type"] not in _MODELS:
            yield unscored("tpu-recipes", name, f"{values['model_type']} is no config that is read")
        else:
            yield built_row("tpu-recipes", name, _recipe_row, name, values)


def _degrees(text: str, devices: int) -> dict[str, int]:
    """Degrees by kind; -1 stands for what is left."""
    given = {key: int(value) for key, value in json.loads(text or "{}").items()}
    kinds = {"fsdp": 1, "data": 1, "tensor": 1, "context": 1, "expert": 1}
    is_rest, rest_of = devices, "fsdp"
    for key, value in given.items():
        kind = next((known for known in kinds if f"_{known}_" in key), None)
        if key.startswith("dcn") or "pipeline" in key:
            continue
        if kind is None:
            raise ValueError(f"parallelism {key} is not read")
        if value == -1:
            rest_of = kind
        else:
            kinds[kind] *= value
    for value in kinds.values():
        is_rest //= value
    kinds[rest_of] *= is_rest
    return kinds


def _recipe_row(name: str, values: Mapping[str, str]) -> Row:
    chips, slices, length = (whole(values, key) for key in ("chips", "slices", "seq"))
    chip = _CHIPS[values["hw"]]
    devices = chips * (2 if chip == "tpu7x" else 1)
    tokens = whole(values, "global_tokens_per_step")
    each = quantity(values["per_device_batch"])
    if each is None or tokens % length or round(each * devices * length) != tokens:
        raise ValueError(f"{values['per_device_batch']} sequences a device are not {tokens} tokens a step")
    ways = _degrees(values["parallelism"], devices // slices)
    tp, cp, ep = ways["tensor"], ways["context"], ways["expert"]
    copies = devices // (ways["fsdp"] * ep * tp * cp)
    dp, batch = devices // (tp * cp), tokens // length
    if values["quantization"] not in _PRODUCTS:
        raise ValueError(f"{values['quantization']} is no precision that is priced")
    products = _PRODUCTS[values["quantization"]]
    strategy: dict[str, Any] = {
        "dp": dp,
        "cp": cp,
        "ep": ep,
        "shard": "all" if copies == 1 else ways["fsdp"] * ep * cp,
        "tp": tp,
        "pp": 1,
        "micro_batch_size": max(1, batch // dp),
        "zero": 3,
        "recompute": _kept_mode(values),
        **schedule_of(1, 1),
    }
    return Row(
        dataset="tpu-recipes",
        split=chip,
        name=name,
        model=_MODELS[values["model_type"]],
        sequence_length=length,
        cluster=_slices(chip, devices, slices),
        global_batch_size=batch,
        strategy=strategy,
        recipe=f"{products}-adam-bf16-gradients" if products else XLA,
        seconds=quantity(values["step_s"]),
        memory_unknown="activations are kept on the host" if _offloads(values) else None,
        group=(chip, chips, values["model_type"], length, batch),
    )
