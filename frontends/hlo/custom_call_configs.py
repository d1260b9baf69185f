"""Kernels of compilers that are matrix products or convolutions, told by the target and the configuration of the call.

cuBLAS, cuDNN, hipBLASLt and oneDNN calls carry their dimension numbers in `backend_config`; those of convolutions are
attributes of the call. Their epilogues (a bias, an activation) are left out: they are vector work on the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze.frontends.hlo.hlo_text import Instruction, Shape
from phaze.frontends.hlo.opcode_attributes import attributes_of
from phaze.frontends.stablehlo.op_rules.kernels import find_value

__all__ = ["Kernel", "configuration", "known_kernel"]

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
