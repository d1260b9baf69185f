"""Element types and precision recipes: what a parameter weighs in training, and graphs cast to the types of a recipe.

Element types have names that graphs use and names that people write; `element_type`, `rate_name` and `dtype_bytes` say
what each means to hardware.

A parameter occupies parameter + gradient + master + state bytes. Mixed bf16 with Adam keeps a bf16 copy (2), an fp32
gradient (4), an fp32 master copy (4) and two fp32 moments (8): 18 bytes.

A recipe is a precision and an optimizer, `bf16-adam` or `mxfp8-muon`, or `bf16-none` for inference; `-bf16-gradients`
behind it accumulates and reduces gradients in bf16. The precisions and optimizers that are known by name stand in
`PRECISIONS` and `OPTIMIZERS`, each with what is stored where and what its price leaves out.

Captured models often come in float32 and train in bfloat16. `cast_graph` replaces the type of a graph's parameters by
the recipe's compute type: every float tensor of the parameters' own (most common) type changes; types that were chosen
on purpose, such as float32 logits in a bfloat16 model, stay. Where products run at another type than tensors are stored
in (fp8, fp4, tf32), those that read a parameter of a repeated layer, and their gradients, are marked to be priced so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from phaze.errors import HardwareError, UnknownNameError, near_names, shown
from phaze.hardware.hardware_numbers import non_negative, positive
from phaze.ir import DType, Graph, Op, OpKind
from phaze.name_spelling import spelled_alike

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "PRODUCT_DTYPE",
    "RATE_NAMES",
    "Optimizer",
    "Precision",
    "PrecisionRecipe",
    "cast_graph",
    "dtype_bytes",
    "element_type",
    "precision_recipe",
    "precision_recipe_names",
    "rate_name",
    "recipe_of",
]

_RATES = {
    DType.BFLOAT16: "bf16",
    DType.FLOAT16: "fp16",
    DType.FLOAT32: "fp32",
    DType.FLOAT64: "fp64",
    DType.FLOAT8: "fp8",
    DType.INT8: "int8",
}

RATE_NAMES = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp6", "fp4", "int8")
"""The types that matrix units distinguish. No tensor is stored in tf32, fp6 or fp4: products round to them."""

_OPERAND_BYTES = {"tf32": 4, "fp6": 1, "fp4": 1}

_BY_NAME = {short: dtype for dtype, short in _RATES.items()} | {dtype.value: dtype for dtype in DType}
_BYTES = {name: dtype.size_bytes for name, dtype in _BY_NAME.items()} | _OPERAND_BYTES


def element_type(dtype: str) -> DType:
    """The type that people call ``dtype``; a `HardwareError` where there is none."""
    if not isinstance(dtype, str) or dtype not in _BY_NAME:
        raise HardwareError(f"unknown element type {shown(dtype)}; known are {', '.join(_BY_NAME)}.")
    return _BY_NAME[dtype]


def rate_name(dtype: str) -> str:
    """The matrix rate that ``dtype`` runs at; types that matrix units do not know (int32, bool, ...) run as fp32."""
    if isinstance(dtype, str) and dtype in RATE_NAMES:
        return dtype
    element = element_type(dtype)
    return _RATES[DType.INT8] if element is DType.UINT8 else _RATES.get(element, _RATES[DType.FLOAT32])


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; of types that products round to, those that an operand takes, rounded up."""
    size = _BYTES.get(dtype) if isinstance(dtype, str) else None
    return element_type(dtype).size_bytes if size is None else size


