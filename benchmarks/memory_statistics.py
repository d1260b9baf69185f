"""Activations that a plan counts against what XLA and torch hold, on small stacks of blocks on this machine's CPU.

    python benchmarks/memory_statistics.py

XLA: the temporary bytes of compiled gradients (`compiled.memory_analysis()`). torch: the bytes of the storages that are
alive behind forward, each once, seen by a dispatch mode and counted through weak references. Both are those of a deep
stack less those of a shallow one, per block, which leaves what blocks keep. Planned: what `kept_tensors` keeps of a
block of the imported graph. Everything kept, and with the user's own remat of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import phaze
from phaze.cost import AttentionMode, planned_graph
from phaze.ir import Graph, RecomputeMode, kept_tensors

BATCH, LENGTH, HIDDEN, WIDE = 4, 128, 64, 256
SHALLOW, DEEP = 2, 6
ACTIVATIONS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tanh": (jnp.tanh, torch.tanh),
    "relu": (jax.nn.relu, torch.relu),
    "gelu": (jax.nn.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
}
"""What each framework calls a function; their gradients keep different things."""


def planned_bytes(graph: Graph, mode: RecomputeMode) -> float:
    """Bytes that one of the repeated layers of a graph keeps."""
    planned = planned_graph(graph, AttentionMode.UNFUSED)
    keys = [layer.key for layer in planned.layers]
    block = max(planned.layers, key=lambda layer: keys.count(layer.key))
    return float(sum(planned.tensors[name].size_bytes for name in kept_tensors(planned, block, mode)))


def jax_model(
    name: str, depth: int, *, is_rematerialized: bool, is_scanned: bool = True
) -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    """MLP blocks in a scan or one after the other, and the shapes of the arguments."""
    activate = ACTIVATIONS[name][0]

    def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + activate(x @ weights["up"]) @ weights["down"], None

    body = jax.checkpoint(block) if is_rematerialized else block

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, weights, unroll=1 if is_scanned else depth)[0].mean()

    shapes = {"up": (depth, HIDDEN, WIDE), "down": (depth, WIDE, HIDDEN)}
    weights = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    return loss, (weights, jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), jnp.float32))


def xla_bytes(name: str, *, is_rematerialized: bool, is_scanned: bool = True) -> float:
    """Temporary bytes per block of the compiled gradient."""
    sizes = []
    for depth in (SHALLOW, DEEP):
        loss, arguments = jax_model(name, depth, is_rematerialized=is_rematerialized, is_scanned=is_scanned)
        compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    return float(sizes[1] - sizes[0]) / (DEEP - SHALLOW)


class Block(torch.nn.Module):
    """The same block in torch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[name][1]
        self.up, self.down = torch.nn.Linear(HIDDEN, WIDE, bias=False), torch.nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.activate(self.up(x)))
        return y


class Stack(torch.nn.Module):
    """Blocks one after the other, each rematerialized where asked."""

    def __init__(self, name: str, depth: int, *, is_rematerialized: bool) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(name) for _ in range(depth))
        self.is_rematerialized = is_rematerialized

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_rematerialized else block(x)
        return x.mean()


class _Storages(TorchDispatchMode):
    """Remembers every storage that operators make, without keeping it alive; those of parameters are none of them."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.parameters = {StorageWeakRef(parameter.untyped_storage()).cdata for parameter in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    @property
    def alive_bytes(self) -> int:
        """Bytes of the storages that still live, each once."""
        alive = {reference.cdata: size for reference, size in self.made if not reference.expired()}
        return sum(size for place, size in alive.items() if place not in self.parameters)


def torch_bytes(name: str, *, is_rematerialized: bool) -> float:
    """Bytes per block that live between forward and backward."""
    sizes = []
    for depth in (SHALLOW, DEEP):
        model = Stack(name, depth, is_rematerialized=is_rematerialized)
        x = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
        with _Storages(model) as storages:
            loss = model(x)
            sizes.append(storages.alive_bytes)
        loss.backward()
    return float(sizes[1] - sizes[0]) / (DEEP - SHALLOW)


def rows() -> list[tuple[str, str, str, float, float]]:
    """(framework, function, remat, measured bytes, planned bytes) of one block."""
    found = []
    for name in ACTIVATIONS:
        loss, arguments = jax_model(name, DEEP, is_rematerialized=False)
        module = Stack(name, DEEP, is_rematerialized=False)
        graphs = {
            "xla scan": phaze.import_graph(loss, arguments),
            "xla unrolled": phaze.import_graph(loss, arguments),
            "torch": phaze.import_graph(module, (torch.zeros(BATCH, LENGTH, HIDDEN),)),
        }
        measure = {
            "xla scan": xla_bytes,
            "xla unrolled": partial(xla_bytes, is_scanned=False),
            "torch": torch_bytes,
        }
        for framework, graph in graphs.items():
            for mode in (RecomputeMode.NONE, RecomputeMode.FULL):
                measured = measure[framework](name, is_rematerialized=mode is RecomputeMode.FULL)
                found.append((framework, name, mode.value, measured, planned_bytes(graph, mode)))
    return found


def main() -> None:
    """Print a line for each framework, function and remat."""
    for framework, name, remat, measured, planned in rows():
        print(
            f"{framework:12} {name:4} remat {remat:4} measured {measured:9,.0f} planned {planned:9,.0f} bytes a block "
            f"{planned / measured - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
