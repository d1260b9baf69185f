"""Rows of published training runs as questions to `phaze.evaluate`, one reader per file format.

What a file does not say is said here, with its source:

- SC'21 (Narayanan et al., arXiv:2104.04473): gradients are summed and reduced in fp16, the optimizer is not sharded.
- Korthikanti et al. (arXiv:2205.05198): the same, one pipeline.
- BigScience: nodes of 8 A100 joined by 4 NVLinks each and 4 Omni-Path links of 100 Gb/s (arXiv:2211.05100, section
  3.4). The authors' log of the sweep (train/tr11-176B-ml/chronicles-prequel.md of bigscience-workshop/bigscience) says
  that up to its section "Rebalancing layers" gradients are summed in fp16, and from there on in fp32 on top, with
  embeddings counted as layers when stages are cut; so also before it where only that makes stages equal. Else they are
  filled one after the other with as many blocks as the fullest needs. ZeRO-1. Every launch of a kernel waited for its
  end (CUDA_LAUNCH_BLOCKING=1 in train/tr11-176B-ml/tr11-176B-ml.slurm of the same repository, "do not remove").
- torchtitan: ZeRO-3 (FSDP2) over the data axis, fp32 masters and fp32 reductions, bf16 all-gathers. Its selective
  checkpointing is the one by op, the default of its Llama 3 8B job (train_configs/llama3_8b.toml): mode `products`.
- MaxText: fully sharded data parallel inside a slice, plain data parallel between slices (here sharded over all of
  them: memory of runs on several slices is therefore a lower bound). Gradients are summed in the type that products
  compute in, that of the cast weights. Attention as the file says: products on v4 and v5e, a kernel on v5p. A batch per
  device counts for each of the tensor-parallel devices, over which activations between layers are split, too. Between
  slices 50 Gb/s a chip are assumed.
- InternEvo (doc/en/train_performance.md of InternLM/InternEvo): ZeRO-1 over `zero1_group` of the data-parallel GPUs,
  gradients in bf16, their reduction behind the last backward, FlashAttention; nodes of 8 A100 with 4 RoCE links of 100
  Gb/s. InternLM-7B is a Llama of 32 layers with a hidden size of 4096, 11008 in between, 32 heads with biases and a
  vocabulary of 103,168. Rows with memory alone are not scored.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from phaze.errors import PhazeError
from phaze.hardware import Cluster, InterconnectLevel, PrecisionRecipe, find_accelerator, parse_cluster

__all__ = ["DATASETS", "Row", "read_rows"]

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run: its model and strategy, seconds (None: it did not run or nobody wrote it down) and memory.

    ``reason`` says why it is not scored. Rows of equal ``group`` differ in strategy only. ``stack`` holds what is known
    to differ from the stack of the chip's calibration. ``attention`` says how that ran: Megatron-LM of 2021 and 2022
    had no fused kernel, torchtitan calls torch's and MaxText its own.
    """

    dataset: str
    name: str
    model: Any = None
    sequence_length: int | None = None
    cluster: Cluster | None = None
    global_batch_size: int = 0
    strategy: dict[str, Any] = field(default_factory=dict)
    recipe: PrecisionRecipe | None = None
    stack: dict[str, Any] = field(default_factory=dict)
    attention: str = "unfused"
    tokens: int = 0
    seconds: float | None = None
    memory_bytes: float | None = None
    is_out_of_memory: bool = False
    group: tuple[Any, ...] | None = None
    reason: str | None = None

    @property
    def question(self) -> tuple[Any, ...]:
        """What makes two rows repeats of each other."""
        texts = [str(sorted(values.items())) for values in (self.strategy, self.stack)]
        asked = (self.sequence_length, self.global_batch_size, self.recipe, self.cluster)
        return (self.dataset, str(self.model), *asked, *texts)


def _recipe(name: str, compute: str, reduction: str, gradient: float) -> PrecisionRecipe:
    return PrecisionRecipe(
        name=name,
        compute_dtype=compute,
        reduction_dtype=reduction,
        parameter_bytes=2,
        gradient_bytes=gradient,
        master_bytes=4,
        state_bytes=8,
    )


