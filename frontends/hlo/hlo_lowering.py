"""Write the instructions of HLO text as the operations of StableHLO, in the document that `module.py` reads.

StableHLO has no tuples, so they end here. The value of an instruction is a *tree*: the number of an array, or a tuple
of trees. A tuple, a get-tuple-element, the start and the end of an asynchronous operation only build and take apart
trees; parameters, results, calls, loops and branches have one value for every array in them. Opcodes get the names and
attributes that StableHLO has for them (`_ATTRIBUTES`); one that is not known here keeps its name and becomes an opaque
op. Attributes that nobody knows are skipped and counted.

Text that was damaged is still text: where the shapes of operands and result contradict each other, `shape_checks.py`
says so.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from phaze.frontends.hlo.hlo_text import (
    Computation,
    HloModule,
    HloTextError,
    Instruction,
    Shape,
    aliases_of,
    is_partitioned,
    partition_count,
    replica_count,
    split_list,
)
from phaze.frontends.hlo.opcode_attributes import (
    KNOWN_ATTRIBUTES,
    attributes_of,
    configuration,
    constant_value,
    known_kernel,
    quoted,
    stablehlo_name,
)
from phaze.frontends.hlo.shape_checks import check_shapes
from phaze.frontends.stablehlo.module import Document

__all__ = ["lower_module"]

Tree = Any
"""The number of an array, or a tuple of trees; Python's types cannot say this without a cost in every line."""

MOST_NESTED = 150
"""How deep computations may stand inside computations that are copied into their callers, such as those of reductions.
HLO has no recursion; damaged text may have."""

MOST_CONFIGURATION = 200
"""The longest configuration of a custom call that is kept where it is no JSON: a number, such as a dimension."""

_ELEMENTS = {"pred": "i1", "c64": "complex<f32>", "c128": "complex<f64>", "token": "!stablehlo.token"}
_GENERIC_NAME = re.compile(r"(arg|param|parameter|p|input)?[._]?\d*(\.\d+)*(\.clone)*", re.IGNORECASE)
"""Names that compilers give to parameters, which say nothing about what they are."""

_TORCH_DATA = "xla__device_data"
_MOVED_BY_MODULE = "torch/nn/modules/module.py"
"""The file of torch that moves the parameters of a module to a device; data is moved by the caller's own file."""

_REGION_ATTRIBUTES = ("to_apply", "select", "scatter", "comparator")
_PASSES_THROUGH = frozenset({"domain", "add-dependency", "async-update", "copy-update"})
"""Opcodes that give their first operand, tuple or not."""


def lower_module(module: HloModule) -> Document:
    """The document of a module; raises HloTextError where the text contradicts itself."""
    lowering = _Lowering(module)
    entry = module.entry
    functions = [lowering.entry_function(entry)]
    while lowering.wanted:
        name = lowering.wanted.pop(0)
        functions.append(lowering.function(lowering.computation(name, entry.line)))
    skipped = lowering.skipped
    notes = []
    if skipped:
        listed = ", ".join(f"{name} ({count})" for name, count in skipped.most_common(5))
        notes.append(f"{skipped.total()} attributes that are not known were skipped: {listed}")
    return {
        "name": module.name,
        "entry": entry.name,
        "functions": functions,
        "meshes": [],
        "aliases": aliases_of(module),
        "partitions": partition_count(module),
        "replicas": replica_count(module),
        "is_partitioned": is_partitioned(module),
        "notes": notes,
    }


def _type(shape: Shape) -> list[Any]:
    element = _ELEMENTS.get(shape.element)
    if element is None:
        signed = re.fullmatch(r"s(\d+)", shape.element)
        unsigned = re.fullmatch(r"u(\d+)", shape.element)
        element = f"i{signed[1]}" if signed else f"ui{unsigned[1]}" if unsigned else shape.element
    return [list(shape.dims), element]


def _leaves(tree: Tree) -> list[int]:
    """The numbers in a tree, in order."""
    return [tree] if isinstance(tree, int) else [number for part in tree for number in _leaves(part)]


