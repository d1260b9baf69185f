"""The price of work (seconds, bytes, energy, what binds) on every accelerator of an array, in one call.

A price depends on few of an accelerator's fields (that of a vector op not on its arrays), and its terms on fewer:
products on (rows, cols, cores), tilings on the size of a memory. Each is evaluated once per distinct value inside the
call and then gathered (`distinct_rows`), so that tens of thousands of accelerators cost little more than a thousand.
Works of one kind are evaluated together, as many as fit the processor's cache (`_LARGEST_BLOCK`): on one accelerator
all of them, on thousands one after the other. Nothing is kept between calls, except in a `PriceTable` that the caller
owns.

    core:    tensor time on one array, vector time on one unit, traffic with 1/cores of the buffer
    spread:  tensor time on all arrays, vector time on all units, traffic with the whole buffer
    seconds = max(tensor / matrix, vector / vector, traffic / (bandwidth * memory)) + overhead      (calibration)

A stack that does not hide traffic behind matrix products adds it to their time. Products that are not aligned as it
needs run at `UNALIGNED_SHARE` of their rate.

Where a calibration has the chip's measured product kernels, they take the place of the tensor time, own traffic
included (`phaze.cost.measured_kernels`). They occupy the whole chip: on one core they take as many times longer as
there are cores. Products inside of fused attention stay on the arrays, at the share of their rate that such kernels
reach.

Energy is that of the off-chip traffic, of the traffic between buffer and core (the same tilings, fitted into the core's
private L2), and of what the arrays draw from L2: each operand element feeds a whole row or column at once.

On one core a larger number of cores means a smaller share of the buffer, and so possibly more traffic: the law that
more cores never cost time is one of spread prices, and of core prices at an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phaze.cost.calibration import IDEAL, Calibration
from phaze.cost.estimate import BINDINGS, Binding, CoreKind, Estimate, stack_estimates
from phaze.cost.measured_kernels import CANDIDATES, kernel_seconds
from phaze.cost.off_chip_traffic import ProductTiling, product_traffic_bytes
from phaze.cost.operator_work import Product, Work
from phaze.cost.systolic_cycles import ArrayGrid, array_grid, product_cycles
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.accelerator import EnergyModel, energy_model
from phaze.hardware.precision import dtype_bytes

__all__ = [
    "PriceTable",
    "PriceTables",
    "distinct_accelerators",
    "distinct_rows",
    "price_works",
]

_Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]
_CODE = {binding: np.uint8(code) for code, binding in enumerate(BINDINGS)}
_TENSOR_COLUMNS = ("tensor_cores", "tensor_rows", "tensor_cols")
_VECTOR_COLUMNS = ("vector_cores", "vector_lanes")
_SHARED_COLUMNS = ("buffer_bytes", "hbm_bandwidth_bytes_per_s", "clock_hz")
_RELEVANT = {
    CoreKind.TENSOR: (*_TENSOR_COLUMNS, *_SHARED_COLUMNS),
    CoreKind.VECTOR: (*_VECTOR_COLUMNS, *_SHARED_COLUMNS),
    CoreKind.BOTH: (*_TENSOR_COLUMNS, *_VECTOR_COLUMNS, *_SHARED_COLUMNS),
}
_VECTOR_OPERATION_L2_BYTES = 12.0
"""What one lane operation moves between L2 and lanes: two fp32 operands read and one written."""
_LARGEST_BLOCK = 2**18
"""Numbers of works times candidates that are evaluated at once: 2 MB an array, which stays in a processor's cache."""
_BLOCK_COUNTS = 50
"""About how many block counts the tilings of a product try for each size of a memory."""
_SINGLE_BYTES = 4
"""Of float32. Only narrower types run on the units that need aligned sides."""


def price_works(
    works: Sequence[Work],
    accelerators: AcceleratorArray | Accelerator,
    *,
    calibration: Calibration = IDEAL,
    energy: EnergyModel | None = None,
) -> Estimate:
    """Prices of all ``works`` on all ``accelerators``."""
    chips = AcceleratorArray.of([accelerators]) if isinstance(accelerators, Accelerator) else accelerators
    model = energy or energy_model()
    estimate = Estimate.empty([work.kind for work in works], len(chips))
    if not len(chips):
        return estimate
    alone = _chip_terms(chips, calibration, model) if len(chips) == 1 else None
    for kind, rows in _rows_by_kind(estimate.kinds).items():
        if alone is not None:
            _price_rows(works, rows, alone, _FIRST, estimate)
        else:
            representatives, sources = distinct_accelerators(kind, chips)
            terms = _chip_terms(chips.take(representatives), calibration, model)
            _price_rows(works, rows, terms, sources, estimate)
    return estimate