_FP16 = _recipe("fp16, fp16 gradients", "float16", "float16", 2)
_BF16_SUMMED = _recipe("bf16, bf16 and fp32 gradients", "bfloat16", "float32", 6)
_BF16 = _recipe("bf16, bf16 gradients", "bfloat16", "bfloat16", 2)
_FSDP = _recipe("fp32 masters, bf16 compute", "bfloat16", "float32", 4)
_XLA = _recipe("fp32 masters, bf16 compute and sums", "bfloat16", "bfloat16", 4)


def _gpt(hidden: int, layers: int, heads: int, vocabulary: int, length: int, **others: Any) -> dict[str, Any]:
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


def _cluster(chip: str, devices: int, *levels: tuple[int, float, float]) -> Cluster:
    built = [InterconnectLevel(size, bandwidth, latency) for size, bandwidth, latency in levels[:-1]]
    inside = 1
    for level in built:
        inside *= level.size
    size, bandwidth, latency = levels[-1]
    outer = max(1, -(-devices // inside)) if size == 0 else size
    return Cluster(find_accelerator(chip), devices, (*built, InterconnectLevel(outer, bandwidth, latency)))


def _dgx(devices: int) -> Cluster:
    return _cluster("a100-80gb", devices, (8, 300e9, 1e-6), (0, 25e9, 5e-6))


def _schedule(pipeline: int, chunks: int) -> dict[str, Any]:
    name = "none" if pipeline == 1 else "1f1b" if chunks == 1 else "interleaved-1f1b"
    return {"schedule": name, "chunks": chunks}


def _check_stages(layers: int, stages: int) -> None:
    if stages > layers:
        raise ValueError(f"{stages} stages for {layers} layers")


def _even(layers: int, stages: int) -> tuple[int, ...]:
    _check_stages(layers, stages)
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def _filled(layers: int, stages: int) -> list[int]:
    """As many layers a stage as the fullest needs, from the front; no stage is empty."""
    _check_stages(layers, stages)
    most, sizes = -(-layers // stages), list[int]()
    for stage in range(stages):
        left = layers - sum(sizes) - (stages - stage - 1)
        sizes.append(max(1, min(most, left)))
    return sizes


def _megatron_row(values: dict[str, str], dataset: str, name: str, **others: Any) -> Row:
    keys = ("layers", "hidden", "heads", "seq", "vocab", "tp", "pp", "dp", "gpus", "global_batch", "micro_batch")
    number = {key: _whole(values, key) for key in keys}
    chunks = next((_whole(values, key) for key in ("interleave_chunks", "interleave") if values[key]), 1)
    strategy = {
        "dp": number["dp"],
        "tp": number["tp"],
        "pp": number["pp"],
        "micro_batch_size": number["micro_batch"],
        "zero": 0,
        "stages": _even(number["layers"], number["pp"] * chunks),
        **_schedule(number["pp"], chunks),
        **others.pop("strategy"),
    }
    if number["tp"] == 1:
        strategy.pop("sequence_parallel")
    return Row(
        dataset=dataset,
        name=name,
        model=_gpt(number["hidden"], number["layers"], number["heads"], number["vocab"], number["seq"]),
        cluster=_dgx(number["gpus"]),
        global_batch_size=number["global_batch"],
        strategy=strategy,
        recipe=_FP16,
        tokens=number["global_batch"] * number["seq"],
        **others,
    )


def _sc21(path: Path) -> Iterator[Row]:
    for values in _lines(path):
        name = values["model"]
        strategy = {"recompute": values["recompute"] or "full", "sequence_parallel": False}
        facts = {"strategy": strategy, "seconds": _seconds(values["iter_time_s_from_agg"])}
        yield _read("sc21", name, _megatron_row, values, "sc21", name, **facts)


def _korthikanti(path: Path) -> Iterator[Row]:
    kinds = (("full", False, "iter_s_full_recompute"), ("selective", True, "iter_s_selective_seqpar"))
    for values in _lines(path):
        for recompute, is_split, column in kinds:
            strategy = {"recompute": recompute, "sequence_parallel": is_split}
            name = f"{values['model']} {recompute}"
            facts = {"strategy": strategy, "seconds": _seconds(values[column])}
            yield _read("korthikanti", name, _megatron_row, values, "korthikanti", name, **facts)


def _bigscience(path: Path) -> Iterator[Row]:
    for values in _lines(path):
        name = f"line {values['line']}"
        missing = [key for key in ("hidden", "layers", "heads") if not values[key].isdigit()]
        if missing:
            yield Row(dataset="bigscience", name=name, reason=f"incomplete: {', '.join(missing)}")
        else:
            yield _read("bigscience", name, _bigscience_row, name, values)


def _bigscience_stages(layers: int, stages: int, is_rebalanced: bool) -> tuple[int, ...]:
    """Layers a stage: with the embedding and the head counted as layers, or on top of the first and the last."""
    if is_rebalanced or (layers % stages and (layers + 2) % stages == 0):
        return tuple(_filled(layers + 2, stages))
    sizes = _filled(layers, stages)
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def _bigscience_row(name: str, values: dict[str, str]) -> Row:
    keys = ("hidden", "layers", "heads", "dp", "tp", "pp", "mbs", "gbs", "gpus")
    hidden, layers, heads, dp, tp, pp, size, batch, devices = (_whole(values, key) for key in keys)
    is_rebalanced = values["section"] == "Rebalancing layers"
    memory = re.fullmatch(r"([\d.]+) ?Gi?B", values["mem"])
    strategy = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": size,
        "zero": 1 if not values["zero"] else int(values["zero"]),
        "recompute": "full",
        "sequence_parallel": False,
        "stages": _bigscience_stages(layers, pp, is_rebalanced),
        **_schedule(pp, 1),
    }
    return Row(
        dataset="bigscience",
        name=name,
        model=_gpt(hidden, layers, heads, 250880, 2048),
        cluster=_cluster("a100-80gb", devices, (8, 100e9, 1e-6), (0, 6.25e9, 5e-6)),
        global_batch_size=batch,
        strategy=strategy,
        recipe=_BF16_SUMMED if is_rebalanced else _FP16,
        stack={"launches_ahead": False},
        tokens=batch * 2048,
        seconds=_seconds(values["sec_per_it"]),
        memory_bytes=float(memory[1]) * GIB if memory else None,
        is_out_of_memory=values["mem"].upper() == "OOM",
        group=(hidden, layers, heads, devices, batch),
    )


def _torchtitan(path: Path) -> Iterator[Row]:
    for number, values in enumerate(_lines(path), start=2):
        name = f"line {number}: {values['model']} {values['gpus']} {values['precision']} compile {values['compile']}"
        if values["tp"] not in ("", "1"):
            name += f", tp {values['tp']}"
        reason = None
        if values["cp"] not in ("", "1"):
            reason = "context parallelism is not priced"
        elif "async" in values["extra"].lower():
            reason = "asynchronous tensor parallelism is not priced"
        elif values["precision"] != "bf16":
            reason = f"{values['precision'] or 'no precision'}: only bf16 is priced (not casts and scales of float8)"
        if reason is not None:
            yield Row(dataset="torchtitan", name=name, reason=reason)
        else:
            yield _read("torchtitan", name, _torchtitan_row, name, values)


_TITAN_MODELS = {"8B": "llama3-8b", "70B": "llama3-70b"}
_TITAN_MODES = {"none": "none", "selective": "products", "selective-op": "products", "full": "full"}


def _torchtitan_row(name: str, values: dict[str, str]) -> Row:
    keys = ("gpus", "fsdp", "tp", "pp", "local_batch", "seq")
    devices, fsdp, tp, pp, size, length = (_whole(values, key) for key in keys)
    model = next((known for text, known in _TITAN_MODELS.items() if values["model"].endswith(f"-{text}")), None)
    if model is None or pp != 1:
        raise ValueError(f"model {values['model']} with pp {pp} is not read")
    if values["act_ckpt"] not in _TITAN_MODES:
        raise ValueError(f"activation checkpointing {values['act_ckpt']!r} is not priced")
    batch = _whole(values, "global_batch") if values["global_batch"] else size * fsdp
    chip = replace(find_accelerator("h100"), hbm_bytes=96 * GIB, hbm_bandwidth_bytes_per_s=2.4e12)
    base = _cluster("h100", devices, (8, 450e9, 1e-6), (0, 50e9, 5e-6))
    strategy = {
        "dp": fsdp,
        "tp": tp,
        "pp": 1,
        "micro_batch_size": size,
        "zero": 3,
        "recompute": _TITAN_MODES[values["act_ckpt"]],
        "stages": None,
        **_schedule(1, 1),
    }
    if tp > 1:
        strategy["sequence_parallel"] = True
    rate = _seconds(values["tokens_per_s_per_gpu"])
    return Row(
        dataset="torchtitan",
        name=name,
        model=model,
        sequence_length=length,
        cluster=replace(base, accelerator=chip),
        global_batch_size=batch,
        strategy=strategy,
        recipe=_FSDP,
        stack={"fusion": "none"} if values["compile"] == "no" else {},
        attention="fused",
        tokens=batch * length,
        seconds=None if rate is None else batch * length / (rate * devices),
        memory_bytes=None if (memory := _seconds(values["mem_GiB"])) is None else memory * GIB,
    )


_MAXTEXT_FILE = "maxtext_v4_v5e_v5p_as_published.csv"
_MAXTEXT_CHIPS = {"TPU v4": "tpuv4", "TPU v5e": "tpuv5e", "TPU v5p": "tpuv5p"}
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
}
"""The torus of a slice of so many chips."""


_INTERNLM_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 103_168,
    "max_position_embeddings": 2048,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def _internevo(path: Path) -> Iterator[Row]:
    for number, values in enumerate(_lines(path), start=2):
        degrees = f"dp {values['dp']}, tp {values['tp']}, ZeRO-1 over {values['zero1_group']}"
        name = f"line {number}: {values['gpus']} GPUs, {degrees}, {values['micro_num']} x {values['micro_bsz']}"
        if not values["tokens_per_s_per_gpu"]:
            yield Row(dataset="internevo", name=name, reason="no time was written down")
        else:
            yield _read("internevo", name, _internevo_row, name, values)


def _internevo_row(name: str, values: dict[str, str]) -> Row:
    keys = ("gpus", "tp", "dp", "pp", "zero1_group", "micro_bsz", "micro_num", "seq")
    devices, tp, dp, pp, shard, size, count, length = (_whole(values, key) for key in keys)
    strategy = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": size,
        "zero": 1,
        "shard": "all" if shard == dp else shard,
        "recompute": {"yes": "full", "no": "none"}[values["act_ckpt"]],
        "stages": None,
        **_schedule(pp, 1),
    }
    batch = dp * size * count
    rate = _seconds(values["tokens_per_s_per_gpu"])
    return Row(
        dataset="internevo",
        name=name,
        model=_INTERNLM_7B,
        sequence_length=length,
        cluster=_cluster("a100-80gb", devices, (8, 300e9, 1e-6), (0, 6.25e9, 5e-6)),
        global_batch_size=batch,
        strategy=strategy,
        recipe=_BF16,
        attention="fused",
        tokens=batch * length,
        seconds=None if rate is None else batch * length / (rate * devices),
        group=(devices, size, count, values["act_ckpt"], tp),
    )


