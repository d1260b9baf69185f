"""One GPT through torch, JAX unrolled, JAX scanned and config: one plan; and what cannot be split is left out."""

import jax
import jax.numpy as jnp
import jax_models
import pytest
import torch_models
from plans import checked, small_cluster

import phaze
from phaze.errors import PlanError
from phaze.ir import Graph

LENGTH, WIDTH, HEADS, LAYERS, WORDS = 512, 2048, 16, 2, 1000
"""Large enough that matrix products decide: small vector ops differ between the frameworks."""


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    """The same model four times."""
    sizes = {"LENGTH": LENGTH, "WIDTH": WIDTH, "HEADS": HEADS, "LAYERS": LAYERS, "WORDS": WORDS}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(jax_models, name, size)
        tokens = {name: jax_models.ids(2, LENGTH) for name in ("ids", "labels")}
        unrolled, scanned = (jax_models.gpt_parameters(LAYERS, stacked=stacked) for stacked in (False, True))
        found = {
            "jax": phaze.import_graph(jax_models.gpt_loss, (unrolled, tokens)),
            "jax scanned": phaze.import_graph(jax_models.gpt_scan, (scanned, tokens)),
        }
    model = torch_models.gpt2(n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_positions=LENGTH, vocab_size=WORDS)
    words = torch_models.ids(2, LENGTH)
    found["torch"] = phaze.import_graph(model, {"input_ids": words, "labels": words})
    found["config"] = phaze.import_graph(model.config, sequence_length=LENGTH)
    return found


def test_one_model_from_four_frontends_gets_one_plan(graphs: dict[str, Graph]) -> None:
    question = {"global_batch_size": 64, "micro_batch_size": (2, 4), "tp": (1, 2), "gap": 0.0}
    plans = {
        name: checked(phaze.optimize(graph, cluster=small_cluster(), target=None, **question), graph)
        for name, graph in graphs.items()
    }
    assert {plan.model.parameter_count for plan in plans.values()} == {plans["config"].model.parameter_count}
    assert {name: plan.strategy for name, plan in plans.items()} == dict.fromkeys(plans, plans["config"].strategy)
    cuts = {tuple(len(stage.layers) for stage in plan.stages) for plan in plans.values()}
    assert len(cuts) == 1
    times = [plan.step_time_s for plan in plans.values()]
    assert max(times) < 1.5 * min(times)


def test_degrees_that_a_captured_model_does_not_allow_are_left_out_by_name() -> None:
    """An associative scan over time is captured as slices that split sequences contradict."""

    def loss(parameters: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = parameters["embed"][batch["ids"]]
        keep = jax.nn.sigmoid(x @ parameters["decay"])
        _, states = jax.lax.associative_scan(
            lambda early, late: (early[0] * late[0], early[1] * late[0] + late[1]), (keep, (1 - keep) * x), axis=1
        )
        chosen = jax.nn.log_softmax(states @ parameters["head"])
        return -jnp.take_along_axis(chosen, batch["labels"][..., None], -1).mean()

    shapes = {"embed": (32, 16), "decay": (16, 16), "head": (16, 32)}
    parameters = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("ids", "labels")}
    graph = phaze.import_graph(loss, (parameters, batch))
    question = {"cluster": small_cluster(devices=4), "global_batch_size": 8, "target": None}
    assert phaze.optimize(graph, cp=(1, 2), **question).strategy.cp == 1
    with pytest.raises(PlanError, match="cannot be split for cp=2"):
        phaze.optimize(graph, cp=(2,), **question)
