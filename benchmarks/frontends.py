"""How long a model takes from its name, or from a torch module, to a verified graph with backward, layers and repeats.

    python benchmarks/frontends.py [NAME ...]
    python benchmarks/frontends.py --torch [NAME ...]
    python benchmarks/frontends.py --jax [NAME ...]

A row a model: processor seconds to the verified graph with its backward, seconds more to its layers, ops, layers,
distinct layers; the last line gives the slowest row and ops per second over all rows. With `--torch` the models are
torch modules of the same names, built on the meta device in bfloat16 with sequences of 2,048 (or the model's longest);
a row adds the seconds with every block captured by itself and whether that graph is equal, and the last line the
process's largest resident memory, torch itself included. With `--jax` they are JAX losses of the
same sizes over shapes in bfloat16: blocks one after another (`gpt2-xl`), or a scan over stacked ones (`gpt2-xl-scan`).
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


def from_torch(name: str) -> Callable[..., Graph]:
    """The import of a torch module that has the config of a built-in name; with `False` every block is captured."""
    import torch
    import transformers

    from phaze.frontends.torch import importing

    transformers.logging.set_verbosity_error()
    build = getattr(transformers, TORCH_MODELS[name])
    config = build.config_class(**{"decoder_start_token_id": 0, "pad_token_id": 0, **NAMED_CONFIGS[name]})
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(config).to(torch.bfloat16)
    positions = getattr(config, "max_position_embeddings", None) or 512
    ids = torch.empty(1, min(2048, positions), dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    return lambda copies_blocks=True: importing.import_module(model, inputs, {}, copies_blocks=copies_blocks)


JAX_MODELS = {"gpt2-xl": False, "gpt2-xl-scan": True}
"""By name: whether the blocks are stacked and scanned over."""


def from_jax(name: str) -> Callable[[], Graph]:
    """The import of a JAX loss that has the sizes of a built-in name."""
    import jax
    import jax.numpy as jnp

    config, is_stacked = NAMED_CONFIGS[name.removesuffix("-scan")], JAX_MODELS[name]
    width, heads, layers = (int(config[key]) for key in ("n_embd", "n_head", "n_layer"))
    length, words = int(config["n_positions"]), int(config["vocab_size"])
    lead = (layers,) if is_stacked else ()

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def block() -> dict[str, jax.ShapeDtypeStruct]:
        columns = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        norms = {"norm_1": (width,), "norm_2": (width,)}
        return {key: shape(*lead, *sizes) for key, sizes in {**columns, **norms}.items()}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def apply(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        split = (*x.shape[:2], heads, width // heads)
        query, key, value = (part.reshape(split) for part in jnp.split(norm(x, p["norm_1"]) @ p["qkv"], 3, axis=-1))
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", query, key), axis=-1)
        x = x + jnp.einsum("bhst,bthd->bshd", scores, value).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["norm_2"]) @ p["up"]) @ p["down"]

    def loss(params: dict[str, object], ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["wte"][ids] + params["wpe"]  # type: ignore[index]
        if is_stacked:
            x, _ = jax.lax.scan(lambda x, p: (apply(x, p), None), x, params["h"])
        else:
            for p in params["h"]:  # type: ignore[attr-defined]
                x = apply(x, p)
        logits = jax.nn.log_softmax(x @ params["wte"].T)  # type: ignore[attr-defined]
        return -jnp.take_along_axis(logits, labels[..., None], -1).mean()

    blocks = block() if is_stacked else [block() for _ in range(layers)]
    params = {"wte": shape(words, width), "wpe": shape(length, width), "h": blocks}
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return lambda: phaze.import_graph(loss, (params, ids, ids))


def from_name(name: str) -> Callable[[], Graph]:
    """The import of a built-in name."""
    return lambda: phaze.import_graph(name)


def compared(graph: Graph, import_model: Callable[..., Graph]) -> str:
    """Seconds for the same graph with every block captured by itself, and whether the two are equal."""
    started = time.process_time()
    whole = import_model(False)
    seconds = time.process_time() - started
    is_equal = graph == whole and list(graph.tensors) == list(whole.tensors)
    return f"{seconds:>9.3f}  {'equal' if is_equal else 'UNEQUAL'}"


def main() -> None:
    """Import every model once and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="built-in names (all)")
    parser.add_argument("--torch", action="store_true", help="import torch modules instead of configs")
    parser.add_argument("--jax", action="store_true", help="import JAX losses instead of configs")
    arguments = parser.parse_args()
    known = TORCH_MODELS if arguments.torch else JAX_MODELS if arguments.jax else NAMED_CONFIGS
    names = arguments.names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown name {unknown[0]}; known are {', '.join(known)}")
    build = from_torch if arguments.torch else from_jax if arguments.jax else from_name
    phaze.import_graph("gpt2")  # so that no row pays for loading plugins
    whole = f"{'whole s':>9}" if arguments.torch else ""
    print(f"{'model':<18}{'graph s':>9}{'layers s':>9}{'ops':>7}{'layers':>8}{'distinct':>9}{whole}")
    seconds: dict[str, float] = {}
    ops = 0
    for name in names:
        import_model = build(name)
        started = time.process_time()
        graph = import_model()
        imported = time.process_time()
        layers, distinct = len(graph.layers), len(graph.distinct_layers)
        ended = time.process_time()
        seconds[name] = ended - started
        ops += len(graph.ops)
        row = f"{name:<18}{imported - started:>9.3f}{ended - imported:>9.3f}{len(graph.ops):>7}{layers:>8}{distinct:>9}"
        print(row + (compared(graph, import_model) if arguments.torch else ""), flush=True)
    slowest, total = max(seconds, key=lambda name: seconds[name]), sum(seconds.values())
    print(f"slowest {slowest} {seconds[slowest]:.2f} s; {ops / total:,.0f} ops per second over {len(names)} models")
    if arguments.torch or arguments.jax:
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"largest resident memory {kibibytes / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
