"""A placed model: from chosen stages to step time, memory per device, time parts and timeline, all from one simulation.

`evaluate_placement` takes stages that somebody else chose, and `assemble` the stages of a search. Both return the same
`Placement` for the same stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.errors import PlacementError
from phaze.parallelism import Parallelism
from phaze.place.memory.device_memory import DeviceMemory, Fit
from phaze.place.model.stage_costs import StageCosts
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.simulation.event_simulation import Simulation, StageTimes, simulate
from phaze.place.simulation.pass_orders import Pass, in_flight
from phaze.place.simulation.timeline import KINDS, EventKind, EventTable, Timeline
from phaze.profile.layer_profile import RecomputeMode

__all__ = ["PlacedStage", "Placement", "TimeParts", "assemble", "evaluate_placement", "stage_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """One stage of the pipeline.

    Attributes:
        layers: indices into the graph, in order.
        recompute: its recompute mode.
        device: its place in the pipeline.
        chunk: which of the device's stages it is.
        width: devices that share each of its layers.
        forward_s: one forward, receiving included.
        backward_s: one backward with its weights' part, receiving and recompute included.
    """

    layers: tuple[int, ...]
    recompute: RecomputeMode
    device: int
    chunk: int
    tp: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Where the batch goes on the device that ends last; the parts add up to the batch.

    Attributes:
        compute_s: forward and backward of its layers.
        recompute_s: running forward again.
        transfer_s: receiving from neighbours, as far as recompute does not hide it.
        collective_s: gathering parameters and scattering gradients that layers do not hide.
        bubble_s: waiting.
        reduction_s: gradients that are reduced after the last backward.
        update_s: the optimizer, and gathering what it updated.
    """

    compute_s: float
    recompute_s: float
    transfer_s: float
    collective_s: float
    bubble_s: float
    reduction_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A plan and what it costs.

    Attributes:
        degrees: how devices are divided.
        micro_batches: of the fullest pipeline.
        stages: in the order of the pipeline.
        memory: of one device of each place in the pipeline.
        time_s: simulated seconds per batch.
        parts: where they go.
        timeline: every pass of one pipeline.
    """

    parallelism: Parallelism
    micro_batches: int
    stages: tuple[PlacedStage, ...]
    memory: tuple[DeviceMemory, ...]
    time_s: float
    parts: TimeParts
    timeline: Timeline

    @property
    def device_count(self) -> int:
        """Devices in use."""
        widest = [max(stage.tp for stage in self.stages if stage.device == place) for place in range(len(self.memory))]
        return self.parallelism.dp * sum(widest)

    @property
    def fit(self) -> Fit:
        """The worst of its devices."""
        fits = {memory.fit for memory in self.memory}
        return next(fit for fit in (Fit.OVER, Fit.MARGINAL, Fit.FITS) if fit in fits)


def evaluate_placement(
    prepared: PreparedProblem, parallelism: Parallelism, stages: Sequence[tuple[Sequence[int], RecomputeMode]]
) -> Placement:
    """The placement of given stages, whether it fits or not.

    Raises:
        PlacementError: the stages do not cut the graph in order, or are not as many as the degrees say.
    """
    space, modes = prepared.space, prepared.problem.choices.recompute
    if len(stages) != parallelism.stages:
        raise PlacementError(f"{len(stages)} stages for {parallelism.pp} devices of {parallelism.chunks} chunks.")
    if parallelism.tp not in prepared.stage_sums:
        raise PlacementError(f"tensor width {parallelism.tp} was not profiled; known are {list(prepared.stage_sums)}.")
    states = {row.tobytes(): index for index, row in enumerate(space.inside)}
    pairs = {pair: index for index, pair in enumerate(zip(space.source.tolist(), space.target.tolist(), strict=True))}
    placed, before, chosen = np.zeros(space.layers, dtype=bool), 0, []
    for layers, mode in stages:
        if mode not in modes:
            raise PlacementError(f"recompute mode {mode} is not among {[str(known) for known in modes]}.")
        placed[list(layers)] = True
        after = states.get(placed.tobytes())
        if after is None or (before, after) not in pairs:
            raise PlacementError(f"stage {list(layers)} is empty, or reads from a later stage.")
        if space.members(pairs[before, after]) != tuple(sorted(layers)):
            raise PlacementError(f"stage {list(layers)} repeats layers of an earlier stage.")
        chosen.append((pairs[before, after], modes.index(mode)))
        before = after
    if before != space.states - 1:
        raise PlacementError(f"layers {np.flatnonzero(~placed).tolist()} are in no stage.")
    return assemble(prepared, parallelism, chosen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chosen:
    """The chosen stages' rows of the tables, per stage in the order of the pipeline."""

    table: StageCosts
    at: tuple[list[int], list[int]]
    received_s: FloatArray
    returned_s: FloatArray
    recompute_s: FloatArray
    work_s: FloatArray


