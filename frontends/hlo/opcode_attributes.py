"""The attributes of HLO's instructions in the form that StableHLO's operations have them, library calls included.

Opcodes: `attributes_of` reads the attributes of each opcode.

Kernels of compilers that are matrix products or convolutions (`known_kernel`) are told by the target and the
configuration of the call. cuBLAS, cuDNN, hipBLASLt and oneDNN calls carry their dimension numbers in `backend_config`;
those of convolutions are attributes of the call. Their epilogues (a bias, an activation) are left out: they are vector
work on the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze.frontends.hlo.hlo_text import Instruction, Shape
from phaze.frontends.stablehlo.op_rules.collectives_and_custom_calls import find_value

__all__ = [
    "KNOWN_ATTRIBUTES",
    "Kernel",
    "attributes_of",
    "configuration",
    "constant_value",
    "known_kernel",
    "quoted",
    "stablehlo_name",
]

MOST_ELEMENTS = 64
"""The most elements whose contents are kept for a constant, as `mlir_reader.py` keeps them."""

_KNOWN = """
metadata sharding backend_config frontend_attributes control-predecessors channel_id use_global_device_ids
replica_groups source_target_pairs constrain_layout operand_layout_constraints to_apply calls condition body
branch_computations true_computation false_computation called_computations dimensions permutation slice padding
window dim_labels feature_group_count batch_group_count lhs_contracting_dims rhs_contracting_dims lhs_batch_dims
rhs_batch_dims operand_precision algorithm direction type index iota_dimension dynamic_slice_sizes offset_dims
collapsed_slice_dims start_index_map index_vector_dim slice_sizes operand_batching_dims start_indices_batching_dims
indices_are_sorted unique_indices update_window_dims inserted_window_dims scatter_dims_to_operand_dims
input_batching_dims scatter_indices_batching_dims is_stable custom_call_target custom_call_has_side_effect
api_version kind output_operand_aliasing split_dimension exponent_bits mantissa_bits distribution delta epsilon
feature_index fft_type fft_length left_side lower unit_diagonal transpose_a select scatter comparator k largest
lhs_ragged_dims rhs_group_dims origin statistics async_execution_thread execution_thread async_group_id schedule
cross_program_prefetch_index is_host_transfer infeed_config outfeed_config outfeed_shape dims domain entry exit
is_cross_program_prefetch ragged_dims result_accuracy literal original_value sparsity expand
"""

KNOWN_ATTRIBUTES = frozenset(_KNOWN.split())
"""The attributes that are read, or that are known to say nothing about the graph."""

_NAMES = {
    "broadcast": "broadcast_in_dim",
    "dot": "dot_general",
    "opt-barrier": "optimization_barrier",
    "erf": "erf",
    "popcnt": "popcnt",
    "log-plus-one": "log_plus_one",
    "topk": "top_k",
}
"""Opcodes that StableHLO calls differently; the others have the same names with underscores."""


def stablehlo_name(opcode: str) -> str:
    """The name of StableHLO's operation for an opcode."""
    return f"stablehlo.{_NAMES.get(opcode, opcode.replace('-', '_'))}"


def quoted(text: str) -> str:
    """The contents of a text in quotes."""
    return text.strip().strip('"')


