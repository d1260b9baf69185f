"""Dumps a train step that runs on eight host devices, before, during and after compilation: `... FOLDER MESH...`.

A mesh is written `DPxTP`, with `f` behind it where parameters are divided over the copies as well (ZeRO-3). Sizes are
such that each device has at least two of everything.
"""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

LENGTH, WIDTH, HEADS, LAYERS, WORDS, SAMPLES = 8, 64, 16, 2, 128, 16
Tree = Any


def parameters() -> Tree:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    size = WIDTH // HEADS
    heads = {name: shape(WIDTH, HEADS, size) for name in "qkv"}
    block = {**heads, "o": shape(HEADS, size, WIDTH), "up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    return {"wte": shape(WORDS, WIDTH), "h": [{"scale": shape(WIDTH), **block}] * LAYERS, "head": shape(WIDTH, WORDS)}


def specs(path: Any, leaf: Any, is_sharded: bool) -> PartitionSpec:
    """Megatron's division, and the last other dimension over the copies for ZeRO-3."""
    name = str(path[-1].key)
    along = {"q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0, "wte": 0, "head": 1}.get(name)
    axes: list[Any] = ["tp" if dim == along else None for dim in range(len(leaf.shape))]
    if is_sharded:
        axes[max(dim for dim, axis in enumerate(axes) if axis is None)] = "dp"
    return PartitionSpec(*axes)


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def loss(params: Tree, ids: jax.Array, labels: jax.Array) -> jax.Array:
    x = params["wte"][ids]
    for p in params["h"]:
        y = normalized(x, p["scale"])
        query, key, value = (jnp.einsum("bsd,dhe->bshe", y, p[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", query, key), -1)
        x = x + jnp.einsum("bshe,hed->bsd", jnp.einsum("bhst,bthe->bshe", weights, value), p["o"])
        x = x + jax.nn.gelu(normalized(x, p["scale"]) @ p["up"]) @ p["down"]
    scores = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(scores, labels[..., None], -1).mean()


def step(params: Tree, opt_state: Tree, ids: jax.Array, labels: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, ids, labels)
    opt_state = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, opt_state), opt_state, value


def dump(folder: Path, mesh_text: str) -> None:
    dp, tp = (int(size) for size in mesh_text.rstrip("f").split("x"))
    mesh = jax.make_mesh((dp, tp), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    params = parameters()
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, specs(path, leaf, mesh_text.endswith("f"))), params
    )
    batch, whole = NamedSharding(mesh, PartitionSpec("dp")), NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct((SAMPLES, LENGTH), jnp.int32)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, shardings, batch, batch),
        out_shardings=(shardings, shardings, whole),
        donate_argnums=(0, 1),
    )
    options = {"xla_dump_to": str(folder / mesh_text), "xla_dump_hlo_pass_re": "spmd.*"}
    options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options |= {"xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}
    jitted.lower(params, params, ids, ids).compile(compiler_options=options)


if __name__ == "__main__":
    os.environ.pop("XLA_FLAGS", None)
    jax.config.update("jax_num_cpu_devices", 8)
    for mesh_text in sys.argv[2:]:
        dump(Path(sys.argv[1]), mesh_text)
