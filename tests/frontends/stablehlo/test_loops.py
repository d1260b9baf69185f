"""Long loops count as one trip whose ops have all trips as a factor: flops, parameters and bytes are those of all."""

import jax
import jax.numpy as jnp
import jax_models as models
import pytest
from jax import lax

import phaze
from phaze.cost import AttentionMode, planned_graph, price_ops
from phaze.errors import GraphError, ImportModelError
from phaze.hardware import find_accelerator
from phaze.ir import FactorKind, Graph, Phase, Rule

BATCH, INPUTS, WIDTH, OUTPUTS = 8, 16, 32, 4
RECURRENT, READ, PREDICTED = (2 * BATCH * a * b for a, b in ((WIDTH, WIDTH), (INPUTS, WIDTH), (WIDTH, OUTPUTS)))
PARAMETERS = {"w": models.shape(WIDTH, WIDTH), "u": models.shape(INPUTS, WIDTH), "o": models.shape(WIDTH, OUTPUTS)}


def recurrent_loss(parameters: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """A recurrent network over time with stacked outputs; a loop in a loop where time has two dimensions."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state @ parameters["w"] + x @ parameters["u"])
        return state, state

    def chunk(state: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(step, state, xs)

    _, outputs = lax.scan(step if inputs.ndim == 3 else chunk, jnp.zeros((inputs.shape[-2], WIDTH)), inputs)
    return jnp.mean((outputs @ parameters["o"]) ** 2)


def trained(*times: int, is_hlo: bool = False) -> Graph:
    step = jax.jit(jax.value_and_grad(recurrent_loss)).lower(PARAMETERS, models.shape(*times, BATCH, INPUTS))
    text = step.compile().as_text() if is_hlo else step.as_text()
    return phaze.import_graph(text.encode(), frontend="hlo", parameters=[0, 1, 2])


@pytest.mark.parametrize("times", [(600,), (3000,), (3, 700)])
@pytest.mark.parametrize("is_hlo", [False, True])
def test_flops_of_a_long_loop_are_those_of_all_trips_forward_and_backward(times: tuple[int, ...], is_hlo: bool) -> None:
    graph = trained(*times, is_hlo=is_hlo)
    trips = times[0] * (times[1] if len(times) > 1 else 1)
    assert graph.matmul_flops(Phase.FORWARD) == trips * (RECURRENT + READ + PREDICTED)
    assert graph.matmul_flops(Phase.BACKWARD) == trips * (2 * RECURRENT + READ + 2 * PREDICTED)
    assert graph.parameter_count == WIDTH * WIDTH + INPUTS * WIDTH + WIDTH * OUTPUTS
    assert len(graph.gradients) == 3
    assert len(graph.ops) < 150
    assert any("counts as one trip with all of them in every op" in note for note in graph.notes)


def test_a_short_loop_is_run_trip_by_trip_and_agrees_but_for_its_first_and_last_trip() -> None:
    short, long = trained(6), trained(600)
    assert short.matmul_flops(Phase.FORWARD) * 100 == long.matmul_flops(Phase.FORWARD)
    # The first state is zero and has no gradient, which trip by trip is seen.
    missing = long.matmul_flops(Phase.BACKWARD) - short.matmul_flops(Phase.BACKWARD) * 100
    assert missing == pytest.approx(100 * RECURRENT)


@pytest.mark.parametrize("chip", ["a100-80gb", "tpuv4"])
def test_a_loop_costs_what_its_trips_cost_one_after_the_other(chip: str) -> None:
    def product_seconds(graph: Graph, phase: Phase) -> float:
        planned = planned_graph(graph, AttentionMode.UNFUSED)
        ops = [op for op in planned.ops_of(phase) if op.gemms]
        return float(price_ops(planned, ops, find_accelerator(chip)).spread_s.sum())

    short, long = trained(60), trained(600)
    assert any(op.rule.trips == 600 for op in long.ops)
    assert not any(op.rule.trips > 1 for op in short.ops)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert product_seconds(long, phase) == pytest.approx(10 * product_seconds(short, phase), rel=0.05)


def test_the_trips_of_a_loop_are_not_divided_among_devices() -> None:
    rule = next(op.rule for op in trained(600).ops if op.rule.trips > 1)
    (trips,) = (factor for factor in rule.factors if factor.kind is FactorKind.SERIAL)
    assert Rule.parse(str(rule)) == rule
    assert rule.of_one_trip.trips == 1
    with pytest.raises(GraphError, match="must stay whole"):
        rule.local({trips.name: 2})


def test_a_graph_with_a_long_loop_can_be_planned() -> None:
    plan = phaze.optimize(trained(600), cluster="a100-80gb:2", global_batch_size=8)
    assert plan.step_time_s > 0


def test_twice_the_trips_take_twice_the_time_launches_included() -> None:
    def loss(parameters: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        return recurrent_loss(parameters, jnp.swapaxes(inputs, 0, 1))

    options = {"cluster": "a100-80gb:2", "global_batch_size": 8, "strategy": {"dp": 2}}
    seconds = [
        phaze.evaluate(loss, (PARAMETERS, models.shape(BATCH, trips, INPUTS)), **options).plan.step_time_s
        for trips in (1000, 2000)
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.02)


def test_ops_that_are_the_same_in_all_trips_are_done_once() -> None:
    def repeated(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5000, lambda _, state: state + jnp.tanh(x @ w), x)

    text = jax.jit(repeated).lower(models.shape(8, 8), models.shape(4, 8)).as_text()
    graph = phaze.import_graph(text.encode(), frontend="hlo", batch=[1])
    assert graph.matmul_flops(Phase.FORWARD) == 2 * 4 * 8 * 8


def test_a_count_beyond_what_can_be_counted_is_refused_without_running_the_loop() -> None:
    def repeated(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2_000_000_000, lambda _, state: jnp.tanh(state @ w), x)

    text = jax.jit(repeated).lower(models.shape(1 << 14, 1 << 14), models.shape(1 << 14, 1 << 14)).as_text()
    with pytest.raises(ImportModelError, match="a loop of 2,000,000,000 trips cannot be counted as one"):
        phaze.import_graph(text.encode(), frontend="hlo", batch=[1])
