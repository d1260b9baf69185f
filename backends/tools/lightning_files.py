"""Target 'lightning': a plan as arguments of Lightning 2.6's Trainer and ModelParallelStrategy, in a module of its own.

ModelParallelStrategy makes a mesh of data and tensor parallelism; the LightningModule's `configure_model` shards itself
on it, for which the module has a function. It has one axis for data, so that ZeRO shards over all of dp. ZeRO-0 is DDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import ConfigText, Settings
from phaze.backends.tools.script_texts import PythonText
from phaze.backends.tools.tool_target import (
    ToolTarget,
    micro_batches,
    nodes,
    strongest_recompute,
    torchrun,
    unread_keys,
    whole,
)
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.strategy_files import StrategyFile
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["LightningTarget", "phaze_targets"]

_FILE = "lightning_plan.py"
_PRECISIONS = {"bfloat16": "bf16-true", "float16": "16-true", "float32": "32-true"}
_DDP_PRECISIONS = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}
_PROGRAM = '''

def trainer(**more):
    """A Trainer with the plan's strategy; `more` are arguments of your own."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    strategy = ModelParallelStrategy(**STRATEGY) if SHARDING["zero"] else DDPStrategy()
    return Trainer(**{**TRAINER, "strategy": strategy, **more})


def shard(module, blocks, device_mesh):
    """Call this in `configure_model`: recompute and FSDP2 for every block, then for the module around them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    for parent, name in blocks:
        block = getattr(parent, name)
        block = checkpoint_wrapper(block) if SHARDING["recompute"] == "full" else block
        setattr(parent, name, block)
        if SHARDING["zero"]:
            keeps = SHARDING["zero"] == 2
            fully_shard(block, mesh=device_mesh["data_parallel"], reshard_after_forward=not keeps)
    if SHARDING["zero"]:
        fully_shard(module, mesh=device_mesh["data_parallel"], reshard_after_forward=SHARDING["zero"] == 3)
    return module
'''


class LightningTarget(ToolTarget):
    """Writes a module with a Trainer and with what `configure_model` calls."""

    name = "lightning"
    tool = "Lightning 2.6.6"
    checked = (
        "imported, and its Trainer and ModelParallelStrategy built, by lightning 2.6.6; Trainer.fit on 4 CPU processes "
        "has the plan's shards and ends at one process's parameters; not run: tp, which is your model's code"
    )

    @property
    def capabilities(self) -> Capabilities:
        """One stage."""
        return Capabilities(
            zero_stages=frozenset({0, 2, 3}),
            tensor_parallel_zero_stages=frozenset({2, 3}),
            compute_dtypes=frozenset(_PRECISIONS),
            recompute_modes=frozenset({"none", "full"}),
            allows_strided_parameters=True,
        )

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """Python that makes a ModelParallelStrategy."""
        return PythonText(part) if name.endswith(".py") and "ModelParallelStrategy" in text else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Arguments of the trainer and of the strategy."""
        strategy, dtype = plan.strategy, plan.question.precision.compute_dtype
        if dtype not in _PRECISIONS:
            raise PlanError(f"Lightning trains in bf16, fp16 or fp32; the plan computes in {dtype}.")
        if strategy.tp > 1 and strategy.zero == 0:
            raise PlanError("Lightning has tp with FSDP2 only; plan with strategy zero=2 or zero=3, dp > 1.")
        count, each = nodes(plan)
        return {
            "trainer.num_nodes": count,
            "trainer.devices": each,
            "trainer.accumulate_grad_batches": micro_batches(plan),
            "trainer.precision": (_PRECISIONS if strategy.zero else _DDP_PRECISIONS)[dtype],
            "strategy.data_parallel_size": strategy.dp,
            "strategy.tensor_parallel_size": strategy.tp,
            "sharding.zero": strategy.zero,
            "sharding.sequence_parallel": bool(strategy.sequence_parallel),
            "sharding.recompute": strongest_recompute(plan),
            "sharding.micro_batch_size": strategy.micro_batch_size,
        }

    def files(self, plan: Plan) -> dict[str, str]:
        """One module."""
        python = PythonText()
        return {_FILE: python.render(self.head(plan), self.settings(plan, python)) + _PROGRAM}

    def launch(self, plan: Plan) -> str:
        """Any script that uses the module."""
        return f"{torchrun(plan)} your_script.py  # which calls lightning_plan.trainer() and lightning_plan.shard()"

    def left_out(self, plan: Plan) -> list[str]:
        """What the LightningModule does."""
        strategy = plan.strategy
        sentences = [
            f"Your loader gives {strategy.micro_batch_size} sequences to each process.",
            "`configure_model` calls `shard(self.model, blocks, self.device_mesh)`, blocks being (parent, name) pairs.",
        ]
        if strategy.tp > 1:
            sentences.append(
                "Tensor parallelism is your module's: parallelize_module on device_mesh['tensor_parallel']."
            )
        if strategy.zero:
            sentences.append("bf16-true keeps no float32 copy of parameters; the plan's precision may count one.")
        return [*sentences, *super().left_out(plan)]

    def owned(self, settings: Settings) -> set[str]:
        """Nothing: every setting is always written."""
        return set()

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of our module, or of a script with literal arguments."""
        words = {key.rpartition(".")[2]: value for key, value in settings.items()}
        tp = whole(words.get("tensor_parallel_size")) or 1
        dp = whole(words.get("data_parallel_size")) or max(1, devices // tp)
        zero = whole(words.get("zero", 3)) or 0
        zero = zero if dp > 1 else 0
        micro, steps = whole(words.get("micro_batch_size")), whole(words.get("accumulate_grad_batches", 1))
        strategy = {
            "dp": dp,
            "shard": "all" if zero else None,
            "zero": zero,
            "cp": 1,
            "ep": 1,
            "tp": tp,
            "sequence_parallel": bool(words.get("sequence_parallel")) if tp > 1 else None,
            "micro_batch_size": micro,
            "pp": 1,
            "recompute": words.get("recompute", "none"),
        }
        known = {"tensor_parallel_size", "data_parallel_size", "zero", "recompute", "micro_batch_size", "devices"}
        known |= {"num_nodes", "accumulate_grad_batches", "sequence_parallel", "precision"}
        return StrategyFile(
            tool=self.name,
            strategy={key: value for key, value in strategy.items() if value is not None},
            global_batch_size=dp * micro * steps if micro and steps else None,
            precision="fp16" if str(words.get("precision", "")).startswith("16") else None,
            **unread_keys(words, known, (), is_whole=False),
        )


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The module for Lightning."""
    return (LightningTarget(),)