def assemble(prepared: PreparedProblem, parallelism: Parallelism, chosen: Sequence[tuple[int, int]]) -> Placement:
    """The placement of stages given by their index in the stage space and their mode."""
    problem, rounds = prepared.problem, parallelism.micro_batches_per_pipeline(prepared.problem.micro_batches)
    table, tp = prepared.stage_costs(parallelism), prepared.stage_sums[parallelism.tp]
    listed, modes = [stage for stage, _ in chosen], [mode for _, mode in chosen]
    at = (modes, listed)
    rows = _Chosen(
        table=table,
        at=at,
        received_s=table.received_s[listed],
        returned_s=table.returned_s[listed],
        recompute_s=tp.recompute_s[at],
        work_s=tp.forward_s[at] + tp.backward_input_s[at] + tp.backward_weight_s[at],
    )
    times = stage_times(table, chosen, parallelism)
    simulation = simulate(prepared.program(parallelism), times)
    flight = in_flight(parallelism.schedule, parallelism.pp, rounds, parallelism.chunks)
    memory = [
        table.memory.of_device(
            problem, list(zip(modes[place :: parallelism.pp], listed[place :: parallelism.pp], strict=True)), counts
        )
        for place, counts in enumerate(flight.tolist())
    ]
    return Placement(
        parallelism=parallelism,
        micro_batches=rounds,
        stages=tuple(
            PlacedStage(
                layers=prepared.space.members(stage),
                recompute=problem.choices.recompute[mode],
                device=index % parallelism.pp,
                chunk=index // parallelism.pp,
                tp=int(table.devices[stage]),
                forward_s=float(table.forward_s[mode, stage]),
                backward_s=float(table.backward_s[mode, stage] + table.weight_s[mode, stage]),
            )
            for index, (stage, mode) in enumerate(chosen)
        ),
        memory=tuple(memory),
        time_s=float(simulation.time_s[0]),
        parts=_parts(parallelism, rounds, rows, times, simulation),
        timeline=_timeline(prepared, parallelism, rows, simulation),
    )


def stage_times(table: StageCosts, chosen: Sequence[tuple[int, int]], parallelism: Parallelism) -> StageTimes:
    """What simulation needs of stages given by their index and their mode."""
    listed, at = [stage for stage, _ in chosen], ([mode for _, mode in chosen], [stage for stage, _ in chosen])
    return StageTimes(
        **{
            name: _by_device(getattr(table, name)[at], parallelism)
            for name in ("forward_s", "backward_s", "weight_s", "exposed_s")
        },
        **{
            name: _by_device(getattr(table, name)[listed], parallelism) for name in ("reduction_s", "tie_s", "finish_s")
        },
    )


def _by_device(values: FloatArray, parallelism: Parallelism) -> FloatArray:
    """Per stage in order to (1, device, chunk)."""
    return np.asarray(values.reshape(1, parallelism.chunks, parallelism.pp).transpose(0, 2, 1))


def _parts(
    parallelism: Parallelism, rounds: int, rows: _Chosen, times: StageTimes, simulation: Simulation
) -> TimeParts:
    device = int(simulation.device_end_s[0].argmax())
    own = slice(device, None, parallelism.pp)
    busy = float((times.forward_s + times.backward_s + times.weight_s)[0, device].sum())
    compute, recompute = float(rows.work_s[own].sum()), float(rows.recompute_s[own].sum())
    transfer = float((rows.received_s + np.maximum(rows.returned_s - rows.recompute_s, 0.0))[own].sum())
    ended, settled = float(simulation.compute_end_s[0, device]), float(simulation.reduced_s[0, device])
    return TimeParts(
        compute_s=rounds * compute,
        recompute_s=rounds * recompute,
        transfer_s=rounds * transfer,
        collective_s=max(rounds * (busy - compute - recompute - transfer), 0.0),
        bubble_s=ended - rounds * busy,
        reduction_s=settled - ended,
        update_s=float(simulation.device_end_s[0, device]) - settled,
    )


def _timeline(prepared: PreparedProblem, parallelism: Parallelism, rows: _Chosen, simulation: Simulation) -> Timeline:
    """Every pass in its parts (receive, or recompute, which hides it; then the layers), and what follows the last."""
    order, ends = prepared.program(parallelism).order, simulation.pass_end_s[0]
    device = np.broadcast_to(np.arange(parallelism.pp)[:, None], ends.shape)
    stage = order.chunk * parallelism.pp + device
    durations = np.stack([getattr(rows.table, name)[rows.at] for name in ("forward_s", "backward_s", "weight_s")])
    starts = ends - durations[order.kind, stage]
    again = starts + np.where(order.kind == Pass.BACKWARD, rows.recompute_s[stage], 0.0)
    sent = np.stack([rows.received_s, rows.returned_s, np.zeros(parallelism.stages)])
    ready = np.maximum(again, starts + sent[order.kind, stage])
    runs = np.array([KINDS.index(kind) for kind in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.WEIGHT)])
    marks = [values[0] for values in (simulation.compute_end_s, simulation.reduced_s, simulation.device_end_s)]
    alone = np.full(parallelism.pp, -1)

    def events(kind: EventKind | IntArray, at: tuple[IntArray, ...], start: FloatArray, end: FloatArray) -> EventTable:
        number = np.full(start.shape, KINDS.index(kind)) if isinstance(kind, EventKind) else kind
        return EventTable(device=at[0], kind=number, stage=at[1], micro_batch=at[2], start_s=start, end_s=end)

    passes, after = (device, stage, order.micro_batch), (device[:, 0], alone, alone)
    parts = (
        events(EventKind.RECOMPUTE, passes, starts, again),
        events(EventKind.RECEIVE, passes, again, ready),
        events(runs[order.kind], passes, ready, ends),
        events(EventKind.REDUCE, after, marks[0], marks[1]),
        events(EventKind.UPDATE, after, marks[1], marks[2]),
    )
    return Timeline(parallelism.pp, float(simulation.time_s[0]), EventTable.joined(parts))
