"""Target 'megatron-lm': a plan as arguments of Megatron-LM (github.com/NVIDIA/Megatron-LM), and the way back.

`megatron_settings.py` has the words; here they are options of `pretrain_gpt.py`, in a script of one's own or in ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import ConfigText, Settings
from phaze.backends.tools.megatron_settings import CAPABILITIES, KEYS, PASSED_OVER, megatron_settings, megatron_strategy
from phaze.backends.tools.option_texts import DASHED_OPTIONS
from phaze.backends.tools.tool_target import ToolTarget, command_line, torchrun, unread_keys, whole
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.strategy_files import StrategyFile

if TYPE_CHECKING:
    from phaze.capabilities import Capabilities
    from phaze.plan.plan import Plan

__all__ = ["MegatronTarget", "phaze_targets"]

_FILE = "megatron_lm.sh"
_DEFAULTS = {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size", "padded_vocab_size"}
"""Sizes of the model, which the file may name."""
_VOCABULARY = 50257
"""The vocabulary of GPT-2's tokenizer, which Megatron-LM's GPT examples read."""
_PADDING = 128
"""Megatron-LM pads vocabularies to a multiple of this x tp."""


class MegatronTarget(ToolTarget):
    """Writes the arguments that a plan decides, one in each line."""

    name = "megatron-lm"
    tool = "Megatron-LM core_v0.16"
    checked = (
        "values accepted by megatron-core 0.16.1's TransformerConfig and DistributedDataParallelConfig; groups of its "
        "parallel_state on 8 processes of gloo are the plan's; loss and gradients of its GPTModel at tp 2 on CPUs are "
        "those at tp 1; losses and gradients of its pipeline schedules over the layout's stages on CPUs are one "
        "process's; loss and gradients of its mixture with experts over ep 2 on CPUs are those at ep 1; not run: its "
        "trainer, whose recompute asks for CUDA's generator, contexts, whose attention is Transformer Engine's, and "
        "its sharding of parameters; not parsed: option names, read in megatron/training/arguments.py, which the "
        "package does not have"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Those of megatron-core."""
        return CAPABILITIES

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """Any text with one of its options."""
        known = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size")
        return DASHED_OPTIONS if any(option in text for option in known) and not name.endswith(".py") else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Options without their dashes."""
        settings = megatron_settings(plan)
        if "fp8" in settings:
            settings["fp8_format"] = settings.pop("fp8")
        if "use_megatron_fsdp" in settings:  # what its arguments ask for beside it
            settings |= {"no_gradient_accumulation_fusion": True, "ckpt_format": "fsdp_dtensor"}
        return {name.replace("_", "-"): value for name, value in settings.items()}

    def files(self, plan: Plan) -> dict[str, str]:
        """One file, which a shell sources: an array of arguments."""
        return {_FILE: DASHED_OPTIONS.render(self.head(plan), self.settings(plan, DASHED_OPTIONS))}

    def launch(self, plan: Plan) -> str:
        """Megatron-LM's program for GPT; the model's own arguments come behind the plan's."""
        program = 'pretrain_gpt.py "${PLANNED[@]}" "${MODEL_AND_DATA[@]}"'
        return f"source {_FILE}\n{command_line(torchrun(plan), program)}"

    def owned(self, settings: Settings) -> set[str]:
        """The options that are read, but those of the model and the batch."""
        sizes = {"num-layers", "seq-length", "bf16", "fp16"}
        return {key for key in settings if key.replace("-", "_") in KEYS} - sizes

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of arguments, wherever they stand in a script."""
        options = {key.replace("-", "_"): value for key, value in settings.items()}
        named = {*KEYS, *_DEFAULTS, "ckpt_format", "no_gradient_accumulation_fusion"}
        read = {spelled for name in named for spelled in (name, name.replace("_", "-"))}
        others = [spelled for name in PASSED_OVER for spelled in (name, name.replace("_", "-"))]
        return StrategyFile(
            tool=self.name,
            strategy=megatron_strategy(options, devices),
            global_batch_size=whole(options.get("global_batch_size")),
            sequence_length=whole(options.get("seq_length")),
            precision="fp8" if "fp8_format" in options else "fp16" if "fp16" in options else None,
            config=_model(options),
            **unread_keys(settings, read, others, is_whole=False, prefix="--"),
            notes=unset_variables(settings, "--"),
        )


def unset_variables(settings: Settings, prefix: str = "") -> tuple[str, ...]:
    """What a file leaves to variables that it does not set."""
    read = {name.replace("_", "-") for name in KEYS} | set(KEYS)
    return tuple(
        f"{prefix}{key} is {value}, which this file does not set: it is left to the search"
        for key, value in settings.items()
        if key in read and isinstance(value, str) and value.startswith("$")
    )


def _model(options: Settings) -> dict[str, object] | None:
    """The GPT that arguments describe, as `phaze.import_graph` takes a config; None where a size is missing.

    Where no vocabulary is named it is GPT-2's, padded as Megatron-LM pads it.
    """
    layers, hidden, heads = (whole(options.get(name)) for name in ("num_layers", "hidden_size", "num_attention_heads"))
    if layers is None or hidden is None or heads is None or "swiglu" in options or "num_experts" in options:
        return None
    multiple = _PADDING * (whole(options.get("tensor_model_parallel_size")) or 1)
    vocabulary = whole(options.get("vocab_size")) or -(-_VOCABULARY // multiple) * multiple
    return {
        "model_type": "megatron-gpt",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": whole(options.get("seq_length")) or whole(options.get("max_position_embeddings")) or 1024,
        "vocab_size": vocabulary,
    }


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The arguments for Megatron-LM."""
    return (MegatronTarget(),)
