"""Lower MaxText's own train step for eight devices of a host, for `maxtext_modules.py`: its text, proto and counts.

    python benchmarks/maxtext_lowering.py FOLDER MODEL [KEY=VALUE ...]

The step is that of `maxtext.trainers.pre_train`: its model, loss, clipping, Adam and shardings. Nothing is run.
Packages that MaxText imports for data, checkpoints and logging, and that are not installed, are stood in for.
"""

import importlib
import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

os.environ |= {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",  # without Google's cloud packages, as MaxText offers it
}

SETTINGS = (
    *("hardware=cpu", "run_name=lowering", "dataset_type=synthetic", "log_config=false", "enable_checkpointing=false"),
    *("skip_jax_distributed_system=true", "base_output_directory=unused", "attention=dot_product"),
)
MOST_MISSING = 30
"""How many packages are stood in for before it is something else that is wrong."""


class StandIn(types.ModuleType):
    """A package that is imported and never used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()


def train_modules() -> tuple[Any, Any]:
    """MaxText's modules of ahead-of-time compilation and of training."""
    tensorflow = StandIn("tensorflow")
    tensorflow.__spec__ = ModuleSpec("tensorflow", None)
    tensorflow.errors = types.SimpleNamespace(FailedPreconditionError=OSError)
    sys.modules["tensorflow"] = tensorflow
    for _ in range(MOST_MISSING):
        try:
            importlib.import_module("maxtext.trainers.pre_train.train_compile")
            break
        except ModuleNotFoundError as error:
            sys.modules[str(error.name)] = StandIn(str(error.name))
    folder = "maxtext.trainers.pre_train"
    return importlib.import_module(f"{folder}.train_compile"), importlib.import_module(f"{folder}.train")


def lowered_step(name: str, options: list[str]) -> tuple[Any, int]:
    """The lowered step of a model, and how many parameters MaxText counts."""
    compile_module, train = train_modules()
    import jax
    from flax.linen import partitioning
    from jax.sharding import AxisType, Mesh
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, sharding

    base = Path(sys.modules["maxtext"].__file__ or "").parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base), f"model_name={name}", *SETTINGS, *options])
    devices = maxtext_utils.create_device_mesh(config, jax.devices())
    mesh = Mesh(devices, config.mesh_axes, axis_types=(AxisType.Auto,) * len(config.mesh_axes))
    arguments, keywords, state_shardings, _, model = compile_module.get_shaped_inputs(mesh, config)
    parameter_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
    data_sharding = sharding.get_input_data_sharding(config, mesh)
    step, inputs, results, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data_sharding, state_shardings, model, config, parameter_shardings
    )
    with jax.set_mesh(mesh), mesh, partitioning.axis_rules(config.logical_axis_rules):
        jitted = jax.jit(
            step, in_shardings=inputs, out_shardings=results, static_argnums=static, donate_argnums=donated
        )
        lowered = jitted.lower(*arguments, **keywords)
    return lowered, sum(array.size for array in jax.tree.leaves(arguments[0].params))


def main() -> None:
    """Write the step's forms, what XLA counts for it, and the optimized module where it is asked for."""
    folder, name, options = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    compiles = "compile" in options
    lowered, parameters = lowered_step(name, [option for option in options if option != "compile"])
    hlo = lowered.compiler_ir("hlo")
    (folder / "stablehlo.mlir").write_text(lowered.as_text())
    (folder / "debug.mlir").write_text(lowered.as_text(debug_info=True))
    (folder / "hlo.txt").write_text(hlo.as_hlo_text())
    (folder / "hlo.pb").write_bytes(hlo.as_serialized_hlo_module_proto())
    counted = {"parameters": parameters, "xla_flops": (lowered.cost_analysis() or {}).get("flops")}
    if compiles:
        (folder / "after_optimizations.txt").write_text(lowered.compile().as_text())
    (folder / "counted.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    main()
