"""Collectives in the text of a compiled module, by mesh axis, with the trips of the loops that they are in.

An all-reduce counts twice (a reduce-scatter and an all-gather), others once, tensors of less than a KiB not at all.
"""

import re
from collections.abc import Mapping

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
WEIGHTS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}
SIZES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s64": 8}
LEAST_BYTES = 1024


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            found[name] = []
        elif name and line.startswith("  "):
            found[name].append(line.strip())
    return found


def axis_traffic(text: str, mesh: Mapping[str, int], shares: tuple[float, ...] = ()) -> dict[str, float]:
    """Bytes by axis of a module for devices numbered along the axes, last fastest; several are named together.

    `shares` says how often a branch is taken, by how deep conditionals lie in each other.
    """
    inside = computations(text)
    totals = dict.fromkeys(mesh, 0.0)

    def walk(name: str, times: float, depth: int) -> None:
        for line in inside.get(name, ()):
            for kind in KINDS:
                if re.search(r"[})\]] " + kind + r"(?:-start)?\(", line):
                    axis = axis_of(line, mesh)
                    if axis is None:
                        continue
                    count = int(np.prod([mesh[name] for name in axis.split(" ")]))
                    for size in sizes(line, kind, count):
                        totals[axis] = totals.get(axis, 0.0) + times * WEIGHTS[kind] * size * (size >= LEAST_BYTES)
            loop = re.search(r"while\(.*body=%?([\w.\-]+)", line)
            if loop:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert trips, line
                walk(loop[1], times * int(trips[1]), depth)
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            if branches:
                for branch in branches[1].split(","):
                    walk(branch.strip().removeprefix("%"), times * shares[depth], depth + 1)
            called = re.search(r" call\(.*to_apply=%?([\w.\-]+)", line)
            if called:
                walk(called[1], times, depth)

    walk("ENTRY", 1.0, 0)
    return totals


def sizes(line: str, kind: str, group: int) -> list[int]:
    """Bytes of the whole tensors that a collective works on."""
    left = line.split(f" {kind}")[0].split("=", 1)[1]
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", left)
    found = [SIZES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n] or [1])) for dtype, dims in shapes]
    if kind == "all-to-all":
        return [sum(found)]
    return [size * group for size in found] if kind == "reduce-scatter" else found


def axis_of(line: str, mesh: Mapping[str, int]) -> str | None:
    """The axes along which the devices of a collective differ; None where it is of one device."""
    numbers = np.arange(int(np.prod(list(mesh.values())))).reshape(tuple(mesh.values()))
    group = first_group(line)
    at = [np.argwhere(numbers == device)[0] for device in group]
    differing = [name for index, name in enumerate(mesh) if len({int(one[index]) for one in at}) > 1]
    return " ".join(differing) or None


def first_group(line: str) -> list[int]:
    """The devices of one group of a collective, in any of the forms that XLA writes."""
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line)
    if pairs:
        return [int(pairs[1]), int(pairs[2])]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return [int(one) for one in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, reshaped = ([int(n) for n in one.split(",")] for one in (iota[1], iota[2]))
        ids = np.arange(int(np.prod(reshaped))).reshape(reshaped)
        if iota[3]:
            ids = ids.transpose([int(n) for n in iota[3].split(",")])
        return [int(n) for n in ids.reshape(shape)[0]]
    named = re.search(r"groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", line)
    assert named, line
    shape = [int(one.split("=")[1]) for one in named[1].split(",")]
    ids = np.arange(int(np.prod(shape)))
    if named[3]:
        ids = ids.reshape([int(n) for n in named[2].split(",")]).transpose([int(n) for n in named[3].split(",")])
    names = [one.split("=")[0].strip("' ") for one in named[1].split(",")]
    axes = [names.index(one.strip("' ")) for one in named[4].split(",")]
    ids = ids.reshape(shape)
    index = tuple(slice(None) if axis in axes else 0 for axis in range(len(shape)))
    return [int(n) for n in ids[index].reshape(-1)]