def attributes_of(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    """The attributes of StableHLO's operation; `shapes` are those of the operands."""
    reader = _READERS.get(instruction.opcode)
    return {} if reader is None else reader(instruction, shapes)


def _broadcast(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"broadcast_dimensions": list(instruction.integers("dimensions"))}


def _transpose(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"permutation": list(instruction.integers("dimensions"))}


def _dimensions(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"dimensions": list(instruction.integers("dimensions"))}


def _dimension(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"dimension": next(iter(instruction.integers("dimensions")), 0)}


def _iota(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"iota_dimension": next(iter(instruction.integers("iota_dimension")), 0)}


def _slice(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    ranges = [
        [int(word) for word in part.split(":")]
        for part in re.findall(r"\[([\d:]+)\]", instruction.attributes.get("slice", ""))
    ]
    return {
        "start_indices": [part[0] for part in ranges],
        "limit_indices": [part[1] for part in ranges],
        "strides": [part[2] if len(part) > 2 else 1 for part in ranges],
    }


def _pad(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    """`padding=0_1x2_3_4` has low, high and perhaps interior padding of each dimension."""
    given = [
        [int(word) for word in part.split("_")] for part in instruction.attributes.get("padding", "").split("x") if part
    ]
    return {
        "edge_padding_low": [part[0] for part in given],
        "edge_padding_high": [part[1] if len(part) > 1 else 0 for part in given],
        "interior_padding": [part[2] if len(part) > 2 else 0 for part in given],
    }


def _dynamic_slice(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"slice_sizes": list(instruction.integers("dynamic_slice_sizes"))}


def _compare(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"comparison_direction": instruction.attributes.get("direction", "")}


def _dot(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    numbers = {
        "lhs_batching_dimensions": list(instruction.integers("lhs_batch_dims")),
        "rhs_batching_dimensions": list(instruction.integers("rhs_batch_dims")),
        "lhs_contracting_dimensions": list(instruction.integers("lhs_contracting_dims")),
        "rhs_contracting_dimensions": list(instruction.integers("rhs_contracting_dims")),
    }
    return {"dot_dimension_numbers": numbers}


def _ragged_dot(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    ragged = instruction.integers("lhs_ragged_dims")
    groups = instruction.integers("rhs_group_dims")
    return {**_dot(instruction, shapes), "lhs_ragged_dimensions": list(ragged), "rhs_group_dimensions": list(groups)}


def _convolution(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    """`dim_labels=b01f_01io->b01f` and `window={size=3x3 stride=2x2 ...}`."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes.get("dim_labels", ""))
    window = _window(instruction)
    text = "{}x{}->{}".format(*(f"[{', '.join(part)}]" for part in labels.groups())) if labels else ""
    attributes: dict[str, Any] = {"dimension_numbers": {"text": text}}
    for name in ("feature_group_count", "batch_group_count"):
        attributes[name] = next(iter(instruction.integers(name)), 1)
    if "lhs_dilate" in window:
        attributes["lhs_dilation"] = window["lhs_dilate"]
    if "stride" in window:
        attributes["window_strides"] = window["stride"]
    return attributes


def _window(instruction: Instruction) -> dict[str, list[int]]:
    """The fields of a window that are sizes, a number for each dimension."""
    fields = re.findall(r"(\w+)=([\d_x-]+)", instruction.attributes.get("window", ""))
    return {name: [int(part) for part in value.split("x")] for name, value in fields if "_" not in value}


def _reduce_window(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {"window_dimensions": _window(instruction).get("size", [1] * len(shapes[0].dims))}


def _gather(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    names = "offset_dims collapsed_slice_dims start_index_map operand_batching_dims start_indices_batching_dims"
    numbers: dict[str, Any] = {name: list(instruction.integers(name)) for name in names.split()}
    numbers["index_vector_dim"] = next(iter(instruction.integers("index_vector_dim")), 0)
    return {"dimension_numbers": numbers, "slice_sizes": list(instruction.integers("slice_sizes"))}


def _scatter(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    names = ("update_window_dims", "inserted_window_dims", "input_batching_dims", "scatter_indices_batching_dims")
    numbers: dict[str, Any] = {name: list(instruction.integers(name)) for name in names}
    numbers["index_vector_dim"] = next(iter(instruction.integers("index_vector_dim")), 0)
    return {"scatter_dimension_numbers": numbers}


def _collective(instruction: Instruction, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Who takes part, as XLA writes it, and along which dimension."""
    names = ("replica_groups", "source_target_pairs")
    attributes: dict[str, Any] = {
        name: instruction.attributes[name] for name in names if instruction.attributes.get(name)
    }
    dimensions = instruction.integers("dimensions") or instruction.integers("split_dimension")
    return {**attributes, "dimensions": list(dimensions)}


_READERS: dict[str, Callable[[Instruction, Sequence[Shape]], dict[str, Any]]] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reverse": _dimensions,
    "reduce": _dimensions,
    "map": _dimensions,
    "concatenate": _dimension,
    "sort": _dimension,
    "iota": _iota,
    "slice": _slice,
    "pad": _pad,
    "dynamic-slice": _dynamic_slice,
    "compare": _compare,
    "dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce-window": _reduce_window,
    "select-and-scatter": _reduce_window,
    "gather": _gather,
    "scatter": _scatter,
    "all-reduce": _collective,
    "all-gather": _collective,
    "reduce-scatter": _collective,
    "all-to-all": _collective,
    "ragged-all-to-all": _collective,
    "collective-permute": _collective,
    "collective-broadcast": _collective,
}


def constant_value(instruction: Instruction) -> dict[str, Any]:
    """The contents of a constant: `splat` where all elements are equal, `values` of few integers, else the `size`."""
    size = math.prod(instruction.shape.dims)
    text = instruction.argument
    if len(text) > 32 * MOST_ELEMENTS or "..." in text or instruction.shape.element.startswith("c"):
        return {"size": size, "text": hash_of(text)}
    words = re.findall(r"[^\s{},:]+", re.sub(r"\d+:", "", text)) if size > 1 else [text]
    numbers = [_number(word) for word in words]
    if not numbers or any(number is None for number in numbers):
        return {"size": size}
    if all(number == numbers[0] for number in numbers):
        return {"splat": numbers[0]}
    if size <= MOST_ELEMENTS and all(isinstance(number, int) for number in numbers):
        return {"values": [int(number) for number in numbers if number is not None]}
    return {"size": size, "text": hash_of(text)}


def hash_of(text: str) -> str:
    """A short text that tells the contents of two constants apart."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _number(word: str) -> bool | int | float | None:
    word = word.strip().strip("{}").strip()
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        return None


_PRODUCT_TARGETS = re.compile(r"^__?(cublas|cublas\$lt|hipblas|onednn|triton)\$?.*(gemm|matmul)")
_CONVOLUTION_TARGETS = {
    "__cudnn$convForward": "forward",
    "__cudnn$convBiasActivationForward": "forward",
    "__onednn$convolution": "forward",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The StableHLO operation that a kernel computes from its first operands."""

    name: str
    operand_count: int
    attributes: dict[str, Any]


def known_kernel(instruction: Instruction, target: str, shapes: Sequence[Shape]) -> Kernel | None:
    """The operation of a custom call; None where it is not known."""
    if _PRODUCT_TARGETS.match(target) and len(shapes) >= 2:
        numbers = _dot_numbers(configuration(instruction), shapes)
        return None if numbers is None else Kernel("stablehlo.dot_general", 2, {"dot_dimension_numbers": numbers})
    if target in _CONVOLUTION_TARGETS and len(shapes) >= 2:
        return Kernel("stablehlo.convolution", 2, attributes_of(replace(instruction, opcode="convolution"), shapes))
    return None


def configuration(instruction: Instruction) -> Mapping[str, Any]:
    """The configuration of a call: JSON, plain or as a quoted text."""
    text = instruction.attributes.get("backend_config", "")
    if text.startswith('"'):
        text = text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    try:
        config = json.loads(text)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _dot_numbers(config: Mapping[str, Any], shapes: Sequence[Shape]) -> dict[str, list[int]] | None:
    """The dimension numbers in a configuration, wherever it nests them; those of a plain product where it has none."""
    found = find_value(config, "dot_dimension_numbers")
    if not isinstance(found, Mapping):
        if len(shapes[0].dims) != 2 or len(shapes[1].dims) != 2 or shapes[0].dims[1] != shapes[1].dims[0]:
            return None
        found = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    names = {
        "lhs_batching_dimensions": ("lhs_batch_dimensions", "lhs_batching_dimensions"),
        "rhs_batching_dimensions": ("rhs_batch_dimensions", "rhs_batching_dimensions"),
        "lhs_contracting_dimensions": ("lhs_contracting_dimensions",),
        "rhs_contracting_dimensions": ("rhs_contracting_dimensions",),
    }
    return {
        name: [int(dim) for spelling in spellings for dim in found.get(spelling, ())]
        for name, spellings in names.items()
    }
