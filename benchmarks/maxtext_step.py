"""A step of MaxText's own model on eight devices of a host, for `tool_checks.py`: mesh, shards, loss and gradients.

The model is MaxText's default one with few dimensions. One device computes the same from the same file with all axes 1.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",  # without Google's cloud packages, as MaxText offers it
}

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

SIZES = (
    *("base_emb_dim=64", "base_num_query_heads=8", "base_num_kv_heads=8", "base_mlp_dim=128", "head_dim=8"),
    *("base_num_decoder_layers=4", "vocab_size=256", "max_target_length=64", "dtype=float32"),
    *("attention=dot_product", "hardware=cpu", "run_name=check", "dataset_type=synthetic", "log_config=false"),
    *("enable_checkpointing=false", "skip_jax_distributed_system=true", "base_output_directory=unused"),
)
EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "sparse_matmul=false",
    "base_moe_mlp_dim=128",
)
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor", "tensor_sequence")
ONE_DEVICE = tuple(f"{where}_{axis}_parallelism=1" for where in ("ici", "dcn") for axis in AXES)


def gradients(config: Any, devices: list[Any]) -> tuple[Any, Any, Any, Any]:
    """The mesh, the parameters, the loss and its gradients on these devices."""
    mesh = maxtext_utils.get_mesh_from_config(config, devices)
    model = model_creation_utils.from_config(config, mesh=mesh)
    samples, length = config.micro_batch_size_to_train_on, config.max_target_length
    tokens = jnp.arange(samples * length).reshape(samples, length) % 251
    positions, segments = jnp.broadcast_to(jnp.arange(length), tokens.shape), jnp.ones_like(tokens)

    def start(key: Any) -> Any:
        keys = {"params": key, "dropout": key, "aqt": key}
        return model.init(keys, tokens, positions, decoder_segment_ids=segments, enable_dropout=False)

    def loss(parameters: Any) -> Any:
        logits = model.apply(parameters, tokens, positions, decoder_segment_ids=segments, enable_dropout=False)
        logarithms = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(logarithms, jnp.roll(tokens, -1, 1)[..., None], -1).mean()

    with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        specs = linen.get_partition_spec(jax.eval_shape(start, jax.random.key(0)))
        shardings = linen.logical_to_mesh_sharding(specs, mesh, config.logical_axis_rules)
        parameters = jax.jit(start, out_shardings=shardings)(jax.random.key(0))
        value, slopes = jax.jit(jax.value_and_grad(loss))(parameters)
    return mesh, linen.meta.unbox(parameters), value, linen.meta.unbox(slopes)


def main() -> None:
    """Check the file in the folder that the argument names."""
    folder = Path(sys.argv[1])
    expected = json.loads((folder / "expected.json").read_text())
    degrees, ep = expected["mesh"], expected["ep"]
    sizes = (*SIZES, *(EXPERTS if ep > 1 else ()))
    config = pyconfig.initialize(["", str(folder / "maxtext.yml"), *sizes])
    assert config.global_batch_size_to_train_on == expected["global_batch_size"]
    assert config.gradient_accumulation_steps == (1 if degrees["pp"] > 1 else expected["micro_batches"])
    if degrees["pp"] > 1:
        assert config.num_pipeline_microbatches == expected["micro_batches"]
        assert config.num_layers_per_pipeline_stage == expected["blocks"] // degrees["pp"]
    mesh, parameters, value, slopes = gradients(config, jax.devices())
    shards = degrees["dp_shard"]
    planned = {"stage": degrees["pp"], "data": degrees["dp_replicate"], "fsdp": shards // ep, "expert": ep}
    planned |= {"context": degrees["cp"]}
    for axis, size in planned.items():
        assert mesh.shape[axis] == size, (axis, mesh.shape)
    assert mesh.shape["tensor"] * mesh.shape["tensor_sequence"] == degrees["tp"]
    kernels = [
        (jax.tree_util.keystr(path), array)
        for path, array in jax.tree_util.tree_flatten_with_path(parameters)[0]
        if "layers" in jax.tree_util.keystr(path) and "kernel" in jax.tree_util.keystr(path)
    ]
    for name, array in kernels:
        ways = array.size // np.prod(array.sharding.shard_shape(array.shape))
        assert ways == degrees["pp"] * shards * degrees["cp"] * degrees["tp"], (name, array.shape, ways)
    if degrees["pp"] > 1:  # its pipelines have a tree of parameters of their own, which draws other numbers
        assert np.isfinite(value)
        return
    alone = pyconfig.initialize(["", str(folder / "maxtext.yml"), *sizes, *ONE_DEVICE])
    _, _, reference, references = gradients(alone, jax.devices()[:1])
    np.testing.assert_allclose(value, reference, rtol=1e-5)
    for part, whole in zip(jax.tree.leaves(slopes), jax.tree.leaves(references), strict=True):
        np.testing.assert_allclose(np.ravel(part), np.ravel(whole), rtol=1e-3, atol=1e-6)


if __name__ == "__main__":
    main()