PRODUCT_DTYPE = "product_dtype"
"""The attribute of an op that says at which type its product runs, where that is not its operands'."""
_TRAINABLE = (DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecipe:
    """How a model is trained, numerically.

    The compute type is that of matrix operands and activations and overrides captured float types; gradients are summed
    over devices in the reduction type. Bytes are per parameter: the copy that forward and backward read, the
    accumulated gradient, the master copy that the optimizer updates (0 when it updates the first), its own state.

    Products with parameters of repeated layers run at the product type where there is one. An update takes so many lane
    operations per parameter, and a Newton-Schulz iteration (Muon) where it orthogonalizes them. Where gathered weights
    are cast, ZeRO-3 keeps no copy in the compute type beside the master: it exists while a layer is gathered. The note
    says what the price leaves out.
    """

    name: str
    compute_dtype: str
    reduction_dtype: str
    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float
    state_bytes: float
    product_dtype: str = ""
    update_operations: float = 12.0
    orthogonalizes_updates: bool = False
    casts_gathered_weights: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        """Check that sizes are sizes."""
        owner = f"precision recipe {self.name}"
        for field in ("compute_dtype", "reduction_dtype"):
            dtype = element_type(getattr(self, field))
            if dtype not in _TRAINABLE:
                raise HardwareError(f"{owner}: {field} is {dtype}; expected one of {', '.join(_TRAINABLE)}.")
        positive(owner, "parameter_bytes", self.parameter_bytes)
        for field in ("gradient_bytes", "master_bytes", "state_bytes", "update_operations"):
            non_negative(owner, field, getattr(self, field))
        if self.product_dtype:
            rate_name(self.product_dtype)

    @property
    def trains(self) -> bool:
        """Whether there are gradients; a recipe without any is for inference, where nothing is reduced or updated."""
        return self.gradient_bytes > 0

    @property
    def of_frozen(self) -> PrecisionRecipe:
        """The same for parameters that are read and not trained: nothing is kept besides the copy that is read."""
        return replace(self, gradient_bytes=0, master_bytes=0, state_bytes=0, casts_gathered_weights=False)

    @property
    def quantizes_products(self) -> bool:
        """Whether products need kernels that cast and scale their operands, which few targets run."""
        return self.product_dtype not in ("", "tf32")

    @property
    def reduction_bytes(self) -> int:
        """Bytes per parameter that a gradient reduction sends."""
        return dtype_bytes(self.reduction_dtype) if self.trains else 0

    @property
    def bytes_per_parameter(self) -> float:
        """Everything that one parameter occupies during training."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Master copy and state: what ZeRO-1 shards."""
        return self.master_bytes + self.state_bytes

    @property
    def update_bytes(self) -> float:
        """HBM traffic of updating one parameter.

        The gradient is read; master (or parameter) and state are read and written; a separate parameter copy is
        written from the master.
        """
        if not self.trains:
            return 0.0
        updated = self.master_bytes + self.state_bytes if self.master_bytes else self.parameter_bytes + self.state_bytes
        return self.gradient_bytes + 2 * updated + (self.parameter_bytes if self.master_bytes else 0)


@dataclass(frozen=True, slots=True)
class Precision:
    """Types and bytes of a precision, whatever the optimizer: a row of `PRECISIONS`."""

    compute_dtype: str
    parameter_bytes: float
    master_bytes: float
    product_dtype: str = ""
    note: str = ""
    casts_gathered_weights: bool = False


_FP8_NOTE = (
    "products with parameters of repeated layers run at the chip's {rate} rate, on bf16 tensors: casts, scales{more} "
    "and the {rate} copies of weights that some stacks keep are not priced; attention, embedding and logits stay bf16"
)


def _eight(more: str = "", rate: str = "fp8") -> Precision:
    return Precision("bfloat16", 2, 4, rate, _FP8_NOTE.format(rate=rate, more=more))


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16": Precision("bfloat16", 2, 4),
        "bf16-cast": Precision(
            "bfloat16",
            2,
            4,
            note="weights are float32 and cast when they are gathered, as FSDP2 and XLA do, so that ZeRO-3 keeps no "
            "copy in bf16; with less ZeRO the copy is counted",
            casts_gathered_weights=True,
        ),
        "fp16": Precision("float16", 2, 4),
        "fp32": Precision("float32", 4, 0),
        "tf32": Precision(
            "float32", 4, 0, "tf32", "tensors are float32, products with parameters run at the tf32 rate"
        ),
        "fp8": _eight(" and the history of maxima"),
        "fp8-delayed": _eight(" and the history of maxima"),
        "fp8-current": _eight(" and a pass for each maximum"),
        "fp8-tensorwise": _eight(" and a pass for each maximum"),
        "fp8-rowwise": _eight(" and a pass for each maximum"),
        "mxfp8": _eight(" of every 32 elements"),
        "nvfp4": _eight(" of every 16 elements, rotations and rounding", "fp4"),
    }
)
"""Weights are read in the compute type (bf16: 2 bytes) and updated in an fp32 master copy (4), or are fp32 themselves.

`fp8` is delayed scaling; the recipes of fp8 differ in scales, which are not priced, and so cost the same here.
"""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps for one parameter, and the lane operations of its update, counted by hand."""

    state_bytes: float
    operations: float
    orthogonalizes: bool = False
    note: str = ""


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adam": Optimizer(8, 12),
        "adamw": Optimizer(8, 12),
        "sgd": Optimizer(0, 4),
        "momentum-sgd": Optimizer(4, 6),
        "adafactor": Optimizer(0, 16, note="sums over rows and columns take next to nothing and are not counted"),
        "lion": Optimizer(4, 8),
        "adam8bit": Optimizer(2 + 2 * 4 / 256, 28, note="moments of 1 byte with a float32 scale for every 256"),
        "none": Optimizer(
            0, 0, note="inference: no gradients, no updates; what pipelines send backwards in training is still counted"
        ),
        "muon": Optimizer(
            4,
            8,
            orthogonalizes=True,
            note="every parameter is counted as part of a matrix that Muon updates, of 4096 x 16384 at most; gathering "
            "whole matrices where ZeRO divides them is not priced",
        ),
    }
)
"""Moments are float32 unless said otherwise."""

_OTHER_PRECISIONS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
}
_OTHER_OPTIMIZERS = {
    "adamw8bit": "adam8bit",
    "8bit-adam": "adam8bit",
    "8bit-adamw": "adam8bit",
    "paged-adamw-8bit": "adam8bit",
    "sgd-momentum": "momentum-sgd",
}
"""Names that frameworks and tools have for what is known here by another."""

_SAME_RECIPE = {"adamw": "adam"}
"""Optimizers that weigh and cost the same share a recipe."""
_LOW_GRADIENTS = "-bf16-gradients"


def recipe_of(precision: str, optimizer: str, *, low_gradients: bool = False) -> PrecisionRecipe:
    """The recipe of a precision and an optimizer, gradients accumulated and reduced in bf16 where ``low_gradients``.

    Other spellings of a name are understood; one that nobody knows is an `UnknownNameError` with near ones.
    """
    precision, optimizer = known_precision(precision), known_optimizer(optimizer)
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    types, update = PRECISIONS[precision], OPTIMIZERS[optimizer]
    trains = optimizer != "none"
    name = f"{precision}-{_SAME_RECIPE.get(optimizer, optimizer)}{_LOW_GRADIENTS if low_gradients else ''}"
    return PrecisionRecipe(
        name=name,
        compute_dtype=types.compute_dtype,
        reduction_dtype="bfloat16" if low_gradients else "float32",
        parameter_bytes=types.parameter_bytes,
        gradient_bytes=0 if not trains else 2 if low_gradients else 4,
        master_bytes=types.master_bytes if trains else 0,
        state_bytes=update.state_bytes,
        product_dtype=types.product_dtype,
        update_operations=update.operations,
        orthogonalizes_updates=update.orthogonalizes,
        casts_gathered_weights=types.casts_gathered_weights and trains,
        note="; ".join(note for note in (types.note, update.note) if note),
    )


def known_precision(name: str) -> str:
    """The precision that a name such as ``bfloat16`` or ``FP8`` means; one that nobody knows as it is."""
    return spelled_alike(name, PRECISIONS, _OTHER_PRECISIONS) or name


def known_optimizer(name: str) -> str:
    """The optimizer that a name such as ``AdamW`` or ``adamw_8bit`` means; `UnknownNameError` where there is none."""
    meant = spelled_alike(name, OPTIMIZERS, _OTHER_OPTIMIZERS)
    if meant is None:
        raise UnknownNameError("optimizer", name, OPTIMIZERS)
    return meant


def precision_recipe_names() -> tuple[str, ...]:
    """Names that `precision_recipe` knows."""
    pairs = [f"{precision}-{name}" for precision in PRECISIONS for name in OPTIMIZERS if name not in _SAME_RECIPE]
    return tuple(f"{pair}{suffix}" for suffix in ("", _LOW_GRADIENTS) for pair in pairs)


def precision_recipe(name: str = "bf16-adam") -> PrecisionRecipe:
    """The recipe called ``name``, a precision with its optimizer; a precision alone is with Adam.

    An `UnknownNameError` offers near names where there is none.
    """
    if known_precision(name) in PRECISIONS:
        return recipe_of(name, "adam")
    known = precision_recipe_names()
    name = spelled_alike(name, known) or name
    if name not in known:
        advice = f"Recipes are such a name, a dash and one of {', '.join(OPTIMIZERS)}; {known[0]} is one."
        raise UnknownNameError("precision", name, PRECISIONS, advice, near=near_names(str(name), (*PRECISIONS, *known)))
    pair = name.removesuffix(_LOW_GRADIENTS)
    precision = max((known for known in PRECISIONS if pair.startswith(f"{known}-")), key=len)
    return recipe_of(precision, pair.removeprefix(f"{precision}-"), low_gradients=pair != name)


def cast_graph(graph: Graph, recipe: PrecisionRecipe) -> Graph:
    """``graph`` at the recipe's compute and product types; itself where nothing changes."""
    sizes = Counter[DType]()
    for tensor in graph.parameters or tuple(graph.tensors.values()):
        if tensor.dtype.is_float:
            sizes[tensor.dtype] += tensor.elements
    target = element_type(recipe.compute_dtype)
    captured = sizes.most_common(1)[0][0] if sizes else target
    if captured is not target:
        tensors = {
            name: replace(tensor, dtype=target) if tensor.dtype is captured else tensor
            for name, tensor in graph.tensors.items()
        }
        notes = (*graph.notes, f"{captured} priced as {target} ({recipe.name})")
        graph = replace(graph, tensors=tensors, notes=notes)
    return _with_products_in(graph, recipe.product_dtype) if recipe.product_dtype else graph


def _with_products_in(graph: Graph, dtype: str) -> Graph:
    """The graph with products of parameters in repeated layers, and their gradients, marked to run at ``dtype``."""
    counts = Counter(layer.key for layer in graph.layers)
    repeated = {layer.index for layer in graph.layers if counts[layer.key] > 1}
    layer_of = graph.layer_graph.layer_of
    stored = {tensor.id for tensor in graph.parameters}
    marked: set[str] = set()

    def is_marked(op: Op) -> bool:
        if op.kind is OpKind.VIEW and stored.intersection(op.inputs):
            stored.update(op.outputs)
        if op.kind is not OpKind.CONTRACTION:
            return False
        is_own = bool(stored.intersection(op.inputs)) and layer_of.get(op.id) in repeated
        return is_own or op.gradient_of in marked

    ops = []
    for op in graph.ops:
        if is_marked(op):
            marked.add(op.id)
            op = replace(op, attributes=(*op.attributes, (PRODUCT_DTYPE, dtype)))
        ops.append(op)
    return replace(graph, ops=tuple(ops)) if marked else graph
