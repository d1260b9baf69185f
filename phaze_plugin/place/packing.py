"""A quick proof that some degrees cannot beat a target, on chains: fill the stages from the front and count them.

With lead(p) the seconds of the layers before p, W the t of all layers and n = min(m, S-s) - 1, the s-th stage of a plan
that takes at most U, starting at layer p, satisfies

    m t' + tail <= U - lead_F(p)            t' with the weights' part also where it is split off
    m t + D <= U - lead_(F+B)(p)            D = max(0, m-1-s) W_s for zero-bubble, else 0
    (m-1) t + D - n E <= U - W              E = F or B (zero-bubble: F); gpipe: n = 0
    (m-n-2) t <= U - 2 W + lead_(F+B)(p)    if m > n + 1, and not for gpipe
    held bytes + (in flight - 1) * least stash + peak and buffers <= usable bytes
    m (g + p (held - usable) / in flight) + tail <= U - lead_F(p)    for any price p >= 0 of a byte of stash

where peak is the largest over layers of the least stash up to one and its working set, g is the least t' + p * stash
over recompute modes (seconds that a stage saves it stashes as bytes) and tail is at least the update, the gather, and
reduction minus the backward that may hide it. Every stage but the first receives at least what crosses the cheapest
cut, which belongs to its F. All other terms are sums over the stage's layers (of two sums of which a pass takes the
longer, the one that is longer over the whole model is used). A stage that starts later gives up at least as much as its
allowance shrinks: filling every stage as far as it goes gets farthest with each number of stages. If more than S are
needed, nothing with these degrees beats U. Interleaved schedules are let through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phaze.capabilities import PipelineSchedule
from phaze.cost import Collective
from phaze.hardware.dtypes import dtype_bytes
from phaze.place.degrees import SCHEDULES, Choices
from phaze.place.network import Network
from phaze.place.problem import PlacementProblem
from phaze.place.profile import LayerProfile
from phaze.place.states import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.widths import cut_bytes

__all__ = ["HELD", "THROUGH", "Packing", "build_packing"]

_SLACK = 1e-10
_AT_ONCE = 4_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Layers of a chain, per (width, layer) and the least over recompute modes; empty if the graph is no chain.

    `recompute_s`, `stash_bytes` and `peak_bytes` (the working set) are per (mode, width, layer), `least_cut_s` is the
    least time of receiving what crosses a cut, per width.
    """

    widths: tuple[int, ...]
    forward_s: FloatArray
    input_s: FloatArray
    weight_s: FloatArray
    parameters: FloatArray
    stashed_bytes: FloatArray
    working_bytes: FloatArray
    prices: FloatArray
    priced_s: FloatArray
    recompute_s: FloatArray
    stash_bytes: FloatArray
    peak_bytes: FloatArray
    least_cut_s: FloatArray
    problem: PlacementProblem
    network: Network
    mixed_widths: frozenset[int]
    most_used: int
    update_s: float

    def refuted(self, choices: Choices, target_s: FloatArray) -> BoolArray:
        """Whether nothing with each of these degrees takes less than its target."""
        result = np.zeros(len(choices), dtype=bool)
        for part in self._parts(choices):
            some = choices.take(part)
            result[part] = self._refuted(some, self.terms(some), target_s[part])
        return result

    def _parts(self, choices: Choices) -> list[IntArray]:
        """Indices of what can be packed, in portions."""
        asked = np.flatnonzero(choices.chunks == 1) if self.forward_s.size else np.zeros(0, dtype=np.int64)
        return [asked[start : start + _AT_ONCE] for start in range(0, len(asked), _AT_ONCE)]

    def tightened(self, choices: Choices, target_s: float, steps: int = 5) -> FloatArray:
        """A bound under each choice, at least its floor, by bisection up to the target."""
        floors = choices.floor_s.copy()
        for part in self._parts(choices):
            some = choices.take(part)
            terms = self.terms(some)
            low, high = some.floor_s, np.maximum(some.floor_s, target_s)
            for _ in range(steps):
                middle = (low + high) / 2
                out = self._refuted(some, terms, middle)
                low, high = np.where(out, middle, low), np.where(out, high, middle)
            floors[part] = low
        return floors

    def _refuted(self, choices: Choices, terms: FloatArray, target_s: FloatArray) -> BoolArray:
        target_s = target_s * (1 + _SLACK)
        gpipe = choices.schedule == SCHEDULES.index(PipelineSchedule.GPIPE)
        split = choices.schedule == SCHEDULES.index(PipelineSchedule.ZERO_BUBBLE)
        used = np.ones(len(choices), dtype=np.int64)
        dead = np.zeros(len(choices), dtype=bool)
        rows = len(terms) - 1
        stage = np.zeros((rows, len(choices)))
        scratch, scratches = np.zeros((2, len(choices))), self._scratch(choices)
        lead = np.zeros((2, len(choices)))
        cut = self.least_cut_s[np.searchsorted(self.widths, choices.width)]
        received = self._received(choices, terms, cut)
        spare = target_s - terms[THROUGH].sum(axis=0) - (choices.devices - 1) * cut
        caps = np.stack([target_s, target_s])
        prices = self.prices[:, np.searchsorted(self.widths, choices.width)]

        def is_over() -> BoolArray:
            flight = np.where(split, choices.devices, choices.devices - used + 1)
            flight = np.where(gpipe, choices.rounds, np.minimum(choices.rounds, np.maximum(flight, 1)))
            delayed = np.where(split, np.maximum(choices.rounds - used, 0) * stage[_WEIGHT], 0.0)
            early = np.where(gpipe, 0, np.minimum(choices.rounds, np.maximum(choices.devices - used + 1, 1)) - 1)
            peak = (choices.rounds - 1) * stage[THROUGH] + delayed - early * stage[_EARLY]
            is_slow = (stage[_STAY] > caps[0]) | (choices.rounds * stage[THROUGH] + delayed > caps[1]) | (peak > spare)
            twice = (choices.rounds - early - 2) * stage[THROUGH] > 2 * spare - caps[1]
            is_slow |= twice & (choices.rounds > early + 1) & ~gpipe
            tail = stage[_STAY] - choices.rounds * (stage[THROUGH] + stage[_WEIGHT])
            for priced, price in zip(stage[_PRICED:], prices, strict=True):
                stretched = choices.rounds * (priced + price * (stage[HELD] - usable) / flight)
                is_slow |= stretched + tail > caps[0]
            return np.asarray(is_slow | (stage[HELD] + (flight - 1) * stage[_STASH] + scratch.sum(axis=0) > usable))

        usable = self.problem.usable_bytes * (1 + _SLACK)
        for layer in range(terms.shape[1]):
            stage += terms[:rows, layer]
            np.maximum(scratch[0], stage[_STASH] + scratches[0, layer], out=scratch[0])
            np.maximum(scratch[1], scratches[1, layer], out=scratch[1])
            over = is_over()
            if over.any():
                used += over
                np.copyto(stage, terms[:rows, layer] + received, where=over)
                np.copyto(scratch[0], terms[_STASH, layer] + scratches[0, layer], where=over)
                np.copyto(scratch[1], scratches[1, layer], where=over)
                np.copyto(caps, target_s - lead, where=over)
                lead += over * cut
                dead |= over & is_over()
            lead += terms[[rows, THROUGH], layer]
        return np.asarray(dead | (used > choices.devices))

    def _received(self, choices: Choices, terms: FloatArray, cut_s: FloatArray) -> FloatArray:
        """Per (term, choice): what the least transfer into a stage adds to it."""
        received = np.zeros((len(terms) - 1, len(choices)))
        received[_STAY], received[THROUGH], received[_PRICED:] = choices.rounds * cut_s, cut_s, cut_s
        is_forward = terms[_EARLY].sum(axis=0) == terms[-1].sum(axis=0)
        received[_EARLY] = np.where(is_forward, cut_s, 0.0)
        return received

    def _scratch(self, choices: Choices) -> FloatArray:
        """Per (working set or buffers, layer, choice): bytes of which a stage needs the largest."""
        at = np.searchsorted(self.widths, choices.width)
        return np.stack([self.working_bytes[at].T, self.parameters[at].T * self.buffered_bytes(choices)])

    def buffered_bytes(self, choices: Choices) -> FloatArray:
        """Bytes of buffers per parameter of the largest layer."""
        recipe, copied = self.problem.recipe, choices.pipelines > 1
        reduced = np.where(copied & (choices.zero_stage >= 2), recipe.reduction_bytes, 0.0)
        return np.asarray(reduced + np.where(copied & (choices.zero_stage == 3), 2 * recipe.parameter_bytes, 0.0))

    def _rates(self, choices: Choices) -> FloatArray:
        """Seconds per byte of gather, scatter and all-reduce over the pipelines of each choice, latencies left out."""
        levels = np.array([self.network.depth(used) for used in range(self.most_used + 1)])
        depth = levels[np.minimum(choices.width * choices.pipelines * choices.devices, self.most_used)]
        keys = np.stack([choices.width, choices.pipelines, depth], axis=1)
        distinct, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        used = (choices.width * choices.pipelines * choices.devices)[first]
        rates = np.empty((3, len(distinct)))
        for index, (width, pipelines, _) in enumerate(distinct.tolist()):
            strides = (width, 1) if width in self.mixed_widths else (width,)
            for row, kind in enumerate((Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)):
                prices = [self.network.collective(kind, pipelines, stride, int(used[index])) for stride in strides]
                rates[row, index] = min(price.s_per_byte for price in prices)
        return rates[:, which.ravel()]

    def terms(self, choices: Choices) -> FloatArray:
        """Per (term, layer, choice): what a stage and what is before it add up."""
        at = np.searchsorted(self.widths, choices.width)
        forward, first, weight = (table[at].T for table in (self.forward_s, self.input_s, self.weight_s))
        parameters, stash = self.parameters[at].T, self.stashed_bytes[at].T
        zero, copies, rounds = choices.zero_stage, choices.pipelines, choices.rounds
        recipe = self.problem.recipe
        gather, scatter, reduce = (parameters * rate for rate in self._rates(choices))
        size = dtype_bytes(recipe.reduction_dtype)
        gathered = np.where(zero == 3, recipe.parameter_bytes, 0.0) * gather
        scattered = np.where(zero >= 2, size, 0.0) * scatter
        split = choices.schedule == SCHEDULES.index(PipelineSchedule.ZERO_BUBBLE)
        run = _longer(forward, gathered)
        back = _longer(np.where(split, first, first + weight), gathered + np.where(split, 0.0, scattered))
        later = np.where(split, _longer(weight, scattered), 0.0)
        reduced = np.where(zero == 0, size * reduce, np.where(zero == 1, size * scatter, 0.0))
        hidden = np.where(zero < 2, np.where(split, weight, first + weight), 0.0)
        updated = parameters * (self.update_s / np.where(zero >= 1, copies, 1))
        tail = reduced - hidden + updated + np.where((zero == 1) | (zero == 2), recipe.parameter_bytes, 0.0) * gather
        shards = [np.where(zero >= least, copies, 1) for least in (1, 2, 3)]
        held = (
            recipe.optimizer_bytes / shards[0] + recipe.gradient_bytes / shards[1] + recipe.parameter_bytes / shards[2]
        )
        through = run + back
        stay = rounds * (through + later) + tail
        early = np.where(split | (run.sum(axis=0) < back.sum(axis=0)), run, back)
        priced = [table[at].T for table in self.priced_s]
        return np.stack([stay, through, later, early, parameters * held, stash, *priced, run])


