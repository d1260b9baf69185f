"""How attention runs: a fact of the chip's software or the user's word, one truth from the question to verification."""

from pathlib import Path

import pytest
from plans import QUESTION, checked, small_cluster, small_graph

import phaze
from phaze.asked_model import ready_to_plan
from phaze.cost import AttentionMode, settled_attention
from phaze.errors import PlanError, QuestionError
from phaze.hardware import preset
from phaze.installed import installed_plugins
from phaze.ir import Phase
from phaze.model_import import import_with_plugins
from phaze.plan.plan import Plan


def planned(attention: str | None = None) -> Plan:
    return checked(phaze.optimize(small_graph(), cluster=small_cluster(), attention=attention, **QUESTION))


@pytest.mark.parametrize(
    ("chip", "mode"),
    [
        ("v100", "unfused"),
        ("a100-80gb", "fused"),
        ("h100", "fused"),
        ("mi300x", "fused"),
        ("tpuv3", "unfused"),
        ("tpuv5e", "fused"),
        ("trn2", "fused"),
        ("tpuv4-paper", "unfused"),
    ],
)
def test_attention_runs_as_the_chips_software_does_it(chip: str, mode: str) -> None:
    assert settled_attention(None, preset(chip).accelerator) is AttentionMode(mode)


def test_every_kernel_of_a_chip_says_where_it_is_known_from() -> None:
    kernels = [chip.attention_kernel for chip in map(preset, ("h100", "tpuv6e", "gaudi3")) if chip.attention_kernel]
    assert len(kernels) == 3
    assert all(kernel.name and kernel.source for kernel in kernels)


@pytest.mark.slow
def test_fused_attention_is_the_default_and_takes_less_time_and_memory() -> None:
    fused, unfused = planned(), planned("unfused")
    assert fused.question.attention is AttentionMode.FUSED
    assert fused.step_time_s < unfused.step_time_s
    assert fused.model.matmul_flops_per_sample == unfused.model.matmul_flops_per_sample
    names = [{op.name.rsplit(".", 1)[-1] for kind in plan.layer_kinds for op in kind.ops} for plan in (fused, unfused)]
    assert "softmax" not in names[0]
    assert "softmax" in names[1]
    assert fused.bound_s < unfused.bound_s


@pytest.mark.slow
def test_a_saved_plan_knows_how_attention_ran(tmp_path: Path) -> None:
    for mode in ("fused", "unfused"):
        plan = planned(mode)
        plan.save(tmp_path / "plan.json")
        loaded = phaze.load_plan(tmp_path / "plan.json", small_graph())
        assert loaded == plan
        assert loaded.question.attention == mode
        with pytest.raises(PlanError, match="is a plan for something else"):
            phaze.load_plan(tmp_path / "plan.json", small_graph(num_layers=5))


def test_another_word_for_attention_is_refused() -> None:
    with pytest.raises(QuestionError, match=r"attention is 'flash'; expected 'fused' or 'unfused', or None for what"):
        phaze.optimize(small_graph(), cluster=small_cluster(), attention="flash")


def test_an_attention_that_stays_apart_is_said() -> None:
    sizes = {"num_layers": 2, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 64, "vocab_size": 99}
    config = {"model_type": "t5", **sizes}
    plan = phaze.optimize(config, cluster="h100:2", sequence_length=32, micro_batch_size=1, tp=1)
    notes = " ".join(plan.provenance.notes)
    assert "2 attentions fused" in notes
    assert "4 attentions stay products with a softmax: kernels would write the gradient of their learned bias" in notes


@pytest.mark.parametrize("mode", AttentionMode)
@pytest.mark.parametrize("name", ["gpt2", "t5-large", "mixtral-8x7b"])
def test_a_known_model_is_planned_alike_whether_its_backward_was_derived_before_or_not(
    name: str, mode: AttentionMode
) -> None:
    both = [
        import_with_plugins(installed_plugins(), name, None, frontend=None, options={}, needs_backward=needs)
        for needs in (True, False)
    ]
    assert [any(op.phase is Phase.BACKWARD for op in graph.ops) for graph in both] == [True, False]
    for has_fused_loss in (False, True):
        whole, forward = (ready_to_plan(graph, mode, trains=True, has_fused_loss=has_fused_loss) for graph in both)
        assert forward == whole
        assert [op.id for op in forward.ops] == [op.id for op in whole.ops]
        assert forward.notes == whole.notes
