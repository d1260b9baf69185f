"""Spaces of accelerators to search: the paper's, a grid of one's own with limits, or one from a JSON file.

The paper's space (Wang et al., ICML 2024), all quantities powers of two: 1 to 4096 tensor cores, 1 to 4096 vector
cores, arrays of 2..256 rows and 2..256 columns, as many vector lanes as rows, and a buffer of 2 to 128 MiB; with an
area of at most tpuv4-paper's, and of at least 30 % of it unless there is a single tensor core or a single vector core.
Points inherit tpuv4-paper's clock, rates and HBM bandwidth at any HBM size. There are 29,360.

A space of one's own (`grid`, or `load` from a file) is every combination of values per field, clocks and HBM bandwidths
included, with limits on area, power, price (from prices that are given) or any function of the points. Limits are
applied in order, and an error names the one that leaves nothing. Power is what everything at once would draw
(`powers_w`): leakage, all arrays and lanes at every cycle, HBM at full bandwidth. No utilisation is assumed, so that it
compares accelerators only. Networks are searched beside a space, not in it: see `network` of `phaze.search`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from phaze.errors import FormatError, QuestionError, meant, shown
from phaze.file_access import read_document
from phaze.hardware.accelerator import (
    INTEGER_FIELDS,
    REAL_FIELDS,
    Accelerator,
    AcceleratorArray,
    area_mm2,
    areas_mm2,
    energy_model,
    largest,
)
from phaze.hardware.chip_presets import preset
from phaze.hardware.hardware_numbers import positive_integer
from phaze.json_documents import DRAFT, SchemaCheck

__all__ = ["PAPER_HBM_BYTES", "SPACE_SCHEMA", "device_prices", "grid", "load", "paper", "powers_w"]

FORMAT = "phaze-space"
VERSION = 1

MOST_POINTS = 1_000_000
"""The largest grid, before limits: some 250 bytes a point, names included, which makes a quarter of a gigabyte."""

_MIB = 2**20
_GIB = 2**30

_BASELINE = "tpuv4-paper"
"""The accelerator whose clock, rates and bandwidth points inherit, and whose area limits the paper's space."""

_LEAST_AREA_SHARE = 0.3
"""The paper leaves out accelerators with less than this share of the baseline's area, unless a kind of core is single.
"""

_TOLD_FIELDS = {"hbm_bandwidth_bytes_per_s": (1e9, "h", "g"), "clock_hz": (1e6, "c", "m")}
"""How names tell bandwidths and clocks where a space has several: the unit, and the letters around the number."""

PRICE_NAMES = ("device", "mm2", "hbm_gb_per_s")
"""What prices may be given for: a device whatever it is, a mm2 of it, a GB/s of its HBM."""

PAPER_HBM_BYTES = (32 * _GIB, 64 * _GIB, 80 * _GIB)
"""The HBM sizes that the paper's search crosses with its accelerators."""


def paper(hbm_bytes: int = PAPER_HBM_BYTES[0]) -> AcceleratorArray:
    """The paper's 29,360 accelerators with ``hbm_bytes`` of HBM, in order of their tuples.

    The tuple is (tensor cores, rows, columns, vector cores, lanes, buffer bytes); it also makes the name.
    """
    hbm_bytes = positive_integer("the paper's space", "hbm_bytes", hbm_bytes)
    cores, sides, buffers = 2 ** np.arange(13), 2 ** np.arange(1, 9), _MIB * 2 ** np.arange(1, 8)
    grid = np.meshgrid(cores, sides, sides, cores, buffers, indexing="ij")
    tensor_cores, rows, cols, vector_cores, buffer_bytes = (axis.ravel().astype(np.int64) for axis in grid)
    baseline = preset(_BASELINE).accelerator
    count = len(rows)
    points = AcceleratorArray(
        names=("unnamed",) * count,
        tensor_cores=tensor_cores,
        tensor_rows=rows,
        tensor_cols=cols,
        vector_cores=vector_cores,
        vector_lanes=rows.copy(),
        buffer_bytes=buffer_bytes,
        hbm_bytes=np.full(count, hbm_bytes, dtype=np.int64),
        hbm_bandwidth_bytes_per_s=np.full(count, baseline.hbm_bandwidth_bytes_per_s),
        clock_hz=np.full(count, baseline.clock_hz),
        rates=np.tile(AcceleratorArray.of([baseline]).rates, (count, 1)),
    )
    areas, most = areas_mm2(points), area_mm2(baseline)
    is_single = (tensor_cores == 1) | (vector_cores == 1)
    chosen = points.take(np.flatnonzero((areas <= most) & ((areas >= _LEAST_AREA_SHARE * most) | is_single)))
    return chosen.renamed(point_names(chosen))


