"""Target 'torchtitan': configs of torchtitan 0.3.0 (a Python module) and of 0.2 (a TOML job), written and read.

torchtitan shards by FSDP2, over `data_parallel_shard_degree` x cp devices, with `data_parallel_replicate_degree`
copies: under ZeRO 3 it gathers parameters in both passes ("always"), and under ZeRO 2 it keeps them after the forward
("never"). By default it gathers in both passes without a pipeline, and keeps them with one. Experts are divided over
the innermost devices, tp among them, so that expert parallelism is written without tp only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import TOML, ConfigText, Settings
from phaze.backends.tools.script_texts import PythonText
from phaze.backends.tools.tool_target import (
    ToolTarget,
    block_counts,
    command_line,
    micro_batches,
    shard_groups,
    shard_of,
    strongest_recompute,
    torchrun,
    unread_keys,
    whole,
)
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.parallelism import PipelineSchedule
from phaze.strategy_files import StrategyFile
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["TorchtitanTarget", "phaze_targets"]

_SCHEDULES = {
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
}
_SCHEDULE_WORDS = {word.lower(): schedule for schedule, word in _SCHEDULES.items()}
_PRECISIONS = ("bfloat16", "float32")
_PARALLELISM = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "tensor_parallel_degree",
    "enable_sequence_parallel",
    "context_parallel_degree",
    "expert_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "module_fqns_per_model_part",
)
_TRAINING = (
    *("seq_len", "local_batch_size", "batch_size", "global_batch_size", "mixed_precision_param"),
    "disable_cuda_graphs",
)
_SECTIONS = ("job", "profiling", "metrics", "optimizer", "lr_scheduler", "checkpoint", "comm", "compile", "debug")
_OTHERS = (
    *(f"{section}.*" for section in _SECTIONS),
    *("validation.*", "validator.*", "experimental.*", "fault_tolerance.*", "memory_estimation.*", "quantize.*"),
    *("float8.*", "mx.*", "model.*", "override.*", "loss.*", "dataloader.*", "tokenizer.*", "activation_checkpoint.*"),
    *(f"training.{name}" for name in ("dataset*", "max_norm", "steps", "dtype", "mixed_precision_reduce", "gc_*")),
    *(f"training.{name}" for name in ("deterministic", "seed", "compile", "warmup_steps", "enable_cpu_offload")),
    *(f"parallelism.{name}" for name in ("enable_fsdp_symm_mem", "spmd_backend", "context_parallel_*")),
    *(f"parallelism.{name}" for name in ("enable_async_tensor_parallel", "enable_compiled_autograd")),
    *(f"parallelism.pipeline_parallel_{name}" for name in ("schedule_csv", "*_stage_less_layers", "layers_per_stage")),
    *("parallelism.expert_tensor_parallel_degree", "Trainer.*"),
)
"""What else jobs of torchtitan 0.1 to 0.3 have."""
_MODULE = "torchtitan_plan"
"""The name of the module that is written; `--module` takes it."""

_PROGRAM = '''

def planned():
    """The base config with the plan's settings: `--module torchtitan_plan --config planned`."""
    import importlib

    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    registry = importlib.import_module(f"torchtitan.models.{BASE['module']}.config_registry")
    config = getattr(registry, BASE["config"])()
    for section, settings in ((config.training, TRAINING), (config.parallelism, PARALLELISM)):
        for name, value in settings.items():
            setattr(section, name, value)
    modes = {"full": FullAC.Config, "selective": SelectiveAC.Config}
    mode = ACTIVATION_CHECKPOINT["mode"]
    config.activation_checkpoint = modes[mode]() if mode in modes else None
    if QUANTIZATION["float8"]:
        from torchtitan.components.quantization import Float8LinearConverter

        config.compile.enable = True  # the casts are slow unless they are compiled
        float8 = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)
        model = importlib.import_module(f"torchtitan.models.{BASE['module']}")
        config.model_spec = model.model_registry(BASE["flavor"], converters=[float8])
    return config
