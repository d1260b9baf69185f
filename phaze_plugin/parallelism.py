"""`Parallelism`, one strategy; `Choices`, what may be chosen; and how a user's ``strategy=`` is checked and read.

The fields are spelled as users type them in ``strategy=``, and every table, plan and target uses the same words. Ranks
are ordered with tp innermost, then cp, then the ZeRO shard group, then its copies, then pp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from phaze.errors import QuestionError, meant, shown
from phaze.ir import SEARCHED_MODES, RecomputeMode
from phaze.ir.kept_activations import OFFLOADING_POLICIES, recompute_mode

__all__ = [
    "ALL_DEVICES",
    "HOST_WORDS",
    "MIXED_SEQUENCES",
    "PIPELINE_SCHEDULES",
    "STRATEGY_KEYS",
    "ZERO_STAGES",
    "Choices",
    "Offload",
    "Parallelism",
    "PipelineSchedule",
    "read_strategy",
]

ZERO_STAGES = (0, 1, 2, 3)
"""0 shards nothing; 1 optimizer state; 2 also gradients; 3 also parameters (Rajbhandari et al., arXiv:1910.02054)."""

ALL_DEVICES = "all"
"""The value of `shard` that means all dp x cp devices."""

MIXED_SEQUENCES = "mixed"
"""The value of `sequence_parallel` that splits sequences between or inside of some layers, wherever it is fastest."""


class Offload(StrEnum):
    """What is kept in the host's memory instead of the device's."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """The optimizer's states and master copy, which pass through the device in every update."""
    ACTIVATIONS = "activations"
    """What layers keep between forward and backward, which leaves in forward and comes back in backward."""
    BOTH = "optimizer+activations"

    @property
    def moves_states(self) -> bool:
        """Whether optimizer states are on the host."""
        return self in (Offload.OPTIMIZER, Offload.BOTH)

    @property
    def moves_activations(self) -> bool:
        """Whether activations are on the host."""
        return self in (Offload.ACTIVATIONS, Offload.BOTH)


HOST_WORDS = {
    Offload.OPTIMIZER: "optimizer states",
    Offload.ACTIVATIONS: "activations",
    Offload.BOTH: "optimizer states and activations",
}
"""What is kept on hosts, in words."""


class PipelineSchedule(StrEnum):
    """The order in which a pipeline runs its microbatches; NONE is the schedule of a single stage."""

    NONE = "none"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    EAGER = "eager-1f1b"
    """1F1B with twice as many forwards first: what one program does whose stages all hear from each other in a tick."""
    ZERO_BUBBLE_V = "zb-v"
    DUAL_PIPE_V = "dualpipe-v"

    @property
    def is_v_shaped(self) -> bool:
        """Whether stages go down the devices and come back, so that the first one holds the first and last stage."""
        return self in (PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V)

    @property
    def has_chunks(self) -> bool:
        """Whether every device has several stages."""
        return self is PipelineSchedule.INTERLEAVED or self.is_v_shaped

    @property
    def splits_backward(self) -> bool:
        """Whether the weights' part of backward may come later than the inputs' part."""
        return self is PipelineSchedule.ZERO_BUBBLE or self.is_v_shaped

    def chunk_counts(self, offered: Iterable[int]) -> tuple[int, ...]:
        """How many stages each device may have, of those offered to interleaved pipelines; two in the shape of a V."""
        if self is PipelineSchedule.INTERLEAVED:
            return tuple(dict.fromkeys(offered))
        return (2,) if self.is_v_shaped else (1,)

    def stage_at(self, pp: int, device: int, chunk: int) -> int:
        """Which stage of the pipeline a chunk of a device is."""
        is_way_back = self.is_v_shaped and chunk % 2 == 1
        return (chunk + 1) * pp - 1 - device if is_way_back else chunk * pp + device

    def place_of(self, pp: int, stage: int) -> tuple[int, int]:
        """The device and the chunk of a stage."""
        chunk, place = divmod(stage, pp)
        return (pp - 1 - place if self.is_v_shaped and chunk % 2 == 1 else place), chunk


PIPELINE_SCHEDULES = tuple(kind for kind in PipelineSchedule if kind is not PipelineSchedule.NONE)
"""The schedules of pipelines with several stages."""


