"""Random placement problems, each from one seed."""

from dataclasses import fields, replace
from random import Random

from phaze.cost import IDEAL
from phaze.hardware import Cluster, HostLink, InterconnectLevel, Links, precision_recipe, preset
from phaze.ir import SEARCHED_MODES
from phaze.parallelism import PIPELINE_SCHEDULES, Choices, Offload, Parallelism, PipelineSchedule
from phaze.place import PlacementProblem, find_placement
from phaze.profile.layer_profile import (
    BoundaryTensor,
    Bounded,
    Flow,
    LayerProfile,
    PlacementGraph,
    PlacementLayer,
    RecomputeMode,
)
from phaze.targets import Capabilities


def random_graph(random: Random, layers: int) -> PlacementGraph:
    """A chain, a chain with a tensor that is read again later, or a graph that branches; sometimes with a tie."""
    shape = random.choice(["chain", "skip", "branching"])
    flows = [Flow(producer, (producer + 1,)) for producer in range(layers - 1)]
    if shape == "skip" and layers > 2:
        flows[0] = Flow(0, (1, layers - 1))
    if shape == "branching":
        flows = []
        for producer in range(layers - 1):
            readers = {random.randrange(producer + 1, layers) for _ in range(random.choice([0, 1, 1, 2]))}
            if readers:
                flows.append(Flow(producer, tuple(sorted(readers)), random.choice([0, 0, 1])))
    equal = random.random() < 0.5
    keys = [random.choice("ab") if equal else str(layer) for layer in range(layers)]
    ties: dict[str, tuple[int, ...]] = {}
    if layers > 1 and random.random() < 0.5:
        ties["tie"] = tuple(sorted({0, layers - 1, *random.sample(range(layers), random.choice([0, 0, 1]))}))
        keys = [f"tied {key}" if layer in ties["tie"] else key for layer, key in enumerate(keys)]
    named = tuple(PlacementLayer(f"layer {index}", key) for index, key in enumerate(keys))
    return PlacementGraph(layers=named, flows=tuple(flows), ties=ties)


def random_profiles(
    random: Random, graph: PlacementGraph, tp_degrees: tuple[int, ...], modes: tuple[RecomputeMode, ...]
) -> dict[tuple[str, int, RecomputeMode], LayerProfile]:
    """Profiles whose layers differ in what dominates them; some cannot be sliced."""
    stash_scale = random.choice([0.1, 1.0, 4.0])
    profiles = {}
    for key in dict.fromkeys(layer.key for layer in graph.layers):
        parameters, stash = random.uniform(0.2, 1) * 1e6, random.uniform(0.2, 1) * 1e6 * stash_scale
        seconds = [random.uniform(0.2, 1) for _ in range(3)]
        output = random.uniform(1e4, 1e5)
        sliceable = random.random() < 0.7 or 1 not in tp_degrees
        others = random.uniform(0.5, 2)
        for tp in tp_degrees:
            sliced = sliceable and tp > 1
            cut = tp if sliced else 1
            for mode in modes:
                again = {"none": 0.0, "selective": 0.2, "full": 1.0}[mode]
                profiles[key, tp, mode] = LayerProfile(
                    forward_s=Bounded.exact([others, seconds[0] / cut]),
                    backward_input_s=Bounded.exact([others, seconds[1] / cut]),
                    backward_weight_s=Bounded.exact([others, seconds[2] / cut]),
                    recompute_s=Bounded.exact([others, again * seconds[0] / cut]),
                    parameter_bytes={"bfloat16": 2 * parameters / cut, "int8": 100.0},
                    stashed_bytes=stash / cut * (1 - 0.8 * again),
                    peak_working_bytes=stash * (others - 0.5) / cut,
                    outputs=(BoundaryTensor(output), BoundaryTensor(output / 3)),
                    is_tensor_parallel=sliced,
                    tied_parameters={"tie": parameters / 2 / cut} if key.startswith("tied") else {},
                )
    return profiles


def random_capabilities(random: Random) -> Capabilities:
    """Everything, or a target with gaps."""
    if random.random() < 0.6:
        return Capabilities.everything()
    flags = {
        name: random.random() < 0.5
        for name in (
            "allows_uneven_stages",
            "allows_mixed_tp",
            "allows_idle_devices",
            "allows_uneven_micro_batches",
        )
    }
    return Capabilities(
        schedules=frozenset(random.sample(list(PIPELINE_SCHEDULES), random.randrange(len(PIPELINE_SCHEDULES) + 1))),
        zero_stages=frozenset(random.sample(range(4), random.randrange(1, 5))),
        excluded_pairs=frozenset(
            {(PipelineSchedule.ZERO_BUBBLE, 3), (random.choice(list(PIPELINE_SCHEDULES)), random.randrange(4))}
        ),
        **flags,
    )


