"""Questions that are answered quickly, for tests of plans."""

from functools import cache
from typing import Any

from graphs import TINY_CONFIGS

import phaze
from phaze.frontends.transformer_config import graph_from_config
from phaze.hardware import Cluster, InterconnectLevel, find_accelerator
from phaze.ir import Graph
from phaze.plan.plan import Plan
from phaze.verify.plan_checks import check_plan

SMALL_GPT: dict[str, Any] = {
    **TINY_CONFIGS["megatron-gpt"],
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 1000,
}


def small_graph(**changes: Any) -> Graph:
    """A GPT of six layers."""
    return graph_from_config({**SMALL_GPT, **changes}, name="small-gpt", sequence_length=256)


IDEAL_CHIP, FITTED_CHIP = "ideal-a100", "a100-80gb"
"""One chip by two names; a calibration was fitted to the second."""


def small_cluster(hbm_bytes: int = 80 * 2**30, devices: int = 8, chip_name: str = IDEAL_CHIP) -> Cluster:
    """Nodes of four A100s with so much memory."""
    from dataclasses import replace

    chip = replace(find_accelerator(FITTED_CHIP), name=chip_name, hbm_bytes=hbm_bytes)
    levels = (InterconnectLevel(4, 250e9, 3e-6), InterconnectLevel(-(-devices // 4), 25e9, 5e-6))
    return Cluster(chip, devices, levels)


QUESTION: dict[str, Any] = {"global_batch_size": 32, "micro_batch_size": (1, 2), "tp": (1,)}


@cache
def small_plan(hbm_mib: int = 80 * 1024, devices: int = 8, chip_name: str = IDEAL_CHIP) -> Plan:
    """The plan of the small GPT."""
    cluster = small_cluster(hbm_mib * 2**20, devices, chip_name)
    return checked(phaze.optimize(small_graph(), cluster=cluster, **QUESTION))


def checked(plan: Plan, model: object = None) -> Plan:
    """The plan, after every number of it was derived again."""
    wrong = [finding for finding in check_plan(plan, model or small_graph()) if not finding.holds]
    assert not wrong, wrong[:5]
    return plan
