"""Rules for logical names lay out a linen model as its plan says, or are refused."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen
from jax.sharding import PartitionSpec

import phaze
from phaze.errors import PlanError
from phaze.plan.plan import Plan

WIDTH, HIDDEN, WORDS, BATCH = 16, 64, 48, 8


KERNEL = linen.initializers.lecun_normal()


def named(names: tuple[str, ...], initializer: Any = KERNEL) -> Any:
    return linen.with_logical_partitioning(initializer, names)


class NamedDimensions(linen.Module):
    """An embedding, a feed-forward layer and a head, with names for all dimensions."""

    embedding: tuple[str, str] = ("word", "embedding")

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        initializer = named(self.embedding, linen.initializers.normal(0.02))
        x = linen.Embed(WORDS, WIDTH, embedding_init=initializer)(ids)
        bias = named(("hidden",), linen.initializers.zeros_init())
        hidden = linen.relu(linen.Dense(HIDDEN, kernel_init=named(("width", "hidden")), bias_init=bias)(x))
        bias = named(("width",), linen.initializers.zeros_init())
        x = x + linen.Dense(WIDTH, kernel_init=named(("hidden", "width")), bias_init=bias)(hidden)
        return linen.Dense(WORDS, kernel_init=named(("width", "vocabulary")), use_bias=False)(x)


IDS = np.arange(BATCH * 4).reshape(BATCH, 4) % WORDS


def planned(module: linen.Module, **strategy: int) -> tuple[Plan, Any]:
    """A plan for a module, and the shapes of its variables in their boxes."""
    variables = jax.eval_shape(module.init, jax.random.key(0), IDS)
    copies = strategy.get("dp", 1)
    settled = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "zero": 0,
        "recompute": "none",
        "micro_batch_size": BATCH // copies,
        **strategy,
    }
    if settled["tp"] != 1:
        settled["sequence_parallel"] = False
    question: dict[str, Any] = {"cluster": "cpu:8", "global_batch_size": BATCH, "precision": "fp32", "target": "jax"}
    plan = phaze.evaluate(
        module, (IDS,), loss_fn=lambda scores: (scores**2).mean(), strategy=settled, compares=False, **question
    ).plan
    return plan, variables


def layouts(plan: Plan, variables: Any) -> dict[str, tuple[Any, Any]]:
    """The layout of every matrix under the rules, and the plan's."""
    rules = plan.logical_axis_rules(variables)
    given = linen.logical_to_mesh(linen.get_partition_spec(variables), rules)
    specs = plan.specs(linen.unbox(variables))
    is_spec = {"is_leaf": lambda leaf: isinstance(leaf, PartitionSpec)}
    pairs = zip(jax.tree_util.tree_leaves_with_path(given, **is_spec), jax.tree.leaves(specs, **is_spec), strict=True)
    return {jax.tree_util.keystr(path): (spec, plan_spec) for (path, spec), plan_spec in pairs if len(plan_spec) > 1}


def test_matrices_lie_under_the_rules_as_the_plan_says() -> None:
    measured = layouts(*planned(NamedDimensions(), dp=2, tp=4))
    assert {given == wanted for given, wanted in measured.values()} == {True}
    assert PartitionSpec(None, "tp") in [given for given, _ in measured.values()]


def test_shards_divide_every_matrix_that_the_plan_divides() -> None:
    plan, variables = planned(NamedDimensions(), dp=2, tp=4, zero=3)
    for given, wanted in layouts(plan, variables).values():
        assert sorted(filter(None, given)) == sorted(filter(None, wanted)), "each axis cuts one dimension"
        assert [entry == "tp" for entry in given] == [entry == "tp" for entry in wanted]


def test_activations_lie_between_layers_as_their_names_say() -> None:
    plan, variables = planned(NamedDimensions(), dp=2, tp=4)
    rules = plan.logical_axis_rules(variables, activations=("samples", "positions", None))
    assert rules[-2:] == (("samples", "dp"), ("positions", None))


def test_names_that_lie_in_two_ways_are_refused_with_what_helps() -> None:
    plan, variables = planned(NamedDimensions(embedding=("width", "hidden")), dp=2, tp=4)
    rules = dict(plan.logical_axis_rules(variables))
    assert rules["hidden"] == "tp"
    plan, variables = planned(NamedDimensions(embedding=("hidden", "width")), dp=2, tp=4)
    with pytest.raises(PlanError, match=r"no rules lay out .*Give its dimensions names of their own"):
        plan.logical_axis_rules(variables)


def test_parameters_without_names_are_refused() -> None:
    plan, variables = planned(NamedDimensions(), dp=2, tp=4)
    with pytest.raises(PlanError, match="no parameter names its dimensions"):
        plan.logical_axis_rules(jax.tree.map(lambda leaf: leaf, linen.unbox(variables)))