_FIRST: _Indices = np.zeros(1, np.int64)
"""The only accelerator of an array of one."""


def _rows_by_kind(kinds: Sequence[CoreKind]) -> dict[CoreKind, list[int]]:
    """The rows of works of each kind that occupies cores."""
    rows: dict[CoreKind, list[int]] = {}
    for row, kind in enumerate(kinds):
        if kind is not CoreKind.NONE:
            rows.setdefault(kind, []).append(row)
    return rows


def _price_rows(
    works: Sequence[Work], rows: Sequence[int], terms: _ChipTerms, sources: _Indices, estimate: Estimate
) -> None:
    """Write the prices of the works at some rows, all of one kind, in blocks that fit the processor's cache."""
    together = max(1, _LARGEST_BLOCK // terms.largest)
    for start in range(0, len(rows), together):
        block = rows[start : start + together]
        priced = Estimate.empty([works[row].kind for row in block], len(terms.chips))
        _price([works[row] for row in block], terms, priced)
        priced.repeat([works[row].trips for row in block])
        priced.gather(sources, estimate, block)


class PriceTable:
    """Prices on one accelerator under one calibration, each worked out when it is first asked for.

    Whoever prices many layers, microbatch sizes or splits owns one and passes it on.
    """

    def __init__(self, accelerator: Accelerator, calibration: Calibration = IDEAL) -> None:
        self.accelerator, self.calibration = accelerator, calibration
        self.chips = AcceleratorArray.of([accelerator])
        self._terms = _chip_terms(self.chips, calibration, energy_model())
        self._rows: dict[Work, int] = {}
        self._prices = Estimate.empty([], 1)

    def prices(self, works: Sequence[Work]) -> Estimate:
        """The prices of works: equal to those of `price_works`."""
        unknown = [work for work in dict.fromkeys(works) if work not in self._rows]
        if unknown:
            self._rows |= {work: len(self._rows) + place for place, work in enumerate(unknown)}
            estimate = Estimate.empty([work.kind for work in unknown], 1)
            for rows in _rows_by_kind(estimate.kinds).values():
                _price_rows(unknown, rows, self._terms, _FIRST, estimate)
            self._prices = stack_estimates([self._prices, estimate])
        return self._prices.rows([self._rows[work] for work in works])


class PriceTables:
    """One price table for each accelerator and calibration that was asked for."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Accelerator, Calibration], PriceTable] = {}
        self._last: PriceTable | None = None

    def on(self, accelerator: Accelerator, calibration: Calibration) -> PriceTable:
        """The table of an accelerator under a calibration."""
        last = self._last  # most often the same one is asked for again, and both values are large to hash
        if last is not None and last.accelerator is accelerator and last.calibration is calibration:
            return last
        key = (accelerator, calibration)
        if key not in self._tables:
            self._tables[key] = PriceTable(accelerator, calibration)
        self._last = self._tables[key]
        return self._last


def distinct_accelerators(kind: CoreKind, chips: AcceleratorArray) -> tuple[_Indices, _Indices]:
    """The ``chips`` on which a work of this kind is evaluated, and for each chip which of those has its price."""
    return distinct_rows([*(getattr(chips, name) for name in _RELEVANT[kind]), *chips.rates.T])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ChipTerms:
    """The terms of a price that depend on the accelerators only, each once per distinct value.

    ``core_index`` and ``spread_index`` say which triple of a grid each accelerator has; ``share_index``,
    ``buffer_index`` and ``l2_index`` which of the memory sizes its share of the buffer, its buffer and its private L2
    are.
    """

    chips: AcceleratorArray
    calibration: Calibration
    energy: EnergyModel
    core_grid: ArrayGrid
    core_index: _Indices
    spread_grid: ArrayGrid
    spread_index: _Indices
    memory_sizes: _Floats
    share_index: _Indices
    buffer_index: _Indices
    l2_index: _Indices
    bandwidth: _Floats
    buffer_j_per_byte: _Floats
    tensor_l2_j_per_byte: _Floats
    vector_l2_j_per_byte: _Floats

    @property
    def largest(self) -> int:
        """Entries of the largest array that one work needs."""
        kernels = CANDIDATES * len(self.chips) if self.calibration.products else 0
        return max(len(self.chips), len(self.spread_grid.flat_rows), _BLOCK_COUNTS * len(self.memory_sizes), kernels)


def _chip_terms(chips: AcceleratorArray, calibration: Calibration, energy: EnergyModel) -> _ChipTerms:
    """The terms of these accelerators."""
    rows, cols, cores = chips.tensor_rows, chips.tensor_cols, chips.tensor_cores
    core_first, core_index = distinct_rows([rows, cols])
    spread_first, spread_index = distinct_rows([rows, cols, cores])
    tensor_l2 = chips.tensor_l2_bytes
    sizes = np.concatenate((chips.buffer_bytes // cores, chips.buffer_bytes, tensor_l2))
    size_first, memory_index = distinct_rows([sizes])
    share_index, buffer_index, l2_index = np.split(memory_index, 3)
    return _ChipTerms(
        chips=chips,
        calibration=calibration,
        energy=energy,
        core_grid=array_grid(rows[core_first], cols[core_first], np.ones(len(core_first))),
        core_index=core_index,
        spread_grid=array_grid(rows[spread_first], cols[spread_first], cores[spread_first]),
        spread_index=spread_index,
        memory_sizes=sizes[size_first].astype(np.float64),
        share_index=share_index,
        buffer_index=buffer_index,
        l2_index=l2_index,
        bandwidth=chips.hbm_bandwidth_bytes_per_s * calibration.memory,
        buffer_j_per_byte=energy.sram_j_per_byte(chips.buffer_bytes),
        tensor_l2_j_per_byte=energy.sram_j_per_byte(tensor_l2),
        vector_l2_j_per_byte=energy.sram_j_per_byte(chips.vector_l2_bytes),
    )


def _price(works: Sequence[Work], terms: _ChipTerms, estimate: Estimate) -> None:
    """Write the prices of works of one kind into the rows of ``estimate``."""
    traffic = _traffic(works, terms.memory_sizes)
    estimate.core_bytes[:] = traffic[:, terms.share_index]
    estimate.spread_bytes[:] = traffic[:, terms.buffer_index]
    kernels = _kernel_times(works, terms)
    _time(works, terms, False, kernels, estimate.core_bytes, estimate.core_s, estimate.core_binding)
    _time(works, terms, True, kernels, estimate.spread_bytes, estimate.spread_s, estimate.spread_binding)
    on_chip_j = _on_chip_energy(works, terms, traffic)
    estimate.core_energy_j[:] = estimate.core_bytes * terms.energy.hbm_j_per_byte + on_chip_j
    estimate.spread_energy_j[:] = estimate.spread_bytes * terms.energy.hbm_j_per_byte + on_chip_j


def _traffic(works: Sequence[Work], memory_sizes: _Floats) -> _Floats:
    """Off-chip bytes of each work for each size of a memory."""
    traffic = np.empty((len(works), len(memory_sizes)))
    traffic[:] = _column([work.streamed_bytes for work in works])
    products, rows = list[ProductTiling](), list[int]()
    for row, work in enumerate(works):
        for tiling in work.tilings:
            if isinstance(tiling, ProductTiling):
                products.append(tiling)
                rows.append(row)
            else:
                traffic[row] += tiling.traffic_bytes(memory_sizes)
    if products:
        np.add.at(traffic, rows, product_traffic_bytes(products, memory_sizes))
    return traffic


def _column(values: Sequence[float]) -> _Floats:
    """Numbers of works, one below the other, against which accelerators stand side by side."""
    return np.array(values, dtype=np.float64)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class _KernelTimes:
    """The works of a block that run as a library's product kernels: their rows, and seconds [row, accelerator]."""

    rows: list[int]
    seconds: _Floats

    def memory_s(self, works: Sequence[Work], moved_s: _Floats, bandwidth: _Floats) -> _Floats:
        """Seconds of traffic besides that of product kernels, which is in their own: what streams through."""
        if not self.rows:
            return moved_s
        besides = moved_s.copy()
        besides[self.rows] = _column([works[row].streamed_bytes for row in self.rows]) / bandwidth
        return besides


def _kernel_times(works: Sequence[Work], terms: _ChipTerms) -> _KernelTimes:
    """Which works of one kind run as product kernels, and how long; none where the chip's were not measured."""
    kernels, chips = terms.calibration.products, terms.chips
    rows = [row for row, work in enumerate(works) if work.is_plain_product] if kernels else []
    seconds = np.zeros((len(rows), len(chips)))
    products = [(place, works[row].products[0], works[row].tilings[0]) for place, row in enumerate(rows)]
    by_type: dict[str, list[tuple[int, Product, float]]] = {}
    for place, product, tiling in products:
        by_type.setdefault(product.dtype, []).append((place, product, tiling.compulsory_bytes))
    for dtype, members in by_type.items():
        assert kernels is not None
        sizes = [_column([getattr(product, name) for _, product, _ in members]) for name in _SIZES]
        moved = _column([size for _, _, size in members])
        share = _column([_reached_share(product, terms.calibration) for _, product, _ in members])
        pieces = _column([product.pieces for _, product, _ in members])
        taken = kernel_seconds(kernels, dtype, sizes, moved, chips, pieces)
        seconds[[place for place, _, _ in members]] = taken / share
    return _KernelTimes(rows, seconds)


def _time(
    works: Sequence[Work],
    terms: _ChipTerms,
    is_spread: bool,
    kernels: _KernelTimes,
    moved: _Floats,
    seconds: _Floats,
    binding: NDArray[np.uint8],
) -> None:
    """Write the seconds of works of one kind and what binds them into ``seconds`` and ``binding``."""
    binding[:] = _CODE[Binding.COMPUTE]
    if works[0].products:
        _tensor_time(works, terms, is_spread, set(kernels.rows), seconds, binding)
        seconds[kernels.rows] = kernels.seconds * (1 if is_spread else terms.chips.tensor_cores)
    memory_s = moved / terms.bandwidth
    np.copyto(binding, _CODE[Binding.MEMORY], where=memory_s > seconds)
    if terms.calibration.stack.hides_memory:
        np.maximum(seconds, memory_s, out=seconds)
    else:
        seconds += kernels.memory_s(works, memory_s, terms.bandwidth)
    if works[0].vector_operations:
        lanes = terms.chips.vector_lanes * (terms.chips.vector_cores if is_spread else 1)
        operations = _column([work.vector_operations for work in works])
        vector_s = np.ceil(operations / lanes) / (terms.chips.clock_hz * terms.calibration.vector)
        binding[vector_s >= seconds] = _CODE[Binding.COMPUTE]
        np.maximum(seconds, vector_s, out=seconds)
    if terms.calibration.op_overhead_s:
        np.copyto(binding, _CODE[Binding.OVERHEAD], where=seconds < terms.calibration.op_overhead_s)
        seconds += terms.calibration.op_overhead_s


UNALIGNED_SHARE = 0.33
"""Of the rate of aligned products, what a product of 16 or 8 bits reaches whose rows cannot be read 16 bytes at a time.
GPT-2 trained 25 % quicker with a vocabulary of 50,304 than with 50,257 (A. Karpathy on nanoGPT, 2023), which says 0.3
to 0.4 for its head, and vTrain's runs on A100s with heads of 50,257, 25,128 and 12,564 say the same. BigScience's with
attention heads of 108 elements are predicted 9 to 14 % too slow with it (20 to 28 % at the rate of float32)."""
_SIZES = ("batch", "m", "n", "k")


def _tensor_time(
    works: Sequence[Work],
    terms: _ChipTerms,
    is_spread: bool,
    elsewhere: Set[int],
    seconds: _Floats,
    binding: NDArray[np.uint8],
) -> None:
    """Write the seconds of all products, and whether arrays mostly fill and drain, into ``seconds`` and ``binding``.

    Rows that are priced ``elsewhere`` are left as they are.
    """
    grid, triples = (terms.spread_grid, terms.spread_index) if is_spread else (terms.core_grid, terms.core_index)
    products = [(row, p) for row, work in enumerate(works) if row not in elsewhere for p in work.products]
    if not products:
        return
    sizes = ([getattr(product, name) for _, product in products] for name in _SIZES)
    cycles = product_cycles(grid, *map(_column, sizes))
    # Cycles are added up by work, type and alignment first, since these run at different rates.
    groups: dict[tuple[int, str, float], int] = {}
    keys = [(row, product.dtype, _aligned_share(product, terms.calibration)) for row, product in products]
    group = [groups.setdefault(key, len(groups)) for key in keys]
    total, without_fill = _added(cycles.total, group, len(groups)), _added(cycles.without_fill, group, len(groups))
    rows = [row for row, _, _ in groups]
    all_total, all_without_fill = (_summed(values, rows, len(works)) for values in (total, without_fill))
    is_mostly_fill = all_total > 2 * all_without_fill
    np.copyto(binding, _CODE[Binding.FILL], where=is_mostly_fill[:, triples])
    share = terms.calibration.matrix * (terms.calibration.products.attention if terms.calibration.products else 1.0)
    for (row, dtype, aligned), group_cycles in zip(groups, total, strict=True):
        rate = terms.chips.clock_hz * terms.chips.rate(dtype)
        reached = share * terms.calibration.attention_share if works[row].is_fused_attention else share
        seconds[row] += group_cycles[triples] / (rate * reached * aligned)


def _added(values: _Floats, targets: Sequence[int], count: int) -> _Floats:
    """The rows of ``values`` added up where they have the same target."""
    return values if count == len(values) else _summed(values, targets, count)


def _summed(values: _Floats, targets: Sequence[int], count: int) -> _Floats:
    """The rows of ``values`` added up into their targets; rows that are no target are 0."""
    sums = np.zeros((count, values.shape[1]))
    np.add.at(sums, targets, values)
    return sums


def _reached_share(product: Product, calibration: Calibration) -> float:
    """Of the rate at which a library ran products of the type, the share that this product reaches."""
    return calibration.product_share(product.dtype) * _aligned_share(product, calibration)


def _aligned_share(product: Product, calibration: Calibration) -> float:
    """Of the rate of aligned products, what this one reaches: single ones by their rows, batched ones by all sides."""
    size, alignment = dtype_bytes(product.dtype), calibration.stack.alignment_bytes
    sides = (product.row,) if product.batch == 1 else (product.m, product.n, product.k)
    is_unaligned = size < _SINGLE_BYTES and any(side * size % alignment for side in sides)
    return UNALIGNED_SHARE if is_unaligned else 1.0


def _on_chip_energy(works: Sequence[Work], terms: _ChipTerms, traffic: _Floats) -> _Floats:
    """Energy of arithmetic and of on-chip bytes, [work, accelerator]."""
    arithmetic_j = [
        work.vector_operations * terms.energy.vector_operation_j
        + sum(product.macs * terms.energy.mac_energy_j(product.dtype) for product in work.products)
        for work in works
    ]
    joules: _Floats = traffic[:, terms.l2_index] * terms.buffer_j_per_byte + _column(arithmetic_j)
    if works[0].products:
        operands = _column([sum(p.macs * dtype_bytes(p.dtype) for p in work.products) for work in works])
        l2_bytes = operands / terms.core_grid.rows + operands / terms.core_grid.cols
        joules += l2_bytes[:, terms.core_index] * terms.tensor_l2_j_per_byte
    if works[0].vector_operations:
        operations = _column([work.vector_operations for work in works])
        joules += (operations * _VECTOR_OPERATION_L2_BYTES) * terms.vector_l2_j_per_byte
    return joules


_LARGEST_TABLE = 2**24
"""Entries of the table of row keys. A larger table would need more than 128 MiB; a smaller one means more sorting."""


def distinct_rows(columns: Sequence[NDArray[np.generic]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The index at which each distinct row of ``columns`` first appears, and for every row which distinct one it is.

    Columns have few different values each, so a row's key is a small integer in mixed radix, and one pass over a table
    of all keys finds the distinct ones. Where the table would be too large, keys are renumbered on the way.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        values = np.unique(column)
        if len(values) > 1:
            key = key * len(values) + np.searchsorted(values, column)
            size *= len(values)
        if size > _LARGEST_TABLE:
            values, key = np.unique(key, return_inverse=True)
            size = len(values)
    first_of_key = np.full(size, -1, dtype=np.int64)
    first_of_key[key[::-1]] = np.arange(len(key) - 1, -1, -1)
    is_used = first_of_key >= 0
    return first_of_key[is_used], (np.cumsum(is_used) - 1)[key]
