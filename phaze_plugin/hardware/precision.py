"""Precision recipes: what a parameter weighs while it is trained, in which types work is done, and graphs cast to them.

A parameter occupies parameter + gradient + master + state bytes. Mixed bf16 with Adam keeps a bf16 copy (2), an fp32
gradient (4), an fp32 master copy (4) and two fp32 moments (8): 18 bytes.

Captured models often come in float32 and train in bfloat16. `cast_graph` replaces the type of a graph's parameters by
the recipe's compute type: every float tensor of the parameters' own (most common) type changes; types that were chosen
on purpose, such as float32 logits in a bfloat16 model, stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from phaze.errors import HardwareError, UnknownNameError
from phaze.hardware.element_types import dtype_bytes, element_type
from phaze.hardware.field_checks import non_negative, positive
from phaze.ir import DType, Graph

__all__ = [
    "PrecisionRecipe",
    "cast_graph",
    "precision_recipe",
    "precision_recipe_names",
]

_TRAINABLE = (DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecipe:
    """How a model is trained, numerically.

    The compute type is that of matrix operands and activations and overrides captured float types; gradients are summed
    over devices in the reduction type. Bytes are per parameter: the copy that forward and backward read, the
    accumulated gradient, the master copy that the optimizer updates (0 when it updates the first), its own state.
    """

    name: str
    compute_dtype: str
    reduction_dtype: str
    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float
    state_bytes: float

    def __post_init__(self) -> None:
        """Check that sizes are sizes."""
        owner = f"precision recipe {self.name}"
        for field in ("compute_dtype", "reduction_dtype"):
            dtype = element_type(getattr(self, field))
            if dtype not in _TRAINABLE:
                raise HardwareError(f"{owner}: {field} is {dtype}; expected one of {', '.join(_TRAINABLE)}.")
        for field in ("parameter_bytes", "gradient_bytes"):
            positive(owner, field, getattr(self, field))
        for field in ("master_bytes", "state_bytes"):
            non_negative(owner, field, getattr(self, field))

    @property
    def reduction_bytes(self) -> int:
        """Bytes per parameter that a gradient reduction sends."""
        return dtype_bytes(self.reduction_dtype)

    @property
    def bytes_per_parameter(self) -> float:
        """Everything that one parameter occupies during training."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Master copy and state: what ZeRO-1 shards."""
        return self.master_bytes + self.state_bytes

    @property
    def update_bytes(self) -> float:
        """HBM traffic of updating one parameter.

        The gradient is read; master (or parameter) and state are read and written; a separate parameter copy is
        written from the master.
        """
        updated = self.master_bytes + self.state_bytes if self.master_bytes else self.parameter_bytes + self.state_bytes
        return self.gradient_bytes + 2 * updated + (self.parameter_bytes if self.master_bytes else 0)


def _recipes() -> dict[str, PrecisionRecipe]:
    rows = (
        # name, compute, reduction, parameter, gradient, master, state
        ("bf16-adam", "bfloat16", "float32", 2, 4, 4, 8),
        ("fp16-adam", "float16", "float32", 2, 4, 4, 8),
        ("bf16-adam-bf16-gradients", "bfloat16", "bfloat16", 2, 2, 4, 8),
        ("bf16-sgd", "bfloat16", "float32", 2, 4, 4, 0),
        ("fp32-adam", "float32", "float32", 4, 4, 0, 8),
        ("fp32-sgd", "float32", "float32", 4, 4, 0, 0),
    )
    return {
        name: PrecisionRecipe(
            name=name,
            compute_dtype=compute,
            reduction_dtype=reduction,
            parameter_bytes=parameter,
            gradient_bytes=gradient,
            master_bytes=master,
            state_bytes=state,
        )
        for name, compute, reduction, parameter, gradient, master, state in rows
    }


def precision_recipe_names() -> tuple[str, ...]:
    """Names that `precision_recipe` knows."""
    return tuple(_recipes())


def precision_recipe(name: str = "bf16-adam") -> PrecisionRecipe:
    """The recipe called ``name``; an `UnknownNameError` lists near names where there is none."""
    recipes = _recipes()
    if name not in recipes:
        raise UnknownNameError("precision recipe", name, recipes)
    return recipes[name]


def cast_graph(graph: Graph, recipe: PrecisionRecipe) -> Graph:
    """``graph`` at the recipe's compute type; itself where nothing changes."""
    sizes = Counter[DType]()
    for tensor in graph.parameters or tuple(graph.tensors.values()):
        if tensor.dtype.is_float:
            sizes[tensor.dtype] += tensor.elements
    target = element_type(recipe.compute_dtype)
    captured = sizes.most_common(1)[0][0] if sizes else target
    if captured is target:
        return graph
    tensors = {
        name: replace(tensor, dtype=target) if tensor.dtype is captured else tensor
        for name, tensor in graph.tensors.items()
    }
    return replace(graph, tensors=tensors, notes=(*graph.notes, f"{captured} priced as {target} ({recipe.name})"))
