"""One of several JAX processes that plan together; started by the tests as `... RANK RANKS PORT FOLDER`."""

import sys
from pathlib import Path

import jax
from plans import QUESTION, small_cluster, small_graph

import phaze
from phaze.errors import PhazeError


def main(rank: int, ranks: int, port: str, folder: Path) -> None:
    """Plan the same model, then another one on the last rank."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", ranks, rank)
    found = [phaze.optimize(small_graph(), cluster=small_cluster(), **QUESTION).to_json()]
    try:
        layers = 3 if rank == ranks - 1 else 4
        phaze.optimize(small_graph(num_layers=layers), cluster=small_cluster(), **QUESTION)
    except PhazeError as error:
        found.append(str(error))
    (folder / f"jax{rank}.txt").write_text("\n====\n".join(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
