"""A placed model: its stages, what each device holds, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass

from phaze.parallelism import Parallelism
from phaze.place.memory.device_memory import DeviceMemory, Fit
from phaze.place.simulation.timeline import Timeline
from phaze.profile.layer_profile import RecomputeMode

__all__ = ["PlacedStage", "Placement", "TimeParts"]


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
