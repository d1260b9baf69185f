"""Train a Llama, its layers under `jax.lax.scan`, with a plan on the eight devices of this host.

On this machine:  python examples/jax_llama.py
Larger:           python examples/jax_llama.py --layers 32 --width 4096 --heads 32 --words 32000 --length 2048 \
                      --batch 128 --cluster tpuv4:64

The model is a loss of (parameters, tokens) and knows nothing of Phaze or of devices. `--cluster` names the chips; where
that is another cluster than this host's, the plan is printed and not run.
"""

import argparse

import jax
import jax.numpy as jnp

import phaze


def make_parameters(key: jax.Array, *, words: int, layers: int, width: int, heads: int) -> dict:
    """The parameters; those of the layers are stacked, as a scan wants them."""
    hidden = 8 * width // 3 // heads * heads

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    shapes = {
        "query": (width, width),
        "key": (width, width),
        "value": (width, width),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    keys = dict(zip((*shapes, "words", "head"), jax.random.split(key, len(shapes) + 2), strict=True))
    return {
        "words": draw(keys["words"], words, width),
        "layers": {
            **{name: draw(keys[name], layers, *shape) for name, shape in shapes.items()},
            "norm_1": jnp.ones((layers, width)),
            "norm_2": jnp.ones((layers, width)),
        },
        "norm": jnp.ones(width),
        "head": draw(keys["head"], width, words),
    }


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding of [batch, length, heads, features]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate(
        [x[..., :half] * cosine - x[..., half:] * sine, x[..., half:] * cosine + x[..., :half] * sine], -1
    )


def block(x: jax.Array, layer: dict, heads: int) -> jax.Array:
    """One layer."""
    batch, length, width = x.shape
    y = normalized(x, layer["norm_1"])
    query, key, value = (
        (y @ layer[name]).reshape(batch, length, heads, width // heads) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bshd,bthd->bhst", rotated(query), rotated(key)) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhst,bthd->bshd", weights, value).reshape(batch, length, width) @ layer["out"]
    y = normalized(x, layer["norm_2"])
    return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


def make_loss(heads: int):
    """The loss: a mean over the tokens of a batch."""

    def llama(parameters: dict, tokens: jax.Array) -> jax.Array:
        x = parameters["words"][tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer, heads), None), x, parameters["layers"])
        logits = normalized(x, parameters["norm"]) @ parameters["head"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -chosen.mean()

    return llama


def main() -> None:
    """Plan, and train if the cluster is this host."""
    arguments = read_arguments()
    sizes = {"words": arguments.words, "layers": arguments.layers, "width": arguments.width, "heads": arguments.heads}
    jax.config.update("jax_num_cpu_devices", 8)  # before JAX is first used; leave it out on real devices
    loss = make_loss(arguments.heads)

    # Shapes are enough to plan with: nothing is allocated for a model of any size.
    parameters = jax.eval_shape(lambda: make_parameters(jax.random.key(0), **sizes))
    tokens = jax.ShapeDtypeStruct((arguments.batch, arguments.length + 1), jnp.int32)
    is_here = arguments.cluster == "cpu:8"
    plan = phaze.optimize(
        loss,
        (parameters, tokens),
        cluster=arguments.cluster,
        global_batch_size=arguments.batch,
        precision="fp32" if is_here else "bf16",
        tp=arguments.tp,
    )
    print(plan)
    if not is_here:
        return

    run = plan.apply(loss, inputs=(parameters, tokens))
    # Given a function, each device makes its own part of the parameters.
    state = run.start(lambda: make_parameters(jax.random.key(0), **sizes))
    key = jax.random.key(1)
    tokens = jax.random.randint(key, (arguments.batch, arguments.length + 1), 0, arguments.words)
    for step in range(arguments.steps):
        state, value = run.step(state, tokens)
        print(f"step {step}: loss {float(value):.4f}")
    print("the head lies on the mesh as", run.specs["head"])


def read_arguments() -> argparse.Namespace:
    """The sizes; the defaults take seconds on a laptop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--words", type=int, default=512, help="size of the vocabulary")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tp", type=int, default=None, help="ask for this tensor-parallel degree")
    parser.add_argument("--cluster", default="cpu:8", metavar="CHIP:COUNT")
    return parser.parse_args()


if __name__ == "__main__":
    main()
