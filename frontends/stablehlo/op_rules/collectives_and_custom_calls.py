"""Rules of collectives and sharding annotations, and of custom calls: kernels that are told by their names.

Collectives and sharding annotations that a module already has are kept, and said in notes.

Custom calls are kernels of cuDNN, Transformer Engine, Pallas and Neuron. A call is known by its target, and where the
target only says which compiler it is for (`tpu_custom_call`) by the name of its kernel. Some are annotations of
shardings. What is not known here becomes an opaque op, which lowers the graph's coverage; a note then says how many
flops the call's configuration gives, where it gives any (Mosaic's `cost_estimate`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence

from phaze.frontends.stablehlo.op_rules.products_and_reductions import REDUCTIONS, ragged_product
from phaze.frontends.stablehlo.symbols import Broadcast, Call, Constant, Shape, Tensor, Unsupported, Value, Values
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import elementwise_rule

__all__ = ["COLLECTIVES", "EMPTY_MESH", "KERNELS", "find_value", "sharding"]

MOST_CHARACTERS = 200
"""Shardings are cut here: their text is a hint for people, and those of large meshes are long."""

EMPTY_MESH = "@empty_mesh"
"""The mesh that JAX names where there is none."""


def _collective(call: Call) -> Values:
    """One collective op for each operand. A dimension that changes size is covered in part by the smaller side."""
    if len(call.values) != len(call.operation.types):
        raise Unsupported
    call.recorder.note(f"collective already present: {call.name}")
    results: list[Tensor] = []
    for index in range(len(call.values)):
        shape, out_shape = call.shape(index), call.out_shape(index)
        if len(shape) != len(out_shape):
            raise Unsupported
        larger = tuple(map(max, shape, out_shape))
        dims = tuple(Dim((f"d{dim}",)) for dim in range(len(shape)))
        kinds = [FactorKind.FREE if a == b else FactorKind.WHOLE for a, b in zip(shape, out_shape, strict=True)]
        factors = tuple(Factor(f"d{dim}", size, kinds[dim]) for dim, size in enumerate(larger))
        rule = Rule((_covering(dims, shape, larger),), (_covering(dims, out_shape, larger),), factors)
        (value,) = call.emit(
            OpKind.COLLECTIVE, call.name, rule, call.id(index), outputs=(index,), attributes=_participants(call)
        )
        assert isinstance(value, Tensor)
        results.append(value)
    return tuple(results)


def _participants(call: Call) -> dict[str, str]:
    """Who takes part in a collective, as the module writes it."""
    given = call.attribute("replica_groups")
    return {"replica_groups": given[:MOST_CHARACTERS]} if isinstance(given, str) else {}


def _covering(dims: Dims, shape: Shape, larger: Shape) -> Dims:
    """The dimensions of the operand or the result: those smaller than the larger of the two cover it in part."""
    sizes = zip(dims, shape, larger, strict=True)
    return tuple(dim if size == full else Dim(dim.factors, size) for dim, size, full in sizes)


def sharding(call: Call) -> Values:
    """An annotation of how a tensor should be sharded: a view that keeps the annotation."""
    given = call.attribute("sharding") or call.attribute("mhlo.sharding") or call.attribute("sdy.sharding") or ""
    text = str(given.get("text", given) if isinstance(given, dict) else given)[:MOST_CHARACTERS]
    value = call.values[0]
    if EMPTY_MESH in text or isinstance(value, Constant | Broadcast):
        return (value,)
    call.recorder.note("sharding constraint already present, kept as a view")
    rule = elementwise_rule(value.shape, value.shape)
    return call.emit(OpKind.VIEW, "sharding_constraint", rule, call.id(0), attributes={"sharding": text})


_COLLECTIVE_NAMES = (
    "all_gather all_reduce reduce_scatter all_to_all collective_permute collective_broadcast cross-replica-sum "
    "all_slice manual_all_reduce"
)

COLLECTIVES: dict[str, Callable[[Call], Values]] = {
    **dict.fromkeys(_COLLECTIVE_NAMES.split(), _collective),
    "sharding_constraint": sharding,
    "reshard": sharding,
    "sharding_group": sharding,
}


_PASSES_THROUGH = re.compile(
    r"xla\.sdy\.FuncResultSharding|AwsNeuronTransferWithStaticRing|AwsNeuronModuleMarker\w*|MoveTo(Host|Device)|"
    r"PipelineMarker|xla\.megascale\.provide_metadata"
)
"""Targets that give their operands: marks for a compiler, which compute nothing."""

_ANNOTATIONS = frozenset({"Sharding", "annotate_device_placement", "LayoutConstraint"})
_LOCAL_SHAPES = frozenset({"SPMDFullToShardShape", "SPMDShardToFullShape"})
_ATTENTION = re.compile(r"fmha|attention|attn|flash_fwd|flash_bwd|splash_mha|^mha_|_mha_", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd|_dkv|_dq(?![a-z])|gradient", re.IGNORECASE)
_ONLY_QUERY_GRADIENT = re.compile(r"_dq(?![a-z])", re.IGNORECASE)
_PRODUCT = re.compile(r"gmm|grouped_?matmul|ragged_?dot|matmul|gemm", re.IGNORECASE)
_NEURON_UNARY = {"AwsNeuronGelu": "gelu", "AwsNeuronSilu": "silu", "AwsNeuronErf": "erf", "AwsNeuronTanh": "tanh"}


def _custom_call(call: Call) -> Values:
    """The operation of a kernel; raises Unsupported where it is not known."""
    target = str(call.attribute("call_target_name") or "")
    name = _kernel_name(call, target)
    if _PASSES_THROUGH.fullmatch(target):
        return call.values
    if target in _ANNOTATIONS:
        return sharding(call)
    if target in _LOCAL_SHAPES:
        call.recorder.note("parts that run per device (shard_map) are priced at their local shapes")
        raise Unsupported
    if "topk" in target.lower() or "top_k" in target.lower():
        return REDUCTIONS["top_k"](call)
    if target in _NEURON_UNARY or target.removesuffix("Backward") in _NEURON_UNARY:
        return _unary(call, target)
    if target in ("AwsNeuronRmsNorm", "AwsNeuronSoftmax"):
        return _normalization(call, target)
    if _ATTENTION.search(name):
        return _attention(call, name)
    if _PRODUCT.search(name):
        return _product(call, name)
    _note_flops(call, name)
    raise Unsupported


def _kernel_name(call: Call, target: str) -> str:
    """The target and the name of the kernel: attributes or the configuration have it."""
    named = (
        call.attribute("kernel_name")
        or find_value(_config(call), "kernel_name")
        or find_value(_config(call), "func_name")
    )
    return f"{target} {named}" if named else target


def _config(call: Call) -> object:
    """The configuration of a call: a dictionary, or JSON."""
    for name in ("mhlo.backend_config", "backend_config"):
        given = call.attribute(name)
        if isinstance(given, dict):
            return given
        if isinstance(given, str) and given.startswith("{"):
            try:
                parsed: object = json.loads(given)
            except ValueError:
                continue
            return parsed
    return {}


def find_value(config: object, name: str) -> object:
    """The value of a key of a configuration, in a dictionary or in one inside of it."""
    if not isinstance(config, dict):
        return None
    if name in config:
        return config[name]
    return next((value for value in (find_value(inner, name) for inner in config.values()) if value is not None), None)


def _note_flops(call: Call, name: str) -> None:
    estimate = find_value(_config(call), "cost_estimate")
    flops = estimate.get("flops") if isinstance(estimate, dict) else None
    if isinstance(flops, int | float) and flops > 0:
        call.recorder.note(
            f"the custom call {name} is not known; its own estimate is {flops:,.0f} flops, which are not in the graph"
        )


def _unary(call: Call, target: str) -> Values:
    """A function of every element, or its gradient, which reads the input and the gradient that came in."""
    base = target.removesuffix("Backward")
    function = _NEURON_UNARY[base] if target == base else f"{_NEURON_UNARY[base]}_backward"
    inputs = [call.id(index) for index, value in enumerate(call.values) if value.shape == call.out_shape()]
    rule = elementwise_rule(call.out_shape(), *[call.out_shape()] * len(inputs))
    return call.emit(OpKind.ELEMENTWISE, function, rule, *inputs)


def _normalization(call: Call, target: str) -> Values:
    """A softmax, or a norm by the root of the mean square, along the dimension that the configuration has."""
    shape = call.out_shape()
    given = call.attribute("backend_config")
    dim = int(given) if isinstance(given, str) and given.isdigit() else len(shape) - 1
    if call.shape(0) != shape or dim >= len(shape):
        raise Unsupported
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    kinds = {dim: FactorKind.NORMALIZED}
    factors = tuple(Factor(f"d{i}", size, kinds.get(i, FactorKind.FREE)) for i, size in enumerate(shape))
    if target == "AwsNeuronSoftmax":
        return call.emit(OpKind.SOFTMAX, "softmax", Rule((dims,), (dims,), factors), call.id(0))
    has_weight = len(call.values) > 1 and call.shape(1) == (shape[dim],)
    operands, inputs = ((dims, (dims[dim],)), (call.id(0), call.id(1))) if has_weight else ((dims,), (call.id(0),))
    return call.emit(OpKind.NORM, "rms_norm", Rule(operands, (dims,), factors), *inputs)


def _product(call: Call, name: str) -> Values:
    """A matrix product, plain or with a matrix for every group of rows."""
    call.recorder.note(f"matrix product: custom call {name}")
    if len(call.values) < 2:
        raise Unsupported
    return ragged_product(call)


def _attention(call: Call, name: str) -> Values:
    """A fused attention kernel, or its backward.

    The first three tensors of four dimensions are query, key and value, with the batch first and the head size last.
    Which of the two between are the heads is told by the shape of the scores in the configuration (cuDNN), else the
    smaller one is.
    """
    call.recorder.note(f"fused attention: custom call {name}")
    ranked = [index for index, value in enumerate(call.values) if len(value.shape) == 4 and value.dtype.is_float]
    if len(ranked) < 3:
        raise Unsupported
    layout = _AttentionLayout(call, [call.shape(index) for index in ranked[:3]])
    if not _BACKWARD.search(name):
        return layout.forward(ranked)
    if _ONLY_QUERY_GRADIENT.search(name):
        # The pair of kernels for the gradients of query, key and value is counted with the other one.
        call.recorder.note(f"the flops of {name} are counted with its kernel for keys and values")
        raise Unsupported
    return layout.backward(ranked)


class _AttentionLayout:
    """The factors of an attention and the dimensions of its tensors."""

    def __init__(self, call: Call, shapes: Sequence[Shape]) -> None:
        query, key, value = shapes
        self.call = call
        self.heads = self._heads_dim(query)
        length = 3 - self.heads
        if query[self.heads] % key[self.heads]:
            raise Unsupported
        self.sizes = {"b": query[0], "g": key[self.heads], "r": query[self.heads] // key[self.heads]}
        self.sizes |= {"s": query[length], "t": key[length], "d": query[3], "e": value[3]}
        b, g, s, t, d, e = (Dim((name,)) for name in "bgstde")
        grouped = Dim(("g", "r")) if self.sizes["r"] > 1 else g
        self.query, self.key, self.value = (b, grouped, s, d), (b, g, t, d), (b, g, t, e)
        self.context = (b, grouped, s, e)

    def _heads_dim(self, query: Shape) -> int:
        scores = find_value(find_value(_config(self.call), "intermediate_tensor_shape"), "dimensions")
        if isinstance(scores, list) and len(scores) == 4 and query[1] != query[2]:
            return 1 if query[1] == int(scores[1]) else 2
        return 2 if query[2] <= query[1] else 1

    def dims(self, named: Dims, shape: Shape) -> Dims:
        """The dimensions in the order that a tensor of this shape has them; raises Unsupported where none fits."""
        batch, head, position, width = named
        orders = [(batch, position, head, width), (batch, head, position, width)]
        for order in orders if self.heads == 2 else reversed(orders):
            if tuple(math.prod(self.sizes[name] for name in dim.factors) for dim in order) == shape:
                return order
        raise Unsupported

    def rule(self, operands: Sequence[Dims], results: Sequence[Dims]) -> Rule:
        used = {name for dims in (*operands, *results) for dim in dims for name in dim.factors}
        kinds = {"t": FactorKind.NORMALIZED}
        factors = tuple(Factor(n, size, kinds.get(n, FactorKind.FREE)) for n, size in self.sizes.items() if n in used)
        return Rule(tuple(operands), tuple(results), factors)

    def forward(self, ranked: Sequence[int]) -> Values:
        call = self.call
        named = (self.query, self.key, self.value)
        operands = [self.dims(dims, call.shape(index)) for dims, index in zip(named, ranked, strict=False)]
        rule = self.rule(operands, [self.dims(self.context, call.out_shape())])
        inputs = [call.id(index) for index in ranked[:3]]
        (attended,) = call.emit(OpKind.ATTENTION, "attention", rule, *inputs, outputs=(0,))
        return (attended, *self._scratch({0}))

    def backward(self, ranked: Sequence[int]) -> Values:
        """The gradients of query, key and value, as many of them as there are among the results, by their shapes."""
        call = self.call
        named = [self.query, self.key, self.value] + [self.context] * (len(ranked) - 3)
        operands, inputs = [], []
        for dims, index in zip(named, ranked, strict=True):
            operands.append(self.dims(dims, call.shape(index)))
            inputs.append(call.id(index))
        wanted = [self.query, self.key, self.value]
        results: dict[int, Dims] = {}
        for output in range(len(call.operation.types)):
            if len(call.out_shape(output)) != 4 or not wanted:
                continue
            for dims in list(wanted):
                try:
                    results[output] = self.dims(dims, call.out_shape(output))
                except Unsupported:
                    continue
                wanted.remove(dims)
                break
        if not results:
            raise Unsupported
        rule = self.rule(operands, list(results.values()))
        made = call.emit(OpKind.ATTENTION, "attention_backward", rule, *inputs, outputs=tuple(results))
        scratch = iter(self._scratch(set(results)))
        by_output = dict(zip(results, made, strict=True))
        return tuple(by_output.get(index) or next(scratch) for index in range(len(call.operation.types)))

    def _scratch(self, made: set[int]) -> list[Value]:
        """The other results: statistics and workspace, which hold nothing that anybody else would need."""
        call = self.call
        return [
            call.recorder.constant(("scratch", call.recorder.unique()), call.out_shape(index), call.out_dtype(index))
            for index in range(len(call.operation.types))
            if index not in made
        ]


KERNELS: dict[str, Callable[[Call], Values]] = {"custom_call": _custom_call}
