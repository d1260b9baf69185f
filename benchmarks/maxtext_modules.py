"""Whether train steps that MaxText itself lowers become the graphs that they are, in every form that JAX writes.

    python benchmarks/maxtext_modules.py [--environment DIR] [--only NAME] [--keep DIR]

A row a model: MaxText 0.2.3's own train step (model, loss, clipping, Adam, shardings over 8 devices; nobody here wrote
it), lowered by `maxtext_lowering.py` in an environment of its own, then imported as `phaze import` does it from
StableHLO text with and without locations, HLO text and HLO proto. Shown are parameters beside MaxText's own count,
flops of products forward and backward beside those that the text holds, layers and how many of them are distinct, the
strategy, and seconds of processor time. The four forms must give equal numbers.

The text holds what is computed again, too (`remat_policy=full` is MaxText's default), and the graph's flops do not:
`written` counts every product of the HLO text by XLA's own HloCostAnalysis, as often as its loops run. XLA's count of a
whole module (`lowered.cost_analysis`) is shown as well; it counts the body of a loop once, and vector operations.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from public_modules import instruction_flops
from tools import MAXTEXT_PACKAGES, environment

import phaze
from phaze.frontends.hlo.hlo_text import Computation, HloModule, read_hlo_text
from phaze.ir import Graph, Phase

SIZES = ("per_device_batch_size=1", "max_target_length=2048")
DENSE_EXPERTS = ("sparse_matmul=false", "megablox=false")
"""MaxText's grouped product is a kernel that does not lower for a host."""

FOUR_LAYERS = ("override_model_config=true", "base_num_decoder_layers=4")
SMALL = (
    *("override_model_config=true", "base_num_decoder_layers=4", "base_emb_dim=64", "base_mlp_dim=128"),
    *("base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=8", "vocab_size=256", "max_target_length=64"),
)
MODELS: dict[str, tuple[str, ...]] = {
    "llama2-7b": SIZES,
    "gpt3-6b": SIZES,
    "qwen3-8b": SIZES,
    "mixtral-8x7b": (*SIZES, *DENSE_EXPERTS, *FOUR_LAYERS),
    "deepseek2-16b": (*SIZES, *DENSE_EXPERTS, *FOUR_LAYERS),
    "gemma3-4b": (*SIZES, "override_model_config=true", "base_num_decoder_layers=6"),
    "llama2-7b compiled": ("per_device_batch_size=1", *SMALL, "compile"),
}
"""What is asked of MaxText for every row; the last one is compiled for the host's 8 devices, small."""

FORMS = ("stablehlo.mlir", "debug.mlir", "hlo.txt", "hlo.pb", "after_optimizations.txt")
EXTRA_PACKAGES = ("optax", "drjax")


def written_flops(module: HloModule, computation: Computation) -> float:
    """The flops of all products of a computation and of what it calls, loops as often as they run."""
    total = 0.0
    shapes = {instruction.name: instruction for instruction in computation.instructions}
    for instruction in computation.instructions:
        if instruction.opcode in ("dot", "convolution"):
            total += instruction_flops(instruction, [shapes[name] for name in instruction.operands])
        attributes = instruction.attributes
        if instruction.opcode == "while":
            condition = module.computations[attributes["condition"].removeprefix("%")]
            trips = max(int(i.argument) for i in condition.instructions if i.opcode == "constant")
            total += trips * written_flops(module, module.computations[attributes["body"].removeprefix("%")])
        if instruction.opcode in ("call", "fusion"):
            called = attributes.get("calls") or attributes["to_apply"]
            total += written_flops(module, module.computations[called.removeprefix("%")])
    return total


def row_of(graph: Graph, seconds: float) -> str:
    """What is compared of a graph."""
    forward, backward = (graph.matmul_flops(phase) / 1e12 for phase in (Phase.FORWARD, Phase.BACKWARD))
    keys = [layer.key for layer in graph.layers]
    strategy = " ".join(f"{name} {value}" for name, value in graph.runs_as.items())
    return (
        f"{graph.parameter_count:,} parameters, {forward:.4g} + {backward:.4g} Tflop, {len(keys)} layers "
        f"({len(set(keys))} distinct), {strategy or 'no strategy'}, coverage "
        f"{graph.coverage().flops_share:.2%}, {seconds:.1f} s"
    )


def report(name: str, folder: Path) -> None:
    """Import the forms in a folder and print what they gave."""
    counted = json.loads((folder / "counted.json").read_text())
    module = read_hlo_text((folder / "hlo.txt").read_text())
    written = written_flops(module, module.entry) / 1e12
    print(
        f"{name}: MaxText counts {counted['parameters']:,} parameters; products as written {written:.4g} Tflop, ",
        end="",
    )
    print(f"XLA's count of the module {counted['xla_flops'] / 1e12:.4g} Tflop")
    for form in FORMS:
        if not (folder / form).is_file():
            continue
        started_s = time.process_time()
        try:
            graph = phaze.import_graph(folder / form)
            print(f"  {form}: {row_of(graph, time.process_time() - started_s)}", flush=True)
        except phaze.PhazeError as error:
            print(f"  {form}: {re.sub(r' +', ' ', str(error))[:300]}", flush=True)


def main() -> None:
    """Lower and import every model, or those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, metavar="DIR", help="where MaxText is, or is to be installed")
    parser.add_argument("--only", metavar="NAME", help="models whose name begins so")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the modules stay")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        python = environment(arguments.environment or Path(scratch, "maxtext"), (*MAXTEXT_PACKAGES, *EXTRA_PACKAGES))
        for name, options in MODELS.items():
            if not name.startswith(arguments.only or ""):
                continue
            folder = (arguments.keep or Path(scratch)) / name.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "counted.json").is_file():
                script = Path(__file__).with_name("maxtext_lowering.py")
                command = [str(python), str(script), str(folder), name.split()[0], *options]
                done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
                if done.returncode != 0:
                    print(f"{name}: MaxText does not lower it here: {done.stderr.strip().splitlines()[-1][:300]}")
                    continue
            report(name, folder)


if __name__ == "__main__":
    main()
