"""Functions, steps, lowered functions and jaxprs: roles of arguments, phases, notes, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import pytest

import phaze
from phaze.errors import ImportModelError
from phaze.ir import Graph, Phase, Role


@pytest.fixture(scope="module")
def loss_graph() -> Graph:
    return phaze.import_graph(models.gpt_loss, (models.gpt_parameters(), models.tokens()))


@pytest.fixture(scope="module")
def step_graph() -> Graph:
    params = models.gpt_parameters()
    return phaze.import_graph(jax.jit(models.adam_step), (params, models.adam_state(params), models.tokens()))


def roles(graph: Graph, role: Role) -> set[str]:
    return {tensor.id for tensor in graph.tensors.values() if tensor.role is role}


def totals(graph: Graph) -> tuple[Any, ...]:
    flops = tuple(graph.matmul_flops(phase) for phase in Phase)
    return (graph.parameter_count, len(graph.layers), len(graph.distinct_layers), *flops)


def test_parameters_are_named_by_their_path_and_the_rest_is_the_batch(loss_graph: Graph) -> None:
    assert loss_graph.tensors["params.h.0.attn.qkv.w"].shape == (48, 144)
    assert roles(loss_graph, Role.BATCH) == {"batch.ids", "batch.labels"}


def test_a_step_has_the_forward_and_backward_of_its_loss(loss_graph: Graph, step_graph: Graph) -> None:
    assert totals(step_graph) == totals(loss_graph)
    keys = [[layer.key for layer in graph.layers[1:-1]] for graph in (step_graph, loss_graph)]
    assert keys[0] == keys[1]


def test_a_step_s_optimizer_state_and_update_are_told_apart(step_graph: Graph) -> None:
    states = roles(step_graph, Role.OPTIMIZER_STATE)
    assert len(states) == 2 * len(roles(step_graph, Role.PARAMETER)) + 1
    assert all(name.startswith(("state.first.", "state.second.", "state.count")) for name in states)
    assert roles(step_graph, Role.BATCH) == {"batch.ids", "batch.labels"}
    updates = step_graph.ops_of(Phase.UPDATE)
    assert len(updates) > 4 * len(step_graph.parameters)
    assert not any(op.kind.is_matrix for op in updates)
    assert {name for name, _ in step_graph.gradients} == {tensor.id for tensor in step_graph.parameters}


def test_gradients_already_computed_are_found(loss_graph: Graph) -> None:
    graph = phaze.import_graph(jax.value_and_grad(models.gpt_loss), (models.gpt_parameters(), models.tokens()))
    assert totals(graph) == totals(loss_graph)


def test_a_lowered_function_is_imported_as_it_is(loss_graph: Graph) -> None:
    lowered = jax.jit(jax.value_and_grad(models.gpt_loss)).lower(models.gpt_parameters(), models.tokens())
    graph = phaze.import_graph(lowered)
    assert totals(graph) == totals(loss_graph)
    assert any("followed from the batch arguments" in note for note in graph.notes)
    assert graph.with_micro_batch(6).matmul_flops("backward") == 3 * graph.matmul_flops("backward")
    with pytest.raises(ImportModelError, match="a lowered function has its own inputs"):
        phaze.import_graph(lowered, (1,))


def test_a_traced_function_and_a_jaxpr_are_imported(loss_graph: Graph) -> None:
    arguments = (models.gpt_parameters(), models.tokens())
    traced = jax.jit(jax.value_and_grad(models.gpt_loss)).trace(*arguments)
    assert totals(phaze.import_graph(traced)) == totals(loss_graph)
    jaxpr = jax.make_jaxpr(models.gpt_loss)(*arguments)
    count = len(jaxpr.in_avals)
    graph = phaze.import_graph(jaxpr, parameters=range(count - 2), batch=[count - 2, count - 1])
    assert graph.parameter_count == loss_graph.parameter_count
    assert graph.matmul_flops("backward") == loss_graph.matmul_flops("backward")


def test_roles_are_taken_by_argument_number_and_by_path() -> None:
    def loss(images: jax.Array, model: Any) -> jax.Array:
        return (jnp.tanh(images @ model["first"]) @ model["head"]["w"]).mean()

    inputs = (models.shape(4, 6), {"first": models.shape(6, 8), "head": {"w": models.shape(8, 3)}})
    graph = phaze.import_graph(loss, inputs, parameters=1)
    assert roles(graph, Role.PARAMETER) == {"model.first", "model.head.w"}
    assert roles(graph, Role.BATCH) == {"images"}
    by_path = phaze.import_graph(loss, inputs, parameters="model['head']", batch=0)
    assert roles(by_path, Role.PARAMETER) == {"model.head.w"}
    assert roles(by_path, Role.OTHER) >= {"model.first"}


def test_arrays_and_shapes_may_be_mixed() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w).sum()

    graph = phaze.import_graph(loss, (jnp.zeros((6, 8)), models.shape(4, 6)))
    assert (graph.parameter_count, graph.micro_batch_size) == (48, 4)


def test_a_loss_may_have_more_beside_it() -> None:
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ w
        return y.mean(), y

    graph = phaze.import_graph(loss, (models.shape(6, 8), models.shape(4, 6)))
    assert graph.matmul_flops("backward") == graph.matmul_flops("forward") == 2 * 4 * 6 * 8


def test_a_batch_that_shapes_do_not_follow_leaves_the_graph_fixed_and_says_so() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        if x.shape[0] != 4:
            raise ValueError("only four")
        return (x.reshape(2, 12) @ w).sum()

    graph = phaze.import_graph(loss, (models.shape(12, 8), models.shape(4, 6)))
    assert any(note.startswith("fixed to the batch that it was captured with") for note in graph.notes)


def test_a_loop_over_time_is_run_and_its_steps_share_their_parameter() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        last, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return last.sum()

    graph = phaze.import_graph(loss, (models.shape(8, 8), models.shape(4, 5, 8)))
    assert graph.matmul_flops("forward") == 5 * 2 * 4 * 8 * 8
    assert graph.parameter_count == 64
    assert set(graph.layer_graph.tied_parameters) == {"w"}


def test_branches_and_loops_that_depend_on_data_are_counted_and_noted() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)
        y = jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: y * 0.5, y)
        return jax.lax.stop_gradient(y).sum() + (x @ w).sum()

    graph = phaze.import_graph(loss, (models.shape(8, 8), models.shape(4, 8)))
    assert any("a branch that depends on data is counted as its longest side" in note for note in graph.notes)
    assert any("a loop whose number of trips depends on data is counted once" in note for note in graph.notes)


def test_shardings_that_are_already_there_are_kept_and_said() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x @ w, by_rows).sum()

    lowered = jax.jit(jax.value_and_grad(loss), in_shardings=(by_rows, by_rows)).lower(
        models.shape(8, 8), models.shape(4, 8)
    )
    graph = phaze.import_graph(lowered)
    assert any(op.function == "sharding_constraint" and '"x"' in str(op.attribute("sharding")) for op in graph.ops)
    assert any(note.startswith("sharding already present: w") for note in graph.notes)
    assert any(note.startswith("mesh already present") for note in graph.notes)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (models.gpt_loss, None, {}, "gpt_loss needs its arguments: pass inputs"),
        (models.gpt_loss, (1,), {}, "the inputs do not fit gpt_loss: missing a required argument: 'batch'"),
        (lambda w, x: (x @ w).sum(), (models.shape(3, 3), models.shape(4, 5)), {}, "failed while Phaze traced it"),
        (lambda w: (w, len), (models.shape(3),), {}, r"return the arrays alone \(params, static = equinox.partition"),
        (lambda n: jnp.sum(n * 1.0), (models.ids(),), {}, "no floating point arrays among its parameters"),
        (lambda w: w.sum(), (models.shape(3),), {"parameters": 2}, "parameters names argument 2"),
        (lambda w: w.sum(), (models.shape(3),), {"parameters": "v"}, "no argument has this path; they are 0 w"),
        (lambda w: w.sum(), (models.shape(3),), {"parameters": 1.5}, "expected argument numbers or pytree paths"),
        (lambda w: w.sum(), (models.shape(3),), {"loss_fn": len}, "loss_fn goes with linen and nnx modules"),
        (models.LinenGPT(), (models.ids(),), {}, "hold no scalar loss; pass loss_fn="),
    ],
)
def test_what_cannot_be_imported_is_said(model: Any, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        phaze.import_graph(model, inputs, **options)
