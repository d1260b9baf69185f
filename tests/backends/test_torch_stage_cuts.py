"""Where torch models are cut into stages, and what crosses the cuts."""

import pytest
import torch
from torch_plans import imported
from torch_training import build_model

import phaze
from phaze.backends.torch.pipeline import find_cut_paths
from phaze.backends.torch.stage_cuts import cut_paths, dry_run
from phaze.backends.torch.stage_models import build_stage
from phaze.errors import PlanError
from phaze.hooks import PluginManager
from phaze.targets import find_target


def test_cuts_stand_before_the_outermost_module_that_holds_no_earlier_layer() -> None:
    model = build_model("t5")
    names = [layer.name for layer in imported("t5").layers]
    assert cut_paths([names[:4], names[4:]], model) == ["decoder"]
    assert cut_paths([names[:2], names[2:]], model) == ["encoder.block.1"]
    model = build_model("gpt2")
    names = [layer.name for layer in imported("gpt2").layers]
    assert cut_paths([names[:1], names[1:3], names[3:]], model) == ["transformer.h.0", "transformer.ln_f"]


class Balanced(torch.nn.Module):
    """Blocks whose results are all read again in the end, as scores of routers are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for block in self.blocks:
            x = block(x)
            results.append(x)
        return torch.stack(results).square().mean()


def test_a_model_whose_end_reads_all_blocks_is_planned_in_one_stage_and_says_so() -> None:
    model, plugins = Balanced(), PluginManager.load()
    target = find_target("torch", model, plugins, phaze.import_graph(model, (2, 4)))
    assert not target.capabilities.schedules
    assert target.notes[0].startswith("one pipeline stage only:")
    assert find_target("torch", build_model("t5"), plugins, imported("t5")).capabilities.schedules


def test_a_model_that_nothing_cuts_is_refused_with_what_is_known() -> None:
    builders = [offer.value for offer in PluginManager.load().stage_builders()]
    with pytest.raises(PlanError, match=r"nothing cuts Uncut into stages \(known: list of blocks"):
        find_cut_paths(build_model("uncut"), [["0:early"], ["1:late"]], builders)


class Gated(torch.nn.Module):
    """Blocks that take flags made of the embedding; `late` flags are read again behind the blocks."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Bilinear(4, 4, 4) for _ in range(2))
        self.bias = torch.nn.Parameter(torch.ones(4))
        self.late = late

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        keep = (x > 0).float()
        for block in self.blocks:
            x = block(x, keep)
        return ((x + self.bias) * keep if self.late else x + self.bias).sum()


def test_what_has_no_gradient_but_depends_on_parameters_crosses_a_cut_or_is_refused() -> None:
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64)}
    run = dry_run(Gated(late=False), ["blocks.1"], batch, torch.bfloat16)
    (boundary,) = run.boundaries
    assert [(tensor.dtype, tensor.requires_grad) for tensor in boundary.tensors] == [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
    ]
    assert run.stages[""] == {0, 1}
    with pytest.raises(PlanError, match="reads what an earlier stage compared or counted"):
        dry_run(Gated(late=True), ["blocks.1"], batch, torch.float32)


class Encoder(torch.nn.Module):
    """Attention of torch.nn, which reads its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.spare = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.encoder(x).square().mean()
        return result


def test_a_module_that_is_read_without_a_call_stays_with_its_reader() -> None:
    model, paths = Encoder(), ["encoder.layers.1"]
    run = dry_run(model, paths, {"x": torch.zeros(2, 3, 8)}, torch.float32)
    assert run.stages["encoder.layers.0.self_attn.out_proj"] == {0}
    assert run.stages["encoder.layers.1.self_attn.out_proj"] == {1}
    assert "spare" not in run.stages
    last = build_stage(model, paths, run, 1).module
    assert last.get_submodule("encoder.layers.1.self_attn.out_proj").weight is not None


class Dropped(torch.nn.Module):
    """Layers that are dropped by chance, as in BART and OPT."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop, self.blocks = layerdrop, torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.training or torch.rand([]) >= self.layerdrop:
                x = block(x)
        return x.sum()


def test_layers_that_chance_drops_are_refused_and_layers_that_it_never_drops_are_cut() -> None:
    batch = {"x": torch.zeros(2, 4)}
    assert dry_run(Dropped(0.0), ["blocks.1"], batch, torch.float32).reached == 1
    with pytest.raises(PlanError, match="Dropped decides by the values of tensors what it runs"):
        dry_run(Dropped(0.5), ["blocks.1"], batch, torch.float32)
