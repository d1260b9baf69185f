"""A made-up format: a network of dense layers, one word and one number a line.

input 64
dense 128
shuffle
dense 10
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from phaze.errors import FormatError
from phaze.ir import Graph, GraphBuilder, OpKind, Role
from phaze_sample.shuffle import SHUFFLE

TINY = ("input 64", "dense 128", "shuffle", "dense 10")


class ToyFrontend:
    """Imports `.toy` files."""

    name = "toy"
    libraries = ()
    options = ()

    def accepts(self, model: object) -> bool:
        """Whether this is the path of a `.toy` file."""
        return isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".toy")

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The network's training graph."""
        path = Path(str(model))
        return read_network(path.stem, path.read_text().splitlines())


def tiny(*, sequence_length: int | None) -> Graph:
    """The network that is known as `toy-tiny`; it has no sequence."""
    return read_network("toy-tiny", TINY)


def read_network(name: str, lines: Iterable[str]) -> Graph:
    """Forward, a loss, and the backward that Phaze derives from the rules."""
    (_, width), *layers = (_parse(line) for line in lines)
    builder = GraphBuilder(name)
    x = builder.argument("x", (1, width), Role.BATCH)
    for index, (word, size) in enumerate(layers):
        module = f"layers.{index}"
        if word == "shuffle":
            rule = builder.rule("b i -> b i", {"b": 1, "i": width})
            (x,) = builder.add(f"{module}.shuffle", OpKind.OPAQUE, SHUFFLE, rule, [x], module=module)
        else:
            weight = builder.parameter(f"{module}.weight", size, width)
            rule = builder.rule("b i, o i -> b o", {"b": 1, "i": width, "o": size})
            (x,) = builder.add(f"{module}.dense", OpKind.CONTRACTION, "linear", rule, [x, weight], module=module)
            width = size
    rule = builder.rule("b i -> .", {"b": 1, "i": width})
    outputs = builder.add("loss", OpKind.REDUCTION, "sum", rule, [x], module="loss")
    return builder.build(outputs).with_backward()


def _parse(line: str) -> tuple[str, int]:
    word, _, number = line.partition(" ")
    if word == "shuffle" and not number:
        return word, 0
    if word not in ("input", "dense") or not number.isdigit() or int(number) == 0:
        raise FormatError(f"toy network: {line!r}; expected 'input N', 'dense N' or 'shuffle'.")
    return word, int(number)
