"""Activations that a plan counts against what XLA and torch hold, on small stacks of blocks on this machine's CPU.

    python benchmarks/memory_statistics.py

XLA: the temporary bytes of compiled gradients (`compiled.memory_analysis()`), of blocks in a scan and one after the
other. The barriers that `jax.checkpoint` sets stay where they are: XLA's compiler for CPUs drops them, and with them
the remat of blocks outside of a scan. torch: the bytes of the storages that are alive behind forward, each once, seen
by a dispatch mode and counted through weak references. Both are those of a deep stack less those of a shallow one, per
block, which leaves what blocks keep. Planned: what `kept_tensors` keeps of a block of the imported graph. Everything
kept, and with the user's own remat of each block: MLPs of several functions, one behind a norm, attention, and a block
of Llama.
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

BATCH, LENGTH, HIDDEN, WIDE, HEADS = 4, 128, 64, 256, 4
SHALLOW, DEEP = 4, 8
"""Deep enough that the most is held between forward and backward, and not inside of one block's backward."""

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander,optimization-barrier-expander"}
"""Passes of XLA's compiler for CPUs that are left out, so that what is computed again stays so."""

ACTIVATIONS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tanh": (jnp.tanh, torch.tanh),
    "relu": (jax.nn.relu, torch.relu),
    "gelu": (jax.nn.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "silu": (jax.nn.silu, torch.nn.functional.silu),
}
"""What each framework calls a function; their gradients keep different things."""

Weights = dict[str, jax.Array]
Part = Callable[[jax.Array, Weights], jax.Array]


def planned_bytes(graph: Graph, mode: RecomputeMode) -> float:
    """Bytes that one of the repeated layers of a graph keeps."""
    planned = planned_graph(graph, AttentionMode.UNFUSED)
    keys = [layer.key for layer in planned.layers]
    block = max(planned.layers, key=lambda layer: keys.count(layer.key))
    return float(sum(planned.tensors[name].size_bytes for name in kept_tensors(planned, block, mode)))


def mlp(name: str) -> Part:
    """Two products with a function between them."""
    return lambda x, weights: ACTIVATIONS[name][0](x @ weights["up"]) @ weights["down"]


def gated(x: jax.Array, weights: Weights) -> jax.Array:
    """The MLP of Llama."""
    return (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]


def attention(x: jax.Array, weights: Weights) -> jax.Array:
    """Causal attention, written out."""
    query, key, value = (jnp.einsum("bsi,ihd->bhsd", x, weights[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bhsd,bhtd->bhst", query, key) / (HIDDEN // HEADS) ** 0.5
    causal = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(causal, -1), value)
    return jnp.einsum("bhsd,hdi->bsi", mixed, weights["out"])


def normed(part: Part, scale: str) -> Part:
    """A part behind a norm by the root of the mean square."""
    return lambda x, weights: part(x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weights[scale], weights)


PARTS: Mapping[str, tuple[Part, ...]] = {
    **{name: (mlp(name),) for name in ACTIVATIONS},
    "normed": (normed(gated, "scale_2"),),
    "attention": (attention,),
    "llama": (normed(attention, "scale_1"), normed(gated, "scale_2")),
}
"""The parts of each block, each added to what it reads."""


def jax_model(
    name: str, depth: int, *, is_rematerialized: bool, is_scanned: bool = True
) -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    """Blocks in a scan or one after the other, and the shapes of the arguments."""

    def block(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
        for part in PARTS[name]:
            x = x + part(x, weights)
        return x, None

    body = jax.checkpoint(block) if is_rematerialized else block

    def scanned(weights: Weights, x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, weights)[0].mean()

    def unrolled(blocks: list[Weights], x: jax.Array) -> jax.Array:
        for weights in blocks:
            x, _ = body(x, weights)
        return x.mean()

    heads, norm = (HIDDEN, HEADS, HIDDEN // HEADS), (HIDDEN,)
    shapes = {"up": (HIDDEN, WIDE), "gate": (HIDDEN, WIDE), "down": (WIDE, HIDDEN), "scale_1": norm, "scale_2": norm}
    shapes |= {"query": heads, "key": heads, "value": heads, "out": (HEADS, HIDDEN // HEADS, HIDDEN)}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), jnp.float32)
    if is_scanned:
        return scanned, ({key: jax.ShapeDtypeStruct((depth, *shape), jnp.float32) for key, shape in shapes.items()}, x)
    return unrolled, ([{key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}] * depth, x)


def xla_bytes(name: str, *, is_rematerialized: bool, is_scanned: bool = True) -> float:
    """Temporary bytes per block of the compiled gradient."""
    sizes = []
    for depth in (SHALLOW, DEEP):
        loss, arguments = jax_model(name, depth, is_rematerialized=is_rematerialized, is_scanned=is_scanned)
        compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile(compiler_options=KEEP_BARRIERS)
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
    for name in PARTS:
        graphs: dict[str, tuple[Graph, Callable[..., float]]] = {}
        for framework, is_scanned in (("xla scan", True), ("xla unrolled", False)):
            loss, arguments = jax_model(name, DEEP, is_rematerialized=False, is_scanned=is_scanned)
            graphs[framework] = phaze.import_graph(loss, arguments), partial(xla_bytes, is_scanned=is_scanned)
        if name in ACTIVATIONS:
            module = Stack(name, DEEP, is_rematerialized=False)
            graphs["torch"] = phaze.import_graph(module, (torch.zeros(BATCH, LENGTH, HIDDEN),)), torch_bytes
        for framework, (graph, measure) in graphs.items():
            for mode in (RecomputeMode.NONE, RecomputeMode.FULL):
                measured = measure(name, is_rematerialized=mode is RecomputeMode.FULL)
                found.append((framework, name, mode.value, measured, planned_bytes(graph, mode)))
    return found


def main() -> None:
    """Print a line for each framework, function and remat."""
    for framework, name, remat, measured, planned in rows():
        print(
            f"{framework:12} {name:9} remat {remat:4} measured {measured:9,.0f} planned {planned:9,.0f} bytes a block "
            f"{planned / measured - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