def random_problem(
    seed: int, *, largest: int = 4, most_devices: int = 6, most_micro_batches: int = 6, memory_bytes: int | None = None
) -> PlacementProblem:
    """A problem of at most so many layers, devices and microbatches, on chips with little or with this much memory.

    Of every third seed some parameters are frozen.
    """
    random = Random(seed)
    graph = random_graph(random, random.randrange(1, largest + 1))
    tp_degrees = random.choice([(1,), (1, 2), (2,), (1, 2, 4)])
    modes = tuple(mode for mode in SEARCHED_MODES if random.random() < 0.7) or (RecomputeMode.NONE,)
    modes = modes if len(graph.layers) < 5 else tuple(random.sample(modes, min(len(modes), 2)))
    bandwidth = random.choice([1e5, 1e6, 1e8])
    nodes = (InterconnectLevel(2, 4 * bandwidth, 1e-3), InterconnectLevel(8, bandwidth, 1e-2))
    flat = (InterconnectLevel(16, bandwidth),)
    torus = (
        InterconnectLevel(2, bandwidth, 1e-3, Links.LINE),
        InterconnectLevel(4, bandwidth, 1e-3, Links.RING),
        InterconnectLevel(2, bandwidth / 4, 1e-2),
    )
    memory = int(random.choice([8e6, 20e6, 80e6, 1e9]))
    chip = replace(preset("a100-80gb").accelerator, hbm_bytes=memory_bytes or memory)
    problem = PlacementProblem(
        graph=graph,
        profiles=random_profiles(random, graph, tp_degrees, modes),
        cluster=Cluster(chip, random.randrange(1, most_devices + 1), random.choice([nodes, flat, torus])),
        micro_batches=random.randrange(1, most_micro_batches + 1),
        recipe=precision_recipe(random.choice(["bf16-adam", "fp32-sgd", "bf16-adam-bf16-gradients"])),
        capabilities=random_capabilities(random),
        choices=Choices(
            schedule=random.choice([PIPELINE_SCHEDULES, (random.choice(list(PIPELINE_SCHEDULES)),)]),
            recompute=modes,
            chunks=(2, 3),
        ),
        dp_divides_batch=random.random() < 0.3,
        memory_margin=random.choice([0.0, 0.1]),
        overlaps_reduction=random.random() < 0.7,
        calibration=random.choice([IDEAL, replace(IDEAL, link=0.5, memory=0.7)]),
        accelerator=1,
    )
    return with_frozen(problem, seed) if seed % 3 == 1 else problem


def with_frozen(problem: PlacementProblem, seed: int) -> PlacementProblem:
    """The problem with none, some or all parameters of each kind of layer frozen, and sometimes the tied ones."""
    random = Random(seed + 4)
    shares = {key: random.choice([0.0, 0.6, 0.99, 1.0]) for key in {layer.key: 0 for layer in problem.graph.layers}}
    freezes_ties = random.random() < 0.5
    profiles = {}
    for index, profile in problem.profiles.items():
        tied = sum(profile.tied_parameters.values())
        profiles[index] = replace(
            profile,
            frozen_parameters=shares[index[0]] * (profile.parameters - tied) + freezes_ties * tied,
            frozen_ties=profile.tied_parameters if freezes_ties else {},
            tied_parameters={} if freezes_ties else profile.tied_parameters,
        )
    return replace(problem, profiles=profiles)


def stage_sharded_problem(seed: int, *, largest: int = 5, most_devices: int = 6) -> PlacementProblem:
    """A problem whose inner layers are equal, for a target that shards the first and the last over all stages."""
    problem = random_problem(seed, largest=largest, most_devices=most_devices)
    first, *inner, last = problem.graph.layers if len(problem.graph.layers) > 2 else (*problem.graph.layers, None)
    free = [layer.key for layer in inner if layer and not layer.key.startswith("tied")]
    graph = problem.graph
    if last is not None and free:
        layers = (first, *(replace(layer, key=free[0]) for layer in inner), last)
        ties = {name: (0, len(layers) - 1) for name in graph.ties}
        graph = replace(graph, layers=layers, ties=ties)
    pipelines = frozenset({PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B})
    capabilities = Capabilities(
        schedules=pipelines,
        zero_stages=frozenset(range(4)),
        excluded_pairs=frozenset((schedule, zero) for schedule in pipelines for zero in (2, 3)),
        allows_idle_devices=True,
        allows_uneven_micro_batches=True,
        spreads_ends=True,
    )
    return changed(problem, graph=graph, capabilities=capabilities, schedule=PIPELINE_SCHEDULES)


def problem_with_axes(
    seed: int, *, largest: int = 3, most_devices: int = 12, most_micro_batches: int = 4
) -> PlacementProblem:
    """A random problem with hybrid sharding, and on some seeds with split sequences and divided experts."""
    problem = random_problem(seed, largest=largest, most_micro_batches=most_micro_batches)
    random = Random(seed + 1)
    nodes = (InterconnectLevel(random.choice([2, 3, 4]), 1e7, 1e-4), InterconnectLevel(12, 1e6, 1e-3))
    devices = random.randrange(2, most_devices + 1)
    cluster = Cluster(problem.cluster.accelerator, devices, random.choice([nodes, problem.cluster.levels]))
    return with_axes(replace(problem, cluster=cluster), seed)