class _Lowering:
    """The document as it grows: `wanted` has the computations that are called and not written yet."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.wanted: list[str] = []
        self.seen: set[str] = set()
        self.skipped: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._depth = 0

    def computation(self, name: str, line: int) -> Computation:
        name = name.strip().removeprefix("%")
        if name not in self.module.computations:
            raise HloTextError(f"line {line}: the computation {name!r} is called, but the module does not have it.")
        return self.module.computations[name]

    def tree(self, shape: Shape) -> Tree:
        """New numbers for all arrays of a shape."""
        return next(self._numbers) if shape.parts is None else tuple(self.tree(part) for part in shape.parts)

    def callee(self, name: str, line: int) -> Computation:
        """A computation that is called as a function, which is written once."""
        computation = self.computation(name, line)
        if computation.name not in self.seen:
            self.seen.add(computation.name)
            self.wanted.append(computation.name)
        return computation

    def body(self, computation: Computation) -> tuple[list[Any], Shape, list[Tree]]:
        """A computation as a region, with the shape and the trees of its result."""
        if self._depth > MOST_NESTED:
            raise HloTextError(f"line {computation.line}: computations are nested more than {MOST_NESTED} deep.")
        self._depth += 1
        body = _Body(self, computation)
        for instruction in computation.instructions:
            body.add(instruction)
        self._depth -= 1
        root = body.tree(computation.root, computation.line)
        shape = body.shapes[computation.root]
        returned = _leaves(root)
        body.operations.append(["func.return", returned, [], [], {}, [], ""])
        arguments = [number for p in computation.parameters for number in _leaves(body.values[p.name])]
        types = [_type(leaf) for p in computation.parameters for leaf in p.shape.leaves]
        return [arguments, types, body.operations], shape, returned

    def function(self, computation: Computation) -> dict[str, Any]:
        region, shape, _ = self.body(computation)
        arguments = [[kind, "", ""] for kind in region[1]]
        results = [[_type(leaf), "", ""] for leaf in shape.leaves]
        return {"name": computation.name, "arguments": arguments, "results": results, "body": region}

    def entry_function(self, computation: Computation) -> dict[str, Any]:
        """The entry, whose arguments have names and shardings."""
        self.seen.add(computation.name)
        entry = self.function(computation)
        arguments = []
        for parameter in computation.parameters:
            leaves = parameter.shape.leaves
            name = _argument_name(parameter)
            shardings = _shardings(parameter.attributes.get("sharding", ""), len(leaves))
            for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
                suffix = f".{index}" if parameter.shape.parts is not None and name else ""
                arguments.append([_type(leaf), f"{name}{suffix}", sharding])
        entry["arguments"] = arguments
        root = next(i for i in computation.instructions if i.name == computation.root)
        shardings = _shardings(root.attributes.get("sharding", ""), len(entry["results"]))
        entry["results"] = [[kind, "", s] for (kind, _, _), s in zip(entry["results"], shardings, strict=True)]
        return entry


def _argument_name(parameter: Instruction) -> str:
    """What the metadata calls a parameter, else its own name, where that says anything."""
    name = op_name(parameter).replace("\\'", "'").replace('\\"', '"')
    if name == _TORCH_DATA:  # all arguments of torch_xla are called so; those that a module moved are its parameters
        return f"params.{parameter.name}" if _MOVED_BY_MODULE in parameter.attributes["metadata"] else parameter.name
    if name and not name.startswith("jit("):
        return name
    return "" if _GENERIC_NAME.fullmatch(parameter.name) else parameter.name


def op_name(instruction: Instruction) -> str:
    """The name of the operation in the program, from the metadata."""
    match = re.search(r'op_name="((?:\\.|[^"\\])*)"', instruction.attributes.get("metadata", ""))
    return match[1] if match else ""


def _shardings(text: str, count: int) -> list[str]:
    """The sharding of every array of a value: one for all, or a list of them in braces."""
    if text.startswith("{{"):
        parts = split_list(text[1:-1])
        if len(parts) == count:
            return parts
    return [text] * count


class _Body:
    """The operations of a computation as they are written, and the trees of the instructions so far."""

    def __init__(self, lowering: _Lowering, computation: Computation) -> None:
        self.lowering = lowering
        self.values: dict[str, Tree] = {}
        self.shapes: dict[str, Shape] = {}
        self.operations: list[list[Any]] = []
        for index, parameter in enumerate(computation.parameters):
            if int(parameter.argument) != index:
                raise HloTextError(f"line {parameter.line}: parameter numbers are not 0, 1, 2 and so on.")
            self.values[parameter.name] = lowering.tree(parameter.shape)
            self.shapes[parameter.name] = parameter.shape

    def tree(self, name: str, line: int) -> Tree:
        if name not in self.values:
            raise HloTextError(f"line {line}: {name!r} is used before it is made.")
        return self.values[name]

    def add(self, instruction: Instruction) -> None:
        if instruction.opcode == "parameter":
            return
        if instruction.name in self.values:
            raise HloTextError(f"line {instruction.line}: {instruction.name!r} is made twice.")
        for name in instruction.attributes:
            if name not in KNOWN_ATTRIBUTES:
                self.lowering.skipped[name] += 1
        operands = [self.tree(name, instruction.line) for name in instruction.operands]
        shapes = [self.shapes[name] for name in instruction.operands]
        check_shapes(instruction, shapes)
        value = self.lower(instruction, operands, shapes)
        if len(_leaves(value)) != len(instruction.shape.leaves) and not _is_async(instruction.opcode):
            raise HloTextError(
                f"line {instruction.line}: {instruction.opcode} gives {len(_leaves(value))} arrays, but its shape has "
                f"{len(instruction.shape.leaves)}."
            )
        self.values[instruction.name] = value
        self.shapes[instruction.name] = instruction.shape

    def lower(self, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
        """The tree of an instruction, whose operations are written."""
        opcode = instruction.opcode
        if opcode in _PASSES_THROUGH and operands:
            return operands[0]
        special = _LOWERINGS.get(opcode)
        if special is not None:
            return special(self, instruction, operands, shapes)
        if opcode.endswith("-start"):
            return self._start(instruction, opcode.removesuffix("-start"), operands, shapes)
        if opcode.endswith("-done"):
            return _done(instruction, operands)
        return self.emit(stablehlo_name(opcode), instruction, operands, attributes_of(instruction, shapes))

    def emit(
        self,
        name: str,
        instruction: Instruction,
        operands: Sequence[Tree],
        attributes: dict[str, Any],
        regions: Sequence[Any] = (),
        shape: Shape | None = None,
    ) -> Tree:
        """Write an operation that makes all arrays of a shape, that of the instruction unless another is given."""
        shape = shape or instruction.shape
        tree = self.lowering.tree(shape)
        all_regions = [*regions, *self._regions(instruction)]
        types = [_type(leaf) for leaf in shape.leaves]
        numbers = _leaves(tuple(operands))
        self.operations.append([name, numbers, _leaves(tree), types, attributes, all_regions, op_name(instruction)])
        return tree

    def _regions(self, instruction: Instruction) -> list[Any]:
        """The computations that an operation applies to elements, such as the sum of a reduction."""
        if instruction.opcode in ("call", "custom-call"):
            return []
        given = (instruction.attributes.get(name) for name in _REGION_ATTRIBUTES)
        named = [self.lowering.computation(name, instruction.line) for name in given if name]
        return [self.lowering.body(computation)[0] for computation in named]

    def call(self, computation: Computation, line: int, operands: Sequence[Tree], shape: Shape, scope: str) -> Tree:
        """Write a call of a computation."""
        numbers = _leaves(tuple(operands))
        expected = [_type(leaf) for p in computation.parameters for leaf in p.shape.leaves]
        if len(numbers) != len(expected):
            raise HloTextError(
                f"line {line}: {computation.name!r} takes {len(expected)} arrays, but is called with {len(numbers)}."
            )
        tree = self.lowering.tree(shape)
        types = [_type(leaf) for leaf in shape.leaves]
        attributes = {"callee": computation.name}
        self.operations.append(["func.call", numbers, _leaves(tree), types, attributes, [], scope])
        return tree

    def _start(self, instruction: Instruction, base: str, operands: list[Tree], shapes: list[Shape]) -> Tree:
        """The start of an asynchronous operation: the operation itself, in the tuple that its end takes apart."""
        shape = instruction.shape
        if base == "all-reduce" or shape.parts is None or len(shape.parts) < 2:
            return self.lower(replace(instruction, opcode=base), operands, shapes)
        if base == "copy":
            return (operands[0], operands[0], *(self._token() for _ in shape.parts[2:]))
        opcode = "call" if base == "async" else base
        result = self.lower(replace(instruction, opcode=opcode, shape=shape.parts[1]), operands, shapes)
        given = tuple(operands) if shape.parts[0].parts is not None or len(operands) > 1 else operands[0]
        return (given, result, *(self._token() for _ in shape.parts[2:]))

    def _token(self) -> int:
        tree = self.lowering.tree(Shape("token"))
        self.operations.append(["stablehlo.create_token", [], [tree], [[[], "!stablehlo.token"]], {}, [], ""])
        number: int = tree
        return number


def _is_async(opcode: str) -> bool:
    return opcode.endswith(("-start", "-done", "-update"))


def _done(instruction: Instruction, operands: list[Tree]) -> Tree:
    """What an asynchronous operation made: the second part of its tuple, the first of a copy's."""
    if not operands:
        raise HloTextError(f"line {instruction.line}: {instruction.opcode} has no operand.")
    started = operands[0]
    if isinstance(started, int) or instruction.opcode == "all-reduce-done":
        return started
    if instruction.opcode in ("send-done", "recv-done"):
        data = started[0]
        return (data, started[-1]) if instruction.shape.parts is not None else started[-1]
    return started[0] if instruction.opcode == "copy-done" else started[min(1, len(started) - 1)]


