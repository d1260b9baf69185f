"""Whether no strategy of a placement problem beats a time, shown a second time, for verification, by plain arithmetic.

Nothing of `phaze.place` is asked: strategies are listed and pipelines simulated by `plain_pipeline.py`, and stages are
added up by `plain_placement.py` on the lower bounds of their layers. Let m be the microbatches of a pipeline, S its
stages, and f, b, w a stage's seconds of forward, backward and (in zero-bubble schedules) weight passes. Each strategy
must pass one of these:

1. *By sums* (`_LayerSums.bound_s`). With F, B, W summed over all layers in their quickest mode, some device is busy for
   m (F+B+W) / pp. The largest over stages of a path through the pipeline is at least the mean of such paths:
   GPipe F+B + (m-1)(F+B)/S; 1F1B and zero-bubble F+B + ((m-1) B + max(m-S, 0) F)/S. Chunks of interleaved pipelines
   have n or n+1 layers, so that each begins at one of few layers: `_LayerSums.chunk_bound_s` takes the least of these.
2. *By stages* (`_StageProof.is_filled`). Stages are placed from the front in every way, each at its own price. A stage
   whose memory does not fit, or whose own paths (`_StageProof.stage_bound_s`) already take the time, is not placed.
   If the last layer is never reached, no stages of this strategy beat the time.
3. *By trying* (`_StageProof.fastest_s`). Every row of stages and recompute modes that is left is simulated.

What takes more than the effort allowed is left open, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place import PlacementProblem
from phaze.tolerances import EQUAL_RESULTS, MEMORY_MARGIN
from phaze.verify.plain_pipeline import (
    PlainStage,
    are_offered_stages,
    device_bytes,
    is_offered_device_count,
    plain_device,
    plain_downsets,
    plain_in_flight,
    plain_simulation,
    plain_stages_of,
    plain_strategies,
    without_turn,
)
from phaze.verify.plain_placement import PlainCosts

__all__ = ["PlainEffort", "PlainProof", "prove_plainly"]

_MOST_DOWNSETS = 300
"""Sets of placed layers beyond which nothing is filled or tried: stages grow with their square."""


_EACH = 4_000
"""Steps for which the stages of one strategy are tried: six layers are tried through, and a strategy of many layers
does not take the effort of all others."""


@dataclass(slots=True)
class PlainEffort:
    """How many steps are left before strategies are left open: a stage added up, or eight passes simulated.

    By default verification takes a few seconds for it, on models whose planning takes one.
    """

    left: int = 50_000

    def spend(self, steps: int = 1) -> None:
        """Raise `_EffortSpentError` where nothing is left."""
        self.left -= steps
        if self.left < 0:
            raise _EffortSpentError

    def at_most(self, steps: int) -> PlainEffort:
        """A part of what is left, taken from it."""
        part = PlainEffort(min(steps, max(self.left, 0)))
        self.left -= part.left
        return part

    def give_back(self, part: PlainEffort) -> None:
        """Add what is left of a part."""
        self.left += max(part.left, 0)


class _EffortSpentError(Exception):
    """The effort is spent; what is not shown yet is left open."""


@dataclass(slots=True)
class PlainProof:
    """How many strategies cannot take less than a time, by what shows it, and how many are left open.

    `faster` is a strategy that does take less, with its seconds: the time is no bound.
    """

    by_sums: int = 0
    by_stages: int = 0
    by_trying: int = 0
    left_open: int = 0
    faster: tuple[Parallelism, float] | None = None

    @property
    def strategies(self) -> int:
        """All strategies that were looked at."""
        return self.by_sums + self.by_stages + self.by_trying + self.left_open

    def add(self, other: PlainProof) -> None:
        """Add what was shown for another problem."""
        self.by_sums += other.by_sums
        self.by_stages += other.by_stages
        self.by_trying += other.by_trying
        self.left_open += other.left_open
        self.faster = self.faster or other.faster


def prove_plainly(
    problem: PlacementProblem, time_s: float | Callable[[Parallelism], float], effort: PlainEffort
) -> PlainProof:
    """Show for every strategy that it does not take less than a time; with an infinite time, that nothing fits.

    The time may be another one for each strategy: that at which it would have a certain value.
    """
    proof, downsets = PlainProof(), plain_downsets(problem, _MOST_DOWNSETS)
    sums: dict[int, _LayerSums] = {}
    known_s: dict[tuple[object, ...], float] = {}
    for strategy in plain_strategies(problem):
        enough_s = (time_s(strategy) if callable(time_s) else time_s) * (1 - EQUAL_RESULTS)
        layer_sums = sums.get(strategy.tp)
        if layer_sums is None:
            layer_sums = sums[strategy.tp] = _LayerSums.of(problem, strategy.tp)
        micro_batches = strategy.micro_batches_per_pipeline(problem.micro_batches)
        bound_s = layer_sums.bound_s(strategy, micro_batches)
        if strategy.chunks > 1 and len(downsets) == len(problem.graph.layers) + 1:  # a chain: stages are intervals
            bound_s = max(bound_s, layer_sums.chunk_bound_s(strategy, micro_batches))
        if bound_s >= enough_s:
            proof.by_sums += 1
            continue
        if not downsets:
            proof.left_open += 1
            continue
        shown = _StageProof.of(problem, strategy, enough_s, effort, layer_sums, downsets, known_s)
        shown.add_to(proof)
        if proof.faster is not None:
            return proof
    return proof


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSums:
    """The least seconds of every layer's passes in any recompute mode, by layer.

    `backward_s` is the part that makes gradients of inputs, `weight_s` the one of weights.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]

    @classmethod
    def of(cls, problem: PlacementProblem, tp: int) -> _LayerSums:
        """The sums at one tp."""

        keys = [layer.key for layer in problem.graph.layers]

        def least(name: str) -> tuple[float, ...]:
            return tuple(
                min(
                    float(getattr(problem.profiles[keys[layer], tp, mode], name).bound[problem.accelerator])
                    for mode in problem.choices.recompute
                )
                for layer in range(len(problem.graph.layers))
            )

        return cls(
            forward_s=least("forward_s"), backward_s=least("backward_input_s"), weight_s=least("backward_weight_s")
        )

    def before(self, layers: frozenset[int], *, splits_backward: bool) -> tuple[float, float, float]:
        """Seconds of forward, backward and weight passes of some layers; weights count as backward unless split."""
        forward_s, backward_s, weight_s = (
            math.fsum(seconds[layer] for layer in layers)
            for seconds in (self.forward_s, self.backward_s, self.weight_s)
        )
        return (forward_s, backward_s, weight_s) if splits_backward else (forward_s, backward_s + weight_s, 0.0)

    def bound_s(self, strategy: Parallelism, micro_batches: int) -> float:
        """Seconds that no stages of a strategy beat, by sums over all layers."""
        splits = strategy.schedule.splits_backward
        forward_s, backward_s, weight_s = self.before(frozenset(range(len(self.forward_s))), splits_backward=splits)
        pp, m = strategy.pp, micro_batches
        busy_s = m * (forward_s + backward_s + weight_s) / pp
        through_s = forward_s + backward_s
        if strategy.chunks == 1 and strategy.schedule is PipelineSchedule.GPIPE:
            through_s += (m - 1) * (forward_s + backward_s) / pp
        elif strategy.chunks == 1:
            most_ahead = (pp - 1) * _forwards_ahead(strategy.schedule)
            through_s += ((m - 1) * backward_s + max(m - 1 - most_ahead, 0) * forward_s) / pp
        return max(busy_s, through_s)

    def chunk_bound_s(self, strategy: Parallelism, micro_batches: int) -> float:
        """Seconds that no chunks of a chain of layers beat, each of which has n or n+1 layers.

        Of d stages, x have one layer more: before stage k there are k n + a layers, with a from max(0, x - d + k) to
        min(k, x). A device begins with the first microbatch behind the stages before its first chunk, runs all its
        chunks for all microbatches, and the last microbatch goes back through the stages before.
        """
        depth = strategy.pp * strategy.chunks
        each, more = divmod(len(self.forward_s), depth)
        through_s = [sum(seconds) for seconds in zip(self.forward_s, self.backward_s, self.weight_s, strict=True)]
        before_s = [0.0, *accumulate(through_s)]

        # In the shape of a V only the forwards before a device are certain to come before its passes.
        lead_s = [0.0, *accumulate(self.forward_s)] if strategy.schedule.is_v_shaped else before_s

        def begins(stage: int) -> range:
            return range(stage * each + max(0, more - depth + stage), stage * each + min(stage, more) + 1)

        def least_s(stage: int) -> float:
            ends = begins(stage + 1)
            lengths = [(begin, begin + size) for begin in begins(stage) for size in (each, each + 1)]
            return min(before_s[end] - before_s[begin] for begin, end in lengths if end in ends)

        ends_s = []
        for device in range(strategy.pp):
            held = plain_stages_of(strategy.schedule.value, strategy.pp, depth, device)
            busy_s = sum(least_s(stage) for stage in held)
            ends_s.append(lead_s[begins(device)[0]] + micro_batches * busy_s)
        return max(ends_s) * (1 - EQUAL_RESULTS)


