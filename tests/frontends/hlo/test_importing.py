"""Every form of one function imports to the same graph; dumps of XLA; roles by name and index."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import hlo_forms
import jax
import jax.numpy as jnp
import jax_models as models
import optax
import pytest

import phaze
from phaze.errors import ImportModelError, QuestionError
from phaze.ir import Graph, Phase, Role
from phaze.verify.plan_checks import check_plan


def totals(graph: Graph) -> tuple[Any, ...]:
    flops = tuple(graph.matmul_flops(phase) for phase in Phase)
    keys = [layer.key for layer in graph.layers]
    repeats = tuple(keys.index(key) for key in keys)
    return (graph.parameter_count, len(graph.gradients), graph.micro_batch_size, repeats, *flops)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_all_forms_of_one_function_have_the_same_totals_and_layers(is_scanned: bool) -> None:
    loss = models.gpt_scan if is_scanned else models.gpt_loss
    arguments = (models.gpt_parameters(2, stacked=is_scanned), models.tokens())
    forms = hlo_forms.forms_of(jax.value_and_grad(loss), *arguments)
    forms["hlo proto of a dump"] = hlo_forms.wrapped(forms["hlo proto"])
    expected = totals(phaze.import_graph(loss, arguments))
    for name, data in forms.items():
        graph = phaze.import_graph(data)
        assert totals(graph) == expected, name
        assert graph.coverage().unknown == ()
        assert graph.with_micro_batch(6).matmul_flops("forward") == 3 * graph.matmul_flops("forward")


def test_names_of_arguments_survive_in_every_form_that_has_them() -> None:
    forms = hlo_forms.forms_of(jax.value_and_grad(hlo_forms.small_loss), *hlo_forms.small_arguments())
    for name in ("named text", "bytecode", "hlo text", "hlo proto"):
        graph = phaze.import_graph(forms[name])
        assert {"params.embed", "params.head", "params.layers[1]"} == {
            tensor.id for tensor in graph.parameters if tensor.id != "params.layers[0]"
        }, name


def test_a_whole_step_is_told_apart_in_hlo_text_without_names_of_results() -> None:
    params = hlo_forms.small_arguments()[0]

    def step(params: Any, state: Any, batch: Any) -> Any:
        return models.adam_step(params, state, batch, loss_fn=lambda p, b: hlo_forms.small_loss(p, *b))

    arguments = (params, models.adam_state(params), hlo_forms.small_arguments()[1:])
    loss = phaze.import_graph(hlo_forms.small_loss, hlo_forms.small_arguments())
    for name, data in hlo_forms.forms_of(step, *arguments).items():
        graph = phaze.import_graph(data)
        assert graph.parameter_count == loss.parameter_count, name
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert graph.matmul_flops(phase) == loss.matmul_flops(phase), name
        roles = [tensor.role for tensor in graph.tensors.values()]
        assert roles.count(Role.OPTIMIZER_STATE) == 9, name
        assert roles.count(Role.BATCH) == 2, name
        assert graph.ops_of(Phase.UPDATE), name


def second_dim_loss(params: Any, x: jax.Array) -> jax.Array:
    """A scan over layers that are stacked on their second dimension, each computed again in backward."""

    def block(y: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ layer[0] + layer[1]), None

    layers = tuple(jnp.moveaxis(params[name], 1, 0) for name in ("kernel", "bias"))
    y, _ = jax.lax.scan(jax.checkpoint(block), jnp.sin(x) @ params["first"], layers)
    return ((y @ params["head"]) ** 2).mean()


def test_layers_stacked_on_another_dimension_are_found_in_all_forms_of_a_step_that_clips() -> None:
    params = {"first": models.shape(6, 8), "head": models.shape(8, 3)}
    params |= {"kernel": models.shape(8, 4, 8), "bias": models.shape(8, 4)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(second_dim_loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        metrics = {"a_norm": optax.tree.norm(gradients), "loss": loss, "regularization": jnp.float32(0.0)}
        return optax.apply_updates(params, updates), state, metrics

    arguments = (params, jax.eval_shape(optimizer.init, params), models.shape(5, 6))
    of_loss = phaze.import_graph(second_dim_loss, (params, arguments[2]))
    for name, data in hlo_forms.forms_of(step, *arguments, donated=(0, 1)).items():
        graph = phaze.import_graph(data)
        assert totals(graph)[:6] == totals(of_loss)[:6], name
        assert graph.matmul_flops(Phase.RECOMPUTE) == 4 * (2 * 5 * 8 * 8), name
        assert [layer.name for layer in graph.layers if "scan" in layer.name] == [f"scan.{i}" for i in range(4)], name
        assert len({layer.key for layer in graph.layers[1:5]}) == 1, name
        assert [tensor.role for tensor in graph.tensors.values()].count(Role.BATCH) == 1, name
        assert [tensor.shape for tensor in graph.parameters].count((8, 8)) == 4, name


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that XLA dumped while it compiled a model and a helper."""
    folder = tmp_path_factory.mktemp("dumps")
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}
    step = jax.jit(jax.value_and_grad(hlo_forms.small_loss)).lower(*hlo_forms.small_arguments())
    step.compile(compiler_options=options)
    jax.jit(lambda x: x + 1).lower(models.shape(3)).compile(compiler_options=options)
    return folder


