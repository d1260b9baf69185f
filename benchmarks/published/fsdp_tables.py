"""Runs under torch's fully sharded data parallelism: torchtitan, MosaicML's llm-foundry, IBM's fms-fsdp.

- torchtitan: ZeRO-3 (FSDP2) over the data and context axes, fp32 masters and fp32 reductions, bf16 all-gathers. Its
  selective checkpointing is the one by op, the default of its Llama 3 8B job (train_configs/llama3_8b.toml): mode
  `products`. Compiled are blocks, and since 2025 the loss, too. "float8" is tensorwise scaling, the default of its
  tables. Chips are H100s with 2.4 TB/s HBM2e; where the table says 95 GB, the same part is meant. 400 Gb/s a GPU, also
  for the 405B rows, which do not say it.
- llm-foundry: MPT has ALiBi and no biases; here it is a GPT with learned positions and biases, whose work is the same.
  Composer's mixed precision DEFAULT gathers parameters in fp32 and reduces in bf16; PURE does both in bf16. Kernels are
  torch's own (no compiler). The network of the H100s is not given: 400 Gb/s a GPU is assumed; 1600 Gb/s a node is the
  A100s'. Its loss is fused (`loss_fn: fused_crossentropy` is the default), which is counted in memory alone: the terms
  of the calibrations were fitted to these rows without it.
- fms-fsdp: HSDP shards inside of a node. "Selective AC" recomputes every nth block, and n is not in the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phaze.hardware import Cluster, PrecisionRecipe, find_accelerator
from published.rows import (
    BF16,
    FSDP,
    GIB,
    Row,
    built_row,
    dgx_a100,
    dgx_h100,
    gpt,
    lines_of,
    mixed,
    nodes,
    quantity,
    schedule_of,
    unscored,
    whole,
)

__all__ = ["read_fms", "read_llm_foundry", "read_torchtitan"]

_TITAN_MODELS = {"8b": "llama3-8b", "70b": "llama3-70b", "405b": "llama3.1-405b"}
_TITAN_MODES = {"none": "none", "selective": "products", "selective op": "products", "full": "full"}
_TITAN_PRODUCTS = {
    "bf16": "",
    "float8": "fp8-tensorwise",
    "float8 tensorwise": "fp8-tensorwise",
    "float8 rowwise": "fp8-rowwise",
}


def read_torchtitan(path: Path) -> Iterator[Row]:
    """torchtitan's tables of Llama 3."""
    if path.name == "torchtitan.csv" and path.with_name("torchtitan_all.csv").is_file():
        for number, _ in lines_of(path):
            yield unscored("torchtitan", f"line {number} of {path.name}", "repeated in torchtitan_all.csv")
        return
    for number, values in lines_of(path):
        name = f"line {number}: {values['model']} {values['gpus']} {values['precision']} compile {values['compile']}"
        name += "".join(f", {key} {values[key]}" for key in ("tp", "cp") if values[key] not in ("", "1"))
        name += ", asynchronous tp" if _is_asynchronous(values) else ""
        yield built_row("torchtitan", name, _titan_row, name, values)


def _is_asynchronous(values: Mapping[str, str]) -> bool:
    """Whether collectives of tensor parallelism ran in pieces beside products (torch's asynchronous one)."""
    return "async" in values["extra"].lower()


def _titan_chip(text: str, devices: int) -> Cluster:
    """The cluster that a hardware column names."""
    if text.startswith("H100"):
        chip = find_accelerator("h100")
        if "HBM2e" in text:
            chip = replace(chip, hbm_bytes=96 * GIB, hbm_bandwidth_bytes_per_s=2.4e12)
        return replace(dgx_h100(devices), accelerator=chip)
    if text.startswith("H200"):
        return dgx_h100(devices, chip="h200")
    if text.startswith("A100"):
        return dgx_a100(devices)
    raise ValueError(f"hardware is {text!r}")


def _titan_row(name: str, values: Mapping[str, str]) -> Row:
    devices, fsdp, tp, pp, cp = (whole(values, key, 1) for key in ("gpus", "fsdp", "tp", "pp", "cp"))
    size, length = whole(values, "local_batch", 1), whole(values, "seq")
    model = next((known for text, known in _TITAN_MODELS.items() if values["model"].lower().endswith(text)), None)
    if model is None or pp != 1:
        raise ValueError(f"model {values['model']} with pp {pp} is not read")
    batch = whole(values, "global_batch", size * fsdp)
    rate, memory = quantity(values["tokens_per_s_per_gpu"]), quantity(values["mem_GiB"])
    products = _TITAN_PRODUCTS[values["precision"]]
    strategy: dict[str, Any] = {
        "dp": fsdp,
        "tp": tp,
        "cp": cp,
        "pp": 1,
        "micro_batch_size": size,
        "zero": 3,
        "recompute": _TITAN_MODES[values["act_ckpt"]],
        **schedule_of(1, 1),
        **({"sequence_parallel": True} if tp > 1 else {}),
    }
    return Row(
        dataset="torchtitan",
        name=name,
        model=model,
        sequence_length=length,
        cluster=_titan_chip(values["hw"], devices),
        global_batch_size=batch,
        strategy=strategy,
        recipe=products or FSDP,
        stack={"fusion": _titan_fusion(values), **({"pipelines_products": True} if _is_asynchronous(values) else {})},
        seconds=None if rate is None else batch * length / (rate * devices),
        memory_bytes=None if memory is None else memory * GIB,
        is_out_of_memory=values["out_of_memory"] == "yes",
        group=(model, devices, batch, length, values["hw"], values["compile"], _is_asynchronous(values)),
    )