_SEQUENCE_WORDS = f"True or False (or {MIXED_SEQUENCES!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """One complete strategy: how a batch is divided over dp x cp x tp x pp devices.

    Attributes:
        dp: copies of the pipeline (data parallelism).
        shard: over how many of the dp x cp devices ZeRO shards, neighbours on the network; a divisor of dp x cp, or
            "all" of them. Each group of so many devices holds a whole copy.
        zero: ZeRO stage, 0 to 3.
        cp: devices that each sequence is split over (context parallelism).
        ep: devices that experts are divided over, of the dp x cp ones (expert parallelism).
        tp: devices that each layer is split over (tensor parallelism).
        expert_tp: over how many of the tp devices each expert is cut. It is tp, or 1 if whole experts are divided over
            ep x tp devices; None without experts, or if layers differ.
        sequence_parallel: whether tensors between layers are split along the sequence over the tp devices. With False
            no sequence is split inside of layers either; "mixed" splits wherever it makes the layers fastest.
        pp: devices along the pipeline; each position takes tp of them in every copy.
        schedule: the order of the pipeline's passes; "none" for a single stage.
        chunks: stages on each device: several in interleaved pipelines, two in those of V shape, one in all others.
        micro_batch_size: sequences in a microbatch.
        recompute: the recompute mode of each stage; empty while stages are not chosen yet.
        offload: what is kept in the host's memory.
    """

    dp: int = 1
    shard: int | str = ALL_DEVICES
    zero: int = 0
    cp: int = 1
    ep: int = 1
    tp: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool | str = False
    pp: int = 1
    schedule: PipelineSchedule = PipelineSchedule.NONE
    chunks: int = 1
    micro_batch_size: int = 1
    recompute: tuple[RecomputeMode, ...] = ()
    offload: Offload = Offload.NONE

    def __post_init__(self) -> None:
        """Check that every degree is a count and that ZeRO has the stage."""
        for name in ("dp", "cp", "ep", "tp", "pp", "chunks", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"zero is {self.zero}; expected one of {', '.join(map(str, ZERO_STAGES))}.")
        if self.sequence_parallel not in (True, False, MIXED_SEQUENCES):
            raise ValueError(f"sequence_parallel is {shown(self.sequence_parallel)}; expected {_SEQUENCE_WORDS}.")
        if self.shard != ALL_DEVICES and (isinstance(self.shard, str) or self.shard < 1 or self.replicas % self.shard):
            raise ValueError(
                f"shard is {shown(self.shard)}; expected a divisor of dp x cp, {self.replicas}, or {ALL_DEVICES!r}."
            )
        if self.replicas % self.ep:
            raise ValueError(f"ep is {self.ep}; expected a divisor of dp x cp, {self.replicas}.")
        if self.expert_tp not in (None, 1, self.tp):
            raise ValueError(f"expert_tp is {shown(self.expert_tp)}; expected 1 or tp, {self.tp}.")

    @property
    def stages(self) -> int:
        """Stages in the pipeline."""
        return self.pp * self.chunks

    @property
    def replicas(self) -> int:
        """Devices that hold copies, or ZeRO's shards, of the same dense parameters."""
        return self.dp * self.cp

    @property
    def shard_devices(self) -> int:
        """How many of them ZeRO divides its states over."""
        return self.replicas if self.shard == ALL_DEVICES else int(self.shard)

    @property
    def shard_groups(self) -> int:
        """How many groups of these hold copies of each other."""
        return self.replicas // self.shard_devices

    @property
    def device_count(self) -> int:
        """Devices, where every stage takes tp x cp of them in every copy."""
        return self.replicas * self.tp * self.pp

    def micro_batches_per_pipeline(self, micro_batches: int) -> int:
        """Microbatches that the fullest of the dp pipelines runs, when the batch has so many in all."""
        return -(-micro_batches // self.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a search may choose from, per field of `Parallelism`; None allows every degree that is possible.

    Attributes:
        dp: copies of the pipeline.
        cp: devices that each sequence is split over.
        ep: devices that experts are divided over.
        tp: tensor-parallel degrees.
        expert_tp: the value of `Parallelism.expert_tp`; None allows every layer what is fastest.
        pp: pipeline depths.
        micro_batch_size: sequences in a microbatch.
        schedule: schedules for pipelines of several stages; a single stage is possible whenever `pp` allows it.
        chunks: stages on each device of an interleaved pipeline.
        zero: ZeRO stages.
        shard: how many devices ZeRO divides its states over; None offers those that can pay.
        sequence_parallel: the value of `Parallelism.sequence_parallel`; None allows all of them.
        recompute: modes that a stage may use.
        offload: what may be kept in the host's memory.
        stages: how many layers each stage has; None lets the search cut the model.
    """

    dp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    expert_tp: int | None = None
    pp: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] | None = None
    schedule: tuple[PipelineSchedule, ...] = PIPELINE_SCHEDULES
    chunks: tuple[int, ...] = (2, 3, 4)
    zero: tuple[int, ...] = ZERO_STAGES
    shard: tuple[int | str, ...] | None = None
    sequence_parallel: bool | str | None = None
    recompute: tuple[RecomputeMode, ...] = SEARCHED_MODES
    offload: tuple[Offload, ...] = (Offload.NONE,)
    stages: tuple[int, ...] | None = None

    def within(self, strategy: Mapping[str, object]) -> Choices:
        """These choices without everything that a strategy (as `read_strategy` returns it) rules out."""
        changes: dict[str, object] = {
            key: (strategy[key],)
            for key in ("dp", "cp", "ep", "tp", "pp", "micro_batch_size", "offload")
            if key in strategy
        }
        changes |= {key: strategy[key] for key in ("expert_tp", "sequence_parallel", "stages") if key in strategy}
        if strategy.get("expert_tp", 1) != 1 and "tp" not in strategy:
            changes["tp"] = (strategy["expert_tp"],)
        if "recompute" in strategy:
            modes = strategy["recompute"]
            assert isinstance(modes, tuple)
            changes["recompute"] = tuple(mode for mode in RecomputeMode if mode in modes)
        if "zero" in strategy:  # one device has nothing to shard over, whatever is asked
            is_single = strategy.get("dp") == 1 and strategy.get("cp", 1) == 1
            changes["zero"] = (0,) if is_single else (strategy["zero"],)
            changes["shard"] = (strategy.get("shard", ALL_DEVICES),)  # whoever names a ZeRO stage means all devices
        elif "shard" in strategy:
            changes["shard"] = (strategy["shard"],)
            if strategy["shard"] != ALL_DEVICES:  # ZeRO-0 has nothing to shard
                changes["zero"] = tuple(zero for zero in self.zero if zero)
        schedules = self.schedule
        if strategy.get("schedule") == PipelineSchedule.NONE:
            changes["pp"] = (1,)
        elif "schedule" in strategy:
            schedules = (PipelineSchedule(str(strategy["schedule"])),)
        if strategy.get("chunks") == 1:
            schedules = tuple(kind for kind in schedules if not kind.has_chunks)
        elif "chunks" in strategy:
            is_named = "schedule" in strategy and schedules[0].is_v_shaped
            schedules = schedules if is_named else (PipelineSchedule.INTERLEAVED,)
            changes["chunks"] = (strategy["chunks"],)
        return replace(self, schedule=schedules, **changes)  # type: ignore[arg-type]


LARGEST_DEGREE = 2**31
"""Degrees and counts of a strategy are no larger: products of two still fit 64 bits."""

STRATEGY_KEYS = (*(field.name for field in fields(Parallelism)), "stages")
"""Keys of a strategy as users write it; `stages` says how many layers each stage has."""


def read_strategy(strategy: object) -> dict[str, object]:
    """The settled values of a strategy as users write it, for the keys that they gave.

    Counts are whole numbers, `schedule` a PipelineSchedule, `recompute` a tuple of RecomputeModes and `stages` a tuple
    of counts. Raises QuestionError naming the key that is unknown, impossible or contradicts another one.
    """
    if not isinstance(strategy, Mapping):
        raise QuestionError(
            f"strategy is {shown(strategy)}; expected a mapping with some of {', '.join(STRATEGY_KEYS)}."
        )
    for key in strategy:
        if key not in STRATEGY_KEYS:
            raise QuestionError(
                f"strategy has the key {shown(key)}.{meant(key, STRATEGY_KEYS)} Expected some of "
                f"{', '.join(STRATEGY_KEYS)}."
            )
    settled: dict[str, object] = {
        key: _READERS[str(key)](str(key), value) for key, value in _with_offload(strategy).items() if value is not None
    }
    _check_agreement(settled)
    return settled


def _with_offload(strategy: Mapping[str, object]) -> Mapping[str, object]:
    """The strategy with a policy that moves activations to the host as the two values that it stands for."""
    policy, given = strategy.get("recompute"), strategy.get("offload")
    if not isinstance(policy, str) or policy not in OFFLOADING_POLICIES:
        return strategy
    offload = Offload.ACTIVATIONS if given is None else _offload("offload", given)
    if offload is Offload.NONE:
        raise QuestionError(
            f"strategy has offload 'none' and recompute {policy!r}, which moves activations to the host."
        )
    offload = Offload.BOTH if offload is Offload.OPTIMIZER else offload
    return {**strategy, "recompute": OFFLOADING_POLICIES[policy], "offload": offload}


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_DEGREE:
        raise QuestionError(f"strategy has {key} {shown(value)}; expected a whole number of at least 1.")
    return value


def _shard(key: str, value: object) -> int | str:
    if value == ALL_DEVICES:
        return ALL_DEVICES
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise QuestionError(
            f"strategy has {key} {shown(value)}; expected a whole number of at least 2 that divides dp x cp, or "
            f"{ALL_DEVICES!r}. Where nothing is to be sharded, use zero 0."
        )
    return value


def _schedule(key: str, value: object) -> PipelineSchedule:
    if value not in list(PipelineSchedule):
        raise QuestionError(
            f"strategy has {key} {shown(value)}; expected one of {', '.join(PipelineSchedule)}."
            f"{meant(value, PipelineSchedule)}"
        )
    return PipelineSchedule(str(value))


def _zero(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in ZERO_STAGES:
        raise QuestionError(f"strategy has {key} {shown(value)}; expected one of {', '.join(map(str, ZERO_STAGES))}.")
    return value


def _sequence_parallel(key: str, value: object) -> bool | str:
    if isinstance(value, bool) or value == MIXED_SEQUENCES:
        return MIXED_SEQUENCES if value == MIXED_SEQUENCES else bool(value)
    raise QuestionError(f"strategy has {key} {shown(value)}; expected {_SEQUENCE_WORDS}.")


def _offload(key: str, value: object) -> Offload:
    if value not in list(Offload):
        raise QuestionError(f"strategy has {key} {shown(value)}; expected one of {', '.join(Offload)}.")
    return Offload(str(value))


def _recompute(key: str, value: object) -> tuple[RecomputeMode, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Iterable) or not values:
        raise QuestionError(
            f"strategy has {key} {shown(value)}; expected one of {', '.join(RecomputeMode)}, or one per stage."
        )
    return tuple(map(recompute_mode, values))


def _stages(key: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise QuestionError(f"strategy has {key} {shown(value)}; expected how many layers each stage has.")
    return tuple(_count(key, count) for count in value)


_READERS = {
    **dict.fromkeys(("dp", "cp", "ep", "tp", "expert_tp", "pp", "chunks", "micro_batch_size"), _count),
    "shard": _shard,
    "zero": _zero,
    "sequence_parallel": _sequence_parallel,
    "schedule": _schedule,
    "recompute": _recompute,
    "offload": _offload,
    "stages": _stages,
}


def _check_agreement(settled: Mapping[str, object]) -> None:
    """Raise QuestionError where two keys of a strategy contradict each other."""
    pp, chunks, schedule = settled.get("pp"), settled.get("chunks", 1), settled.get("schedule")
    has_pipeline = schedule not in (None, PipelineSchedule.NONE)
    if pp == 1 and (has_pipeline or chunks != 1):
        raise QuestionError(
            f"strategy has pp 1 and schedule {_told(schedule)} with chunks {chunks}; a single stage has "
            "schedule 'none' and 1 chunk."
        )
    if schedule is PipelineSchedule.NONE and pp not in (None, 1):
        raise QuestionError(f"strategy has schedule 'none' and pp {pp}; several stages need a schedule.")
    _check_chunks(settled)
    if settled.get("tp") == 1 and settled.get("sequence_parallel", False) is not False:
        raise QuestionError(
            f"strategy has sequence_parallel {settled['sequence_parallel']} and tp 1; sequences are split over the tp "
            "devices. Use a larger tp, or leave sequence_parallel out."
        )
    _check_groups(settled)
    _check_experts(settled)
    stages, modes = settled.get("stages"), settled.get("recompute", ())
    assert stages is None or isinstance(stages, tuple)
    assert isinstance(modes, tuple)
    chunks = 2 if isinstance(schedule, PipelineSchedule) and schedule.is_v_shaped else chunks
    if stages is not None and isinstance(pp, int) and isinstance(chunks, int) and pp * chunks != len(stages):
        raise QuestionError(f"strategy has {len(stages)} stages; expected pp x chunks, {pp} x {chunks}.")
    if stages is None and len(set(modes)) > 1:
        raise QuestionError(
            "strategy has a recompute mode per stage; say with `stages` how many layers each stage has."
        )
    if stages is not None and len(modes) not in (0, 1, len(stages)):
        raise QuestionError(
            f"strategy has {len(modes)} recompute modes for {len(stages)} stages; expected one each, or one for all."
        )


def _check_chunks(settled: Mapping[str, object]) -> None:
    """Raise QuestionError where devices have another number of stages than the schedule runs."""
    chunks, schedule = settled.get("chunks", 1), settled.get("schedule")
    if isinstance(schedule, PipelineSchedule) and schedule.is_v_shaped:
        if settled.get("chunks", 2) != 2:
            raise QuestionError(f"strategy has chunks {chunks} with schedule {_told(schedule)}; expected 2 of them.")
    elif chunks != 1 and schedule not in (None, PipelineSchedule.INTERLEAVED):
        raise QuestionError(
            f"strategy has chunks {chunks} with schedule {_told(schedule)}; expected 'interleaved-1f1b'."
        )


def _check_groups(settled: Mapping[str, object]) -> None:
    """Raise QuestionError where states or experts cannot be divided over as many devices as a strategy says."""
    shard, ep, dp, cp = (settled.get(name) for name in ("shard", "ep", "dp", "cp"))
    if isinstance(shard, int) and settled.get("zero") == 0:
        raise QuestionError(f"strategy has shard {shard} and zero 0, which shards nothing; use zero 1, 2 or 3.")
    if isinstance(shard, int) and isinstance(ep, int) and shard % ep and ep % shard:
        raise QuestionError(f"strategy has shard {shard} and ep {ep}; expected one of them to divide the other.")
    if not isinstance(dp, int):
        return
    replicas = dp * (cp if isinstance(cp, int) else 1)
    for name, size in (("shard", shard), ("ep", ep)):
        if isinstance(size, int) and replicas % size:
            near = _divisors_around(replicas, size)
            offer = f" The nearest that do: {', '.join(map(str, near))}." if near else ""
            offer += _whole_experts_offer(settled, replicas) if name == "ep" else ""
            raise QuestionError(
                f"strategy has {name} {size}, which does not divide dp x cp, {dp} x {replicas // dp}.{offer}"
            )


def _check_experts(settled: Mapping[str, object]) -> None:
    """Raise QuestionError where experts are cut over another number of devices than layers are."""
    expert_tp, tp = settled.get("expert_tp"), settled.get("tp")
    if expert_tp is not None and tp is not None and (tp == 1 or expert_tp not in (1, tp)):
        raise QuestionError(
            f"strategy has expert_tp {expert_tp} and tp {tp}; expected 1 (whole experts, divided over the tp devices) "
            "or the same as tp (each expert cut over them), beside a tp above 1."
        )


def _whole_experts_offer(settled: Mapping[str, object], replicas: int) -> str:
    """How a strategy says that experts are divided over more than dp x cp devices, where that is what it may mean."""
    ep, tp = settled["ep"], settled.get("tp")
    assert isinstance(ep, int)
    if not isinstance(tp, int) or tp == 1 or ep % tp or replicas % (ep // tp):
        return ""
    return f" Whole experts divided over {ep} of the dp x cp x tp devices are ep {ep // tp} with expert_tp 1."


def _divisors_around(count: int, wanted: int) -> list[int]:
    """The divisors of a number, larger than 1, next below and above another one."""
    divisors = [size for size in range(2, count + 1) if count % size == 0]
    below, above = ([size for size in divisors if (size > wanted) == is_above] for is_above in (False, True))
    return [*below[-1:], *above[:1]]


def _told(schedule: object) -> str:
    """A schedule as messages show it."""
    return repr(None if schedule is None else str(schedule))