def test_a_folder_of_dumps_gives_the_model_before_optimizations_and_says_which(dumps: Path) -> None:
    graph = phaze.import_graph(dumps)
    expected = phaze.import_graph(hlo_forms.small_loss, hlo_forms.small_arguments())
    assert totals(graph) == totals(expected)
    (note,) = [note for note in graph.notes if note.startswith("took ")]
    assert re.search(r"small_loss\.before_optimizations\.txt, which has the most flops in products \(\S+\) of 2", note)


@pytest.mark.parametrize("ending", ["after_optimizations.txt", "after_optimizations.hlo.pb"])
def test_after_optimizations_fusions_are_walked(dumps: Path, ending: str) -> None:
    (path,) = [path for path in dumps.iterdir() if path.name.endswith(ending) and "small_loss" in path.name]
    graph = phaze.import_graph(path)
    expected = phaze.import_graph(dumps)
    assert graph.parameter_count == expected.parameter_count
    for phase in ("forward", "backward"):
        assert graph.matmul_flops(phase) == pytest.approx(expected.matmul_flops(phase), rel=0.005)
    assert graph.coverage().flops_share > 0.95
    assert any(note.startswith("after optimizations: fusions are walked") for note in graph.notes)


def test_a_forward_gets_its_backward_by_rule_once_its_parameters_are_told() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w.T).sum()  # samples or features: nothing tells them apart

    text = hlo_forms.forms_of(loss, models.shape(8, 6), models.shape(4, 6))["text"]
    with pytest.raises(ImportModelError, match=r"\(--batch 1\), or on 0 argument0 \(--batch 0\), .* pass parameters="):
        phaze.import_graph(text)
    for options in ({"parameters": 0}, {"batch": [1]}, {"parameters": "argument0", "batch": "argument1"}):
        graph = phaze.import_graph(text, **options)
        assert (graph.parameter_count, graph.micro_batch_size) == (48, 4)
        assert graph.matmul_flops("backward") == graph.matmul_flops("forward")
        assert "backward derived by rule" in graph.notes


def network(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array, *, is_transposed: bool = False) -> jax.Array:
    for weight, bias in weights:
        x = jnp.tanh(x @ (weight.T if is_transposed else weight) + bias)
    return x


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_data_of_a_loss_without_names_is_what_no_product_sums_over(is_transposed: bool) -> None:
    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((network(weights, x, is_transposed=is_transposed) - y) ** 2).mean()

    widths = (6, 8, 8, 3)
    shapes = [(b, a) if is_transposed else (a, b) for a, b in itertools.pairwise(widths)]
    weights = [(models.shape(*shape), models.shape(b)) for shape, b in zip(shapes, widths[1:], strict=True)]
    text = hlo_forms.forms_of(loss, weights, models.shape(4, 6), models.shape(4, 3))["text"]
    graph = phaze.import_graph(text)
    assert graph.micro_batch_size == 4
    assert graph.parameter_count == 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    assert len(graph.gradients) == 6
    assert any("argument6, argument7 are taken for the batch" in note for note in graph.notes)


