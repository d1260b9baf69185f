"""Estimate the flops of a module's products without running it, to tell a model from its helper functions.

Calls are followed, a loop counts as often as the compiler says, else once, and of a branch its longest side counts.
"""

from __future__ import annotations

import math
import re
from functools import partial

from phaze.frontends.stablehlo.module import Module, Operation, Region, TensorType

__all__ = ["product_flops"]

MOST_NESTED = 100
"""How deep calls are followed: deeper ones are damaged modules, which call themselves."""

_KERNEL_LAYOUT = re.compile(r"\]x\[([\w, ?]*)\]")


def product_flops(module: Module) -> float:
    """Twice the multiplications of all products and convolutions that the entry reaches; 0 where there is no entry."""
    entry = module.functions.get(module.entry)
    if entry is None and module.functions:
        return max(_Counter(module).region(function.body, 0) for function in module.functions.values())
    return 0.0 if entry is None else _Counter(module).region(entry.body, 0)


class _Counter:
    """Counts regions; a function that is called many times is counted once and remembered."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.types: dict[int, TensorType] = {}
        self.known: dict[str, float] = {}

    def region(self, region: Region, depth: int) -> float:
        self.types.update(zip(region.arguments, region.types, strict=False))
        total = 0.0
        for operation in region.operations:
            self.types.update(zip(operation.results, operation.types, strict=False))
            total += self._operation(operation, depth)
        return total

    def _operation(self, operation: Operation, depth: int) -> float:
        name = operation.short_name
        if name in ("dot_general", "dot", "convolution"):
            return self._product(operation)
        callee = operation.attributes.get("callee")
        if isinstance(callee, str) and callee in self.module.functions and depth < MOST_NESTED:
            if callee not in self.known:
                self.known[callee] = 0.0  # a function that calls itself adds nothing more
                self.known[callee] = self.region(self.module.functions[callee].body, depth + 1)
            return self.known[callee]
        counts = list(map(partial(self.region, depth=depth + 1), operation.regions)) if depth < MOST_NESTED else []
        if name in ("case", "if"):
            return max(counts, default=0.0)
        trips = operation.attributes.get("trips")
        return sum(counts) * (trips if isinstance(trips, int) else 1)

    def _product(self, operation: Operation) -> float:
        sides = [self.types.get(number) for number in operation.operands[:2]]
        if len(sides) < 2 or sides[0] is None or sides[1] is None or not operation.types:
            return 0.0
        left, right = sides[0].shape, sides[1].shape
        result = math.prod(operation.types[0].shape)
        if operation.short_name == "convolution":
            layout = _KERNEL_LAYOUT.search(str(operation.attributes.get("dimension_numbers")))
            words = [word.strip() for word in layout[1].split(",")] if layout else []
            outputs = right[words.index("o")] if "o" in words and len(words) == len(right) else 1
            return 2.0 * result * math.prod(right) / max(1, outputs)
        numbers = operation.attributes.get("dot_dimension_numbers")
        given = numbers.get("lhs_contracting_dimensions") if isinstance(numbers, dict) else None
        dims = given if isinstance(given, list) else [len(left) - 1] if operation.short_name == "dot" else []
        return 2.0 * result * math.prod(left[dim] for dim in dims if isinstance(dim, int) and 0 <= dim < len(left))