def _constant(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    if instruction.shape.parts is not None:
        raise HloTextError(f"line {instruction.line}: a constant of tuple shape is not known.")
    return body.emit("stablehlo.constant", instruction, (), {"value": constant_value(instruction)})


def _tuple(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    return tuple(operands)


def _element(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    index = instruction.integers("index")
    if len(operands) != 1 or isinstance(operands[0], int) or len(index) != 1 or not 0 <= index[0] < len(operands[0]):
        raise HloTextError(f"line {instruction.line}: there is no such element in the tuple.")
    return operands[0][index[0]]


def _call(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    """A call, or a group of instructions that a compiler fused: both run another computation."""
    given = instruction.attributes
    name = given.get("to_apply") or given.get("calls") or given.get("called_computations", "").strip("{}")
    callee = body.lowering.callee(name, instruction.line)
    return body.call(callee, instruction.line, operands, instruction.shape, op_name(instruction))


def _while(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    """A loop over a tuple or one array. Its trips are known where the compiler counted them."""
    regions = []
    for role, given in (("condition", Shape("pred")), ("body", instruction.shape)):
        callee = body.lowering.callee(instruction.attributes.get(role, ""), instruction.line)
        regions.append(_calling_region(body, callee, shapes[0] if shapes else instruction.shape, given, instruction))
    trips = re.search(r'known_trip_count[\\"]*\s*:\s*\{[\\"]*n[\\"]*\s*:\s*[\\"]*(\d+)', str(instruction.attributes))
    attributes = {"trips": int(trips[1])} if trips else {}
    return body.emit("stablehlo.while", instruction, operands, attributes, regions)


def _calling_region(
    body: _Body, callee: Computation, taken: Shape, given: Shape, instruction: Instruction
) -> list[Any]:
    """A region with arguments that calls a computation with them and returns what it gives."""
    inner = _Body(body.lowering, Computation("", False, instruction.line))
    arguments = body.lowering.tree(taken)
    result = inner.call(callee, instruction.line, [arguments], given, op_name(instruction))
    inner.operations.append(["stablehlo.return", _leaves(result), [], [], {}, [], ""])
    return [_leaves(arguments), [_type(leaf) for leaf in taken.leaves], inner.operations]


def _conditional(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    """A branch: each side is called with its own operand."""
    given = instruction.attributes
    names = [given[role] for role in ("true_computation", "false_computation") if role in given]
    names = names or split_list(given.get("branch_computations", "").strip("{}"))
    if not names or len(operands) != len(names) + 1:
        raise HloTextError(f"line {instruction.line}: a conditional needs an operand for each branch.")
    regions = []
    for name, operand in zip(names, operands[1:], strict=True):
        inner = _Body(body.lowering, Computation("", False, instruction.line))
        callee = body.lowering.callee(name, instruction.line)
        result = inner.call(callee, instruction.line, [operand], instruction.shape, op_name(instruction))
        inner.operations.append(["stablehlo.return", _leaves(result), [], [], {}, [], ""])
        regions.append([[], [], inner.operations])
    is_if = shapes[0].element == "pred"
    name = "stablehlo.if" if is_if else "stablehlo.case"
    return body.emit(name, instruction, operands[:1], {}, regions)


def _bitcast(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    """The same memory in another shape: elements are listed as they lie, cut anew, and put in the result's order."""
    (given,), shape = shapes, instruction.shape
    if given.element != shape.element or given.dims == shape.dims:
        name = "stablehlo.bitcast" if given.element == shape.element else "stablehlo.bitcast_convert"
        return body.emit(name, instruction, operands, {})
    to_memory, from_memory = _major_to_minor(given), _major_to_minor(shape)
    tree = operands[0]
    if to_memory != sorted(to_memory):
        given = replace(given, dims=tuple(given.dims[dim] for dim in to_memory), layout=None)
        tree = body.emit("stablehlo.transpose", instruction, [tree], {"permutation": to_memory}, shape=given)
    lying = replace(shape, dims=tuple(shape.dims[dim] for dim in from_memory), layout=None)
    if lying.dims != given.dims:
        tree = body.emit("stablehlo.reshape", instruction, [tree], {}, shape=lying)
    if from_memory != sorted(from_memory):
        order = [from_memory.index(dim) for dim in range(len(from_memory))]
        tree = body.emit("stablehlo.transpose", instruction, [tree], {"permutation": order})
    return tree


def _major_to_minor(shape: Shape) -> list[int]:
    return list(range(len(shape.dims))) if shape.layout is None else list(reversed(shape.layout))


def _custom_call(body: _Body, instruction: Instruction, operands: list[Tree], shapes: list[Shape]) -> Tree:
    """A kernel by name: what is known of it is written as the operation that it computes, with its scratch apart."""
    target = quoted(instruction.attributes.get("custom_call_target", ""))
    kernel = known_kernel(instruction, target, shapes)
    if kernel is None:
        attributes: dict[str, Any] = {"call_target_name": target}
        config = configuration(instruction)
        if config:
            attributes["backend_config"] = config
        given = quoted(instruction.attributes.get("backend_config", ""))
        if not config and len(given) < MOST_CONFIGURATION:
            attributes["backend_config"] = given
        kernel_name = re.search(r'kernel_name[\\"]*\s*[:=]\s*[\\"]*([\w.-]+)', str(dict(instruction.attributes)))
        if kernel_name:
            attributes["kernel_name"] = kernel_name[1]
        if "sharding" in instruction.attributes:
            attributes["sharding"] = instruction.attributes["sharding"]
        return body.emit("stablehlo.custom_call", instruction, operands, attributes)
    shape = instruction.shape
    result = shape if shape.parts is None else shape.parts[0]
    made = body.emit(kernel.name, instruction, operands[: kernel.operand_count], kernel.attributes, shape=result)
    if shape.parts is None:
        return made
    scratch = []
    for part in shape.parts[1:]:
        scratch.append(body.emit("stablehlo.constant", instruction, (), {"value": {"size": 0}}, shape=part))
    return (made, *scratch)


_LOWERINGS: dict[str, Callable[[_Body, Instruction, list[Tree], list[Shape]], Tree]] = {
    "constant": _constant,
    "tuple": _tuple,
    "get-tuple-element": _element,
    "call": _call,
    "fusion": _call,
    "while": _while,
    "conditional": _conditional,
    "bitcast": _bitcast,
    "custom-call": _custom_call,
}
"""The opcodes that are more than an operation with attributes."""