@pytest.mark.parametrize("has_momentum", [False, True])
def test_a_step_that_keeps_its_loss_to_itself_is_a_step(has_momentum: bool) -> None:
    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((network(weights, x) - y) ** 2).mean()

    def sgd(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x, y))

    def momentum(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, jax.grad(loss)(weights, x, y))
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, state), state

    weights = [(models.shape(a, b), models.shape(b)) for a, b in ((6, 8), (8, 7), (7, 3))]
    data = (models.shape(4, 6), models.shape(4, 3))
    expected = phaze.import_graph(loss, (weights, *data)).with_micro_batch(4)
    arguments = (weights, weights, *data) if has_momentum else (weights, *data)
    for name, text in hlo_forms.forms_of(momentum if has_momentum else sgd, *arguments).items():
        graph = phaze.import_graph(text)
        assert graph.parameter_count == expected.parameter_count, name
        assert graph.micro_batch_size == 4, name
        roles = [tensor.role for tensor in graph.tensors.values()]
        assert roles.count(Role.OPTIMIZER_STATE) == 6 * has_momentum, name
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert graph.matmul_flops(phase) == expected.matmul_flops(phase), (name, phase)
        assert any("does not return its loss" in note for note in graph.notes), name
    assert phaze.optimize(graph, cluster="a100-80gb:2", global_batch_size=8, target=None).step_time_s > 0


