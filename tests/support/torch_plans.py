"""Plans of the small torch models, their graphs imported once."""

import functools
from collections.abc import Mapping
from dataclasses import replace

from torch_training import batch_of, build_model

import phaze
from phaze.hardware import Cluster, parse_cluster
from phaze.ir import Graph


@functools.cache
def imported(kind: str) -> Graph:
    return phaze.import_graph(build_model(kind), batch_of(kind))


def planned(
    kind: str,
    world: int,
    strategy: Mapping[str, object],
    target: str | None = "torch",
    precision: str = "fp32",
) -> phaze.Plan:
    """The plan of a strategy."""
    return phaze.evaluate(
        imported(kind),
        cluster=f"cpu:{world}",
        global_batch_size=8,
        precision=precision,
        target=target,
        strategy={"micro_batch_size": 2, **strategy},
        compares=False,
    ).plan


def tight_cluster(memory_bytes: int) -> Cluster:
    """Eight host devices with little memory."""
    cluster = parse_cluster("cpu:8")
    return replace(cluster, accelerator=replace(cluster.accelerator, hbm_bytes=memory_bytes))


def unforced(kind: str, memory_bytes: int) -> phaze.Plan:
    """The plan that `optimize` returns under a limit of memory."""
    return phaze.optimize(
        build_model(kind),
        batch_of(kind),
        cluster=tight_cluster(memory_bytes),
        global_batch_size=16,
        precision="fp32",
        tensor_widths=(1, 2),
        micro_batch_sizes=(2,),
    )
