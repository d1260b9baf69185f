"""What the header and the entry of an HLO module say of it as a whole: donated arguments, devices, partitioning."""

from __future__ import annotations

import itertools
import math
import re

from phaze.frontends.hlo.hlo_text import HloModule, Shape, split_list

__all__ = ["aliases_of", "is_partitioned", "partition_count", "replica_count"]

_SHARDING_TARGETS = re.compile(r"xla\.sdy\.|SPMDFullToShardShape|SPMDShardToFullShape")
"""Marks of annotations that the partitioner has yet to carry out."""


def _count(module: HloModule, name: str) -> int:
    given = module.attributes.get(name, "1")
    return int(given) if given.isdigit() and int(given) > 0 else 1


def replica_count(module: HloModule) -> int:
    """How many replicas of the program run, each with its own part of the batch."""
    return _count(module, "replica_count")


def partition_count(module: HloModule) -> int:
    """For how many devices a module is: as its header says, or the shardings of parameters (protos keep no header)."""
    given = _count(module, "num_partitions")
    if given > 1:
        return given
    for parameter in module.entry.parameters:
        tiles = re.search(r"devices=\[([\d,]+)\]", parameter.attributes.get("sharding", ""))
        if tiles is not None:
            return max(1, math.prod(int(size) for size in tiles[1].split(",") if size))
    return 1


def is_partitioned(module: HloModule) -> bool:
    """Whether a module for several devices has the shapes of one: no instruction is left that is to be partitioned.

    One that is scheduled was compiled, whatever its instructions still say.
    """
    if partition_count(module) == 1:
        return False
    if module.attributes.get("is_scheduled") == "true":
        return True
    entry = module.entry
    return not any(
        "sharding" in instruction.attributes or _SHARDING_TARGETS.search(str(instruction.attributes))
        for computation in module.computations.values()
        for instruction in computation.instructions
        # Copies of parameters keep their sharding to the end.
        if instruction.opcode not in ("parameter", "copy") and instruction.name != entry.root
    )


def aliases_of(module: HloModule) -> list[list[int]]:
    """Pairs of an argument and the result that is written over it, both as numbers among all arrays."""
    entry = module.entry
    starts = list(itertools.accumulate((len(p.shape.leaves) for p in entry.parameters), initial=0))
    shapes = {instruction.name: instruction.shape for instruction in entry.instructions}
    pairs: list[list[int]] = []
    for part in split_list(module.attributes.get("input_output_alias", "")[1:-1]):
        match = re.fullmatch(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}.*", part)
        if match is None or int(match[2]) >= len(entry.parameters):
            continue
        result = _leaf_number(shapes[entry.root], match[1])
        argument = _leaf_number(entry.parameters[int(match[2])].shape, match[3])
        if result is not None and argument is not None:
            pairs.append([starts[int(match[2])] + argument, result])
    return pairs


def _leaf_number(shape: Shape, path: str) -> int | None:
    """The number of an array among the arrays of a shape, by the indices that lead to it."""
    number = 0
    for word in path.replace(",", " ").split():
        if shape.parts is None or int(word) >= len(shape.parts):
            return None
        number += sum(len(part.leaves) for part in shape.parts[: int(word)])
        shape = shape.parts[int(word)]
    return number if shape.parts is None else None