def with_axes(problem: PlacementProblem, seed: int) -> PlacementProblem:
    """The problem with hybrid sharding, and on some seeds with split sequences and divided experts."""
    random = Random(seed + 2)
    experts = {
        key: random.choice([0.0, 0.3, 0.6]) for key in dict.fromkeys(layer.key for layer in problem.graph.layers)
    }
    profiles = {
        index: replace(
            profile,
            expert_parameters=experts[index[0]] * (profile.parameters - sum(profile.tied_parameters.values())),
            frozen_expert_parameters=experts[index[0]]
            * (profile.frozen_parameters - sum(profile.frozen_ties.values())),
        )
        for index, profile in problem.profiles.items()
    }
    return replace(
        problem,
        profiles=profiles,
        capabilities=replace(
            problem.capabilities,
            allows_shard_groups=random.random() < 0.9,
            shards_whole_contexts=False,
            keeps_experts_in_shards=False,
        ),
        cp=random.choice([1, 1, 2, 3]),
        ep=random.choice([1, 1, 2, 3, 4]),
    )


def with_owners(problem: PlacementProblem, seed: int) -> PlacementProblem:
    """The problem on a stack whose ZeRO-1 gives some tensors of each layer to devices, which broadcast them."""
    random = Random(seed + 5)
    stack = replace(problem.calibration.stack, owners_broadcast=True)
    tensors = {layer.key: random.randrange(4) for layer in problem.graph.layers}
    profiles = {
        index: replace(profile, trained_tensors=tensors[index[0]]) for index, profile in problem.profiles.items()
    }
    return replace(problem, profiles=profiles, calibration=replace(problem.calibration, stack=stack))


def with_host(problem: PlacementProblem, seed: int, offload: Offload = Offload.OPTIMIZER) -> PlacementProblem:
    """The problem with something on hosts whose links and memory are small or large."""
    random = Random(seed + 3)
    host = HostLink(random.choice([1e6, 1e8, 1e12]), int(random.choice([1e5, 5e6, 1e9])))
    return replace(problem, cluster=replace(problem.cluster, host=host), offload=offload)


def changed(problem: PlacementProblem, **changes: object) -> PlacementProblem:
    """The problem with some of its fields, or of its choices, changed."""
    names = {field.name for field in fields(Choices)}
    choices = replace(problem.choices, **{name: value for name, value in changes.items() if name in names})
    return replace(problem, choices=choices, **{name: value for name, value in changes.items() if name not in names})


def chain_problem() -> PlacementProblem:
    """The first random problem that is a chain with full recompute, of which everything is allowed, and that fits."""
    for seed in range(10_000):
        problem = random_problem(seed, largest=6, most_devices=8)
        flows = [(flow.producer, flow.consumers) for flow in problem.graph.flows]
        is_chain = flows == [(index, (index + 1,)) for index in range(len(problem.graph.layers) - 1)]
        is_free = problem.capabilities == Capabilities.everything() and set(problem.choices.schedule) == set(
            PIPELINE_SCHEDULES
        )
        modes = (RecomputeMode.NONE, RecomputeMode.FULL)
        if is_chain and is_free and len(flows) >= 3 and problem.choices.recompute == modes:
            narrow = changed(problem, dp=(1,), zero=(0,))
            if find_placement(narrow).best and len(find_placement(problem, top=4).alternatives) == 3:
                return problem
    raise AssertionError


def with_memory(problem: PlacementProblem, hbm_bytes: int) -> PlacementProblem:
    """The same problem on devices with so much memory."""
    accelerator = replace(problem.cluster.accelerator, hbm_bytes=hbm_bytes)
    return replace(problem, cluster=replace(problem.cluster, accelerator=accelerator))


def random_strategy(random: Random, problem: PlacementProblem) -> Parallelism | None:
    """A strategy of up to five stages and three copies, or None where layers or microbatches are too few."""
    schedule = random.choice(list(PipelineSchedule))
    dp = random.randrange(1, 4)
    chunks = 2 if schedule.has_chunks else 1
    pp = 1 if schedule is PipelineSchedule.NONE else random.randrange(2, 6)
    parallelism = Parallelism(
        tp=random.choice(problem.tp_degrees),
        dp=dp,
        pp=pp,
        chunks=chunks,
        schedule=schedule,
        zero=random.choice([0, 1, 2, 3]) if dp > 1 else 0,
    )
    micro_batches = parallelism.micro_batches_per_pipeline(problem.micro_batches)
    is_uneven = schedule is PipelineSchedule.INTERLEAVED and micro_batches % pp
    is_uneven |= schedule is PipelineSchedule.DUAL_PIPE_V and micro_batches < 2 * pp
    return None if parallelism.stages > len(problem.graph.layers) or is_uneven else parallelism
