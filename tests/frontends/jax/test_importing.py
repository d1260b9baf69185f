"""Models of JAX as they come: equal to their jaxprs, to each other and to the same model in torch and as a config."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import optax
import pytest
import torch_models
from flax import linen, nnx
from jax_models import shape

import phaze
from phaze.ir import Graph, OpKind, Phase, Role, stashed_bytes
from phaze.ir.backward import derive_backward


@dataclass(frozen=True)
class Case:
    """A model, its inputs, the function that computes its loss, and the names of its layers."""

    model: Any
    inputs: tuple[Any, ...]
    blocks: tuple[str, ...]
    kinds: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()


def _names(container: str, count: int) -> tuple[str, ...]:
    return tuple(f"{container}.{index}" for index in range(count))


def _linen() -> Case:
    model = models.LinenGPT()
    params = jax.eval_shape(model.init, jax.random.key(0), models.ids())

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        return models.cross_entropy(model.apply(params, ids), labels)

    options = {"loss_fn": models.cross_entropy, "targets": models.ids()}
    arguments = (params, models.ids(), models.ids())
    blocks = _names("LinenGPT.LinenBlock", models.LAYERS)
    return Case(model, (models.ids(),), blocks, options=options, loss=loss, arguments=arguments)


def _nnx() -> Case:
    model = models.nnx_gpt()
    definition, params = nnx.split(model)

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        return models.cross_entropy(nnx.merge(definition, params)(ids), labels)

    options = {"loss_fn": models.cross_entropy, "targets": models.ids()}
    arguments = (params, models.ids(), models.ids())
    return Case(
        model, (models.ids(),), _names("params.h", models.LAYERS), options=options, loss=loss, arguments=arguments
    )


def _conv() -> Case:
    images, labels = models.shape(2, 16, 16, 3), models.shape(2, dtype=jnp.int32)
    inputs = (models.conv_parameters(), images, labels)
    return Case(models.conv_loss, inputs, _names("params.conv", 3), kinds=3)


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: Case(models.gpt_loss, (models.gpt_parameters(), models.tokens()), _names("params.h", 3)),
    "gpt_scan": lambda: Case(
        models.gpt_scan, (models.gpt_parameters(stacked=True), models.tokens()), _names("scan", 3)
    ),
    "linen": _linen,
    "nnx": _nnx,
    "llama": lambda: Case(
        models.llama_loss, (models.llama_parameters(), models.ids(), models.ids()), _names("scan", 4)
    ),
    "moe": lambda: Case(models.moe_loss, (models.moe_parameters(), models.ids(), models.ids()), _names("layer", 3)),
    "conv": _conv,
}


@dataclass(frozen=True)
class Imported:
    case: Case
    graph: Graph

    @property
    def loss(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        case = self.case
        return (case.loss, case.arguments) if case.loss is not None else (case.model, case.inputs)


@pytest.fixture(scope="module", params=CASES)
def imported(request: pytest.FixtureRequest) -> Imported:
    case = CASES[request.param]()
    return Imported(case, phaze.import_graph(case.model, case.inputs, **case.options))


def test_flops_are_those_of_the_jaxpr_forward_and_in_all(imported: Imported) -> None:
    loss, arguments = imported.loss
    graph = imported.graph
    assert graph.matmul_flops("forward") == models.jaxpr_flops(loss, *arguments)
    everything = sum(graph.matmul_flops(phase) for phase in Phase)
    plain = partial(loss, remat=False) if loss is models.llama_loss else loss  # what is computed again is for a plan
    assert everything == models.jaxpr_flops(jax.value_and_grad(plain), *arguments)


def test_parameters_are_the_model_s_to_the_unit_and_each_has_a_gradient(imported: Imported) -> None:
    _, arguments = imported.loss
    assert imported.graph.parameter_count == models.count(arguments[0])
    assert {name for name, _ in imported.graph.gradients} == {tensor.id for tensor in imported.graph.parameters}


def test_layers_are_the_model_s_blocks_and_equal_blocks_are_one(imported: Imported) -> None:
    graph, names = imported.graph, imported.case.blocks
    blocks = [layer for layer in graph.layers if layer.name in names]
    assert [layer.name for layer in blocks] == list(names)
    assert len({layer.key for layer in blocks}) == imported.case.kinds
    assert len(graph.layers) == len(names) + (1 if imported.case.model is models.conv_loss else 2)
    assert graph.layer_graph.is_chain


def test_everything_is_understood(imported: Imported) -> None:
    assert imported.graph.coverage().unknown == ()


def test_the_microbatch_can_be_changed(imported: Imported) -> None:
    larger = imported.graph.with_micro_batch(6)
    for phase in ("forward", "backward", "recompute"):
        assert larger.matmul_flops(phase) == 3 * imported.graph.matmul_flops(phase)
    assert larger.parameter_count == imported.graph.parameter_count


def test_the_same_gpt_in_torch_in_jax_scanned_and_as_a_config_has_the_same_totals() -> None:
    torch_gpt = torch_models.gpt2()
    graphs = [
        phaze.import_graph(torch_gpt, torch_models.FAMILIES["gpt2"].inputs()),
        phaze.import_graph(torch_gpt.config, sequence_length=models.LENGTH, micro_batch_size=2),
        *(phaze.import_graph(CASES[name]().model, CASES[name]().inputs) for name in ("gpt", "gpt_scan")),
    ]
    assert len({graph.parameter_count for graph in graphs}) == 1
    assert len({len(graph.layers) for graph in graphs}) == 1
    assert {len(graph.distinct_layers) for graph in graphs} == {3}
    for phase in ("forward", "backward"):
        flops = [graph.matmul_flops(phase) for graph in graphs]
        assert flops == [pytest.approx(flops[0], rel=0.005)] * 4


def test_a_scan_gives_the_layers_of_the_unrolled_model_and_keeps_what_it_stacks() -> None:
    unrolled, scanned = (phaze.import_graph(CASES[name]().model, CASES[name]().inputs) for name in ("gpt", "gpt_scan"))
    for one, other in zip(unrolled.layers, scanned.layers, strict=True):
        ops = [[(op.kind, op.rule) for op in layer.forward if op.kind is not OpKind.VIEW] for layer in (one, other)]
        products = [[rule for kind, rule in listed if kind is OpKind.CONTRACTION] for listed in ops]
        assert products[0] == products[1]
        assert [kind for kind, _ in ops[0]] == [kind for kind, _ in ops[1]]
    assert scanned.saved
    assert stashed_bytes(scanned, scanned.layers[2]) > stashed_bytes(unrolled, unrolled.layers[2])
    assert scanned.tensors["params.h.attn.qkv.w[2]"].role is Role.PARAMETER
    assert any("stacked arguments are taken apart" in note for note in scanned.notes)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_loss_that_says_what_is_computed_again_is_the_loss_that_does_not(stacked: bool) -> None:
    inputs = (models.gpt_parameters(stacked=stacked), models.tokens())
    plain, remat = (
        phaze.import_graph(partial(models.gpt_loss, stacked=stacked, remat=remat), inputs) for remat in (False, True)
    )
    kinds = [sorted((op.phase, op.kind, op.function) for op in graph.ops) for graph in (plain, remat)]
    assert kinds[0] == kinds[1]
    assert sorted(remat.tensors[name].shape for name in remat.saved) == sorted(
        plain.tensors[name].shape for name in plain.saved
    )
    assert any("jax.checkpoint in the model gives way" in note for note in remat.notes)


@pytest.mark.parametrize("stacked", [False, True])
def test_what_a_step_computes_again_is_no_model_flops(stacked: bool) -> None:
    inputs = (models.gpt_parameters(stacked=stacked), models.tokens())
    plain, remat = (
        phaze.import_graph(jax.value_and_grad(partial(models.gpt_loss, stacked=stacked, remat=remat)), inputs)
        for remat in (False, True)
    )
    for phase in ("forward", "backward"):
        assert remat.matmul_flops(phase) == plain.matmul_flops(phase)
    assert 0.5 < remat.matmul_flops("recompute") / remat.matmul_flops("forward") < 1
    assert plain.matmul_flops("recompute") == 0
    assert len(remat.distinct_layers) == 3


def test_heads_and_the_batch_are_factors() -> None:
    graph = phaze.import_graph(CASES["gpt"]().model, CASES["gpt"]().inputs)
    products = [str(op.rule) for op in graph.layers[1].forward if op.function == "einsum"]
    assert "b0 d0 d1, d1 (d2 d3 d4) -> b0 d0 (d2 d3 d4) | b0=2* d0=16^ d1=48 d2=3 d3=3 d4=16" in products
    assert "b0 d0 d1 d2, b0 d3 d1 d2 -> b0 d1 d0 d3 | b0=2* d0=16^ d1=3 d2=16 d3=16^" in products


def test_a_linen_model_with_statistics_and_dropout_is_captured_in_training() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
            return linen.Dense(4)(linen.Dropout(0.5, deterministic=not train)(x)).mean()

    graph = phaze.import_graph(Net(), {"x": models.shape(6, 5), "train": True})
    assert graph.parameter_count == 5 * 8 + 8 + 2 * 8 + 8 * 4 + 4
    assert {name for name, _ in graph.gradients} == {tensor.id for tensor in graph.parameters}
    assert graph.with_micro_batch(3).matmul_flops("forward") * 2 == graph.matmul_flops("forward")


CROSS_ENTROPIES: dict[str, Callable[[Any, Any], Any]] = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "optax with classes": lambda logits, labels: optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 64)),
    "log_softmax": lambda logits, labels: -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1),
    "logsumexp": lambda logits, labels: (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    ),
}


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_a_lowered_loss_without_gradients_gets_a_backward_by_rule(name: str) -> None:
    def loss(params: Any, x: Any, labels: Any) -> Any:
        return CROSS_ENTROPIES[name](x @ params["w"], labels).mean()

    inputs = ({"w": shape(32, 64)}, shape(8, 16, 32), shape(8, 16, dtype=jnp.int32))
    graph = phaze.import_graph(jax.jit(loss).lower(*inputs), parameters=[0])
    forward = 2 * 8 * 16 * 32 * 64
    assert graph.matmul_flops(Phase.FORWARD) == forward
    assert graph.matmul_flops(Phase.BACKWARD) == forward, "the gradient of the weights; x needs none"


def test_frozen_parameters_beside_the_batch_are_not_taken_for_it() -> None:
    """Five frozen arrays of one argument have the same first dimension, and two of whole numbers the batch's."""

    def loss(adapter: Any, frozen: Any, batch: Any) -> Any:
        x = frozen["embed"][batch["ids"]]
        for p in frozen["blocks"]:
            x = x + jax.nn.relu(x @ (p["up"] + adapter["a"] @ adapter["b"])) @ p["down"]
        return optax.softmax_cross_entropy_with_integer_labels(x @ frozen["embed"].T, batch["labels"]).mean()

    block = {"up": shape(8, 16), "down": shape(16, 8)}
    frozen = {"embed": shape(16, 8), "blocks": [block, block, block]}
    batch = {name: shape(4, 6, dtype=jnp.int32) for name in ("ids", "labels")}
    graph = phaze.import_graph(loss, ({"a": shape(8, 2), "b": shape(2, 16)}, frozen, batch))
    assert graph.micro_batch_size == 4
    assert [tensor.role for tensor in graph.tensors.values() if tensor.role is Role.PARAMETER] == [Role.PARAMETER] * 2


def test_parameters_that_gradients_do_not_reach_or_that_a_step_returns_are_frozen() -> None:
    def loss(params: Any, x: Any) -> Any:
        base = jax.lax.stop_gradient(params["base"])
        return (jax.nn.relu(x @ base) @ params["head"]).mean()

    def step(params: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, x)
        return {"base": params["base"], "head": params["head"] - 0.1 * slopes["head"]}, value

    inputs = ({"base": shape(8, 16), "head": shape(16, 4)}, shape(6, 8))
    for model in (loss, step):
        graph = phaze.import_graph(model, inputs)
        assert [tensor.id for tensor in graph.parameters if tensor.is_frozen] == ["params.base"]
        derived = derive_backward(graph)
        assert [parameter for parameter, _ in derived.gradients] == ["params.head"]
        assert derived.matmul_flops(Phase.BACKWARD) == 2 * 6 * 16 * 4


def test_an_associative_scan_which_slices_off_nothing_at_all_imports() -> None:
    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.associative_scan(jnp.add, x @ params["w"], axis=1) ** 2).mean()

    graph = phaze.import_graph(loss, ({"w": shape(8, 8)}, shape(4, 5, 8)))
    assert graph.parameter_count == 64
