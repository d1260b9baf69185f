"""Files of tools: what is written is read as the same strategy, edited files say the plan, names break out of none."""

import ast
import json
import shlex
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_plans import TOOLS, cases_for, cluster_document, parallelism_of, plan_of

import phaze
from phaze.backends.accelerate import accelerator_arguments, training_arguments
from phaze.errors import FormatError, PlanError
from phaze.hardware import Cluster
from phaze.ir import RecomputeMode
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.plan.handover import obstacles
from phaze.plan.plan import Plan

FILES = {name: next(iter(tool.files(plan_of(Parallelism(recompute=("full",)))))) for name, tool in TOOLS.items()}
"""The first file of each tool, which is the one that is read back."""


def written(name: str, plan: Plan) -> str:
    """A tool's own file for a plan."""
    return TOOLS[name].export(plan, None)[FILES[name]]


@pytest.mark.parametrize("name", sorted(TOOLS))
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_written_is_read_as_the_same_parallelism(name: str, data: st.DataObject) -> None:
    plan = data.draw(cases_for(TOOLS[name])).plan()
    assert obstacles(plan, TOOLS[name].capabilities) == []
    text, batch = written(name, plan), plan.question.global_batch_size
    file = TOOLS[name].read(FILES[name], None, text, plan.cluster.device_count, batch)
    strategy = dict(file.strategy)
    if name == "accelerate":  # its configs have no batch; DDP's have no recompute either
        strategy["micro_batch_size"] = plan.strategy.micro_batch_size
        strategy["recompute"] = plan.strategy.recompute[0] if plan.strategy.zero == 0 else strategy["recompute"]
    else:
        assert file.global_batch_size == batch
    assert parallelism_of(strategy, len(plan.stages)) == plan.strategy
    assert list(strategy.get("stages", [len(stage.layers) for stage in plan.stages])) == [
        len(stage.layers) for stage in plan.stages
    ]
    assert (file.ignored, file.unknown) == ((), ())


@pytest.mark.parametrize("name", sorted(TOOLS))
@settings(max_examples=25)
@given(data=st.data())
def test_a_file_that_is_edited_says_the_other_plan(name: str, data: st.DataObject) -> None:
    first, second = (data.draw(cases_for(TOOLS[name])).plan() for _ in range(2))
    text, wanted = written(name, first), written(name, second)
    before, after = TOOLS[name].edit(FILES[name], None, text, second)
    devices, batch = second.cluster.device_count, second.question.global_batch_size
    read = TOOLS[name].read(FILES[name], None, after, devices, batch)
    expected = TOOLS[name].read(FILES[name], None, wanted, devices, batch)
    assert (read.strategy, read.global_batch_size) == (expected.strategy, expected.global_batch_size)
    assert TOOLS[name].edit(FILES[name], None, text, first)[1] == before


NAMES = st.text(max_size=40) | st.sampled_from(
    [
        "x\nrm -rf /",
        '"; import os #',
        "'''\"\"\"",
        "coding: utf-7",
        "$(touch broken)",
        "a\x85b",
        "a\u2028b",
        "]\n[parallelism]\n",
        "\ud800",
        "\U0001f600",
        "a\r\nPLANNED=(x)",
    ]
)


@pytest.mark.parametrize("name", sorted(TOOLS))
@settings(max_examples=25)
@given(model=NAMES)
def test_no_name_of_a_model_changes_what_a_file_says(name: str, model: str) -> None:
    strategy = Parallelism(dp=8, zero=3, recompute=("full",))
    plain = TOOLS[name].export(plan_of(strategy), None)
    named = TOOLS[name].export(plan_of(strategy, name=model), None)
    assert plain.keys() == named.keys()
    for file, text in named.items():
        text.encode()  # half a character would be refused
        if file == "README.md":
            assert len(text.splitlines()) == len(plain[file].splitlines())
            continue
        assert text == plain[file] or said_by(file, text) == said_by(file, plain[file])


def said_by(file: str, text: str) -> object:
    """What a file says, by a reader that is not ours; names of models apart."""
    if file.endswith(".toml"):
        return tomllib.loads(text)
    if file.endswith((".yaml", ".yml")):
        return yaml.safe_load(text)
    if file.endswith(".json"):
        return {**json.loads(text), "model": None}
    if file.endswith(".py"):
        return ast.dump(ast.parse(text))
    return shlex.split(text, comments=True)


