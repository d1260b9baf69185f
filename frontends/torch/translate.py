"""From a trace to a graph: every node becomes ops with rules, in its module and its phase.

What depends on no input and no parameter (masks, position tables) is made once and not per step: such nodes become
arguments of the graph. What comes out empty is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from phaze.frontends.torch.aten import OPERATORS
from phaze.frontends.torch.aten.elementwise import elementwise
from phaze.frontends.torch.call import CONSTANT, Call, Place, TensorId, Unsupported, Value
from phaze.frontends.torch.capture import ArgumentKind, Capture
from phaze.frontends.torch.dtypes import to_dtype
from phaze.frontends.torch.paths import find_repeated_calls, module_path
from phaze.ir import Graph, GraphBuilder, OpKind, Phase, Role
from phaze.ir.shape_rules import elementwise_rule, opaque_rule

__all__ = ["translate"]

_ROLES = {
    ArgumentKind.PARAMETER: Role.PARAMETER,
    ArgumentKind.BUFFER: Role.OTHER,
    ArgumentKind.INPUT: Role.BATCH,
    ArgumentKind.TANGENT: Role.OTHER,
}


def translate(capture: Capture, module: Any, *, name: str, batch_size: int) -> Graph:
    """The graph of a capture; all parameters of the module are among its arguments, used or not."""
    parameters = dict(module.named_parameters())
    work = _Translation(capture, GraphBuilder(name, micro_batch_size=batch_size), find_repeated_calls(capture, module))
    for parameter, value in parameters.items():
        work.builder.argument(parameter, tuple(value.shape), Role.PARAMETER, to_dtype(value.dtype))
    for node in capture.nodes:
        work.visit(node)
    for parameter, node in capture.gradients.items():
        gradient = work.values.get(node)
        if isinstance(gradient, str) and work.builder.tensors[gradient].shape == work.builder.tensors[parameter].shape:
            work.builder.gradients.append((parameter, gradient))
    outputs = dict.fromkeys(value for node in capture.outputs if isinstance(value := work.value(node), str))
    read = {tensor_id for op in work.builder.ops for tensor_id in op.inputs}
    for tensor_id in [known for known in work.builder.tensors if known.startswith(CONSTANT)]:
        if tensor_id not in read and tensor_id not in outputs:
            del work.builder.tensors[tensor_id]
    notes = [f"captured from torch by {capture.recipe}"]
    if work.folded:
        notes.append(f"{work.folded} ops on constants (masks, tables) are arguments, computed once")
    return work.builder.build(outputs, notes)


@dataclass(slots=True)
class _Translation:
    capture: Capture
    builder: GraphBuilder
    repeated: frozenset[str]
    values: dict[Any, Value] = field(default_factory=dict)
    varying: set[Any] = field(default_factory=set)
    forward_ops: dict[int, str] = field(default_factory=dict)
    forward_nodes: frozenset[Any] | None = None
    folded: int = 0

    def visit(self, node: Any) -> None:
        if node.op == "placeholder":
            self._visit_argument(node)
        elif node.op == "get_attr":
            self.values[node] = None
        elif node.op == "call_function":
            self._visit_call(node)

    def _visit_argument(self, node: Any) -> None:
        what, value = self.capture.arguments[node], node.meta.get("val")
        if not hasattr(value, "shape") or math.prod(value.shape) == 0:
            self.values[node] = None
            return
        tensor_id = what.name
        if what.kind is not ArgumentKind.PARAMETER or tensor_id not in self.builder.tensors:
            tensor_id = self._unused(tensor_id)
            self.builder.argument(tensor_id, tuple(value.shape), _ROLES[what.kind], to_dtype(value.dtype))
        self.values[node] = tensor_id
        if what.kind is not ArgumentKind.BUFFER:
            self.varying.add(node)

    def _visit_call(self, node: Any) -> None:
        import operator

        if node.target is operator.getitem:
            source, index = node.args
            value = self.values.get(source)
            self.values[node] = value[index] if isinstance(value, tuple) else value
            if source in self.varying:
                self.varying.add(node)
            return
        if not self._is_folded(node):
            self.varying.add(node)
            self.values[node] = self._translated(node)

    def _is_folded(self, node: Any) -> bool:
        """Whether a node depends on constants alone; it stays pending until something that varies reads it."""
        is_random = "nondeterministic_seeded" in {
            str(tag).rpartition(".")[2] for tag in getattr(node.target, "tags", ())
        }
        if is_random or any(source in self.varying for source in node.all_input_nodes):
            return False
        self.folded += 1
        return True

    def _constant(self, node: Any) -> Value:
        """The argument that stands for a folded node."""
        value = node.meta.get("val")
        if not hasattr(value, "shape") or math.prod(value.shape) == 0:
            return None
        tensor_id = self._unused(f"{CONSTANT}{node.name}")
        return self.builder.argument(tensor_id, tuple(value.shape), Role.OTHER, to_dtype(value.dtype))

    def value(self, node: Any) -> Value:
        """What a node became; a constant becomes an argument when it is first read."""
        if node not in self.values:
            self.values[node] = self._constant(node)
        return self.values[node]

    def _translated(self, node: Any) -> Value:
        values = node.meta.get("val")
        outputs = tuple(values) if isinstance(values, list | tuple) else (values,)
        call = Call(
            name=_operator_name(node.target),
            arguments=self._arguments(node),
            outputs=outputs,
            builder=self.builder,
            place=self._place(node),
        )
        if not call.made():
            return None
        result = self._apply(call, node)
        if len(outputs) > 1 or isinstance(values, list | tuple):
            result = result if isinstance(result, tuple) else (result,)
        if call.first_op and call.place.phase is Phase.FORWARD and "seq_nr" in node.meta:
            self.forward_ops.setdefault(node.meta["seq_nr"], self.builder.ops[self._index(call.first_op)].id)
        return result

    def _index(self, op_id: str) -> int:
        return next(i for i in range(len(self.builder.ops) - 1, -1, -1) if self.builder.ops[i].id == op_id)

    def _apply(self, call: Call, node: Any) -> Value:
        translate_call = OPERATORS.get(call.name)
        if translate_call is None and _is_pointwise(node.target):
            translate_call = elementwise
        if translate_call is not None:
            count = len(self.builder.ops)
            try:
                return translate_call(call)
            except Unsupported:
                self._forget(count)
                call.first_op = ""
        outputs, inputs = call.made(), call.tensors()
        if not inputs and len(outputs) == 1:  # the gradient of something empty, or a new tensor
            return call.emit(OpKind.COPY, "zeros", elementwise_rule(call.out_shape(outputs[0])), outputs=outputs)
        rule = opaque_rule([call.shape(i) for i in inputs], [call.out_shape(index) for index in outputs])
        return call.emit(OpKind.OPAQUE, call.name, rule, *inputs, outputs=outputs)

    def _forget(self, count: int) -> None:
        """Take back what a table added before it found that it does not know the form."""
        for op in self.builder.ops[count:]:
            for tensor_id in op.outputs:
                del self.builder.tensors[tensor_id]
        del self.builder.ops[count:]

    def _arguments(self, node: Any) -> dict[str, Any]:
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        names += [f"argument_{index}" for index in range(len(names), len(node.args))]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        if schema is not None:
            defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            given = {**defaults, **given}
        return {name: self._argument(value) for name, value in given.items()}

    def _argument(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.fx.Node):
            known = self.value(value)
            return TensorId(known) if isinstance(known, str) else known
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        return value

    def _place(self, node: Any) -> Place:
        phase = self._phase(node)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        module = module_path(stack, self.repeated)
        if phase is Phase.FORWARD:
            return Place(module=module)
        if not stack and self.capture.recipe != "make_fx":
            return Place(phase=phase)
        return Place(module=module, phase=phase, gradient_of=self.forward_ops.get(node.meta.get("seq_nr", -1), ""))

    def _phase(self, node: Any) -> Phase:
        tag = node.meta.get("partitioner_tag")
        if tag is not None:
            return Phase.BACKWARD if tag == "is_backward" else Phase.FORWARD
        if not self.capture.has_backward:
            return Phase.FORWARD
        if self.forward_nodes is None:
            self.forward_nodes = _ancestors(self.capture.outputs[0])
        return Phase.FORWARD if node in self.forward_nodes else Phase.BACKWARD

    def _unused(self, tensor_id: str) -> str:
        candidate, count = tensor_id, 1
        while candidate in self.builder.tensors:
            count += 1
            candidate = f"{tensor_id}.{count}"
        return candidate


def _ancestors(node: Any) -> frozenset[Any]:
    found, waiting = set(), [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(current.all_input_nodes)
    return frozenset(found)


def _operator_name(target: Any) -> str:
    """`addmm` of aten.addmm.default, and likewise for operators of other libraries."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(target, "__name__", target)).replace("<", "").replace(">", "")


def _is_pointwise(target: Any) -> bool:
    return any(str(tag).endswith("pointwise") for tag in getattr(target, "tags", ()))
