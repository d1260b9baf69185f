"""A graph under construction: what every frontend and pass writes into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phaze.errors import GraphError
from phaze.ir.graph import Graph
from phaze.ir.op import Attribute, Op, OpKind, Phase
from phaze.ir.rule import Rule
from phaze.ir.tensor import DType, Role, Tensor

__all__ = ["GraphBuilder"]


class GraphBuilder:
    """Collects tensors and ops; `build` verifies them as a whole. Equal rules share one object."""

    def __init__(self, name: str, *, micro_batch_size: int = 1, dtype: DType = DType.BFLOAT16) -> None:
        self.name = name
        self.micro_batch_size = micro_batch_size
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.gradients: list[tuple[str, str]] = []
        self.is_backward_derived = False
        self.why_backward_kept = ""
        self.runs_as: dict[str, int] = {}
        self.saved: tuple[str, ...] = ()
        self.notes: list[str] = []
        self._rules: dict[object, Rule] = {}
        self._op_ids: set[str] = set()

    @classmethod
    def from_graph(cls, graph: Graph) -> GraphBuilder:
        """Start from all that a graph holds, except for its notes, which `build` takes."""
        builder = cls(graph.name, micro_batch_size=graph.micro_batch_size)
        builder.tensors.update(graph.tensors)
        builder.ops.extend(graph.ops)
        builder.gradients.extend(graph.gradients)
        builder.is_backward_derived = graph.is_backward_derived
        builder.why_backward_kept = graph.why_backward_kept
        builder.runs_as = dict(graph.runs_as)
        builder.saved = graph.saved
        builder._op_ids.update(op.id for op in graph.ops)
        return builder

    def argument(
        self, tensor_id: str, shape: Sequence[int], role: Role, dtype: DType | None = None, *, is_frozen: bool = False
    ) -> str:
        """Add an argument of the graph; returns its id."""
        self._add_tensor(Tensor(tensor_id, tuple(shape), dtype or self.dtype, role, is_frozen))
        return tensor_id

    def parameter(self, tensor_id: str, *shape: int) -> str:
        """Add a parameter, or return the one that is there: a second use ties it."""
        known = self.tensors.get(tensor_id)
        if known is None:
            return self.argument(tensor_id, shape, Role.PARAMETER)
        if known.shape != shape or known.role is not Role.PARAMETER:
            raise GraphError(f"parameter {tensor_id!r} is used with shape {list(shape)} and {list(known.shape)}.")
        return tensor_id

    def rule(self, text: str, sizes: Mapping[str, int], **marks: str) -> Rule:
        """`Rule.of`, with equal rules shared."""
        key = (text, tuple(sizes.items()), tuple(marks.items()))
        if key not in self._rules:
            self._rules[key] = Rule.of(text, sizes, **marks)
        return self._rules[key]

    def shared(self, rule: Rule) -> Rule:
        """The one object for rules equal to this."""
        return self._rules.setdefault(rule, rule)

    def add(
        self,
        op_id: str,
        kind: OpKind,
        function: str,
        rule: Rule,
        inputs: Iterable[str],
        *,
        dtypes: Sequence[DType] | None = None,
        results: Sequence[str] = (),
        module: str = "",
        phase: Phase = Phase.FORWARD,
        gradient_of: str = "",
        origin: str = "",
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[str, ...]:
        """Add an op; returns its result ids: the op's own, then `op_id:name` for each further name in `results`."""
        op_id = self.unused(op_id)
        op = Op(
            id=op_id,
            kind=kind,
            function=function,
            rule=rule,
            inputs=tuple(inputs),
            outputs=(op_id, *(f"{op_id}:{name}" for name in results)),
            module=module,
            phase=phase,
            gradient_of=gradient_of,
            origin=origin,
            attributes=tuple(sorted((attributes or {}).items())),
        )
        return self.insert(op, dtypes or [self.dtype] * len(op.outputs))

    def insert(self, op: Op, dtypes: Sequence[DType]) -> tuple[str, ...]:
        """Add a finished op under its own ids, with its results as tensors of these types."""
        for tensor_id, dims, dtype in zip(op.outputs, op.rule.results, dtypes, strict=True):
            self._add_tensor(Tensor(tensor_id, op.rule.shape(dims), dtype))
        self._op_ids.add(op.id)
        self.ops.append(op)
        return op.outputs

    def build(self, outputs: Iterable[str], notes: Iterable[str] = ()) -> Graph:
        """The verified graph, with the notes taken on the way and these."""
        return Graph(
            name=self.name,
            tensors=self.tensors,
            ops=tuple(self.ops),
            outputs=tuple(outputs),
            gradients=tuple(self.gradients),
            micro_batch_size=self.micro_batch_size,
            is_backward_derived=self.is_backward_derived,
            why_backward_kept=self.why_backward_kept,
            runs_as=self.runs_as,
            saved=self.saved,
            notes=(*self.notes, *notes),
        )

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.id in self.tensors:
            raise GraphError(f"two tensors have the id {tensor.id!r}; ids must be unique.")
        self.tensors[tensor.id] = tensor

    def unused(self, op_id: str) -> str:
        """An id that no op or tensor has: this one, or with a number behind it; it is taken from then on."""
        candidate, count = op_id, 1
        while candidate in self._op_ids or candidate in self.tensors:
            count += 1
            candidate = f"{op_id}.{count}"
        self._op_ids.add(candidate)
        return candidate