def test_a_shell_runs_nothing_of_a_model_s_name(tmp_path: Path) -> None:
    name = "x\ntouch broken\n$(touch broken)`touch broken`"
    strategy = Parallelism(dp=4, tp=2, zero=1, recompute=("full",))
    for tool in ("megatron-lm", "torchrun"):
        for file, text in TOOLS[tool].export(plan_of(strategy, name=name), None).items():
            (tmp_path / file).write_text(text)
    script = 'source megatron_lm.sh; printf "%s\\n" "${PLANNED[@]}"; sh -n launch.sh'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["--tensor-model-parallel-size", "2"]
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("name", ["fsdp", "pjit"])
def test_shardings_of_another_version_are_refused_and_unknown_keys_named(name: str) -> None:
    text = written(name, plan_of(Parallelism(dp=4, tp=2, zero=3, recompute=("full",))))
    other = text.replace("'zero': 3,", "'zero': 3, 'zeros': 3,").replace("'tp': 2,", "'tp': 2, 'ep': 2,")
    file = TOOLS[name].read(FILES[name], None, other, 8, None)
    assert file.unknown == ("mesh.ep (meant: mesh.tp?)", "step.zeros (meant: step.zero?)")
    assert (file.strategy["dp"], file.strategy["tp"], file.strategy["zero"]) == (4, 2, 3)
    with pytest.raises(FormatError, match=f"version 1 of the format phaze-{name}; this Phaze reads 2"):
        TOOLS[name].read(FILES[name], None, text.replace("'version': 2", "'version': 1"), 8, None)


def test_maxtext_gets_its_own_names() -> None:
    strategy = Parallelism(dp=2, tp=4, zero=1, micro_batch_size=8, recompute=(RecomputeMode.DOTS,))
    text = TOOLS["maxtext"].export(plan_of(strategy, micro_batches=3, name="llama3-8b"), None)["maxtext.yml"]
    options = yaml.safe_load(text)
    assert (
        options.items()
        >= {
            "model_name": "llama3-8b",
            "max_target_length": 256,
            "ici_data_parallelism": 2,
            "ici_fsdp_parallelism": 1,
            "ici_tensor_parallelism": 4,
            "dcn_data_parallelism": 1,
            "shard_optimizer_over_data": True,
            "per_device_batch_size": 2.0,
            "gradient_accumulation_steps": 3,
            "remat_policy": "minimal",
        }.items()
    )


def test_slices_of_a_tpu_are_dcn_axes() -> None:
    strategy = Parallelism(dp=512, zero=3, recompute=("full",))
    plan = plan_of(strategy, slices=2)
    text, base = TOOLS["maxtext"].export(plan, None)["maxtext.yml"], plan.cluster
    options = yaml.safe_load(text)
    assert options["dcn_fsdp_parallelism"] == 2
    assert options["ici_fsdp_parallelism"] == 256
    assert options["max_target_length"] == 256
    part = replace(plan, hardware=cluster_document(Cluster(base.accelerator, 500, base.levels)))
    with pytest.raises(PlanError, match=r"500 devices on 2 slices of 256\. Plan for whole slices"):
        TOOLS["maxtext"].export(part, None)


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("torchtitan", {"dp": 4, "ep": 2, "tp": 2, "zero": 3}, "divides experts over the tp devices first"),
        ("accelerate", {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, "split no sequence between layers"),
        ("deepspeed", {"dp": 2, "tp": 2, "cp": 2, "zero": 2}, "combines Ulysses"),
        ("maxtext", {"dp": 4, "cp": 2, "zero": 1}, "Plan with strategy zero=3"),
    ],
)
def test_combinations_that_a_tool_does_not_run_are_refused(
    name: str, strategy: dict[str, object], message: str
) -> None:
    plan = plan_of(Parallelism(**strategy, recompute=("full",)))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        TOOLS[name].export(plan, None)


@pytest.mark.parametrize(("expert_tp", "sizes"), [(1, (4, 1)), (2, (2, 2))])
def test_megatron_counts_the_tp_devices_that_divide_whole_experts(expert_tp: int, sizes: tuple[int, int]) -> None:
    strategy = {"dp": 4, "ep": 2, "tp": 2, "expert_tp": expert_tp, "zero": 1, "sequence_parallel": True}
    plan = plan_of(Parallelism(**strategy, recompute=("full",)))  # type: ignore[arg-type]
    text = TOOLS["megatron-lm"].export(plan, None)["megatron_lm.sh"]
    assert f"--expert-model-parallel-size {sizes[0]}\n" in text
    assert f"--expert-tensor-parallel-size {sizes[1]}\n" in text
    read = TOOLS["megatron-lm"].read("run.sh", None, text, 8, None).strategy
    assert {name: read[name] for name in ("ep", "tp", "expert_tp")} == {"ep": 2, "tp": 2, "expert_tp": expert_tp}


