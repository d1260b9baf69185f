"""Runs of NVIDIA's NeMo and Megatron-Core on H100, B200, B300, GB200 and GB300.

What the pages do not say, and what is assumed for all of them:

- Optimizers are sharded (ZeRO-1, Megatron's distributed optimizer), gradients are summed and reduced in bf16, behind
  backward passes where there are any; sequences are split between layers where tp > 1; attention is one kernel. These
  are the defaults of NeMo's performance recipes. Weight gradients are summed inside of products and updates are fused
  (Transformer Engine, Apex).
- Nodes of 8 with NVLink and 400 Gb/s a GPU (B200, B300 800 Gb/s); GB200 and GB300 in racks of 72 of which 64 are
  used, then 400 and 800 Gb/s a GPU.
- Transformer Engine keeps the inputs of 8-bit products in 8 bits.
- "dgxc" (nvidia_dgxc_benchmarking.csv): recompute is the one of v24.11's files. 405B has 8 key heads, whatever some
  file says. Titles with "PP=41" are wrong, and rows whose tokens do not fit their sequences are marked; both are
  listed.
- "megatron-bridge": recompute is not on the page; none is assumed. Collectives of tensor parallelism run in pieces
  beside products (`tp_comm_overlap` of its performance recipes). "FP8" is current scaling, "FP8-MX" is MXFP8.
  Tokens are sent to experts as its recipes say (`_dispatcher`); experts were forced to be balanced. DeepSeek-V3 is
  without multi-token prediction unless its name says so.
- "nemo-2024": as above; Nemotron-8B and -22B are GPTs with squared ReLU of 32 x 4096 and 40 x 6144 and a vocabulary
  of 256,000 (from general knowledge). Long contexts give TFLOP/s without a formula.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phaze.hardware import Cluster
from published.rows import (
    Row,
    built_row,
    even_stages,
    filled_stages,
    lines_of,
    nodes,
    quantity,
    schedule_of,
    unscored,
    whole,
)

__all__ = ["read_bridge", "read_dgxc", "read_megatron_lm_h100", "read_moe_zoo", "read_nemo"]

MEGATRON_CORE = {
    "accumulates_in_products": True,
    "fuses_update": True,
    "overlaps_softmax": True,
    "fusion": "chains+gates",
    "keeps_narrow_inputs": True,
}
"""What Megatron-Core with Transformer Engine, whose attention is cuDNN's, does otherwise than Megatron-LM of 2021."""

_LINKS = {
    "h100": (8, 450e9, 50e9),
    "h200": (8, 450e9, 50e9),
    "b200": (8, 900e9, 50e9),
    "b300": (8, 900e9, 100e9),
    "gb200": (64, 900e9, 50e9),
    "gb300": (64, 900e9, 100e9),
}
"""Devices that NVLink joins, its bytes per second and those of a device's adapter."""


def _cluster(chip: str, devices: int) -> Cluster:
    size, link, adapter = _LINKS[chip]
    return nodes(chip, devices, (min(size, devices), link, 1e-6), outer=(adapter, 5e-6))


def _chip(text: str) -> str:
    """The chip that a column such as "DGX-GB200" or "H100 (DGX)" names."""
    found = re.search(r"\b(GB300|GB200|B300|B200|H200|H100)\b", text)
    if found is None:
        raise ValueError(f"chip is {text!r}")
    return found[1].lower()


_PRECISIONS = {
    "BF16": "bf16",
    "FP8": "fp8-current",
    "FP8-CS": "fp8-current",
    "FP8-DS": "fp8-delayed",
    "FP8-MX": "mxfp8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
}


def _precision(text: str) -> str:
    """The precision that a column names; of "FP8-MX / subchannel" the first."""
    word = text.split(" ")[0].rstrip("?").upper()
    if word not in _PRECISIONS:
        raise ValueError(f"precision is {text!r}")
    return _PRECISIONS[word]


def _stages(layers: int, stages: int) -> tuple[int, ...]:
    """Equal numbers of blocks, or where that cannot be of blocks, embedding and head."""
    return even_stages(layers, stages) if layers % stages == 0 else tuple(filled_stages(layers + 2, stages))