def point_names(points: AcceleratorArray, told: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the form ``t8x128x128-v2x128-b128m``: tensor cores, vector cores, buffer in MiB.

    Where they are fields to be ``told``, HBM bandwidth in GB/s and clock in MHz follow: ``-h1200g-c1050m``.
    """
    columns = (
        points.tensor_cores,
        points.tensor_rows,
        points.tensor_cols,
        points.vector_cores,
        points.vector_lanes,
        points.buffer_bytes // _MIB,
    )
    names = tuple(
        f"t{tensor}x{rows}x{cols}-v{vector}x{lanes}-b{buffer}m"
        for tensor, rows, cols, vector, lanes, buffer in zip(*(column.tolist() for column in columns), strict=True)
    )
    for field, (unit, letter, suffix) in _TOLD_FIELDS.items():
        if field in told:
            values = (getattr(points, field) / unit).tolist()
            names = tuple(f"{name}-{letter}{value:.9g}{suffix}" for name, value in zip(names, values, strict=True))
    return names


def grid(
    *,
    tensor_cores: Iterable[int],
    tensor_rows: Iterable[int],
    tensor_cols: Iterable[int],
    vector_cores: Iterable[int],
    vector_lanes: Iterable[int] | None = None,
    buffer_mib: Iterable[int],
    hbm_bytes: int = PAPER_HBM_BYTES[0],
    clock_hz: float | Iterable[float] | None = None,
    hbm_bandwidth_bytes_per_s: float | Iterable[float] | None = None,
    min_area_mm2: float | None = None,
    max_area_mm2: float | None = None,
    max_power_w: float | None = None,
    prices: Mapping[str, float] | None = None,
    max_price: float | None = None,
    where: Callable[[AcceleratorArray], NDArray[np.bool_]] | None = None,
) -> AcceleratorArray:
    """Every combination of the values that keeps within the limits, in order of its tuple.

    Without ``vector_lanes`` a vector core has as many lanes as an array has rows. Clock and bandwidth are those of
    tpuv4-paper unless they are given. ``prices`` are your own numbers: for each device (``device``), for a mm2 of its
    area (``mm2``) and for a GB/s of its HBM (``hbm_gb_per_s``); ``max_price`` limits their sum. ``where`` is a function
    that takes all points and returns True for those to keep. Raises QuestionError for an empty field, a limit that
    leaves nothing, or too large a grid.
    """
    fields = {
        "tensor_cores": tensor_cores,
        "tensor_rows": tensor_rows,
        "tensor_cols": tensor_cols,
        "vector_cores": vector_cores,
        "vector_lanes": (0,) if vector_lanes is None else vector_lanes,
        "buffer_mib": buffer_mib,
    }
    follows = vector_lanes is None
    values = {
        name: _axis(name, given, 0 if follows and name == "vector_lanes" else 1) for name, given in fields.items()
    }
    baseline = preset(_BASELINE).accelerator
    reals = {
        "hbm_bandwidth_bytes_per_s": _real_axis("hbm_bandwidth_bytes_per_s", hbm_bandwidth_bytes_per_s, baseline),
        "clock_hz": _real_axis("clock_hz", clock_hz, baseline),
    }
    axes: dict[str, NDArray[np.generic]] = {**values, **reals}
    count = math.prod(len(axis) for axis in axes.values())
    if count > MOST_POINTS:
        sizes = " x ".join(f"{len(axis)} {name}" for name, axis in axes.items())
        raise QuestionError(
            f"the space has at least {count:,} points ({sizes}); at most {MOST_POINTS:,} fit in memory. Give fewer "
            "values, or search it in parts."
        )
    points = _combinations(axes, hbm_bytes, baseline)
    limits = {
        "min_area_mm2": min_area_mm2,
        "max_area_mm2": max_area_mm2,
        "max_power_w": max_power_w,
        "max_price": max_price,
    }
    kept = _within(points, limits, _checked_prices(prices, max_price), where)
    return kept.renamed(point_names(kept, [name for name, axis in reals.items() if len(axis) > 1]))


def _combinations(axes: Mapping[str, NDArray[np.generic]], hbm_bytes: int, baseline: Accelerator) -> AcceleratorArray:
    """Every combination of the axes' values, unnamed."""
    columns = [axis.ravel() for axis in np.meshgrid(*axes.values(), indexing="ij")]
    tensors, rows, cols, vectors, lanes, buffers, bandwidths, clocks = columns
    count = len(tensors)
    return AcceleratorArray(
        names=("unnamed",) * count,
        tensor_cores=tensors,
        tensor_rows=rows,
        tensor_cols=cols,
        vector_cores=vectors,
        vector_lanes=np.where(lanes == 0, rows, lanes),
        buffer_bytes=buffers * _MIB,
        hbm_bytes=np.full(count, hbm_bytes),
        hbm_bandwidth_bytes_per_s=bandwidths,
        clock_hz=clocks,
        rates=np.tile(AcceleratorArray.of([baseline]).rates, (count, 1)),
    )


def _axis(name: str, given: object, least: int) -> NDArray[np.int64]:
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise QuestionError(f"{name} is {shown(given)}; expected whole numbers such as (1, 2, 4).")
    values, most = list(islice(given, MOST_POINTS + 1)), _most(name)
    wrong = [
        value
        for value in values
        if type(value) is bool or not isinstance(value, Integral) or not least <= int(value) <= most
    ]
    if wrong or not values:
        what = shown(wrong[0]) if wrong else "empty"
        raise QuestionError(f"{name} is {what}; expected whole numbers from 1 to {most}, and at least one of them.")
    return np.array(sorted(set(values)), dtype=np.int64)


def _real_axis(name: str, given: object, baseline: Accelerator) -> NDArray[np.float64]:
    """The values of a clock or a bandwidth: the baseline's, one, or several."""
    if given is None:
        return np.array([getattr(baseline, name)])
    is_listed = isinstance(given, Iterable) and not isinstance(given, str)
    values = list(islice(given, MOST_POINTS + 1)) if is_listed else [given]  # type: ignore[call-overload]
    numbers = {float(value) for value in values if isinstance(value, int | float) and _is_positive(value)}
    if not values or not all(map(_is_positive, values)):
        raise QuestionError(f"{name} is {shown(given)}; expected positive numbers, and at least one of them.")
    return np.array(sorted(numbers))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _checked_prices(prices: object, max_price: object) -> dict[str, float]:
    """The user's prices; raises QuestionError for unknown ones, and for a limit without any."""
    if prices is None:
        if max_price is not None:
            raise QuestionError(f"max_price is {shown(max_price)} without prices; add prices, such as {{'mm2': 2}}.")
        return {}
    if not isinstance(prices, Mapping) or not all(
        name in PRICE_NAMES and (price == 0 or _is_positive(price)) for name, price in prices.items()
    ):
        raise QuestionError(f"prices is {shown(prices)}; expected numbers for some of {', '.join(PRICE_NAMES)}.")
    return {str(name): float(price) for name, price in prices.items()}


def device_prices(points: AcceleratorArray, prices: Mapping[str, float]) -> NDArray[np.float64]:
    """What each accelerator costs by the user's prices; memory, links and hosts are not in it."""
    return np.asarray(
        prices.get("device", 0.0)
        + prices.get("mm2", 0.0) * areas_mm2(points)
        + prices.get("hbm_gb_per_s", 0.0) * points.hbm_bandwidth_bytes_per_s / 1e9
    )


def _most(name: str) -> int:
    return largest("buffer_bytes") // _MIB if name == "buffer_mib" else largest(name)


def _within(
    points: AcceleratorArray,
    limits: Mapping[str, float | None],
    prices: Mapping[str, float],
    where: Callable[[AcceleratorArray], NDArray[np.bool_]] | None,
) -> AcceleratorArray:
    for name, limit in limits.items():
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise QuestionError(f"{name} is {shown(limit)}; expected a positive number.")
        measures = {"max_power_w": (powers_w, "W"), "max_price": (lambda chips: device_prices(chips, prices), "")}
        measure, unit = measures.get(name, (areas_mm2, "mm2"))
        sizes = measure(points)
        is_kept = sizes >= limit if name.startswith("min") else sizes <= limit
        if not is_kept.any():
            raise QuestionError(
                f"{name} is {limit:g} and leaves nothing of the space: its points lie between {sizes.min():.6g} and "
                f"{sizes.max():.6g} {unit}".rstrip()
                + ". Move the limit, or give other values."
            )
        points = points.take(np.flatnonzero(is_kept))
    if where is not None:
        is_kept = np.asarray(where(points))
        if is_kept.shape != (len(points),) or is_kept.dtype != np.bool_:
            raise QuestionError(f"where answered with {shown(is_kept)}; expected True or False for each of the points.")
        if not is_kept.any():
            raise QuestionError(f"where leaves nothing of the space: it is False for all {len(points):,} points.")
        points = points.take(np.flatnonzero(is_kept))
    return points


def powers_w(points: AcceleratorArray) -> NDArray[np.float64]:
    """Power of each accelerator with everything at work in every cycle."""
    model = energy_model()
    macs = (points.tensor_cores * points.tensor_rows * points.tensor_cols).astype(np.float64)
    lanes = (points.vector_cores * points.vector_lanes).astype(np.float64)
    busy = points.clock_hz * (macs * model.mac_energy_j("bf16") + lanes * model.vector_operation_j)
    return np.asarray(model.static_power_w(points) + busy + points.hbm_bandwidth_bytes_per_s * model.hbm_j_per_byte)


_GRID_FIELDS = ("tensor_cores", "tensor_rows", "tensor_cols", "vector_cores", "vector_lanes", "buffer_mib")
_REAL_GRID_FIELDS = ("clock_hz", "hbm_bandwidth_bytes_per_s")
_NUMBER_FIELDS = ("min_area_mm2", "max_area_mm2", "max_power_w", "max_price")


_COUNT = {"type": "integer", "minimum": 1}


def _range_schema(step: str) -> dict[str, object]:
    properties = {"from": _COUNT, "to": _COUNT, step: _COUNT}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_COUNTS = {"anyOf": [_COUNT, {"type": "array", "items": _COUNT}, _range_schema("times"), _range_schema("plus")]}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_POSITIVE_OR_NONE = {"anyOf": [_POSITIVE, {"type": "null"}]}
_POSITIVES = {"anyOf": [_POSITIVE, {"type": "array", "items": _POSITIVE}, {"type": "null"}]}
_PRICES = {
    "anyOf": [
        {"type": "object", "properties": {name: {"type": "number", "minimum": 0} for name in PRICE_NAMES}},
        {"type": "null"},
    ]
}

SPACE_SCHEMA: Mapping[str, object] = {
    "$schema": DRAFT,
    "title": "a space",
    "type": "object",
    "properties": {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        **dict.fromkeys(_GRID_FIELDS, _COUNTS),
        **dict.fromkeys(_REAL_GRID_FIELDS, _POSITIVES),
        **dict.fromkeys(_NUMBER_FIELDS, _POSITIVE_OR_NONE),
        "prices": _PRICES,
    },
    "required": ["format", "version", *(name for name in _GRID_FIELDS if name != "vector_lanes")],
    "additionalProperties": False,
}
"""What the file of a space is made of."""

_check_space = SchemaCheck(SPACE_SCHEMA)


def load(path: str | os.PathLike[str]) -> AcceleratorArray:
    """The space that a JSON file describes.

    It has the format "phaze-space", version 1, and the arguments of `grid` but for `where` and memories. Cores, sides,
    lanes and buffers are numbers, lists of numbers, or ranges such as {"from": 1, "to": 64, "times": 2} (or "plus": 8);
    clock and bandwidth are numbers or lists of them, limits single numbers, prices an object. Raises FormatError naming
    what is unknown or wrong, and as `grid` does.
    """
    return from_description(read_document(path, "a space"), os.fspath(path))


def from_description(document: object, where: str = "the space") -> AcceleratorArray:
    """The space that a document describes; see `load`."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise FormatError(f"{where} is not a space: expected an object with format {FORMAT!r} and version {VERSION}.")
    known = ("format", "version", *_GRID_FIELDS, *_REAL_GRID_FIELDS, *_NUMBER_FIELDS, "prices")
    for name in document:
        if name not in known:
            hint = meant(name, known)
            if name in ("hbm_bytes", "hbm_gib"):
                hint = " A search crosses a space with memories of its own: pass hbm_gib, or --hbm."
            raise FormatError(f"{where} has an unknown field {name!r}.{hint} Known: {', '.join(known[2:])}.")
    _check_space(document, where)
    arguments = {name: _listed(f"{where}.{name}", document[name]) for name in _GRID_FIELDS if name in document}
    others = {name: document.get(name) for name in (*_REAL_GRID_FIELDS, *_NUMBER_FIELDS, "prices")}
    return grid(**arguments, **others)  # type: ignore[arg-type]  # every argument is checked there


def _listed(where: str, value: int | list[int] | Mapping[str, int]) -> list[int]:
    """The numbers of a field that is one, a list of them, or a range."""
    if isinstance(value, Mapping):
        return list(islice(_range(where, value), MOST_POINTS + 1))
    return value if isinstance(value, list) else [value]


def _range(where: str, value: Mapping[str, int]) -> Iterator[int]:
    number, last, factor = value["from"], value["to"], value.get("times")
    if number > last or factor == 1:
        raise FormatError(f"{where} is {json.dumps(value)}; expected from <= to, and times of at least 2.")
    while number <= last:
        yield number
        number = number + value["plus"] if factor is None else number * factor


def to_description(points: AcceleratorArray) -> dict[str, object]:
    """A space as a document: the paper's by its name, another one point by point."""
    reference = paper()
    if len(points) == len(reference) and all(
        np.array_equal(getattr(points, name), getattr(reference, name))
        for name in (*INTEGER_FIELDS, *REAL_FIELDS, "rates")
        if name != "hbm_bytes"
    ):
        return {"name": "paper"}
    names = (*INTEGER_FIELDS, *REAL_FIELDS, "rates")
    return {"names": list(points.names), **{name: getattr(points, name).tolist() for name in names}}


def from_points(document: Mapping[str, object]) -> AcceleratorArray:
    """The space that `to_description` wrote."""
    if document == {"name": "paper"}:
        return paper()
    names = document.get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"the space's names are {shown(names)}; expected a list of names.")
    try:
        columns = {name: np.array(values) for name, values in document.items() if name != "names"}
    except ValueError as error:  # rows of different lengths
        raise FormatError(f"the space has a column that is no table: {error}.") from error
    return AcceleratorArray(names=tuple(names), **columns)
