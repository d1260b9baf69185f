"""What is drawn for samples is drawn as on one device, wherever the key comes from; the model's own wishes give way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_dividing as small
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import phaze
from phaze.backends.jax.trace_rewriting import RowsOfBatch, draws_of_samples, with_draws_of_rows
from phaze.errors import PlanError

Loss = Callable[..., Any]


def dropped(params: Any, key: Any, x: Any, y: Any) -> Any:
    hidden = small.hidden(params, x)
    return small.error(params, hidden * jax.random.bernoulli(key, 0.5, hidden.shape), y)


def dropped_again(params: Any, key: Any, x: Any, y: Any) -> Any:
    return jax.checkpoint(lambda params: dropped(params, key, x, y))(params)


def dropped_by_step(params: Any, step: Any, x: Any, y: Any) -> Any:
    return dropped(params, jax.random.fold_in(jax.random.PRNGKey(3), step), x, y)


def dropped_by_sample(params: Any, key: Any, x: Any, y: Any) -> Any:
    keys = jax.random.split(key, x.shape[0])
    masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (small.HIDDEN,)))(keys)
    return small.error(params, small.hidden(params, x) * masks, y)


def dropped_by_place(params: Any, key: Any, x: Any, y: Any) -> Any:
    masks = jax.vmap(lambda place: jax.random.bernoulli(jax.random.fold_in(key, place), 0.5, (small.HIDDEN,)))
    return small.error(params, small.hidden(params, x) * masks(jnp.arange(x.shape[0])), y)


def dropped_in_scan(params: Any, key: Any, x: Any, y: Any) -> Any:
    def layer(hidden: Any, key: Any) -> tuple[Any, None]:
        return hidden * jax.random.bernoulli(key, 0.7, hidden.shape), None

    return small.error(params, jax.lax.scan(layer, small.hidden(params, x), jax.random.split(key, 3))[0], y)


def projected(params: Any, step: Any, x: Any, y: Any) -> Any:
    """A fixed random projection, which all samples share."""
    projection = jax.random.normal(jax.random.key(0), (small.HIDDEN, small.HIDDEN))
    return small.error(params, small.hidden(params, x) @ projection, y)


CASES: dict[str, tuple[Loss, Any]] = {
    "typed key": (dropped, lambda: jax.random.key(1)),
    "raw key": (dropped, lambda: jax.random.PRNGKey(1)),
    "raw key in a checkpoint": (dropped_again, lambda: jax.random.PRNGKey(1)),
    "number of the step": (dropped_by_step, lambda: np.int32(7)),
    "a key for each sample": (dropped_by_sample, lambda: jax.random.key(2)),
    "a key folded with each place": (dropped_by_place, lambda: jax.random.key(2)),
    "keys of layers": (dropped_in_scan, lambda: jax.random.PRNGKey(5)),
    "shared by all": (projected, lambda: np.int32(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_microbatches_draw_what_one_device_draws(name: str) -> None:
    loss, key = CASES[name]
    inputs = (small.weights(), key(), *small.rows())
    value, gradients = small.divided(loss, inputs)
    expected, expected_gradients = jax.jit(jax.value_and_grad(loss))(*inputs)
    assert value == pytest.approx(float(expected), rel=1e-6)
    assert small.largest_error(gradients, expected_gradients) < 1e-6


def draw(size: int, width: int, impl: str) -> Any:
    """A trace that draws numbers of a width for some samples."""
    shape = (3, size, 5)

    def trace(key: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(key, impl=impl), shape, f"uint{width}")

    words = 4 if impl == "rbg" else 2
    return jax.make_jaxpr(trace)(jax.ShapeDtypeStruct((words,), jnp.uint32))


@pytest.mark.parametrize("width", [8, 16, 32])
def test_rows_of_a_draw_are_those_of_the_whole_draw(width: int) -> None:
    key = jax.random.key_data(jax.random.key(4))
    part, twice, whole = (draw(size, width, "threefry2x32") for size in (2, 4, 6))
    rows = with_draws_of_rows(part, draws_of_samples(part, twice), RowsOfBatch(2, 6))
    drawn = [jax.core.eval_jaxpr(rows.jaxpr, rows.consts, key, jnp.uint32(first))[0] for first in (0, 2, 4)]
    expected = jax.core.eval_jaxpr(whole.jaxpr, whole.consts, key)[0]
    np.testing.assert_array_equal(np.concatenate(drawn, axis=1), expected)


def test_other_generators_draw_differently_for_each_microbatch() -> None:
    part, twice = (draw(size, 32, "rbg") for size in (2, 4))
    rows = with_draws_of_rows(part, draws_of_samples(part, twice), RowsOfBatch(2, 6))
    key = jnp.arange(4, dtype=jnp.uint32)
    drawn = [jax.core.eval_jaxpr(rows.jaxpr, rows.consts, key, jnp.uint32(first))[0] for first in (0, 2, 4)]
    assert len({np.asarray(part).tobytes() for part in drawn}) == 3


def test_draws_that_cannot_be_divided_are_refused_by_name() -> None:
    def loss(params: Any, key: Any, x: Any, y: Any) -> Any:
        hidden = small.hidden(params, x)
        return small.error(params, hidden * jax.random.gamma(key, 2.0, hidden.shape), y)

    with pytest.raises(PlanError, match="draws random numbers for samples in random_gamma"):
        small.divided(loss, (small.weights(), jax.random.key(1), *small.rows()))


def constrained(params: Any, x: Any, y: Any) -> Any:
    """A loss with a constraint on a mesh of the user's own."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    wish = NamedSharding(mesh, PartitionSpec("data", "model"))
    hidden = jax.checkpoint(small.hidden)(params, x)
    return small.error(params, jax.lax.with_sharding_constraint(hidden, wish), y)


def test_constraints_and_checkpoints_of_the_model_give_way_to_the_plan() -> None:
    inputs = (small.weights(), *small.rows())
    value, _ = small.divided(constrained, inputs)
    assert value == pytest.approx(float(constrained(*inputs)), rel=1e-6)
    notes = phaze.import_graph(constrained, inputs).notes
    assert "sharding constraints in the model give way: the plan says what lies where" in notes
    assert any("jax.checkpoint in the model gives way" in note for note in notes)
    plan = phaze.optimize(constrained, inputs, cluster="cpu:1", global_batch_size=small.ROWS, precision="fp32")
    assert all(note in plan.explain() for note in notes[-2:])
    run = plan.apply(constrained, inputs=inputs)
    text = run.step.lower(run.start(inputs[0]), *inputs[1:]).as_text()
    assert "optimization_barrier" not in text, "nothing is computed again where the plan recomputes nothing"


def test_a_model_that_divides_its_own_work_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def loss(params: Any, x: Any, y: Any) -> Any:
        rows = PartitionSpec("data")
        run = jax.shard_map(small.hidden, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
        return small.error(params, run(params, x), y)

    with pytest.raises(PlanError, match="divides its work by a shard_map of its own"):
        small.divided(loss, (small.weights(), *small.rows()))