_STAY, THROUGH, _WEIGHT, _EARLY, HELD, _STASH, _PRICED = range(7)


def _longer(one: FloatArray, other: FloatArray) -> FloatArray:
    """Of two terms per (layer, choice), for each choice the one with the larger sum."""
    return np.where(one.sum(axis=0) >= other.sum(axis=0), one, other)


def build_packing(
    problem: PlacementProblem, space: StageSpace, network: Network, update_s: float, use_bounds: bool
) -> Packing:
    """The layers of a problem, ready to be packed; with the profiles' values or their lower bounds."""
    layers = range(space.layers) if space.is_chain else range(0)

    def by_mode(read: Callable[[LayerProfile], float]) -> FloatArray:
        return np.array(
            [
                [[read(problem.profile(layer, width, mode)) for layer in layers] for width in problem.widths]
                for mode in problem.recompute_modes
            ]
        )

    def seconds(name: str) -> FloatArray:
        return by_mode(lambda profile: float(getattr(getattr(profile, name), kind)[problem.accelerator]))

    stash, peak = by_mode(lambda profile: profile.stashed_bytes), by_mode(lambda profile: profile.peak_working_bytes)
    parameters = by_mode(lambda profile: profile.parameters - sum(profile.tied_parameters.values()))
    parameters[..., problem.spread_layers[list(layers)]] = 0.0
    kind = "bound" if use_bounds else "value"
    prices = np.array([_prices(problem, width, layers) for width in problem.widths]).T
    return Packing(
        widths=problem.widths,
        prices=prices,
        priced_s=np.array([_priced_s(problem, row, layers, use_bounds) for row in prices]).reshape(
            len(prices), len(problem.widths), len(layers)
        ),
        recompute_s=seconds("recompute_s"),
        stash_bytes=stash,
        peak_bytes=peak,
        least_cut_s=np.array([_least_cut_bytes(problem, space, width) for width in problem.widths])
        * network.least_s_per_byte,
        forward_s=seconds("forward_s").min(axis=0),
        input_s=seconds("backward_input_s").min(axis=0),
        weight_s=seconds("backward_weight_s").min(axis=0),
        parameters=parameters.min(axis=0),
        stashed_bytes=stash.min(axis=0),
        working_bytes=peak.min(axis=0),
        problem=problem,
        network=network,
        mixed_widths=frozenset(
            width
            for width in problem.widths
            if problem.capabilities.allows_mixed_widths
            and not all(
                problem.profile(layer, width, problem.recompute_modes[0]).is_tensor_parallel for layer in layers
            )
        ),
        most_used=problem.cluster.device_count,
        update_s=update_s,
    )