def _row(dataset: str, name: str, values: Mapping[str, str], model: Any, layers: int, **facts: Any) -> Row:
    """A row of a table with the columns tp, pp, cp, vp, ep, gpus, mbs, gbs, seq and precision."""
    tp, pp, cp, ep = (whole(values, key, 1) for key in ("tp", "pp", "cp", "ep"))
    chunks = 1 if pp == 1 else whole(values, "vp", 1)
    devices, size, batch, length = (whole(values, key) for key in ("gpus", "mbs", "gbs", "seq"))
    dp = devices // (tp * pp * cp)
    precision, chip = _precision(values["precision"]), _chip(facts.pop("chip"))
    if "recompute" not in facts:
        facts["memory_unknown"] = "recompute is not stated"
    zero = 3 if values["fsdp"] not in ("", "0", "1", "/") else 1
    strategy: dict[str, Any] = {
        "dp": dp,
        "cp": cp,
        "ep": ep,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": size,
        "zero": zero if dp * cp > 1 else 0,
        "recompute": facts.pop("recompute", "none"),
        "stages": _stages(layers, pp * chunks),
        **schedule_of(pp, chunks),
        **({"sequence_parallel": True} if tp > 1 else {}),
        **_whole_experts(tp, dp * cp, ep),
    }
    return Row(
        dataset=dataset,
        name=name,
        model=model,
        sequence_length=length,
        cluster=_cluster(chip, devices),
        global_batch_size=batch,
        strategy=strategy,
        recipe=f"{precision}-adam-bf16-gradients",
        **{"stack": MEGATRON_CORE, "split": precision, "group": (str(model), chip, devices, batch, length), **facts},
    )


def _whole_experts(tp: int, replicas: int, ep: int) -> dict[str, Any]:
    """Experts over more devices than copies are whole on each: Megatron's expert_tensor_parallel_size is 1 there."""
    return {"ep": ep // tp, "expert_tp": 1} if replicas % ep and ep % tp == 0 else {}


def _config(values: Mapping[str, str]) -> dict[str, Any]:
    """A model from its sizes in the table."""
    layers, hidden, wide, heads = (whole(values, key) for key in ("layers", "hidden", "ffn", "heads"))
    keys = int(values["kv_heads"].split(" ")[0])
    length, vocabulary = whole(values, "seq"), whole(values, "vocab")
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
    }
    activation = values["activation"]
    if activation == "gelu" and keys == heads:
        return dense_gpt(hidden, layers, heads, vocabulary, length)
    if activation == "swiglu":
        return {"model_type": "llama", **sizes}
    if activation == "squared-relu":
        return {"model_type": "nemotron", **sizes}
    experts = re.fullmatch(r"geglu, (\d+) experts top (\d+)", activation)
    if experts is not None:
        chosen = {"num_local_experts": int(experts[1]), "num_experts_per_tok": int(experts[2])}
        return {"model_type": "mixtral", "hidden_act": "gelu", **sizes, **chosen}
    raise ValueError(f"activation is {activation!r}")