def _maxtext(path: Path, *, hardware: str, dataset: str) -> Iterator[Row]:
    for number, values in enumerate(_lines(path), start=2):
        if values["hw"] == hardware:
            name = f"line {number}: {hardware} {values['model']} {values['chips']}"
            yield _read(dataset, name, _maxtext_row, dataset, name, values)


def _maxtext_row(dataset: str, name: str, values: dict[str, str]) -> Row:
    names = ("chips", "slices", "ici_fsdp", "ici_tensor", "per_device_batch", "seq", "emb", "layers", "heads", "mlp")
    devices, slices, fsdp, tp, size, length, hidden, layers, heads, wide = (_whole(values, key) for key in names)
    chip, copies = _MAXTEXT_CHIPS[values["hw"]], devices // (fsdp * tp)
    described = _gpt(hidden, layers, heads, _whole(values, "vocab"), length, kv_channels=256, ffn_hidden_size=wide) | {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    torus = _SLICES[chip, devices // slices]
    return Row(
        dataset=dataset,
        name=name,
        model=described,
        cluster=parse_cluster(f"{chip}:{devices}@{torus}" + ("+dcn50" if slices > 1 else "")),
        global_batch_size=devices * size,
        strategy={
            "dp": fsdp * copies,
            "tp": tp,
            "pp": 1,
            "micro_batch_size": size * tp,
            "zero": 3,
            "recompute": values["remat"],
            "stages": None,
            **_schedule(1, 1),
            **({"sequence_parallel": True} if tp > 1 else {}),
        },
        recipe=_XLA,
        tokens=devices * size * length,
        attention="fused" if values["attention"].startswith("flash") else "unfused",
        seconds=_seconds(values["step_s"]),
    )


DATASETS = {
    "sc21": ("megatron_sc21_table1.csv", _sc21),
    "korthikanti": ("korthikanti_table5.csv", _korthikanti),
    "bigscience": ("bigscience_a100_topology.csv", _bigscience),
    "torchtitan": ("torchtitan.csv", _torchtitan),
    "maxtext": (_MAXTEXT_FILE, partial(_maxtext, hardware="TPU v4", dataset="maxtext")),
    "maxtext-v5e": (_MAXTEXT_FILE, partial(_maxtext, hardware="TPU v5e", dataset="maxtext-v5e")),
    "maxtext-v5p": (_MAXTEXT_FILE, partial(_maxtext, hardware="TPU v5p", dataset="maxtext-v5p")),
    "internevo": ("internevo_7b_hybrid_zero.csv", _internevo),
}
"""Name to (file, reader)."""


def read_rows(folder: Path, datasets: list[str] | None = None) -> list[Row]:
    """The rows of all datasets that are there, in the order of their files."""
    rows: list[Row] = []
    for name, (file, reader) in DATASETS.items():
        if (folder / file).is_file() and (not datasets or name in datasets):
            rows += reader(folder / file)
    return rows


def _read(dataset: str, name: str, build: Callable[..., Row], *values: Any, **facts: Any) -> Row:
    """The row that ``build`` makes of its values, or the reason why there is none."""
    try:
        row = build(*values, **facts)
    except (ValueError, ArithmeticError, PhazeError) as error:
        return Row(dataset=dataset, name=name, reason=f"incomplete: {error}")
    dp, tp, pp = (row.strategy[key] for key in ("dp", "tp", "pp"))
    if row.cluster is not None and dp * tp * pp != row.cluster.device_count:
        return replace(row, reason=f"dp {dp} x tp {tp} x pp {pp} are not {row.cluster.device_count} devices")
    if row.seconds is None and not row.is_out_of_memory:
        return replace(row, reason="no time was written down")
    return row


def _lines(path: Path) -> list[dict[str, str]]:
    """The rows of a file; a column or value that is not there is empty."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: text for key, text in row.items() if isinstance(text, str)} for row in csv.DictReader(file)]
    return [defaultdict(str, {key: text.strip() for key, text in row.items()}) for row in rows]


_DIGITS = 6


def _whole(values: dict[str, str], key: str) -> int:
    text = values[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) > 0):
        raise ValueError(f"{key} is {text!r}")
    return int(text)


def _seconds(text: str) -> float | None:
    """A measured number above 0, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
