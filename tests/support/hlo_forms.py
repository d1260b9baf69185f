"""One function in all forms that the HLO frontend reads, and damaged copies of them."""

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
from jax.extend.mlir import serialize_portable_artifact

Forms = dict[str, bytes]


def forms_of(function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()) -> Forms:
    """A function lowered, written in each form; `named text` has locations, the text of `as_text` alone has none."""
    lowered = jax.jit(function, keep_unused=True, donate_argnums=donated).lower(*arguments)
    module, hlo = lowered.compiler_ir("stablehlo"), lowered.compiler_ir("hlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    return {
        "text": lowered.as_text().encode(),
        "bytecode": bytecode.getvalue(),
        "hlo text": hlo.as_hlo_text().encode(),
        "hlo proto": hlo.as_serialized_hlo_module_proto(),
        "named text": lowered.as_text(debug_info=True).encode(),
        "portable": serialize_portable_artifact(module.operation.get_asm(), "1.9.0"),
    }


def wrapped(proto: bytes) -> bytes:
    """An HloProto, as XLA dumps it: the module is field 1."""
    length, size = bytearray(), len(proto)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return b"\x0a" + bytes([*length, size]) + proto


def small_loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """An embedding, a scan over two layers, a concatenation, a head and its loss."""
    y = params["embed"][x]
    y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w) + y, None), y, params["layers"])
    return models.cross_entropy(jnp.concatenate([y, y * 2], axis=-1) @ params["head"], labels)


def small_arguments() -> tuple[Any, ...]:
    params = {"embed": models.shape(11, 6), "layers": models.shape(2, 6, 6), "head": models.shape(12, 11)}
    ids = models.shape(3, 5, dtype=jnp.int32)
    return params, ids, ids


def small_forms() -> Forms:
    found = forms_of(jax.value_and_grad(small_loss), *small_arguments())
    return {name: found[name] for name in ("text", "bytecode", "hlo text", "hlo proto")}


def damaged(forms: Forms, count: int) -> Iterator[tuple[str, bytes]]:
    """Damaged copies, the same for the same count: the form's name with the seed, and the bytes."""
    names = list(forms)
    for seed in range(count):
        chance = random.Random(seed)
        name = names[seed % len(names)]
        data = bytearray(forms[name])
        for _ in range(chance.choice((1, 1, 1, 1, 2, 4))):
            chance.choice(_DAMAGES)(chance, data)
        yield f"{name} {seed}", bytes(data)


def _flip(chance: random.Random, data: bytearray) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _digit(chance: random.Random, data: bytearray) -> None:
    places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    if places:
        data[chance.choice(places)] = ord(chance.choice("0123456789-"))


def _cut(chance: random.Random, data: bytearray) -> None:
    start = chance.randrange(len(data) + 1)
    del data[start : start + chance.choice((1, 8, 200, len(data)))]


def _repeat(chance: random.Random, data: bytearray) -> None:
    start = chance.randrange(len(data) + 1)
    part = data[start : start + chance.choice((1, 40, 400))]
    data[start:start] = part


def _swap_lines(chance: random.Random, data: bytearray) -> None:
    lines = data.split(b"\n")
    if len(lines) > 2:
        first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
        lines[first], lines[second] = lines[second], lines[first]
        data[:] = b"\n".join(lines)


_DAMAGES = (_flip, _digit, _digit, _digit, _cut, _repeat, _swap_lines)