def _forwards_ahead(schedule: str) -> int:
    """The forwards that a device runs before its first backward for every stage behind it, in 1F1B and its kin."""
    return 2 if schedule == PipelineSchedule.EAGER else 1


@cache
def _in_flight(schedule: str, pp: int, micro_batches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The microbatches that each chunk of each device holds at most."""
    return tuple(
        tuple(plain_in_flight(schedule, pp, micro_batches, chunks, device, chunk) for chunk in range(chunks))
        for device in range(pp)
    )


@dataclass(slots=True, kw_only=True)
class _StageProof:
    """Stages of one strategy, none of which may take a time.

    Attributes:
        enough_s: the time that is to be shown.
        downsets: the sets of layers that may be placed before a cut, smaller ones first.
        placed_s: the least seconds of the passes of each of them.
        stages: what was added up so far, by the sets before and after it: for the first recompute modes, in order.
    """

    problem: PlacementProblem
    strategy: Parallelism
    costs: PlainCosts
    schedule: str
    micro_batches: int
    enough_s: float
    effort: PlainEffort
    downsets: Sequence[frozenset[int]]
    placed_s: Sequence[tuple[float, float, float]]
    stages: dict[tuple[int, int], list[PlainStage]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        problem: PlacementProblem,
        strategy: Parallelism,
        enough_s: float,
        effort: PlainEffort,
        sums: _LayerSums,
        downsets: Sequence[frozenset[int]],
        known_s: dict[tuple[object, ...], float],
    ) -> _StageProof:
        """The proof for one strategy, of which nothing is shown yet; `known_s` are prices that other ones paid."""
        allows_mixed_tp = problem.capabilities.allows_mixed_tp and strategy.chunks == 1
        is_single = strategy.schedule is PipelineSchedule.NONE
        splits = strategy.schedule.splits_backward
        return cls(
            problem=problem,
            strategy=strategy,
            costs=PlainCosts(problem, strategy, allows_mixed_tp, uses_bounds=True, known_s=known_s),
            schedule=PipelineSchedule.ONE_F_ONE_B.value if is_single else strategy.schedule.value,
            micro_batches=strategy.micro_batches_per_pipeline(problem.micro_batches),
            enough_s=enough_s,
            effort=effort,
            downsets=downsets,
            placed_s=[sums.before(layers, splits_backward=splits) for layers in downsets],
        )

    def add_to(self, proof: PlainProof) -> None:
        """Count how the strategy is decided."""
        whole = self.effort
        try:
            if not self.is_filled():
                proof.by_stages += 1
                return
            self.effort = whole.at_most(_EACH)
            fastest_s = self.fastest_s()
        except _EffortSpentError:
            proof.left_open += 1
            return
        finally:
            if self.effort is not whole:
                whole.give_back(self.effort)
        if fastest_s is None:
            proof.by_trying += 1
        else:
            proof.faster = (self.strategy, fastest_s)

    @property
    def _depth(self) -> int:
        return self.strategy.pp * self.strategy.chunks

    def is_filled(self) -> bool:
        """Whether stages can be placed up to the last layer, each of which may be part of a quicker pipeline."""
        reached = {0}
        for position in range(self._depth):
            reached = {after for before in reached for after in self._next(position, before)}
            if not reached:
                return False
        return len(self.downsets) - 1 in reached

    def _next(self, position: int, before: int) -> Iterator[int]:
        """The sets of layers that may be placed after one more stage."""
        for after in range(before + 1, len(self.downsets)):
            if any(True for _ in self._options(position, before, after)):
                yield after

    def _options(self, position: int, before: int, after: int) -> Iterator[PlainStage]:
        """The stages between two sets of layers that fit and may be quick enough, one for every recompute mode."""
        left, is_last = self._depth - 1 - position, after == len(self.downsets) - 1
        layers = self.downsets[after] - self.downsets[before]
        is_inside = self.downsets[before] < self.downsets[after]
        if not is_inside or is_last != (left == 0) or len(self.downsets[-1]) - len(self.downsets[after]) < left:
            return
        if not self._may_be_offered(layers) or self._least_s(before, after) >= self.enough_s:
            return
        for added_up in self._added_up(before, after):
            (stage,) = without_turn(self.schedule, self.strategy.pp, [added_up], position)
            if self._fits([stage], position) and self._stage_bound_s(position, before, after, stage) < self.enough_s:
                yield stage

    def _may_be_offered(self, layers: frozenset[int]) -> bool:
        """Whether one stage alone does not contradict what is asked of all of them."""
        count, depth, body = len(self.downsets[-1]), self._depth, self.problem.graph.body
        if self.strategy.chunks > 1 and not count // depth <= len(layers) <= -(-count // depth):
            return False
        evens = self.problem.capabilities.allows_uneven_stages
        return evens or sum(body[layer] for layer in layers) * depth == sum(body)

    def _least_s(self, before: int, after: int) -> float:
        """Seconds that no stage between two sets beats: its layers alone, after the first microbatch came there."""
        stage_s = sum(self.placed_s[after]) - sum(self.placed_s[before])
        return (self.placed_s[before][0] + self.micro_batches * stage_s) * (1 - EQUAL_RESULTS)

    def _added_up(self, before: int, after: int) -> Iterator[PlainStage]:
        """The stages between two sets in every recompute mode: added up when they are asked for, paid for at once."""
        modes, stages = self.problem.choices.recompute, self.stages.get((before, after))
        if stages is None:
            self.effort.spend(len(modes))
            stages = self.stages[before, after] = []
        for index, mode in enumerate(modes):
            if index == len(stages):
                placed, layers = set(self.downsets[before]), set(self.downsets[after] - self.downsets[before])
                stages.append(self.costs.stage(placed, layers, mode))
            yield stages[index]

    def _fits(self, chunks: Sequence[PlainStage], position: int) -> bool:
        """Whether the first chunks of a device, or one that is given alone, fit its memory."""
        pp = self.strategy.pp
        device, chunk = plain_device(self.schedule, pp, position)
        in_flight = _in_flight(self.schedule, pp, self.micro_batches, self.strategy.chunks)[device]
        counts = in_flight[: len(chunks)] if len(chunks) > 1 else (in_flight[chunk],)
        return device_bytes(chunks, counts) <= self.problem.usable_bytes * (1 + MEMORY_MARGIN)

    def _stage_bound_s(self, position: int, before: int, after: int, stage: PlainStage) -> float:
        """Seconds of the longest path through one stage, with the least that all other layers take.

        The first microbatch comes to the stage after the stages before it. Then either the stage runs all of its
        passes, after which its device reduces and updates; or it waits for the first backward pass, which comes when
        the first microbatch (in GPipe, the last one) went through all later stages, and then runs what is left.
        """
        forward_s, backward_s, _ = self.placed_s[before]
        whole, passed = self.placed_s[-1], self.placed_s[after]
        m, after_s = self.micro_batches, stage.exposed_s + stage.tie_s + stage.finish_s
        both_s = stage.forward_s + stage.backward_s
        ends_s = [
            forward_s + m * (both_s + stage.weight_s) + after_s,
            forward_s + m * both_s + backward_s,
        ]
        if self.strategy.chunks == 1:
            later_s = whole[0] - passed[0] + whole[1] - passed[1]
            ahead = (self.strategy.pp - 1 - position) * _forwards_ahead(self.schedule)
            left = m - 1 if self.schedule == PipelineSchedule.GPIPE else max(m - 1 - ahead, 0)
            returned_s = forward_s + later_s + (1 + left) * stage.forward_s + m * stage.backward_s
            ends_s += [returned_s + backward_s, returned_s + m * stage.weight_s + after_s]
        return max(ends_s) * (1 - EQUAL_RESULTS)

    def fastest_s(self) -> float | None:
        """The seconds of some stages that take less than the time; None where all were tried and none does.

        Raises `_EffortSpentError` where there are too many.
        """
        for stages, cuts in self._rows(0, [0], []):
            layers = [self.downsets[end] - self.downsets[start] for start, end in pairwise(cuts)]
            if not are_offered_stages(self.problem, self.strategy.chunks, layers):
                continue
            if not is_offered_device_count(self.problem, self.strategy, stages):
                continue
            if math.isinf(self.enough_s):
                return self.enough_s
            self.effort.spend(1 + len(stages) * self.micro_batches // 8)
            seconds = plain_simulation(self.schedule, self.strategy.pp, self.micro_batches, stages)
            if seconds < self.enough_s:
                return seconds
        return None

    def _rows(
        self, position: int, cuts: list[int], stages: list[PlainStage]
    ) -> Iterator[tuple[list[PlainStage], list[int]]]:
        """Every row of stages behind some first ones, with the sets of layers between them."""
        if position == self._depth:
            yield stages, cuts
            return
        for after in range(cuts[-1] + 1, len(self.downsets)):
            for stage in self._options(position, cuts[-1], after):
                self.effort.spend()
                row = [*stages, stage]
                device, _ = plain_device(self.schedule, self.strategy.pp, position)
                chunks = [row[held] for held in plain_stages_of(self.schedule, self.strategy.pp, len(row), device)]
                if self._fits(chunks, position) and self._is_quick(row):
                    yield from self._rows(position + 1, [*cuts, after], row)

    def _is_quick(self, row: Sequence[PlainStage]) -> bool:
        """Whether the first stages of a pipeline leave a chance: no device is busy for the whole time."""
        device, _ = plain_device(self.schedule, self.strategy.pp, len(row) - 1)
        forward_s = sum(stage.forward_s for stage in row[:device])
        held = [row[place] for place in plain_stages_of(self.schedule, self.strategy.pp, len(row), device)]
        busy_s = sum(stage.forward_s + stage.backward_s + stage.weight_s for stage in held)
        return (forward_s + self.micro_batches * busy_s) * (1 - EQUAL_RESULTS) < self.enough_s