def _least_cut_bytes(problem: PlacementProblem, space: StageSpace, width: int) -> float:
    """Bytes that cross the cheapest cut."""
    profiles = [problem.profile(layer, width, problem.recompute_modes[0]) for layer in range(space.layers)]
    return float(cut_bytes(problem, space, profiles)[1:-1].min()) if space.layers > 1 else 0.0


def _prices(problem: PlacementProblem, width: int, layers: range) -> list[float]:
    """For each recompute mode after the first: what it costs over the one before it per byte of stash saved."""
    prices = []
    for before, after in pairwise(problem.recompute_modes):
        spent = saved = 0.0
        for layer in layers:
            one, other = problem.profile(layer, width, before), problem.profile(layer, width, after)
            spent += float((other.recompute_s.value - one.recompute_s.value)[problem.accelerator])
            saved += one.stashed_bytes - other.stashed_bytes
        prices.append(spent / saved if spent > 0 and saved > 0 else 0.0)
    return prices


def _priced_s(problem: PlacementProblem, prices: FloatArray, layers: range, use_bounds: bool) -> list[list[float]]:
    """Per (width, layer): the least seconds of all passes plus the price of what is stashed."""
    kind = "bound" if use_bounds else "value"
    names = ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")

    def cost(profile: LayerProfile, price: float) -> float:
        passes = sum(float(getattr(getattr(profile, name), kind)[problem.accelerator]) for name in names)
        return passes + price * profile.stashed_bytes

    return [
        [min(cost(problem.profile(layer, width, mode), price) for mode in problem.recompute_modes) for layer in layers]
        for width, price in zip(problem.widths, prices.tolist(), strict=True)
    ]
