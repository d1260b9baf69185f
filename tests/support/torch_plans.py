"""Plans of the small torch models, their graphs imported once."""

import functools
from collections.abc import Mapping
from dataclasses import replace

from torch_training import LENGTH, batch_of, build_model, given_loss, inputs_of

import phaze
from phaze.hardware import Cluster, parse_cluster, precision_recipe
from phaze.ir import Graph


@functools.cache
def imported(kind: str) -> Graph:
    batch = batch_of(kind)
    given = given_loss(kind)
    if "targets" in batch and "targets" not in inputs_of(kind, batch):
        given["targets"] = batch["targets"]
    return phaze.import_graph(build_model(kind), inputs_of(kind, batch), **given)


@functools.cache
def described(kind: str) -> Graph:
    """The graph that a model's config describes: it says of tokens which experts take them, and sorts nothing."""
    document = {**build_model(kind).config.to_dict(), "model_type": build_model(kind).config.model_type}
    return phaze.import_graph(document, sequence_length=LENGTH)


def planned(
    kind: str,
    world: int,
    strategy: Mapping[str, object],
    target: str | None = "torch",
    precision: str = "fp32",
) -> phaze.Plan:
    """The plan of a strategy; for ZeRO 1 and 2 in a precision with a master copy.

    It is the only plan of what is given, whatever the gap: a wide one leaves layers on their first schedules. An
    `exchange` beside the strategy is how all attentions get their keys, whatever is fastest.
    """
    asked = {name: value for name, value in strategy.items() if name != "exchange"}
    plan = _planned(kind, world, tuple(completed(world, asked).items()), target, precision)
    if "exchange" not in strategy:
        return plan
    exchanges = dict.fromkeys(plan.layouts.key_exchanges, str(strategy["exchange"]))
    return replace(plan, layouts=replace(plan.layouts, key_exchanges=exchanges))


def completed(world: int, strategy: Mapping[str, object]) -> dict[str, object]:
    """A strategy with the plainest value for what it leaves open, so that nothing has to be searched."""
    cp, tp, pp = (int(str(strategy.get(name, 1))) for name in ("cp", "tp", "pp"))
    dp = world // (cp * tp * pp)
    plain: dict[str, object] = {"dp": dp, "tp": tp, "pp": pp, "zero": 0, "recompute": "none"}
    plain["micro_batch_size"] = 2 if dp > 1 or pp > 1 else 4  # at least two microbatches of eight samples
    if tp > 1:
        plain["sequence_parallel"] = False
    if pp > 1:
        plain |= {"schedule": "1f1b", "chunks": 1}
    return {**plain, **strategy}


def _needs_config(kind: str, strategy: Mapping[str, object]) -> bool:
    """Whether a captured graph does not do: contexts cannot sort tokens; mixtures but Mixtral are slow to capture."""
    is_slow = kind.startswith(("qwen2-moe", "deepseek", "gpt-oss"))
    return is_slow or kind.endswith("-config") or (kind.startswith("mixtral") and strategy.get("cp", 1) != 1)


@functools.cache
def _planned(
    kind: str, world: int, items: tuple[tuple[str, object], ...], target: str | None, precision: str
) -> phaze.Plan:
    strategy = dict(items)
    recipe = precision_recipe(f"{precision}-adam")
    if strategy.get("zero") in (1, 2) and not recipe.master_bytes:
        recipe = replace(recipe, name=f"{precision}-adam-master", master_bytes=4)
    return phaze.evaluate(
        described(kind) if _needs_config(kind, strategy) else imported(kind),
        cluster=f"cpu:{world}",
        global_batch_size=8,
        precision=recipe,
        target=target,
        strategy=strategy,
        compares=False,
        gap=0.9,
    ).plan


def tight_cluster(memory_bytes: int, devices: int = 8) -> Cluster:
    """Host devices with little memory."""
    cluster = parse_cluster(f"cpu:{devices}")
    return replace(cluster, accelerator=replace(cluster.accelerator, hbm_bytes=memory_bytes))


def unforced(kind: str, memory_bytes: int, devices: int = 8) -> phaze.Plan:
    """The plan that `optimize` returns under a limit of memory."""
    return phaze.optimize(
        build_model(kind),
        batch_of(kind),
        cluster=tight_cluster(memory_bytes, devices),
        global_batch_size=16,
        precision="fp32",
        tp=(1, 2),
        micro_batch_size=(2,),
    )