def dense_gpt(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> dict[str, Any]:
    """GPT-3 as NeMo trains it, without dropout."""
    return {
        "model_type": "megatron-gpt",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def read_dgxc(path: Path) -> Iterator[Row]:
    """NVIDIA's benchmark pages."""
    for number, values in lines_of(path):
        degrees = f"tp {values['tp']} pp {values['pp']} cp {values['cp']} vp {values['vp']} ep {values['ep']}"
        name = f"line {number}: {values['model']}, {values['gpus']} {values['gpu']} {values['precision']}, {degrees}"
        reason = _why_not_dgxc(values)
        yield unscored("dgxc", name, reason) if reason else built_row("dgxc", name, _dgxc_row, name, values)


def _why_not_dgxc(values: Mapping[str, str]) -> str | None:
    if values["task"] == "LoRA":
        return "frozen parameters (LoRA) are not priced"
    if values["pp"] == "41":
        return "the title's PP=41 is wrong and what was meant is not known"
    if "not seq" in values["warnings"]:
        return "its tokens per second do not fit its sequence length"
    if values["stack"] in ("MaxText", "PaxML") or not values["tp"]:
        return "the page says neither degrees nor recompute"
    if values["pp"] not in ("", "1") and values["vp"].upper() == "NA":
        return "the page does not say how many chunks a stage of its pipeline has"
    if values["recompute_yaml"] == "?":
        return "recompute is not stated"
    model = values["model"].lower()
    if "nemotron-h" in model:
        return "a hybrid of Mamba and attention is no config that is read"
    if "maverick" in model:
        return "32 layers contradict the model, which has 48"
    return None


def _runs_userbuffers(values: Mapping[str, str]) -> bool:
    """Nemotron 340B on Blackwell, whose script gives userbuffers for tp 8, whatever the v24.11 files say of H100."""
    return values["model"].lower() == "nemotron4 340b" and _chip(values["gpu"]) in ("b200", "gb200")


def _dgxc_row(name: str, values: Mapping[str, str]) -> Row:
    is_deepseek = "deepseek v3" in values["model"].lower()
    model, layers = ("deepseek-v3", 61) if is_deepseek else (_config(values), whole(values, "layers"))
    split = "mixtures" if "deepseek" in str(model) or "mixtral" in str(model) else values["precision"].lower()
    recompute = {"": "none", "none": "none", "selective": "selective"}[values["recompute_yaml"]]
    in_pieces = values["tp_comm_overlap"] == "yes" or _runs_userbuffers(values)
    stack = MEGATRON_CORE | ({"pipelines_products": True} if in_pieces else {})
    facts = {"chip": values["gpu"], "recompute": recompute, "seconds": quantity(values["step_s"]), "stack": stack}
    if not values["recompute_yaml"]:
        facts["memory_unknown"] = "recompute is not stated"
    if is_deepseek:
        facts["not_fitted"] = "its script drops tokens and recomputes modules that the page does not name"
    return _row("dgxc", name, values, model, layers, split=f"{_chip(values['gpu'])} {split}", **facts)


_KIMI = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 4096,
}
"""Kimi K2, from its public config."""

_BRIDGE_MODELS: dict[str, tuple[Any, int, bool]] = {
    "LLAMA3_8B": ("llama3-8b", 32, False),
    "LLAMA3_70B": ("llama3-70b", 80, False),
    "LLAMA3.1_405B": ("llama3.1-405b", 126, False),
    "QWEN3_30B_A3B": ("qwen3-30b-a3b", 48, True),
    "QWEN3_235B_A22B": ("qwen3-235b-a22b", 94, True),
    "DEEPSEEKV3": ("deepseek-v3", 61, True),
    "GPT OSS 120B": ("gpt-oss-120b", 36, True),
    "KIMI_K2": (_KIMI, 61, True),
}
"""By the page's name: the model, its blocks, and whether it is a mixture of experts."""


_ALL_TO_ALL = {("QWEN3_235B_A22B", chip) for chip in ("b300", "b200", "h100")} | {("GPT OSS 120B", "h100")}
"""Models and chips whose recipes name no DeepEP or HybridEP: a copy of a token goes to each of its experts."""
_OVERLAPPED = ("QWEN3_235B_A22B", "h100")
"""The recipe that has had `moe_a2a_overlap` in all releases."""
_OVERLAPPING_RELEASE = "26.06"
"""From it on MXFP8 recipes of GB200, GB300 and B300 have `moe_a2a_overlap`, Kimi K2's with a microbatch of 1 only."""


def _dispatcher(values: Mapping[str, str]) -> dict[str, Any]:
    """How a recipe sends tokens to experts (scripts/performance/configs of Megatron-Bridge)."""
    key = (values["model"].upper().split(" (")[0], _chip(values["system"]))
    overlaps = values["release"] >= _OVERLAPPING_RELEASE and values["precision"] == "MXFP8"
    overlaps = overlaps and not (key[0] == "KIMI_K2" and values["mbs"] != "1")
    return {"sends_tokens_once": key not in _ALL_TO_ALL, "hides_exchanges": overlaps or key == _OVERLAPPED}


def read_bridge(path: Path) -> Iterator[Row]:
    """Megatron-Bridge's pages."""
    for number, values in lines_of(path):
        degrees = f"tp {values['tp']} pp {values['pp']} cp {values['cp']} vp {values['vp']} ep {values['ep']}"
        name = f"line {number}: {values['model']}, {values['gpus']} {values['system']} {values['precision']}, {degrees}"
        reason = _why_not_bridge(values)
        yield (
            unscored("megatron-bridge", name, reason)
            if reason
            else built_row("megatron-bridge", name, _bridge_row, name, values)
        )


def _why_not_bridge(values: Mapping[str, str]) -> str | None:
    model = values["model"].upper()
    if "LORA" in values["task"].upper():
        return "frozen parameters (LoRA) are not priced"
    if model.startswith("NEMOTRON"):
        return "a hybrid of Mamba, attention and experts is no config that is read"
    if "W/ MTP" in model:
        return "multi-token prediction beside a pipeline is not read"
    if values["packed_seq"]:
        return "packed sequences are not priced"
    return None


def _bridge_row(name: str, values: Mapping[str, str]) -> Row:
    model, layers, is_mixture = _BRIDGE_MODELS[values["model"].upper().split(" (")[0]]
    rate = quantity(values["tokens_per_s_per_gpu"])
    devices, batch, length = (whole(values, key) for key in ("gpus", "gbs", "seq"))
    chip = _chip(values["system"])
    stack = MEGATRON_CORE | ({"pipelines_products": True} if whole(values, "tp", 1) > 1 else {})
    if is_mixture:
        stack |= _dispatcher(values)
    is_regression = values["notes"] == "gpt-oss-note"
    return _row(
        "megatron-bridge",
        name,
        values,
        model,
        layers,
        chip=values["system"],
        stack=stack,
        split=f"{chip} {'mixtures' if is_mixture else 'dense'}",
        seconds=None if rate is None else batch * length / (rate * devices),
        not_fitted="the page calls its time a regression of cuDNN's" if is_regression else None,
    )


_NEMO_MODELS: dict[str, tuple[Any, int]] = {
    "GPT3-175B": (dense_gpt(12288, 96, 96, 51200, 2048), 96),
    "LLAMA2-7B": ("llama2-7b", 32),
    "LLAMA2-13B": ("llama2-13b", 40),
    "LLAMA2-70B": ("llama2-70b", 80),
    "LLAMA3-8B": ("llama3-8b", 32),
    "LLAMA3-70B": ("llama3-70b", 80),
    "Nemotron-340B": ("nemotron4-340b", 96),
}
_NEMOTRON_SIZES = {"Nemotron-8B": (32, 4096, 32), "Nemotron-22B": (40, 6144, 48)}


def _nemotron(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "nemotron",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 256_000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def read_nemo(path: Path) -> Iterator[Row]:
    """NeMo's pages of 2024."""
    for number, values in lines_of(path):
        degrees = f"tp {values['tp']} pp {values['pp']} cp {values['cp']}"
        name = f"line {number}: {values['model']} {values['task']} {values['seq']}, {values['gpus']} GPUs, {degrees}"
        if values["task"] == "LoRA":
            yield unscored("nemo-2024", name, "frozen parameters (LoRA) are not priced")
        elif values["note"].startswith("tp*pp*dp*cp"):
            yield unscored("nemo-2024", name, "its degrees are not its number of GPUs")
        elif not values["tokens_per_s_per_gpu"]:
            yield unscored("nemo-2024", name, "TFLOP/s without a formula give no time")
        else:
            yield built_row("nemo-2024", name, _nemo_row, name, values)


def _nemo_row(name: str, values: Mapping[str, str]) -> Row:
    known = values["model"]
    if known in _NEMOTRON_SIZES:
        model, layers = _nemotron(*_NEMOTRON_SIZES[known]), _NEMOTRON_SIZES[known][0]
    else:
        model, layers = _NEMO_MODELS[known]
    rate = quantity(values["tokens_per_s_per_gpu"])
    devices, batch, length = (whole(values, key) for key in ("gpus", "gbs", "seq"))
    seconds = None if rate is None else batch * length / (rate * devices)
    stack = MEGATRON_CORE | ({"pipelines_products": True} if whole(values, "tp") > 1 else {})
    return _row("nemo-2024", name, values, model, layers, chip=values["gpu"], seconds=seconds, stack=stack)


def read_moe_zoo(path: Path) -> Iterator[Row]:
    """Best practices of Megatron's mixtures of experts; "norm, act" recomputes all but products."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['model']} {values['seq']}, {values['gpus']} {values['gpu']}"
        if not values["step_s"]:
            yield unscored("moe-zoo", name, "TFLOP/s without a formula give no time")
        else:
            yield built_row("moe-zoo", name, _zoo_row, name, values)


def _zoo_row(name: str, values: Mapping[str, str]) -> Row:
    if values["model"] != "Qwen3-235B":
        raise ValueError(f"model is {values['model']!r}")
    recompute = {"": "none", "norm, act": "products"}[values["recompute"]]
    columns = {**values, "vp": values["vpp"], "fsdp": ""}
    facts = {"chip": values["gpu"], "recompute": recompute, "seconds": quantity(values["step_s"])}
    return _row("moe-zoo", name, columns, "qwen3-235b-a22b", 94, **facts)


def read_megatron_lm_h100(path: Path) -> Iterator[Row]:
    """Megatron-LM's weak scaling on H100s, which says neither microbatches nor recompute."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['params_B']}B, {values['gpus']} GPUs"
        yield unscored("megatron-lm-h100", name, "microbatch, virtual stages and recompute are not given")
