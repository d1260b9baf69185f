"""The splits of a layer as few variables and small cost tables, so that the best ones are found without a solver.

Variables
    families      a forward op together with the backward ops that follow it: by constraint 2 of `layer_sharding.py` one
                  choice of factors decides for all of them. A value is a combination of their splits that agrees on
                  factors, parameters and gradients. Backward ops that choose for themselves are families of one op.
    availability  for a tensor that several families read in one pass: the set of layouts into which it is moved. With
                  it readers that share a move need not know of each other.
    kept          whether what enters is split along the sequence, whether what leaves is, and the layouts of parameters
                  that other layers use: the least cost is found for all of their values at once.

Tables hold codes: places in a list of prices. The codes follow from rules and layouts, the prices from shapes
(`LayerTables.prices`), so that one structure serves all microbatch sizes at which layouts are the same. An entry of a
table is the sum of the prices at its codes. In microseconds the prices are those of the integer program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phaze.cost import Collective
from phaze.ir import Op, Phase, Role
from phaze.shard.elimination import EliminationPlan, Minimum, plan_elimination
from phaze.shard.layout import WHOLE, Layout, OpSplit, Ways, statistics_bytes
from phaze.shard.mesh_axes import Axis, collective_of, is_possible
from phaze.shard.sharding_problem import ShardingProblem, chooses_its_split, leaving_tensors

__all__ = ["MICROSECONDS", "PARTIAL_PENALTY", "BoundaryChoice", "LayerTables", "layer_tables"]

MICROSECONDS = 1e6
"""Microseconds in a second: solvers' tolerances are made for coefficients near 1, and ops take microseconds."""

PARTIAL_PENALTY = 1e-3
"""Microseconds charged for leaving a sum partial: between equal answers, the one that settles it at once wins."""

COLLECTIVE_PENALTY = 1e-6
"""Microseconds charged for each collective: an all-reduce takes as long as a reduce-scatter and an all-gather, and is
preferred to them. Far below what any op takes, and far above the rounding of sums."""

LARGEST_FAMILY = 256
"""The most values of a family. Those of transformers have up to 50; more make tables too large to gain anything."""

LARGEST_AVAILABILITY = 64
"""The most sets of layouts into which one tensor may be moved, for the same reason."""

FREE, FORBIDDEN, PENALTY = 0, 1, 2
"""The first places of the price list: nothing, infinity, and what leaving a sum partial costs."""

_KIND = 2**32
"""Until all prices are known, a code is a kind of price, in units of this, and a number among those of its kind."""

_MOVE, _STATISTICS, _COMPUTE = _KIND, 2 * _KIND, 3 * _KIND

_COLLECTIVES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)

Codes = NDArray[np.intp]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BoundaryChoice:
    """A kept variable: the layouts among which tensors that enter or leave, or one tied parameter, may choose together.

    `layouts` gives for each of these tensors the layout under each value.
    """

    size: int
    layouts: Mapping[str, Sequence[Layout]]


