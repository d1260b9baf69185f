"""Tell the data of a forward from its parameters by the dimension that samples are counted along.

A model does the same to every sample. So the first dimension of its data goes through the products as a dimension of
their results and is never summed over inside of one, while every dimension of a weight either is, or belongs to the
features, which the next product sums over. Dimensions that some operation makes equal are one class (`_Classes`). A
class is a reading of the data where it is the first dimension of arguments and no other one, no product sums over it,
and most of the flops of products have it in their result. Where two readings have equally many of these flops, such as
in `x @ w.T`, nothing is told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phaze.frontends.stablehlo.dataflow import Dataflow
from phaze.frontends.stablehlo.interpreter import SymbolicRun
from phaze.frontends.stablehlo.symbols import tensors_of
from phaze.ir import Op, OpKind
from phaze.ir.factor_following import Piece, pieces_of

__all__ = ["find_data"]

LEAST_SHARE = 0.5
"""The share of the flops of products that must have the dimension of samples: tables that are made of parameters alone
have products without it, which are small beside those of the model."""


def find_data(
    run: SymbolicRun, dataflow: Dataflow, ends: Sequence[str], known_parameters: Collection[int] = ()
) -> set[int] | None:
    """The arguments that are data on the way to these tensors; None where the products do not tell."""
    live = dataflow.ancestors(ends)
    ops = [op for op in dataflow.ops if op.id in live]
    classes = _Classes(ops)
    shards = [op for op in ops if _takes_shard(op)]
    carried: dict[object, set[int]] = {}
    elsewhere: set[object] = set()
    for index, value in enumerate(run.arguments):
        entries = {tensor.id for tensor in tensors_of((value,))}
        for op in shards:  # in order: an annotation may stand before
            if entries.intersection(op.inputs):
                entries.add(op.outputs[0])
        for tensor_id, piece in classes.pieces_of(entries):
            root = classes.root((tensor_id, piece))
            if piece[0] == 0:
                carried.setdefault(root, set()).add(index)
            else:
                elsewhere.add(root)
    total = sum(op.matmul_flops for op in ops)
    readings = {
        frozenset(arguments): classes.flops.get(root, 0.0)
        for root, arguments in carried.items()
        if root not in elsewhere | classes.contracted and not arguments.intersection(known_parameters)
    }
    most = max(readings.values(), default=0.0)
    best = [arguments for arguments, flops in readings.items() if flops == most]
    return set(best[0]) if len(best) == 1 and most > LEAST_SHARE * total else None


def _takes_shard(op: Op) -> bool:
    """Whether an op annotates a tensor, or gives a device its part of it, behind which dimensions have other sizes."""
    is_part = op.kind is OpKind.OPAQUE or op.function == "sharding_constraint"
    return is_part and len(op.inputs) == 1 and len(op.outputs) == 1


class _Classes:
    """Dimensions of tensors, and factors of these, that are equal: a union of sets, joined op by op.

    `contracted` has the classes that some product sums over, `flops` has those of products with a class in the result.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self._parents: dict[tuple[str, Piece], tuple[str, Piece]] = {}
        self._pieces: dict[str, set[Piece]] = {}
        for op in ops:
            for nodes in _nodes(op).values():
                for tensor_id, piece in nodes:
                    self._pieces.setdefault(tensor_id, set()).add(piece)
                    self._parents[self.root((tensor_id, piece))] = self.root(nodes[0])
        self.contracted: set[object] = set()
        self.flops: dict[object, float] = {}
        for op in ops:
            if op.kind.is_matrix:
                self._add_product(op)

    def root(self, node: tuple[str, Piece]) -> tuple[str, Piece]:
        """The node that stands for the class of this one."""
        way = [node]
        while (parent := self._parents.get(way[-1], way[-1])) != way[-1]:
            way.append(parent)
        self._parents.update(dict.fromkeys(way, way[-1]))
        return way[-1]

    def pieces_of(self, tensor_ids: Collection[str]) -> list[tuple[str, Piece]]:
        """All pieces of these tensors that some op names."""
        return [(tensor_id, piece) for tensor_id in tensor_ids for piece in self._pieces.get(tensor_id, ())]

    def _add_product(self, op: Op) -> None:
        kept = {name for dims in op.rule.results for dim in dims for name in dim.factors}
        roots = {name: self.root(nodes[0]) for name, nodes in _nodes(op).items()}
        self.contracted.update(root for name, root in roots.items() if name not in kept)
        for root in {root for name, root in roots.items() if name in kept}:
            self.flops[root] = self.flops.get(root, 0.0) + op.matmul_flops


def _nodes(op: Op) -> dict[str, list[tuple[str, Piece]]]:
    """The places of every factor of an op in its tensors."""
    nodes: dict[str, list[tuple[str, Piece]]] = {}
    for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
        for name, piece in pieces_of(op.rule, dims):
            nodes.setdefault(name, []).append((tensor_id, piece))
    return nodes
