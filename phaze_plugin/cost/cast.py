"""A graph at another precision: the type of its parameters is replaced by the recipe's compute type.

Captured models often come in float32 and train in bfloat16. Every float tensor of the parameters' own (most common)
type changes; types that were chosen on purpose, such as float32 logits in a bfloat16 model, stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from phaze.hardware import PrecisionRecipe
from phaze.hardware.dtypes import element_type
from phaze.ir import DType, Graph

__all__ = ["cast_graph"]


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