@dataclass(frozen=True, slots=True)
class _Family:
    """A forward op and the ops that follow it; a choice is the place of each op's split among its splits."""

    ops: tuple[Op, ...]
    choices: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _PriceList:
    """What the codes of a layer mean, numbered as they come up."""

    tensors: dict[str, int] = field(default_factory=dict)
    statistics: dict[tuple[str, Ways], int] = field(default_factory=dict)
    computes: dict[tuple[str, Ways], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTables:
    """The structure of one layer at one tp; see the module's docstring."""

    splits: Mapping[str, Sequence[OpSplit]]
    families: tuple[_Family, ...]
    codes: tuple[Codes, ...]
    plan: EliminationPlan
    tensors: tuple[str, ...]
    statistics: tuple[tuple[str, Ways], ...]
    computes: tuple[tuple[str, Ways], ...]

    def prices(self, problem: ShardingProblem, compute_s: Mapping[tuple[str, Ways], float]) -> FloatArray:
        """The price list of a problem with this structure; `compute_s` gives the seconds of each split's local op."""
        ops = {op.id: op for op in problem.ops}
        sizes = [float(problem.graph.tensors[name].size_bytes) for name in self.tensors]
        reduced = [float(statistics_bytes(ops[op_id], ways)) for op_id, ways in self.statistics]
        axis = problem.axis
        return np.concatenate(
            (
                [0.0, np.inf, PARTIAL_PENALTY],
                COLLECTIVE_PENALTY + MICROSECONDS * _move_seconds(axis, np.array(sizes)).ravel(),
                [MICROSECONDS * axis.seconds(Collective.ALL_REDUCE, size) for size in reduced],
                [MICROSECONDS * compute_s[key] for key in self.computes],
            )
        )

    def minimise(self, prices: FloatArray) -> Minimum:
        """The least cost in microseconds for all values of the kept variables."""
        return self.plan.minimise([prices[codes].sum(axis=0) for codes in self.codes])

    def chosen(self, minimum: Minimum, kept: Sequence[int] = ()) -> dict[str, OpSplit]:
        """The best split of every op, given the values of the kept variables."""
        values = minimum.values(kept)
        return {
            op.id: self.splits[op.id][index]
            for family, value in zip(self.families, values, strict=False)
            for op, index in zip(family.ops, family.choices[value], strict=True)
        }


def _move_seconds(axis: Axis, sizes: FloatArray) -> FloatArray:
    """Seconds of every collective on tensors of these sizes, [tensor, collective]."""
    return np.stack([axis.seconds_of_many(collective, sizes) for collective in _COLLECTIVES], axis=1)


def layer_tables(
    problem: ShardingProblem, splits: Mapping[str, Sequence[OpSplit]], kept: Sequence[BoundaryChoice] = ()
) -> LayerTables | None:
    """The variables and tables of a layer; None where they would be too many or too large to gain anything.

    The layouts of `problem` hold for boundary tensors that no kept variable decides on.
    """
    return _TableBuilder(problem, splits, kept).build()


@dataclass(frozen=True, slots=True)
class _Column:
    """What each value of a variable means for one tensor: the layouts that it is made or wanted in.

    The variable is None for what does not depend on any, which has one value.
    """

    variable: int | None
    layouts: tuple[frozenset[Layout], ...]


class _NoTablesError(Exception):
    """Raised inside the builder where a variable would have no value or too many."""


class _TableBuilder:
    """Adds one table after the other; tables of equal scope are one table with more codes to an entry."""

    def __init__(
        self, problem: ShardingProblem, splits: Mapping[str, Sequence[OpSplit]], kept: Sequence[BoundaryChoice]
    ) -> None:
        self.problem, self.splits, self.kept = problem, splits, kept
        self.graph = problem.graph
        self.price_list = _PriceList()
        self.tables: dict[tuple[int, ...], list[Codes]] = {}
        self.gradient_of_parameter = self.graph.parameter_of_gradient
        self.is_stored: dict[str, bool] = {}  # whether a tensor is a parameter, or a view of one

    def build(self) -> LayerTables | None:
        try:
            self.families = self._families()
            self.sizes = [len(family.choices) for family in self.families]
            first_kept = len(self.sizes)
            self.sizes += [choice.size for choice in self.kept]
            self.boundary = {
                name: _Column(first_kept + number, tuple(frozenset((layout,)) for layout in layouts))
                for number, choice in enumerate(self.kept)
                for name, layouts in choice.layouts.items()
            }
            self._add_ops()
            self._add_parameters()
            self._add_moves()
        except _NoTablesError:
            return None
        kept = range(first_kept, first_kept + len(self.kept))
        plan = plan_elimination(self.sizes, list(self.tables), tuple(kept))
        if plan is None:
            return None
        return self._numbered(plan)

    def _numbered(self, plan: EliminationPlan) -> LayerTables:
        """The finished tables; codes, which count each kind of price by itself so far, become places in one list."""
        moves = len(_COLLECTIVES) * len(self.price_list.tensors)
        statistics_at = PENALTY + 1 + moves
        computes_at = statistics_at + len(self.price_list.statistics)
        starts = np.array([0, PENALTY + 1, statistics_at, computes_at])
        return LayerTables(
            splits=self.splits,
            families=self.families,
            codes=tuple(
                np.stack([starts[layer // _KIND] + layer % _KIND for layer in layers])
                for layers in self.tables.values()
            ),
            plan=plan,
            tensors=tuple(self.price_list.tensors),
            statistics=tuple(self.price_list.statistics),
            computes=tuple(self.price_list.computes),
        )

    def _add(self, scope: tuple[int, ...], layer: Codes) -> None:
        """Add a layer of codes over a scope of one or two variables, which may come in any order."""
        if len(scope) == 2 and scope[0] > scope[1]:
            scope, layer = (scope[1], scope[0]), layer.T
        self.tables.setdefault(scope, []).append(layer)

    def _families(self) -> tuple[_Family, ...]:
        members: dict[str, list[Op]] = {}
        for op in self.problem.ops:
            leads = op.phase is Phase.FORWARD or chooses_its_split(op)
            members.setdefault(op.id if leads else op.gradient_of, []).append(op)
        return tuple(_Family(tuple(ops), self._choices(ops)) for ops in members.values())

    def _choices(self, ops: Sequence[Op]) -> tuple[tuple[int, ...], ...]:
        """Every combination of splits of a family's ops that agrees on factors and on the layouts of parameters."""
        leader = self.splits[ops[0].id]
        partial: list[tuple[tuple[int, ...], dict[str, Layout]]] = [((), {})]
        for op in ops:
            names = {factor.name for factor in op.rule.factors}
            parameters = [self._parameter_layouts(op, split) for split in self.splits[op.id]]
            extended = []
            for choice, layouts in partial:
                followed = leader[choice[0]].ways if choice else None
                asked = None if followed is None else tuple(pair for pair in followed if pair[0] in names)
                for index, split in enumerate(self.splits[op.id]):
                    if asked is not None and split.ways != asked:
                        continue
                    wanted = parameters[index]
                    if wanted is None or any(layouts.get(name, layout) != layout for name, layout in wanted.items()):
                        continue
                    extended.append(((*choice, index), {**layouts, **wanted}))
            partial = extended
            if not 0 < len(partial) <= LARGEST_FAMILY:
                raise _NoTablesError
        return tuple(choice for choice, _ in partial)

    def _parameter_layouts(self, op: Op, split: OpSplit) -> dict[str, Layout] | None:
        """The layouts that a split gives parameters, as operands or by their gradients; None where they contradict."""
        layouts: dict[str, Layout] = {}
        pairs = [
            (name, layout)
            for name, layout in zip(op.inputs, split.operands, strict=True)
            if self.graph.tensors[name].role is Role.PARAMETER
        ]
        pairs += [
            (self.gradient_of_parameter[name], layout)
            for name, layout in zip(op.outputs, split.results, strict=True)
            if name in self.gradient_of_parameter
        ]
        for name, layout in pairs:
            if layouts.setdefault(name, layout) != layout:
                return None
        return layouts

    def _add_ops(self) -> None:
        """Add what each op costs by itself: its local work, the reductions that belong to it, the penalty."""
        for variable, family in enumerate(self.families):
            for place, op in enumerate(family.ops):
                layers = [self._op_codes(op, split) for split in self.splits[op.id]]
                chosen = [choice[place] for choice in family.choices]
                for codes in np.array(layers).T:
                    if codes.any():
                        self._add((variable,), codes[chosen])

    def _op_codes(self, op: Op, split: OpSplit) -> list[int]:
        key = (op.id, split.ways)
        codes = [_COMPUTE + self.price_list.computes.setdefault(key, len(self.price_list.computes))]
        codes.append(PENALTY if split.results[0].is_partial else FREE)
        codes.append(
            _STATISTICS + self.price_list.statistics.setdefault(key, len(self.price_list.statistics))
            if statistics_bytes(op, split.ways)
            else FREE
        )
        for name, made, settled in zip(op.outputs, split.made, split.results, strict=True):
            codes.append(self._move_code(name, made, settled, is_settling=True))
        return codes

    def _move_code(self, name: str, before: Layout, after: Layout, *, is_settling: bool = False) -> int:
        """The code of a move. A view of a parameter stays where the parameter is: parameters are never gathered."""
        if before == after:
            return FREE
        if name not in self.is_stored:
            self.is_stored[name] = self.graph.tensors[self.graph.storage(name)].role is Role.PARAMETER
        if not is_possible(before, after) or (self.is_stored[name] and not is_settling):
            return FORBIDDEN
        collective = collective_of(before, after)
        if collective is None:
            return FREE
        number = self.price_list.tensors.setdefault(name, len(self.price_list.tensors))
        return _MOVE + len(_COLLECTIVES) * number + _COLLECTIVES.index(collective)

    def _column(self, variable: int, place: int, layouts: Sequence[Layout]) -> _Column:
        """A column of a family from the layouts that the splits of its op at `place` give."""
        choices = self.families[variable].choices
        return _Column(variable, tuple(frozenset((layouts[choice[place]],)) for choice in choices))

    def _add_parameters(self) -> None:
        """Add constraint 3 between families, and between them and the kept layout of a tied parameter."""
        users: dict[str, dict[int, _Column]] = {}
        for variable, family in enumerate(self.families):
            for place, op in enumerate(family.ops):
                given = [self._parameter_layouts(op, split) or {} for split in self.splits[op.id]]
                for name in given[0] if given else ():
                    column = self._column(variable, place, [layouts.get(name, WHOLE) for layouts in given])
                    users.setdefault(name, {}).setdefault(variable, column)
        for name, columns in users.items():
            first, *others = [*([self.boundary[name]] if name in self.boundary else []), *columns.values()]
            for other in others:
                self._add_pair(first, other, lambda left, right: [FREE if left == right else FORBIDDEN])

    def _add_moves(self) -> None:
        """Add constraints 4 and 5: what moves cost, each once for all readers of one pass."""
        makers: dict[str, _Column] = {}
        readers: dict[tuple[str, Phase], list[_Column]] = {}
        for variable, family in enumerate(self.families):
            for place, op in enumerate(family.ops):
                splits = self.splits[op.id]
                for index, name in enumerate(op.outputs):
                    makers[name] = self._column(variable, place, [split.results[index] for split in splits])
                for index, name in enumerate(op.inputs):
                    if self.graph.tensors[name].role is None:
                        column = self._column(variable, place, [split.operands[index] for split in splits])
                        readers.setdefault((name, op.phase), []).append(column)
        for name, phase in leaving_tensors(self.graph, self.problem.layer):
            readers.setdefault((name, phase), []).append(self._boundary_column(name))
        for (name, _), columns in readers.items():
            self._add_move(name, makers.get(name) or self._boundary_column(name), self._reader(columns))

    def _boundary_column(self, name: str) -> _Column:
        fixed = _Column(None, (frozenset((self.problem.boundary_layout(name),)),))
        return self.boundary.get(name, fixed)

    def _reader(self, columns: Sequence[_Column]) -> _Column:
        """All readers of a tensor in one pass as one column, through an availability where several variables read."""
        always = frozenset[Layout]().union(*(column.layouts[0] for column in columns if column.variable is None))
        wanted: dict[int, tuple[frozenset[Layout], ...]] = {}
        for column in columns:
            if column.variable is not None:
                before = wanted.get(column.variable, (always,) * len(column.layouts))
                wanted[column.variable] = tuple(map(frozenset.union, before, column.layouts))
        if not wanted:
            return _Column(None, (always,))
        if len(wanted) == 1:
            return _Column(*wanted.popitem())
        return self._availability([_Column(*item) for item in wanted.items()])

    def _availability(self, readers: Sequence[_Column]) -> _Column:
        """A new variable: the layouts into which a tensor is moved, a superset of what each reader wants."""
        available: dict[frozenset[Layout], None] = {frozenset(): None}
        for reader in readers:
            available = dict.fromkeys(
                before | wanted for before in available for wanted in _distinct(reader.layouts)[0]
            )
            if len(available) > LARGEST_AVAILABILITY:
                raise _NoTablesError
        column = _Column(len(self.sizes), tuple(available))
        self.sizes.append(len(available))
        for reader in readers:
            self._add_pair(reader, column, lambda wanted, given: [FREE if wanted <= given else FORBIDDEN])
        return column

    def _add_move(self, name: str, maker: _Column, reader: _Column) -> None:
        """Add the moves of one tensor in one pass."""

        def codes_of(before: frozenset[Layout], wanted: frozenset[Layout]) -> list[int]:
            (made,) = before
            return [self._move_code(name, made, layout) for layout in sorted(wanted, key=str)]

        if maker.variable == reader.variable and maker.variable is not None:
            self._add_single(maker.variable, list(map(codes_of, maker.layouts, reader.layouts)))
        elif maker.variable is not None and reader.variable is not None:
            self._add_pair(maker, reader, codes_of)
        elif maker.variable is not None:
            self._add_single(maker.variable, [codes_of(made, reader.layouts[0]) for made in maker.layouts])
        elif reader.variable is not None:
            self._add_single(reader.variable, [codes_of(maker.layouts[0], wanted) for wanted in reader.layouts])

    def _add_single(self, variable: int, codes: list[list[int]]) -> None:
        for layer in _filled(codes).T:
            if layer.any():
                self._add((variable,), layer)

    def _add_pair(
        self,
        left: _Column,
        right: _Column,
        codes_of: Callable[[frozenset[Layout], frozenset[Layout]], list[int]],
    ) -> None:
        """Add the codes of each pair of values of two variables, worked out once for each distinct pair of layouts."""
        assert left.variable is not None
        assert right.variable is not None
        lefts, left_index = _distinct(left.layouts)
        rights, right_index = _distinct(right.layouts)
        pairs = _filled([codes_of(first, second) for first in lefts for second in rights])
        for layer in pairs.reshape(len(lefts), len(rights), -1).transpose(2, 0, 1):
            if layer.any():
                self._add((left.variable, right.variable), layer[np.ix_(left_index, right_index)])


def _distinct(layouts: Sequence[frozenset[Layout]]) -> tuple[list[frozenset[Layout]], list[int]]:
    """The distinct entries of a column, and for each entry which of them it is."""
    numbers: dict[frozenset[Layout], int] = {}
    index = [numbers.setdefault(entry, len(numbers)) for entry in layouts]
    return list(numbers), index


def _filled(codes: Sequence[list[int]]) -> Codes:
    """Lists of codes as one array, the shorter ones filled up with what costs nothing."""
    depth = max(map(len, codes))
    return np.array([[*entry, *[FREE] * (depth - len(entry))] for entry in codes], dtype=np.intp).reshape(-1, depth)
