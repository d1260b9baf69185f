"""Compile and run modules of StableHLO and HLO on eight devices of this host, by what their own annotations say.

    python run_annotated_module.py FOLDER

FOLDER has modules (`*.mlir`, `*.hlo.txt`) and `arguments.npz` with their arguments in order; the first result of each,
by every device, is written to `results.json`, with the shapes that the first device holds of each argument.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax._src import sharding_impls
from jaxlib import _hlo, _jax, xla_client


def run(text: str, arguments: list[np.ndarray]) -> dict[str, object]:
    """The first result on every device, and what the first one holds of each argument."""
    devices = jax.devices()
    options = xla_client.CompileOptions()
    options.num_partitions = len(devices)
    build = options.executable_build_options
    build.num_partitions, build.use_spmd_partitioning = len(devices), True
    build.use_shardy_partitioner = "sdy.mesh" in text
    client = devices[0].client
    executable = client.compile_and_load(text, xla_client.DeviceList(tuple(devices)), options)
    shardings = [
        sharding_impls.GSPMDSharding(devices, xla_client.HloSharding.from_proto(proto))
        for proto in executable.get_parameter_shardings()
    ]
    placed = [jax.device_put(value, sharding) for value, sharding in zip(arguments, shardings, strict=True)]
    outputs = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    shapes = [list(array.addressable_shards[0].data.shape) for array in placed]
    return {"losses": [float(np.asarray(part)) for part in outputs[0]], "shapes": shapes}


def parsed_hlo(text: str) -> str:
    """HLO text, parsed by jaxlib and in the form that its compiler takes."""
    computation = xla_client.XlaComputation(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    return str(_jax.mlir.xla_computation_to_mlir_module(computation))


def main() -> None:
    """Run every module of the folder."""
    folder = Path(sys.argv[1])
    stored = np.load(folder / "arguments.npz")
    arguments = [stored[f"arr_{index}"] for index in range(len(stored.files))]
    texts = {path.name: path.read_text() for path in sorted(folder.glob("*.mlir"))}
    texts |= {path.name: parsed_hlo(path.read_text()) for path in sorted(folder.glob("*.hlo.txt"))}
    results = {name: run(text, arguments) for name, text in texts.items()}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
