"""How long a model takes from its name, or from a torch module, to a verified graph with backward, layers and repeats.

    python benchmarks/frontends.py [NAME ...]
    python benchmarks/frontends.py --torch [NAME ...]

A row a model: seconds to the verified graph with its backward, seconds more to its layers, ops, layers, distinct
layers; the last line gives the slowest row and ops per second over all rows. With `--torch` the models are torch
modules of the same names, built on the meta device in bfloat16 with sequences of 2,048 (or the model's longest), and
the last line adds the process's largest resident memory, torch itself included.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from collections.abc import Callable

import phaze
from phaze.frontends.named_models import NAMED_CONFIGS
from phaze.ir import Graph

TORCH_MODELS = {
    "gpt2-xl": "GPT2LMHeadModel",
    "llama2-7b": "LlamaForCausalLM",
    "mixtral-8x7b": "MixtralForCausalLM",
    "opt-1.3b": "OPTForCausalLM",
    "t5-large": "T5ForConditionalGeneration",
}


def from_torch(name: str) -> Callable[[], Graph]:
    """The import of a torch module that has the config of a built-in name."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    build = getattr(transformers, TORCH_MODELS[name])
    config = build.config_class(**{"decoder_start_token_id": 0, "pad_token_id": 0, **NAMED_CONFIGS[name]})
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(config).to(torch.bfloat16)
    positions = getattr(config, "max_position_embeddings", None) or 512
    ids = torch.empty(1, min(2048, positions), dtype=torch.int64, device="meta")
    return lambda: phaze.import_graph(model, {"input_ids": ids, "labels": ids})


def from_name(name: str) -> Callable[[], Graph]:
    """The import of a built-in name."""
    return lambda: phaze.import_graph(name)


def main() -> None:
    """Import every model once and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="built-in names (all)")
    parser.add_argument("--torch", action="store_true", help="import torch modules instead of configs")
    arguments = parser.parse_args()
    names = arguments.names or list(TORCH_MODELS if arguments.torch else NAMED_CONFIGS)
    phaze.import_graph("gpt2")
    print(f"{'model':<18}{'graph s':>9}{'layers s':>9}{'ops':>7}{'layers':>8}{'distinct':>9}")
    totals: dict[str, tuple[float, int]] = {}
    for name in names:
        take = (from_torch if arguments.torch else from_name)(name)
        start = time.perf_counter()
        graph = take()
        imported = time.perf_counter()
        layers, distinct = len(graph.layers), len(graph.distinct_layers)
        done = time.perf_counter()
        totals[name] = (done - start, len(graph.ops))
        print(f"{name:<18}{imported - start:>9.3f}{done - imported:>9.3f}{len(graph.ops):>7}{layers:>8}{distinct:>9}")
    slowest = max(totals, key=lambda name: totals[name][0])
    seconds, ops = (sum(column) for column in zip(*totals.values(), strict=True))
    print(f"slowest {slowest} {totals[slowest][0]:.2f} s; {ops / seconds:,.0f} ops per second over {len(names)} models")
    if arguments.torch:
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"largest resident memory {kibibytes / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