def test_a_readme_says_the_command_and_what_was_left_out() -> None:
    strategy = Parallelism(dp=2, tp=2, pp=2, zero=1, schedule=PipelineSchedule.ONE_F_ONE_B, recompute=("full", "none"))
    text = TOOLS["megatron-lm"].export(plan_of(strategy, stages=(3, 3), slices=2), None)["README.md"]
    assert "    torchrun --nnodes 2 --nproc-per-node 4 " in text
    assert "one recompute mode for all stages: full is written; the plan has full, none" in text
    assert "not run: its trainer" in text


@pytest.mark.parametrize("target", ["accelerate", "deepspeed"])
def test_a_search_for_a_tool_that_splits_no_sequence_offers_none(target: str) -> None:
    question = {"cluster": "a100-80gb:4", "global_batch_size": 16, "target": target, "tp": 2, "micro_batch_size": 2}
    plan = phaze.optimize("gpt2", **question)
    assert (plan.strategy.tp, plan.strategy.sequence_parallel) == (2, False)
    assert plan.export(target)
    with pytest.raises(PlanError, match=f"target {target} splits no sequence over the tp devices"):
        phaze.evaluate("gpt2", strategy={"tp": 2, "sequence_parallel": True}, compares=False, **question)


def test_a_recipe_of_nemo_is_edited_in_its_own_words() -> None:
    recipe = "def trainer(tensor_parallelism=4, pipeline_parallelism=2, virtual_pipeline_parallelism=5):\n    pass\n\n"
    recipe += "data = run.Config(MockDataModule, seq_length=256, global_batch_size=8, micro_batch_size=1)\n"
    strategy = Parallelism(dp=2, tp=8, zero=1, sequence_parallel=True, micro_batch_size=2, recompute=("none",))
    _, after = TOOLS["megatron-bridge"].edit("recipe.py", None, recipe, plan_of(strategy))
    assert "tensor_parallelism=8, pipeline_parallelism=1, virtual_pipeline_parallelism=None" in after
    assert "global_batch_size=8, micro_batch_size=2" in after


def test_an_older_job_of_torchtitan_keeps_its_own_names() -> None:
    job = '[model]\nconverters = "float8"\n[training]\nbatch_size = 2\n[parallelism]\ntensor_parallel_degree = 8\n'
    strategy = Parallelism(dp=2, zero=3, micro_batch_size=3, recompute=("full",))
    _, after = TOOLS["torchtitan"].edit("job.toml", None, job, plan_of(strategy, precision="fp8"))
    assert 'converters = "float8"' in after
    assert "\nbatch_size = 3\n" in after
    assert "local_batch_size" not in after


def test_ulysses_is_switched_on_by_both_of_its_sizes() -> None:
    strategy = Parallelism(dp=2, cp=4, zero=3, recompute=("none",))
    config = json.loads(TOOLS["deepspeed"].export(plan_of(strategy), None)["ds_config.json"])
    assert (config["data_parallel_size"], config["sequence_parallel_size"]) == (2, 4)


def test_autotp_gets_no_batch_that_deepspeed_would_count_tp_devices_in() -> None:
    strategy = Parallelism(dp=2, tp=4, zero=1, micro_batch_size=3, recompute=("none",))
    text = written("deepspeed", plan_of(strategy, micro_batches=5))
    assert "train_batch_size" not in json.loads(text)
    assert TOOLS["deepspeed"].read("ds_config.json", None, text, 8, None).global_batch_size == 2 * 3 * 5
    whole = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}'
    _, after = TOOLS["deepspeed"].edit("ds_config.json", None, whole, plan_of(strategy, micro_batches=5))
    assert "train_batch_size" not in json.loads(after)