def _titan_fusion(values: Mapping[str, str]) -> str:
    """What torchtitan of the year that a source's name says compiles; one that says none is taken for a new one."""
    if values["compile"] == "no":
        return "none"
    year = re.search(r"20\d\d", values["source"].partition("torchtitan ")[2])
    return "chains" if year is not None and int(year[0]) < _COMPILED_LOSS_YEAR else "chains+loss"


_COMPILED_LOSS_YEAR = 2025
"""Before, torchtitan's own code had turned the compiling of its loss off, because it failed (train.py)."""
_FOUNDRY_CHIPS = {"h100_80gb": "h100", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}
_FOUNDRY_RECIPES = {
    "DEFAULT": mixed("fp32 gathers, bf16 reductions", "bfloat16", "bfloat16", gradient=4, parameter=4, master=0),
    "PURE": BF16,
}


def read_llm_foundry(path: Path) -> Iterator[Row]:
    """MosaicML's tables of MPT."""
    for number, values in lines_of(path):
        batch = f"{values['micro_batch']} x {values['grad_accum']}"
        name = f"line {number}: {values['model']} {values['seq']}, {values['gpus']} {values['gpu']}, {batch}"
        if values["act_cpu_offload"] == "True":
            yield unscored("llm-foundry", name, "activations in the host's memory are not priced")
        else:
            yield built_row("llm-foundry", name, _foundry_row, name, values)


def _foundry_recipe(values: Mapping[str, str]) -> PrecisionRecipe | str:
    if values["precision"] == "amp_fp8":
        return "fp8-delayed"
    if values["precision"] not in ("amp_bf16", "bf16"):
        raise ValueError(f"precision is {values['precision']!r}")
    return _FOUNDRY_RECIPES[values["fsdp_mixed_precision"]]


def _foundry_row(name: str, values: Mapping[str, str]) -> Row:
    keys = ("d_model", "n_layers", "n_heads", "vocab", "seq", "gpus", "micro_batch", "global_batch")
    hidden, layers, heads, vocabulary, length, devices, size, batch = (whole(values, key) for key in keys)
    chip = _FOUNDRY_CHIPS[values["gpu"]]
    wide = hidden * whole(values, "expansion_ratio", 4)
    model = gpt(hidden, layers, heads, vocabulary, length, ffn_hidden_size=wide)
    return Row(
        dataset="llm-foundry",
        split=chip.split("-")[0],
        name=name,
        model=model | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        cluster=dgx_h100(devices) if chip == "h100" else dgx_a100(devices, chip=chip),
        global_batch_size=batch,
        strategy={
            "dp": devices,
            "tp": 1,
            "pp": 1,
            "micro_batch_size": size,
            "zero": whole(values, "zero"),
            "recompute": {"True": "full", "False": "none"}[values["act_ckpt"]],
            **schedule_of(1, 1),
        },
        recipe=_foundry_recipe(values),
        stack={"fusion": "none"},
        memory_stack={"fusion": "loss"},
        seconds=quantity(values["step_s"]),
        group=(values["gpu"], devices, values["model"], length, batch),
    )


def read_fms(path: Path) -> Iterator[Row]:
    """IBM's table of Llama 2."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['model']}, {values['gpus']} {values['gpu']}, {values['sharding']}"
        if values["act_ckpt"] != "No AC":
            yield unscored("fms-fsdp", name, "the table does not say which blocks are recomputed")
        else:
            yield built_row("fms-fsdp", name, _fms_row, name, values)


def _fms_row(name: str, values: Mapping[str, str]) -> Row:
    devices, size, length = (whole(values, key) for key in ("gpus", "local_batch", "seq"))
    chip = {"H100-80GB": "h100", "A100-80GB": "a100-80gb"}[values["gpu"]]
    inner = 450e9 if chip == "h100" else 300e9
    adapters = quantity(values["network"].split(" ")[0])
    rate = quantity(values["tokens_per_s_per_gpu"])
    if adapters is None or values["precision"] != "bf16":
        raise ValueError(f"network {values['network']!r}, precision {values['precision']!r}")
    return Row(
        dataset="fms-fsdp",
        name=name,
        model=values["model"],
        sequence_length=length,
        cluster=nodes(chip, devices, (8, inner, 1e-6), outer=(adapters * 1e9 / 8 / 8, 5e-6)),
        global_batch_size=devices * size,
        strategy={
            "dp": devices,
            "tp": 1,
            "pp": 1,
            "micro_batch_size": size,
            "zero": 3,
            "shard": 8 if values["sharding"] == "HSDP" else "all",
            "recompute": "none",
            **schedule_of(1, 1),
        },
        recipe=BF16,
        seconds=None if rate is None else size * length / rate,
    )
