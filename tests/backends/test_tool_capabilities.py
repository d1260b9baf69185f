"""Capabilities of tools are true: what they allow is written, what they do not is named, and no search leaves them."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT
from tool_plans import TOOLS, Case, any_cases, parallelism_of, plan_of

import phaze
from phaze.errors import PlanError, QuestionError
from phaze.hardware import Cluster, parse_cluster
from phaze.installed import installed_plugins
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.plan.handover import export_plan, obstacles

PLUGINS = installed_plugins()
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@settings(max_examples=100)
@given(case=any_cases(), precision=st.sampled_from(PRECISIONS))
def test_what_capabilities_allow_is_written_and_what_they_do_not_is_named(case: Case, precision: str) -> None:
    plan = plan_of(case.strategy, stages=case.stages, micro_batches=case.micro_batches, precision=precision)
    for name, tool in TOOLS.items():
        reasons = obstacles(plan, tool.capabilities)
        if reasons:
            with pytest.raises(PlanError) as refusal:
                export_plan(plan, PLUGINS, name, None)
            assert all(reason in str(refusal.value) for reason in reasons)
            continue
        file, text = next(iter(export_plan(plan, PLUGINS, name, None).items()))
        read = tool.read(file, None, text, plan.cluster.device_count, plan.question.global_batch_size)
        strategy = dict(read.strategy)
        if name == "accelerate":  # its configs have no batch; DDP's have no recompute either
            strategy["micro_batch_size"] = case.strategy.micro_batch_size
            strategy["recompute"] = case.strategy.recompute[0] if case.strategy.zero == 0 else strategy["recompute"]
        assert parallelism_of(strategy, len(case.stages)) == case.strategy


def shown_claims() -> dict[str, set[str]]:
    """By function of the checks with the tools' own code: the sentences in what it returns as shown."""
    tree = ast.parse((ROOT / "benchmarks" / "tool_checks.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {
            node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for function in functions
    }


def test_what_is_said_to_be_checked_is_what_the_checks_show() -> None:
    functions = shown_claims()
    for name in sorted(TOOLS.keys() - {"fsdp", "pjit"}):  # these are run by tests here
        claims = TOOLS[name].checked.split("; ")
        shown = functions[name.replace("-", "_")]
        unknown = [claim for claim in claims if claim not in shown and not claim.startswith("not ")]
        assert unknown == [], name
        assert len(claims) > len(unknown)


@pytest.fixture(scope="module")
def environment_of_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `benchmarks/tools.py` installs the tools, from the package registry."""
    return tmp_path_factory.mktemp("tools") / "environment"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(TOOLS.keys() - {"fsdp", "pjit"}))
def test_the_tools_own_code_takes_the_files_as_said(environment_of_tools: Path, name: str) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "tools.py"), "--environment", str(environment_of_tools)]
    done = subprocess.run([*program, "--only", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "strategy", "reason"),
    [
        ("torchtitan", {"dp": 4, "ep": 2, "tp": 2, "zero": 3}, "ep 2 beside tp 2"),
        ("torchtitan", {"dp": 2, "cp": 2, "zero": 0}, "ZeRO stage 0 at cp 2"),
        ("deepspeed", {"dp": 2, "tp": 2, "cp": 2, "zero": 2}, "cp 2 beside tp 2"),
        ("deepspeed", {"dp": 2, "tp": 2, "zero": 3}, "ZeRO stage 3 at tp 2"),
        ("maxtext", {"dp": 4, "cp": 2, "zero": 1}, "ZeRO stage 1 at cp 2"),
        ("maxtext", {"dp": 4, "ep": 2, "zero": 1}, "ZeRO stage 1 at ep 2"),
        ("maxtext", {"dp": 4, "shard": 2, "zero": 1}, "ZeRO over 2 of 4 devices (ZeRO stage 1, cp 1, ep 1)"),
        ("accelerate", {"dp": 2, "tp": 2, "zero": 0}, "ZeRO stage 0 at tp 2"),
        ("accelerate", {"dp": 4, "cp": 2, "shard": 2, "zero": 3}, "ZeRO over 2 of 8 devices"),
        ("lightning", {"dp": 2, "tp": 2, "zero": 0}, "ZeRO stage 0 at tp 2"),
        ("megatron-lm", {"dp": 4, "tp": 2, "ep": 2, "zero": 1}, "tp 2 beside ep 2 without sequences split"),
        ("megatron-bridge", {"dp": 4, "ep": 2, "shard": 2, "zero": 1}, "ZeRO over 2 of 4 devices"),
        ("torchrun", {"dp": 2, "cp": 4, "shard": 2, "zero": 3}, "ZeRO over 2 of 8 devices"),
    ],
)
def test_a_combination_that_a_tool_does_not_run_is_named(name: str, strategy: dict[str, Any], reason: str) -> None:
    plan = plan_of(Parallelism(**strategy, recompute=("full",)))  # type: ignore[arg-type]
    assert any(reason in obstacle for obstacle in obstacles(plan, TOOLS[name].capabilities))


def test_ulysses_and_tensor_parallelism_go_with_no_pipeline_in_deepspeed() -> None:
    pipeline: dict[str, Any] = {"pp": 2, "schedule": PipelineSchedule.ONE_F_ONE_B, "recompute": ("full", "full")}
    for degrees in ({"cp": 2}, {"tp": 2}):
        plan = plan_of(Parallelism(dp=2, zero=1, **degrees, **pipeline), stages=(3, 3))  # type: ignore[arg-type]
        assert "a pipeline with schedule 1f1b" in obstacles(plan, TOOLS["deepspeed"].capabilities)


QUESTIONS = st.fixed_dictionaries(
    {
        "target": st.sampled_from(sorted(TOOLS)),
        "tp": st.sampled_from([(1,), (2,), (1, 2)]),
        "cp": st.sampled_from([(1,), (2,)]),
        "ep": st.sampled_from([(1,), (2,)]),
        "precision": st.sampled_from(["bf16", "bf16", "fp16"]),
    }
)


def check_that_answers_are_written(question: dict[str, Any]) -> None:
    """A question for a tool has a plan that the tool's file says, or an error that names what the tool does not run."""
    asked = {"cluster": "a100-80gb:8", "global_batch_size": 16, "micro_batch_size": 1, "sequence_length": 64}
    try:
        plan = phaze.optimize(MIXTURE, **asked, **question)
    except (PlanError, QuestionError) as error:
        refusal = str(error)
    else:
        assert plan.export(question["target"])
        return
    assert f"target {question['target']}" in refusal


@settings(max_examples=8)
@given(question=QUESTIONS)
def test_a_search_for_a_tool_finds_what_its_files_say(question: dict[str, Any]) -> None:
    check_that_answers_are_written(question)


@pytest.mark.exhaustive
@settings(max_examples=200)
@given(question=QUESTIONS)
def test_many_searches_for_tools_find_what_their_files_say(question: dict[str, Any]) -> None:
    check_that_answers_are_written(question)


@pytest.mark.parametrize(
    ("target", "message"),
    [("maxtext", "computes in bfloat16; the precision fp16-adam"), ("torchtitan", "computes in bfloat16, float32")],
)
def test_a_precision_that_a_tool_does_not_compute_in_is_refused_before_a_search(target: str, message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.optimize("gpt2", cluster="a100-80gb:8", target=target, precision="fp16")


def test_devices_that_are_no_whole_slices_are_refused_for_maxtext() -> None:
    base = parse_cluster("a100-80gb:16")
    with pytest.raises(QuestionError, match=r"uses all devices of every node .* 12 devices on nodes of 8"):
        phaze.optimize("gpt2", cluster=Cluster(base.accelerator, 12, base.levels), target="maxtext")


def test_a_search_offers_the_recompute_modes_of_its_target() -> None:
    plan = phaze.optimize(MIXTURE, cluster="a100-80gb:2", global_batch_size=4, target="maxtext", tp=1, ep=1)
    assert set(plan.strategy.recompute) == {"dots+context"}