def test_groups_that_deepspeed_no_longer_has_are_removed_from_its_file() -> None:
    older = '{"train_batch_size": 16, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}'
    plan = plan_of(Parallelism(dp=8, zero=3, recompute=("none",)))
    assert TOOLS["deepspeed"].read("ds_config.json", None, older, 8, None).strategy["shard"] == 4
    _, after = TOOLS["deepspeed"].edit("ds_config.json", None, older, plan)
    assert json.loads(after)["zero_optimization"] == {"stage": 3}


def test_degrees_of_the_first_torchtitan_are_read_and_changed_where_they_stand() -> None:
    job = "[training]\nbatch_size = 8\ntensor_parallel_degree = 2\n[experimental]\npipeline_parallel_degree = 2\n"
    file = TOOLS["torchtitan"].read("job.toml", None, job, 16, None)
    assert {key: file.strategy[key] for key in ("dp", "tp", "pp")} == {"dp": 4, "tp": 2, "pp": 2}
    assert (file.ignored, file.unknown) == ((), ())
    _, after = TOOLS["torchtitan"].edit("job.toml", None, job, plan_of(Parallelism(dp=8, zero=3, recompute=("full",))))
    changed = tomllib.loads(after)
    assert changed["training"]["tensor_parallel_degree"] == 1
    assert changed["experimental"]["pipeline_parallel_degree"] == 1
    assert "tensor_parallel_degree" not in changed["parallelism"]


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8", "mxfp8"])
def test_a_mesh_says_any_precision(precision: str) -> None:
    text = written("torchrun", plan_of(Parallelism(dp=4, zero=1, recompute=("none",)), precision=precision))
    file = TOOLS["torchrun"].read("mesh.json", None, text, 4, None)
    assert file.precision == plan_of(Parallelism(recompute=("none",)), precision=precision).question.precision.name
    assert "stages" not in file.strategy, "one stage has all layers of any model"


def test_maxtext_finds_its_own_defaults_and_knows_both_axes_of_contexts() -> None:
    text = written("maxtext", plan_of(Parallelism(dp=4, cp=2, zero=3, recompute=("full",))))
    assert yaml.safe_load(text)["base_config"] == "base.yml"
    newer = f"{text}ici_context_usp_ulysses_parallelism: 2\n"
    file = TOOLS["maxtext"].read("maxtext.yml", None, newer, 16, None)
    assert (file.strategy["cp"], file.ignored, file.unknown) == (4, (), ())


def test_ddp_needs_no_fsdp_plugin_and_a_plan_that_accelerate_does_not_run_is_named() -> None:
    plan = plan_of(Parallelism(dp=4, micro_batch_size=3, recompute=("full",)), micro_batches=5)
    assert accelerator_arguments(plan) == {"mixed_precision": "bf16", "gradient_accumulation_steps": 5}
    assert training_arguments(plan) == {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 5,
        "bf16": True,
        "fp16": False,
        "gradient_checkpointing": True,
    }
    pipeline = Parallelism(dp=2, pp=2, schedule=PipelineSchedule.ONE_F_ONE_B, recompute=("full", "full"))
    for arguments in (accelerator_arguments, training_arguments):
        with pytest.raises(PlanError, match=r"cannot run this plan: it has a pipeline with schedule 1f1b\. Plan with"):
            arguments(plan_of(pipeline, stages=(3, 3)))


def test_a_shell_hands_on_a_layout_that_was_written_into_a_quoted_variable(tmp_path: Path) -> None:
    strategy = Parallelism(dp=2, pp=2, schedule=PipelineSchedule.ONE_F_ONE_B, recompute=("full", "full"))
    plan = plan_of(strategy, stages=(2, 4))
    options = "--tensor-model-parallel-size 2 \\\n  --micro-batch-size 4"
    variable = f'ARGUMENTS="{options}"  # the "arguments"\nprint_all $ARGUMENTS\n'
    for script in (variable, f"print_all {options}\n"):
        _, after = TOOLS["megatron-lm"].edit("run.sh", None, script, plan)
        program = f"set -f; print_all() {{ printf '%s\\n' \"$@\"; }}\n{after}"
        words = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
        assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et|t*3L"


def test_a_section_of_json_of_which_nothing_is_left_is_removed() -> None:
    older = '{"train_batch_size": 16, "tensor_parallel": {"autotp_size": 4}, "fp16": {}}'
    _, after = TOOLS["deepspeed"].edit("ds_config.json", None, older, plan_of(Parallelism(dp=8, recompute=("none",))))
    assert "tensor_parallel" not in json.loads(after)
    assert json.loads(after)["fp16"] == {}
