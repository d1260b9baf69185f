"""Published rows prepared and predicted: each model is imported once, and each of its slicings is priced once.

A row is predicted by a prepared run (`phaze.calibration_fitting`), which takes as long as `phaze.evaluate` says where
ops run one after the other; `tests/calibration_fitting` compares both.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from published import Row

from phaze.calibration_fitting import PreparedLayers, PreparedRun, Run, prepare_run
from phaze.calibration_fitting.run_prediction import SHOWN_BLOCKS
from phaze.cost import IDEAL, Calibration, Stack
from phaze.cost.calibration import fitted_families
from phaze.errors import PhazeError
from phaze.frontends.named_models import NAMED_CONFIGS
from phaze.hooks import PluginManager
from phaze.ir import Graph
from phaze.model_import import import_with_plugins

__all__ = [
    "Scored",
    "Scorer",
    "constant_errors",
    "distinct",
    "family_of",
    "mean_size",
    "rankings",
    "shipped_calibration",
    "strategy_text",
]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row, its run and the seconds that were predicted for it."""

    row: Row
    run: PreparedRun
    calibration: Calibration
    predicted_s: float
    memory_run: PreparedRun | None = None

    @property
    def needed_bytes(self) -> float:
        """What the fullest device needs, with what is known of the row's memory alone."""
        return (self.memory_run or self.run).needed_bytes

    @property
    def error(self) -> float:
        """Of the step time."""
        assert self.row.seconds is not None
        return self.predicted_s / self.row.seconds - 1

    @property
    def memory_bytes(self) -> float:
        """Of the fullest device, with what allocator and libraries hold."""
        return self.needed_bytes * (1 + self.calibration.reserve)

    @property
    def fit(self) -> str:
        """Whether the fullest device's memory suffices, as plans say it: over where its items alone are too large."""
        capacity = self.run.problem.cluster.accelerator.hbm_bytes
        if self.needed_bytes > capacity:
            return "over"
        return "marginal" if self.memory_bytes > capacity * (1 - self.calibration.margin) else "fits"

    @property
    def flops_per_chip(self) -> float:
        """Matrix flops of one step and chip, recompute not counted."""
        model, blocks = self.run.run.model, self.run.run.blocks
        assert isinstance(model, Graph)
        flops = float(sum(model.matmul_flops(phase) for phase in ("forward", "backward")))
        if blocks is not None:
            block = Counter(layer.key for layer in model.layers).most_common(1)[0][0]
            ops = next([*layer.forward, *layer.backward] for layer in model.layers if layer.key == block)
            flops += (blocks - SHOWN_BLOCKS) * sum(op.matmul_flops for op in ops)
        sequences = self.row.global_batch_size / model.micro_batch_size
        return flops * sequences / self.run.problem.cluster.device_count


def family_of(chip: str) -> str | None:
    """The family of chips that share a calibration with this one; None where it has none."""
    return next((name for name, family in fitted_families().items() if chip in family["chips"]), None)


def shipped_calibration(row: Row) -> Calibration:
    """The calibration that is shipped for the row's chip, on the row's own stack; ideal where there is none.

    A part of the same name with other memory is priced with its name's calibration.
    """
    family = family_of(row.chip)
    if family is None:
        return IDEAL
    shipped = fitted_families()[family]
    stack = replace(Stack(**shipped["stack"]), **row.stack)
    return Calibration(name=shipped["name"], **shipped["terms"], stack=stack)


_UNIFORM = ("megatron-gpt", "llama", "nemotron", "mixtral", "qwen3_moe")
"""Families whose blocks are all equal."""


def shallow(model: Any) -> tuple[Any, int | None]:
    """A model of equal blocks with as many as a prepared run needs to see, and its number of blocks."""
    config = NAMED_CONFIGS.get(model, {}) if isinstance(model, str) else model
    key = next((name for name in ("num_layers", "num_hidden_layers") if name in config), None)
    if key is None or config.get("model_type") not in _UNIFORM or config[key] <= SHOWN_BLOCKS:
        return model, None
    return {**config, key: SHOWN_BLOCKS}, int(config[key])


