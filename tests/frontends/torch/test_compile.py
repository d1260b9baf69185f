"""`torch.compile(model, backend="phaze")`: what the inner backend computes, and a graph to look at."""

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
import torch_models as models

import phaze
from phaze.ir import Phase


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def test_the_backend_is_listed() -> None:
    assert "phaze" in torch._dynamo.list_backends()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_results_and_gradients_equal_the_inner_backend_s(inner: str) -> None:
    model, x = models.Tower().eval(), torch.randn(5, 6, 8)
    through_phaze = gradients(torch.compile(model, backend="phaze", options={"inner": inner}), x)
    torch._dynamo.reset()
    alone = gradients(torch.compile(model, backend=inner), x)
    assert len(alone) == 17
    assert all(torch.equal(one, other) for one, other in zip(through_phaze, alone, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@torch._inductor.config.patch(compile_threads=1)  # for a small kernel no processes that compile are started
def test_inductor_runs_by_default() -> None:
    model, x = models.Tower(0).eval(), torch.randn(5, 6, 8)
    with torch.no_grad():  # its kernels are compiled for as long as the rest of this file runs: no others than these
        through_phaze = torch.compile(model, backend="phaze")(x)
        assert "runs through inductor" in phaze.last_compiled()[-1].notes
        torch._dynamo.reset()
        assert torch.equal(through_phaze, torch.compile(model, backend="inductor")(x))


def test_the_captured_graph_has_flops_layers_and_gradients() -> None:
    model = models.Tower()
    torch.compile(model, backend="phaze", options={"inner": "eager"})(torch.randn(5, 6, 8)).backward()
    graph, plain = phaze.last_compiled()[-1], phaze.import_graph(model, (5, 6, 8))
    assert "runs through eager" in graph.notes
    assert graph.matmul_flops("forward") == plain.matmul_flops("forward")
    assert graph.matmul_flops("backward") == plain.matmul_flops("backward")
    assert {parameter for parameter, _ in graph.gradients} == {name for name, _ in model.named_parameters()}
    assert [layer.name for layer in graph.layers][1:4] == ["blocks.0", "blocks.1", "blocks.2"]
    assert graph.coverage().unknown == ()


def test_inference_has_no_backward() -> None:
    with torch.no_grad():
        torch.compile(models.Tower(), backend="phaze", options={"inner": "eager"})(torch.randn(5, 6, 8))
    assert {op.phase for op in phaze.last_compiled()[-1].ops} == {Phase.FORWARD}


def test_a_changed_shape_is_another_graph() -> None:
    compiled = torch.compile(models.Tower(), backend="phaze", options={"inner": "eager"})
    for batch in (5, 7):
        compiled(torch.randn(batch, 6, 8))
    first, second = phaze.last_compiled()[-2:]
    assert second.matmul_flops("forward") * 5 == first.matmul_flops("forward") * 7


def test_without_a_compiler_aot_eager_takes_over_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler was found, which inductor needs"):
        torch.compile(models.Tower(1), backend="phaze")(torch.randn(5, 6, 8))
    assert "runs through aot_eager" in phaze.last_compiled()[-1].notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "tvm"}, "inner is 'tvm'; expected one of inductor, aot_eager, eager"),
        ({"outer": "eager"}, "the phaze backend takes no option 'outer'; it takes inner"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(models.Tower(), backend="phaze", options=options)(torch.randn(5, 6, 8))
