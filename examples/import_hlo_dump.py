"""Plan from what XLA dumped of a running job: no source code of the model, only the dump.

On this machine:  python examples/import_hlo_dump.py
Your own dump:    start your job with XLA_FLAGS=--xla_dump_to=FOLDER, then
                  python examples/import_hlo_dump.py --dump FOLDER --cluster h100:64 --batch 512

Without `--dump` this program starts a small training job in JAX as a process of its own and lets XLA dump it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import phaze

JOB = """
import jax, jax.numpy as jnp

def loss(parameters, x, y):
    for layer in parameters:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return ((x - y) ** 2).mean()

def train_step(parameters, x, y):
    value, gradients = jax.value_and_grad(loss)(parameters, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

parameters = [{"up": jnp.ones((256, 1024)) / 256, "down": jnp.ones((1024, 256)) / 1024} for _ in range(4)]
parameters, value = jax.jit(train_step)(parameters, jnp.ones((32, 256)), jnp.zeros((32, 256)))
print(f"the job ran a step, its loss was {float(value):.3f}")
"""


def main() -> None:
    """Dump, import, price."""
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(arguments.dump or folder)
        if not arguments.dump:
            run_dumped_job(dump)
        # Of all modules in the folder the one with the most work is taken; parameters, batch and loss are inferred.
        # Where a dump does not show them, `phaze import FOLDER --help` lists the options that say them.
        graph = phaze.import_graph(dump)
    counts = f"{graph.parameter_count:,} parameters, {len(graph.ops)} operations"
    print(f"imported {graph.name}: {counts}")

    plan = phaze.optimize(graph, cluster=arguments.cluster, global_batch_size=arguments.batch)
    print(plan)
    if arguments.out:
        plan.save(arguments.out)


def run_dumped_job(folder: Path) -> None:
    """Run the job with XLA's dump flag, which must be set before XLA starts."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={folder}"}
    subprocess.run([sys.executable, "-c", JOB], env=environment, check=True)
    print(f"XLA dumped {len(list(folder.iterdir()))} files")


def read_arguments() -> argparse.Namespace:
    """Where the dump is, and what to plan for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", metavar="FOLDER", help="that XLA dumped (default: dump a small job first)")
    parser.add_argument("--cluster", default="h100:8", metavar="CHIP:COUNT")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step")
    parser.add_argument("--out", metavar="FILE", help="save the plan as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