@dataclass(frozen=True, slots=True)
class Scorer:
    """Rows as prepared runs; what was imported and sliced serves later rows again."""

    plugins: PluginManager = field(default_factory=PluginManager.load)
    known: PreparedLayers = field(default_factory=PreparedLayers)
    graphs: dict[tuple[str, int | None], Graph] = field(default_factory=dict)

    def graph(self, row: Row) -> tuple[Graph, int | None]:
        """The row's model, imported once, and how many blocks it has where the graph shows only some of them."""
        model, blocks = shallow(row.model)
        key = (str(model), row.sequence_length)
        if key not in self.graphs:
            options = {} if row.sequence_length is None else {"sequence_length": row.sequence_length}
            self.graphs[key] = import_with_plugins(self.plugins, model, None, frontend=None, options=options)
        return self.graphs[key], blocks

    def prepare(self, row: Row, stack: Stack, weight: float = 1.0) -> PreparedRun | str:
        """The row as a prepared run on a stack that has the row's own facts, or why that cannot be."""
        assert row.cluster is not None
        try:
            model, blocks = self.graph(row)
            run = Run(
                name=f"{row.dataset} {row.name}",
                model=model,
                blocks=blocks,
                cluster=row.cluster,
                global_batch_size=row.global_batch_size,
                strategy={key: value for key, value in row.strategy.items() if value is not None},
                seconds=row.seconds or 1.0,
                precision=row.recipe,
                stack=replace(stack, **row.stack),
                attention=row.attention,
                weight=weight,
            )
            return prepare_run(run, stack, self.plugins, self.known)
        except PhazeError as error:
            return f"refused: {error}"

    def score(self, row: Row, calibration: Calibration) -> Scored | str:
        """The row predicted under a calibration, or the reason why it is not."""
        if row.reason is not None:
            return row.reason
        run = self.prepare(row, calibration.stack)
        if isinstance(run, str):
            return run
        seconds = float(run.seconds([replace(calibration, stack=run.stack)])[0])
        memory_run: PreparedRun | str | None = None
        if row.memory_stack:
            memory_run = self.prepare(replace(row, stack={**row.stack, **row.memory_stack}), calibration.stack)
            if isinstance(memory_run, str):
                return memory_run
        return Scored(row=row, run=run, calibration=calibration, predicted_s=seconds, memory_run=memory_run)


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Rows with a time; one that repeats another in everything, time included, counts once."""
    return list({(*row.question, row.seconds): row for row in rows if row.reason is None and row.seconds}.values())


def mean_size(errors: Sequence[float]) -> float:
    """The mean of the errors' sizes."""
    return statistics.mean(abs(error) for error in errors)


def constant_errors(scored: Sequence[Scored]) -> list[float]:
    """Errors of a single rate per chip, the best of the other rows for each."""
    rates = [one.flops_per_chip / float(one.row.seconds or 1) for one in scored]
    errors = []
    for index, rate in enumerate(rates):
        others = sorted(rates[:index] + rates[index + 1 :] or rates)
        # Of many candidates every twentieth is tried: errors change little between neighbours.
        tried = others[:: max(1, len(others) // 20)]
        best = min(tried, key=lambda tried_rate: sum(abs(other / tried_rate - 1) for other in others))
        errors.append(rate / best - 1)
    return errors


def strategy_text(row: Row) -> str:
    """What tells strategies of a group apart."""
    keys = ("dp", "shard", "cp", "ep", "tp", "pp", "micro_batch_size", "zero", "chunks", "recompute")
    return str([row.strategy.get(key) for key in keys])


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """A group of strategies for the same question: pairs in the measured order, and what the predicted best loses."""

    group: tuple[object, ...]
    strategies: int
    pairs: int
    agreed: int
    regret: float


def rankings(scored: Iterable[Scored], least: int = 3) -> list[Ranking]:
    """Every group with at least so many strategies."""
    groups: dict[tuple[object, ...], dict[str, list[Scored]]] = {}
    for one in scored:
        if one.row.group is not None and one.row.seconds:
            groups.setdefault(one.row.group_key, {}).setdefault(strategy_text(one.row), []).append(one)
    found = []
    for group, strategies in groups.items():
        if len(strategies) < least:
            continue
        points = [
            (statistics.mean(float(one.row.seconds or 0) for one in same), same[0].predicted_s)
            for same in strategies.values()
        ]
        unequal = [pair for pair in combinations(points, 2) if pair[0][0] != pair[1][0]]
        agreed = sum((first[0] - second[0]) * (first[1] - second[1]) > 0 for first, second in unequal)
        regret = min(points, key=lambda point: point[1])[0] / min(point[0] for point in points) - 1
        found.append(Ranking(group=group, strategies=len(points), pairs=len(unequal), agreed=agreed, regret=regret))
    return found