def test_inputs_that_are_returned_unchanged_are_no_parameters_and_frozen_weights_are() -> None:
    def step(w: jax.Array, frozen: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            hits = jax.nn.one_hot(labels, 3) * jnp.tanh(x @ frozen @ w.T)
            return hits.sum()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, frozen, x, labels, value

    arguments = (models.shape(3, 8), models.shape(6, 8), models.shape(5, 6), models.shape(5, dtype=jnp.int32))
    lowered = jax.jit(step, donate_argnums=(0, 1, 2, 3), keep_unused=True).lower(*arguments)
    graph = phaze.import_graph(lowered.as_text().encode(), frontend="hlo")
    roles = [tensor.role for tensor in graph.tensors.values() if tensor.shape in ((3, 8), (6, 8), (5, 6), (5,))]
    assert roles[:4] == [Role.PARAMETER, Role.PARAMETER, Role.BATCH, Role.BATCH]
    assert (len(graph.gradients), graph.micro_batch_size) == (1, 5)


def test_names_that_xla_gives_to_every_argument_tell_nothing() -> None:
    text = b"""HloModule m
ENTRY e {
  param = f32[4,6] parameter(0)
  param.1 = f32[6,8] parameter(1)
  ROOT d = f32[4,8] dot(param, param.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    graph = phaze.import_graph(text)
    assert (graph.parameter_count, graph.micro_batch_size) == (48, 4)


def test_a_function_that_returns_nothing_is_refused_and_names_the_others() -> None:
    text = b"""module {
  func.func @work(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }
  func.func @main() { %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %y = "stablehlo.custom_call"(%c) {call_target_name = "check", has_side_effect = true}
      : (tensor<4xf32>) -> tensor<4xf32>
    return }
}"""
    with pytest.raises(ImportModelError, match=r"'main' returns nothing, .* \(entry=, --entry\): work"):
        phaze.import_graph(text)


def test_results_that_fit_several_runs_of_arguments_are_ambiguous() -> None:
    def loss(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ a @ b).sum()

    arguments = (models.shape(6, 6), models.shape(6, 6), models.shape(6, 6))
    hlo = hlo_forms.forms_of(jax.value_and_grad(loss), *arguments)["hlo text"]
    both = "--parameters 0 --batch 1 --batch 2, or --parameters 1 --batch 0 --batch 2"
    with pytest.raises(ImportModelError, match=f"ambiguous which arguments the 1 results belong to .* {both}"):
        phaze.import_graph(hlo)
    without_loss = phaze.import_graph(hlo_forms.forms_of(jax.grad(loss), *arguments)["hlo text"])
    assert any("which is a guess" in note for note in without_loss.notes)


GENERATION = """
HloModule jit_generate, input_output_alias={ {1}: (2, {}, may-alias) }
next { t = (s32[], f32[4,6]) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  one = s32[] constant(1)
  j = s32[] add(i, one)
  x = f32[4,6] get-tuple-element(t), index=1
  y = f32[4,6] tanh(x)
  ROOT r = (s32[], f32[4,6]) tuple(j, y)
}
more { t = (s32[], f32[4,6]) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  n = s32[] constant(LIMIT)
  ROOT r = pred[] compare(i, n), direction=LT
}
ENTRY main {
  ids = s32[4,1] parameter(0)
  w = f32[6,8] parameter(1)
  cache = f32[4,6] parameter(2)
  table = f32[10,6] parameter(3)
  x = f32[4,6] gather(table, ids), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1,
    slice_sizes={1,6}
  c = f32[4,6] add(x, cache)
  start = s32[] START
  state = (s32[], f32[4,6]) tuple(start, c)
  loop = (s32[], f32[4,6]) while(state), condition=more, body=next
  z = f32[4,6] get-tuple-element(loop), index=1
  y = f32[4,8] dot(z, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = (f32[4,8], f32[4,6]) tuple(y, c)
}
"""


def generation(start: str = "constant(0)", limit: str = "3") -> bytes:
    return GENERATION.replace("START", start).replace("LIMIT", limit).encode()


def test_a_program_without_a_loss_is_a_forward_whose_roles_follow_from_types_and_aliases() -> None:
    graph = phaze.import_graph(generation())
    roles = {tensor.id: tensor.role for tensor in graph.tensors.values() if tensor.role is not None}
    assert roles == {"ids": "batch", "w": "parameter", "cache": "other", "table": "parameter"}
    assert {op.phase for op in graph.ops} == {Phase.FORWARD}
    assert any("are taken for the parameters" in note for note in graph.notes)


def test_training_a_program_without_a_loss_says_what_is_missing_and_inference_needs_nothing() -> None:
    with pytest.raises(QuestionError, match=r"name the output that is its loss .*--loss OUTPUT.*--inference"):
        phaze.optimize(generation(), cluster="a100-80gb:2")
    trained = phaze.optimize(
        generation(), cluster="a100-80gb:2", global_batch_size=8, frontend_options={"loss": 0}, target=None
    )
    served = phaze.optimize(generation(), cluster="a100-80gb:2", global_batch_size=8, optimizer="none", target=None)
    assert served.question.precision.name == "bf16-none"
    assert served.step_time_s < trained.step_time_s
    assert all(stage.backward_s == 0 for stage in served.stages)
    assert all(finding.holds for finding in check_plan(served, generation()))


def test_the_trips_of_a_long_loop_count_as_one_and_a_loop_that_depends_on_data_takes_an_assumption() -> None:
    def tanhs(graph: Graph) -> int:
        return sum(op.origin.count("tanh") for op in graph.ops)

    long = phaze.import_graph(generation(limit="1000000"))
    assert any("a loop of 1,000,000 trips counts as one trip" in note for note in long.notes)
    assumed = phaze.import_graph(generation(start="parameter(4)"), trips=1_000_000)
    for graph in (long, assumed):
        assert any(factor.size == 1_000_000 for op in graph.ops if "tanh" in op.origin for factor in op.rule.factors)
    unknown = generation(start="parameter(4)")
    once, thrice = phaze.import_graph(unknown), phaze.import_graph(unknown, trips=3)
    assert any("is counted once; pass trips= (--trips)" in note for note in once.notes)
    assert any("is counted 3 times, as is assumed (trips=)" in note for note in thrice.notes)
    assert tanhs(phaze.import_graph(generation())) == tanhs(thrice)
    with pytest.raises(ImportModelError, match="trips is 0; expected a positive number"):
        phaze.import_graph(unknown, trips=0)


def test_complex_constants_are_constants() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.fft.fft(x) * (1 + 2j) + jnp.array([1j, 2, 3j, 4])

    for name, data in hlo_forms.forms_of(f, models.shape(4)).items():
        graph = phaze.import_graph(data)
        assert {op.phase for op in graph.ops} == {Phase.FORWARD}, name


@pytest.mark.parametrize("form", ["text", "hlo text", "hlo proto"])
def test_two_constants_of_one_shape_are_two(form: str) -> None:
    def edges(x: jax.Array) -> jax.Array:
        kernels = [jnp.array(values) for values in ([[1.5, 2.0], [3.0, 4.0]], [[2.0, 1.5], [4.0, 3.0]])]
        return sum(x @ kernel for kernel in kernels)  # type: ignore[return-value]

    graph = phaze.import_graph(hlo_forms.forms_of(edges, models.shape(3, 2))[form])
    assert graph.matmul_flops("forward") == 2 * (2 * 3 * 2 * 2)


def test_an_entry_other_than_main_may_be_named() -> None:
    text = b"module { func.func @a(%x: tensor<2x3xf32>) -> tensor<2x3xf32> { return %x : tensor<2x3xf32> }"
    text += b"func.func @b(%x: tensor<4x3xf32>) -> tensor<4x3xf32> { %y = stablehlo.tanh %x : tensor<4x3xf32>"
    text += b" return %y : tensor<4x3xf32> } }"
    graph = phaze.import_graph(text, entry="b")
    assert [op.function for op in graph.ops] == ["tanh"]
    with pytest.raises(ImportModelError, match=r"has no function 'c' \(functions: a, b\); name the one to import"):
        phaze.import_graph(text, entry="c")


def test_donated_arguments_tell_parameters_from_optimizer_state_without_names() -> None:
    params = {"a": models.shape(6, 6), "b": models.shape(6, 6)}

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.tanh(x @ p["a"] @ p["b"]).sum())(params)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, g)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state, loss

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, params, models.shape(6, 6))
    text = lowered.compiler_ir("hlo").as_hlo_text().replace("op_name=", "was=").encode()
    graph = phaze.import_graph(text)
    roles = [tensor.role for tensor in graph.tensors.values()]
    assert (roles.count(Role.PARAMETER), roles.count(Role.OPTIMIZER_STATE), roles.count(Role.BATCH)) == (2, 2, 1)


def test_a_microbatch_may_be_asked_for() -> None:
    forms = hlo_forms.small_forms()
    graph = phaze.import_graph(forms["bytecode"], micro_batch_size=12)
    assert graph.micro_batch_size == 12
    assert dataclasses.replace(graph).tensors["x"].shape == (12, 5)


def test_collectives_that_are_already_there_are_kept_and_said() -> None:
    text = b"""
module @jit_f {
  func.func public @main(%w: tensor<8x8xf32> loc("params"), %x: tensor<4x8xf32> loc("x")) -> (tensor<f32>) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %1 = "stablehlo.all_reduce"(%0) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %2 = stablehlo.reduce(%1 init: %c) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<4x8xf32>, tensor<f32>) -> tensor<f32>
    return %2 : tensor<f32>
  }
}
"""
    graph = phaze.import_graph(text, parameters="params")
    assert [op.function for op in graph.ops if op.kind == "collective" and op.phase == "forward"] == ["all_reduce"]
    assert "collective already present: all_reduce" in graph.notes


def test_fused_attention_of_a_custom_call_is_attention() -> None:
    text = b"""