'''
_CALLS = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}
"""Classes of torchtitan 0.3.0, whose keywords are settings of these sections."""
_CONVERTER = "Float8LinearConverter"
_OLDER = {
    f"{section}.{name}": f"parallelism.{name}" for section in ("training", "experimental") for name in _PARALLELISM
}
"""Where jobs of torchtitan before 0.2 have their degrees."""


class TorchtitanTarget(ToolTarget):
    """Writes the sections of a job that a plan decides."""

    name = "torchtitan"
    tool = "torchtitan 0.3.0"
    checked = (
        "parsed by torchtitan 0.3.0's ConfigManager; the mesh of its ParallelDims on 8 processes of gloo is the plan's"
        "; its own functions cut its debug models into the plan's stages and shards; losses and gradients of a debug "
        "model that they shard (dp, tp), with torch's attention, are one process's; not run: its trainer, pipelines, "
        "contexts and experts, whose flex attention has no backward on CPUs; not checked: the TOML for version 0.2"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Stages of any size by module names; no ZeRO-1; no zero-bubble schedule with one stage per device."""
        return Capabilities(
            schedules=frozenset(_SCHEDULES),
            zero_stages=frozenset({0, 2, 3}),
            needs_micro_batches_per_stage=frozenset({PipelineSchedule.INTERLEAVED}),
            context_parallel_zero_stages=frozenset({2, 3}),
            expert_parallel_zero_stages=frozenset({2, 3}),
            excluded_axes=frozenset({("ep", "tp")}),
            compute_dtypes=frozenset(_PRECISIONS),
            recompute_modes=frozenset({"none", "products", "full"}),
            allows_uneven_stages=True,
            allows_strided_parameters=True,
            allows_context_parallel=True,
            allows_expert_parallel=True,
            allows_shard_groups=True,
            product_dtypes=frozenset({"fp8"}),
            can_cut_stages=True,
        )

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """A TOML with the section `parallelism`, or Python that names torchtitan's own config classes."""
        if name.endswith(".toml") and ("[parallelism" in text or "[training" in text):
            return TOML
        is_config = "torchtitan" in text and ("ParallelismConfig" in text or "PARALLELISM" in text)
        return PythonText(part) if name.endswith(".py") and is_config else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Sections `training`, `parallelism` and `activation_checkpoint`."""
        is_older = kind is TOML
        settings = {
            **_training(plan),
            **_parallelism(plan, "output" if is_older else "lm_head"),
            **_recompute(plan, kind),
        }
        if is_older:
            _check_older(plan)
            del settings["parallelism.enable_sequence_parallel"], settings["training.disable_cuda_graphs"]
            return {**settings, "model.converters": ["float8"]} if _quantizes(plan) else settings
        return {**settings, "quantization.float8": _quantizes(plan)}

    def files(self, plan: Plan) -> dict[str, str]:
        """The module for 0.3.0, and a TOML for 0.2 where 0.2 runs the plan."""
        python = PythonText()
        base = {"base.module": "llama3", "base.config": "llama3_8b", "base.flavor": "8B"}
        if plan.strategy.ep > 1:  # a dense model has no experts to divide
            base = {"base.module": "qwen3", "base.config": "qwen3_30b_a3b", "base.flavor": "30B-A3B"}
        settings = {**base, **self.settings(plan, python)}
        files = {f"{_MODULE}.py": python.render(self.head(plan), settings) + _PROGRAM}
        try:
            files["torchtitan.toml"] = TOML.render(self.head(plan), self.settings(plan, TOML))
        except PlanError:
            return files
        return files

    def launch(self, plan: Plan) -> str:
        """torchtitan's trainer with the module, which must be importable."""
        program = f"-m torchtitan.train --module {_MODULE} --config planned"
        return command_line(f"PYTHONPATH=$PWD {torchrun(plan)}", program)

    def left_out(self, plan: Plan) -> list[str]:
        """The model: `BASE` names it."""
        sentences = [
            f"`BASE` in {_MODULE}.py names the model and everything else of the job; set it to yours. The TOML is for "
            "torchtitan 0.2: copy its sections into your job.",
            "Compilation (compile.enable) is no part of a plan; with float8 it is switched on.",
        ]
        return [*sentences, *super().left_out(plan)]

    def owned(self, settings: Settings) -> set[str]:
        """All settings of the pipeline and of sharding."""
        kept = ("base.", "model.", "training.")
        known = {key for key in _known() if key in settings and not key.startswith(kept)}
        return known | (_OLDER.keys() & settings.keys())

    def placed(self, wanted: Settings, current: Settings) -> Settings:
        """The batch of a process was `batch_size` before 0.2, and degrees stood in other sections."""
        is_older = "training.batch_size" in current and "training.local_batch_size" not in current
        names = {"training.local_batch_size": "training.batch_size"} if is_older else {}
        names |= {new: old for old, new in _OLDER.items() if old in current}
        return {names.get(key, key): value for key, value in wanted.items()}

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of a job, with torchtitan's defaults."""
        job = _by_section(settings)
        tp, pp, cp, ep = (
            whole(job.get(f"parallelism.{name}_parallel_degree", 1))
            for name in ("tensor", "pipeline", "context", "expert")
        )
        copies = whole(job.get("parallelism.data_parallel_replicate_degree", 1)) or 1
        shards = whole(job.get("parallelism.data_parallel_shard_degree", -1))
        if shards is None or shards < 1:
            shards = max(1, devices // ((tp or 1) * (pp or 1) * (cp or 1) * copies))
        dp = copies * shards
        is_pipeline = (pp or 1) > 1
        zero = _zero(str(job.get("parallelism.fsdp_reshard_after_forward", "default")), shards * (cp or 1), is_pipeline)
        local = whole(job.get("training.local_batch_size", job.get("training.batch_size", 8)))
        micro = whole(job.get("parallelism.pipeline_parallel_microbatch_size", 1)) if is_pipeline else local
        strategy = {
            "dp": dp,
            "shard": shard_of(copies, shards, cp or 1) if zero else None,
            "zero": zero,
            "cp": cp,
            "ep": ep,
            "tp": tp,
            "sequence_parallel": bool(job.get("parallelism.enable_sequence_parallel", True)) if tp != 1 else None,
            "micro_batch_size": micro,
            "pp": pp,
            **(_pipeline(job, pp or 1) if is_pipeline else {}),
            "recompute": _mode(job),
        }
        batch = whole(job.get("training.global_batch_size", -1))
        return StrategyFile(
            tool=self.name,
            strategy={key: value for key, value in strategy.items() if value is not None},
            global_batch_size=batch if batch and batch > 0 else None if local is None else dp * local,
            sequence_length=whole(job.get("training.seq_len")),
            precision="fp8" if _is_float8(job) else None,
            model=" ".join(str(job[key]) for key in ("model.name", "model.flavor") if key in job) or None,
            **unread_keys(job, _known(), _OTHERS, is_whole=not any(key.startswith("Trainer") for key in settings)),
            notes=_notes(job),
        )


def _known() -> set[str]:
    names = {f"parallelism.{name}" for name in _PARALLELISM} | {f"training.{name}" for name in _TRAINING}
    modes = {"activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"}
    models = {"model.name", "model.flavor", "model.converters", "quantization.float8", "float8"}
    modes |= {"Trainer.activation_checkpoint"}
    return names | modes | models | {"base.module", "base.config", "base.flavor"}


def _by_section(settings: Settings) -> dict[str, object]:
    """Settings with the names of sections where Python calls config classes."""
    job: dict[str, object] = {}
    for key, value in settings.items():
        owner, _, name = key.partition(".")
        if owner == _CONVERTER:  # our own module has it behind a condition
            job |= {"float8": True} if "quantization.float8" not in settings else {}
        elif key in _OLDER:
            job[_OLDER[key]] = value
        elif key != "compile.enable":
            job[f"{_CALLS.get(owner, owner)}.{name}" if name else key] = value
    return job


def _zero(policy: str, shards: int, is_pipeline: bool) -> int:
    if shards == 1:
        return 0
    return {"always": 3, "never": 2}.get(policy, 2 if is_pipeline else 3)


def _pipeline(job: Settings, pp: int) -> dict[str, object]:
    """Schedule, chunks and stages of a pipeline; torchtitan's looped schedules have two stages on each device."""
    schedule = _SCHEDULE_WORDS.get(str(job.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower())
    parts = job.get("parallelism.module_fqns_per_model_part")
    if isinstance(parts, list):
        # What stands around the embedding and the head (norms) belongs to their layers.
        counts = [sum("layers." in str(module) for module in part) for part in parts]
        counts[0] += 1
        counts[-1] += 1
        return {"schedule": schedule, "chunks": max(1, len(parts) // pp), "stages": counts}
    chunks = 2 if schedule is PipelineSchedule.INTERLEAVED else 1 if schedule is not None else None
    return {"schedule": schedule, "chunks": chunks}


def _mode(job: Settings) -> str:
    """The recompute mode: torchtitan's default is its selective mode, which keeps every second product."""
    mode = str(job.get("activation_checkpoint.mode", job.get("Trainer.activation_checkpoint", "selective")))
    known = {"full": "full", "FullAC.Config()": "full", "none": "none", "None": "none", "memory_budget": "full"}
    return known.get(mode, "products")


def _is_float8(job: Settings) -> bool:
    is_converted = "float8" in str(job.get("model.converters", "")) or "float8" in job
    return is_converted or job.get("quantization.float8") is True


def _quantizes(plan: Plan) -> bool:
    return plan.question.precision.quantizes_products


def _notes(job: Settings) -> tuple[str, ...]:
    notes = []
    schedule = str(job.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    if schedule not in _SCHEDULE_WORDS and (whole(job.get("parallelism.pipeline_parallel_degree", 1)) or 1) > 1:
        notes.append(f"pipeline_parallel_schedule {schedule} is not priced; the schedule is left to the search")
    if job.get("activation_checkpoint.mode") == "memory_budget":
        notes.append("activation_checkpoint.mode memory_budget is priced as full, which takes least memory")
    if job.get("training.enable_cpu_offload") is True:
        notes.append("training.enable_cpu_offload is not priced: states are counted on the devices")
    return tuple(notes)


def _check_older(plan: Plan) -> None:
    strategy = plan.strategy
    if strategy.zero == 0 and strategy.dp > 1 and strategy.tp * strategy.pp * strategy.cp > 1:
        raise PlanError(
            f"torchtitan 0.2 combines DDP (ZeRO stage 0, dp={strategy.dp}) with no tensor, pipeline or context "
            f"parallelism (tp={strategy.tp}, pp={strategy.pp}, cp={strategy.cp}); plan with strategy zero=2 or zero=3."
        )
    if strategy.tp > 1 and not strategy.sequence_parallel:
        raise PlanError(
            "torchtitan 0.2 splits sequences wherever tp is above 1, and the plan does not; plan with strategy "
            "sequence_parallel=True."
        )


def _training(plan: Plan) -> dict[str, object]:
    """Batch and precision; torchtitan's local batch is what one step of a pipeline takes, else one microbatch."""
    recipe, strategy = plan.question.precision, plan.strategy
    if recipe.compute_dtype not in _PRECISIONS:
        raise PlanError(f"torchtitan trains in bfloat16 or float32; the plan's precision is {recipe.name}.")
    in_flight = micro_batches(plan) if strategy.pp > 1 else 1
    return {
        "training.seq_len": plan.model.tokens_per_sample,
        "training.local_batch_size": strategy.micro_batch_size * in_flight,
        "training.global_batch_size": plan.question.global_batch_size,
        "training.mixed_precision_param": recipe.compute_dtype,
        # Its CUDA graphs do not go with pipelines, nor with most ways to dispatch tokens to experts.
        "training.disable_cuda_graphs": strategy.pp * strategy.ep > 1,
    }


def _parallelism(plan: Plan, head: str) -> dict[str, object]:
    """Degrees, sharding and the pipeline; `head` is the module of the logits."""
    strategy = plan.strategy
    if strategy.ep > 1 and strategy.tp > 1:
        raise PlanError(
            f"torchtitan divides experts over the tp devices first; the plan has ep {strategy.ep} beside tp "
            f"{strategy.tp}. Plan with tp=1 or ep=1."
        )
    if strategy.cp > 1 and strategy.zero == 0:
        raise PlanError("torchtitan shards states over the cp devices; plan with strategy zero=2 or zero=3.")
    copies, shards = shard_groups(strategy, "torchtitan")
    section: dict[str, object] = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.tp == 1 or bool(strategy.sequence_parallel),
        "context_parallel_degree": strategy.cp,
        "expert_parallel_degree": strategy.ep,
        "pipeline_parallel_degree": strategy.pp,
    }
    if strategy.zero:
        section["fsdp_reshard_after_forward"] = "always" if strategy.zero == 3 else "never"
    if strategy.pp > 1:
        section["pipeline_parallel_schedule"] = _SCHEDULES[PipelineSchedule(strategy.schedule)]
        section["pipeline_parallel_microbatch_size"] = strategy.micro_batch_size
        section["module_fqns_per_model_part"] = _modules(plan, head)
    return {f"parallelism.{name}": value for name, value in section.items()}


def _modules(plan: Plan, head: str) -> list[list[str]]:
    """The modules of each stage, as torchtitan's decoders name them."""
    counts, first = block_counts(plan, "torchtitan"), 0
    parts: list[list[str]] = []
    for count in counts:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _recompute(plan: Plan, kind: ConfigText) -> dict[str, object]:
    """torchtitan's selective mode, by op, keeps every second product: it is the plan's mode `products`."""
    mode = strongest_recompute(plan)
    if mode != "products":
        return {"activation_checkpoint.mode": mode}
    settings: dict[str, object] = {"activation_checkpoint.mode": "selective"}
    return {**settings, "activation_checkpoint.selective_ac_option": "op"} if kind is TOML else settings


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The files for torchtitan."""
    return (TorchtitanTarget(),)
