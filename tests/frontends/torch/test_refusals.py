"""What cannot be imported says why, and what to do."""

from collections.abc import Callable

import pytest
import torch
import torch_models as models

import phaze
from phaze.errors import ImportModelError, PhazeError

X = (5, 6, 8)


class Deciding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


class Failing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(9, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean()


class Raising(Failing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the model's own words")


class TakingAnything(Failing):
    def forward(self, x: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        return super().forward(x)


class WithoutGradient(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.linear(x).mean()


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "data-dependent control flow": (
        lambda: phaze.import_graph(Deciding(), X),
        r"Deciding decides by the values of a tensor at .*test_refusals.py:\d+ \(if y.sum\(\) > 0:\).*torch.where",
    ),
    "a forward that does not fit": (
        lambda: phaze.import_graph(Failing(), X),
        r"Failing.forward failed at .*test_refusals.py:\d+ .* while Phaze ran it on tensors without contents, "
        r"with inputs input_0 \[5, 6, 8\]: RuntimeError: .*\[30, 8\]",
    ),
    "a forward that raises": (
        lambda: phaze.import_graph(Raising(), X),
        'Raising.forward failed at .*KeyError: "the model\'s own words"',
    ),
    "no inputs": (lambda: phaze.import_graph(models.Tower()), "Tower needs inputs .* pass inputs: tensors"),
    "unknown inputs": (
        lambda: phaze.import_graph(models.Tower(), {"y": X}),
        r"the inputs do not fit Tower.forward\(x\): missing a required argument: 'x'",
    ),
    "unknown inputs of a forward that takes any": (
        lambda: phaze.import_graph(TakingAnything(), {"y": X}),
        r"TakingAnything.forward\(x, \*rest, \*\*options\): missing a required argument: 'x'",
    ),
    "an impossible shape": (lambda: phaze.import_graph(models.Tower(), (0, 8)), r"has shape \[0, 8\]"),
    "no trainable parameters": (
        lambda: phaze.import_graph(models.Tower().requires_grad_(False), X),
        r"Tower has no trainable parameters \(16 frozen ones\).*set requires_grad",
    ),
    "no parameters": (lambda: phaze.import_graph(torch.nn.ReLU(), X), r"ReLU has no trainable parameters \(0 frozen"),
    "no scalar loss": (
        lambda: phaze.import_graph(torch.nn.Linear(8, 4), X),
        r"returns a tensor of shape \[5, 6, 4\] \(float32\), which holds no scalar loss; pass labels .* or loss_fn",
    ),
    "a loss function without a scalar": (
        lambda: phaze.import_graph(torch.nn.Linear(8, 4), X, loss_fn=torch.relu),
        r"loss_fn returned a tensor of shape \[5, 6, 4\]",
    ),
    "a loss function that lacks its targets": (
        lambda: phaze.import_graph(torch.nn.Linear(8, 4), X, loss_fn=torch.nn.functional.mse_loss),
        r"loss_fn failed on the output \(a tensor of shape \[5, 6, 4\] \(float32\)\): .*missing .* 'target'",
    ),
    "a loss without gradient": (
        lambda: phaze.import_graph(WithoutGradient(), X),
        "the loss depends on no trainable parameter.*look for torch.no_grad",
    ),
    "a graph module without shapes": (
        lambda: phaze.import_graph(torch.fx.symbolic_trace(models.Tower())),
        "the graph module Tower has no shape for its input 'x'; pass inputs, or run .*ShapeProp",
    ),
    "an impossible dtype": (lambda: phaze.import_graph(models.Tower(), X, dtype="int8"), "dtype is 'int8'; expected a"),
    "a lazy module": (
        lambda: phaze.import_graph(torch.nn.LazyLinear(4), X),
        r"parameter 'weight' has no shape yet \(a lazy module\); run the model once first",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_what_cannot_be_imported_is_refused_with_advice(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(ImportModelError, match=f"(?s){message}"):
        call()
    assert capfd.readouterr() == ("", "")


def test_a_refusal_leaves_the_model_s_own_error_as_its_cause() -> None:
    with pytest.raises(PhazeError) as raised:
        phaze.import_graph(Raising(), X)
    assert raised.value.__cause__ is not None


def test_a_config_only_model_without_labels_says_what_to_pass() -> None:
    model = models.gpt2().transformer
    with pytest.raises(ImportModelError, match="holds no scalar loss; pass labels among the inputs"):
        phaze.import_graph(model)