module @jit_f {
  func.func public @main(%w: tensor<6x2x4xf32> loc("params"), %x: tensor<3x8x6xf32> loc("x")) -> (tensor<f32>) {
    %q = stablehlo.dot_general %x, %w, contracting_dims = [2] x [0]
      : (tensor<3x8x6xf32>, tensor<6x2x4xf32>) -> tensor<3x8x2x4xf32>
    %y = stablehlo.custom_call @__cudnn$fmhaSoftmax(%q, %q, %q)
      : (tensor<3x8x2x4xf32>, tensor<3x8x2x4xf32>, tensor<3x8x2x4xf32>) -> tensor<3x8x2x4xf32>
    %z = stablehlo.custom_call @mystery(%y) : (tensor<3x8x2x4xf32>) -> tensor<3x8x2x4xf32>
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %2 = stablehlo.reduce(%z init: %c) applies stablehlo.add across dimensions = [0, 1, 2, 3]
      : (tensor<3x8x2x4xf32>, tensor<f32>) -> tensor<f32>
    return %2 : tensor<f32>
  }
}
"""
    graph = phaze.import_graph(text, parameters="params")
    (attention,) = [op for op in graph.ops if op.kind == "attention" and op.phase == "forward"]
    assert attention.matmul_flops == 2 * 2 * 3 * 2 * 8 * 8 * 4
    assert "mystery" in {entry.function for entry in graph.coverage().unknown}
