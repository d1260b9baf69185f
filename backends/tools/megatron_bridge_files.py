"""Target 'megatron-bridge': a plan as overrides (YAML) of a Megatron Bridge recipe, and recipes of it and of NeMo read.

A recipe is a Python function that sets attributes (`cfg.model.tensor_model_parallel_size = 4`, Megatron Bridge) or
passes keywords (`tensor_parallelism=4`, NeMo 2): it is read from its syntax and never run. `megatron_lm_files.py` has
the words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import YAML, ConfigText, Settings
from phaze.backends.tools.megatron_lm_files import (
    CAPABILITIES,
    KEYS,
    PASSED_OVER,
    megatron_settings,
    megatron_strategy,
    unset_variables,
)
from phaze.backends.tools.script_texts import PythonText
from phaze.backends.tools.tool_target import ToolTarget, command_line, torchrun, unread_keys, whole
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.strategy_files import StrategyFile

if TYPE_CHECKING:
    from phaze.plan.plan import Plan
    from phaze.targets import Capabilities

__all__ = ["BridgeTarget", "phaze_targets"]

_FILE = "megatron_bridge.yaml"
_SECTIONS = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), "train"),
    **dict.fromkeys(
        (
            "use_distributed_optimizer",
            "num_distributed_optimizer_instances",
            "use_megatron_fsdp",
            "data_parallel_sharding_strategy",
        ),
        "ddp",
    ),
}
"""Where a recipe's config has each word; all others are the model's."""
_NEMO = {
    "tensor_parallelism": "tensor_model_parallel_size",
    "pipeline_parallelism": "pipeline_model_parallel_size",
    "virtual_pipeline_parallelism": "virtual_pipeline_model_parallel_size",
    "context_parallelism": "context_parallel_size",
    "expert_parallelism": "expert_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
}
"""Parameters of NeMo 2's recipes, and what they are in megatron-core."""
_MIXED_PRECISION = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}
_FP8_MIXED_PRECISION = "bf16_with_fp8_delayed_scaling_mixed"


class BridgeTarget(ToolTarget):
    """Writes overrides by section of a recipe's config."""

    name = "megatron-bridge"
    tool = "Megatron Bridge 0.3.1"
    checked = (
        "keys found in the config classes of megatron-bridge 0.3.1 by reading them; not run: importing it needs CUDA"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Those of megatron-core."""
        return CAPABILITIES

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """YAML or Python with megatron-core's words."""
        if name.endswith((".yaml", ".yml")) and "tensor_model_parallel_size" in text:
            return YAML
        is_recipe = "tensor_model_parallel_size" in text or "tensor_parallelism" in text
        return PythonText(part) if name.endswith(".py") and is_recipe else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Dotted keys of the recipe's config."""
        words = megatron_settings(plan)
        precision = _FP8_MIXED_PRECISION if words.pop("fp8", None) else None
        for flag, name in _MIXED_PRECISION.items():
            precision = name if words.pop(flag, False) and precision is None else precision
        words.setdefault("sequence_parallel", False)
        settings = {f"{_SECTIONS.get(word, 'model')}.{word}": value for word, value in words.items()}
        return {**settings, "mixed_precision": precision} if precision else settings

    def files(self, plan: Plan) -> dict[str, str]:
        """One file of overrides."""
        return {_FILE: YAML.render(self.head(plan), self.settings(plan, YAML))}

    def launch(self, plan: Plan) -> str:
        """A recipe's script, which takes overrides from a file."""
        return command_line(torchrun(plan), f'"$RECIPE_SCRIPT" --config-file {_FILE}')

    def left_out(self, plan: Plan) -> list[str]:
        """The recipe itself."""
        sentence = "$RECIPE_SCRIPT is your training script: it merges the file onto its recipe's ConfigContainer."
        return [sentence, *super().left_out(plan)]

    def owned(self, settings: Settings) -> set[str]:
        """Everything that is read, but sizes and batch."""
        kept = ("num_layers", "seq_length", "bf16", "fp16", "batch_size")
        words = {*KEYS, *_NEMO}
        return {key for key in settings if key.rpartition(".")[2] in words and not key.endswith(kept)}

    def placed(self, wanted: Settings, current: Settings) -> Settings:
        """Where the file sets each word, under its own name for it (NeMo's recipes have others)."""
        places = {_NEMO.get(name, name): key for key in current for name in (key.rpartition(".")[2],)}
        return {places.get(key.rpartition(".")[2], key): value for key, value in wanted.items()}

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of overrides or of a recipe; of several values of a word the last one counts."""
        words: dict[str, object] = {}
        for key, value in settings.items():
            name = key.rpartition(".")[2]
            if value is not None:
                words[_NEMO.get(name, name)] = value
        # NeMo's optimizer recipes shard the optimizer unless they are told not to.
        if any(key.rpartition(".")[2] in _NEMO for key in settings):
            words.setdefault("use_distributed_optimizer", True)
        is_fp8 = "fp8" in str(settings.get("mixed_precision", "")) or bool(words.get("fp8"))
        return StrategyFile(
            tool=self.name,
            strategy=megatron_strategy(words, devices),
            global_batch_size=whole(words.get("global_batch_size")),
            sequence_length=whole(words.get("seq_length")),
            precision="fp8" if is_fp8 else None,
            **unread_keys(words, {*KEYS, "mixed_precision"}, PASSED_OVER, is_whole=False),
            notes=unset_variables(words),
        )


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The overrides for Megatron Bridge."""
    return (BridgeTarget(),)
