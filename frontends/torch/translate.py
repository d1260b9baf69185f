"""Translating a trace of torch into a graph: every node becomes ops with factor rules, in its module and its phase.

What depends on no input and no parameter (masks, position tables) is computed once and not in every step: such nodes
become arguments of the graph. Results without elements are left out. The path of an op's module is the one that its
node remembers; where a module is called several times, the calls are numbered.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from phaze.frontends.torch.aten import OPERATORS
from phaze.frontends.torch.aten.elementwise import elementwise
from phaze.frontends.torch.capture import ArgumentKind, Capture, CaptureMethod
from phaze.frontends.torch.fake_model import path_in_model
from phaze.frontends.torch.operator_call import Location, OperatorCall, TensorId, Unsupported, Value, to_dtype
from phaze.ir import Graph, GraphBuilder, OpKind, Phase, Role
from phaze.ir.graph_builder import elementwise_rule, opaque_rule

__all__ = ["translate_capture"]

ModuleStack = Mapping[str, tuple[str, str]]
"""The modules that an operator was called in, outermost first: a key for each call (`block@2`), its path, its class."""

_ROLES = {
    ArgumentKind.PARAMETER: Role.PARAMETER,
    ArgumentKind.BUFFER: Role.OTHER,
    ArgumentKind.INPUT: Role.BATCH,
    ArgumentKind.TANGENT: Role.OTHER,
}


def translate_capture(capture: Capture, module: torch.nn.Module, *, name: str, batch_size: int) -> Graph:
    """Make the graph of a capture; all parameters of the module are among its arguments, used or not."""
    builder = GraphBuilder(name, micro_batch_size=batch_size)
    translation = _Translation(capture, builder, _modules_called_again(capture, module))
    for parameter, value in module.named_parameters():
        is_frozen = value.is_floating_point() and not value.requires_grad
        builder.argument(parameter, tuple(value.shape), Role.PARAMETER, to_dtype(value.dtype), is_frozen=is_frozen)
    for node in capture.nodes:
        translation.visit(node)
    for parameter, node in capture.gradients.items():
        gradient = translation.values.get(node)
        if isinstance(gradient, str) and builder.tensors[gradient].shape == builder.tensors[parameter].shape:
            builder.gradients.append((parameter, gradient))
    outputs = dict.fromkeys(value for node in capture.outputs if isinstance(value := translation.value(node), str))
    read = {tensor_id for op in builder.ops for tensor_id in op.inputs}
    for tensor_id in translation.constants - read - outputs.keys():
        del builder.tensors[tensor_id]
    notes = [f"captured from torch by {capture.method}"]
    if translation.folded:
        notes.append(f"{translation.folded} ops on constants (masks, tables) are arguments, computed once")
    return builder.build(outputs, notes)


@dataclass(slots=True)
class _Translation:
    """The graph so far, and what each node of the trace became.

    `varying` are the nodes that depend on an input or a parameter, or on chance. `constants` are the ids of arguments
    that stand for nodes which do not. `forward_ops` gives the first op of a forward call by the number that autograd
    gave it: a node of the backward has the number of the forward call whose gradient it computes.
    """

    capture: Capture
    builder: GraphBuilder
    called_again: frozenset[str]
    values: dict[torch.fx.Node, Value] = field(default_factory=dict)
    varying: set[torch.fx.Node] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    forward_ops: dict[int, str] = field(default_factory=dict)
    forward_nodes: frozenset[torch.fx.Node] | None = None
    folded: int = 0

    def visit(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            self._visit_argument(node)
        elif node.op == "get_attr":
            self.values[node] = None
        elif node.op == "call_function":
            self._visit_call(node)

    def value(self, node: torch.fx.Node) -> Value:
        """What a node became; a constant becomes an argument when it is first read."""
        if node not in self.values:
            self.values[node] = self._constant(node)
        return self.values[node]

    def _visit_argument(self, node: torch.fx.Node) -> None:
        argument, value = self.capture.arguments[node], node.meta.get("val")
        if not _has_elements(value):
            self.values[node] = None
            return
        tensor_id = argument.name
        if argument.kind is not ArgumentKind.PARAMETER or tensor_id not in self.builder.tensors:
            tensor_id = self._unused(tensor_id)
            self.builder.argument(tensor_id, tuple(value.shape), _ROLES[argument.kind], to_dtype(value.dtype))
        self.values[node] = tensor_id
        if argument.kind is not ArgumentKind.BUFFER:
            self.varying.add(node)

    def _visit_call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            value = self.values.get(source)
            self.values[node] = value[index] if isinstance(value, tuple) else value
            if source in self.varying:
                self.varying.add(node)
        elif _is_random(node) or any(source in self.varying for source in node.all_input_nodes):
            self.varying.add(node)
            self.values[node] = self._translated(node)
        else:  # a constant: it has no value until something that varies reads it
            self.folded += 1

    def _constant(self, node: torch.fx.Node) -> Value:
        """The argument that stands for a node which depends on constants alone."""
        value = node.meta.get("val")
        if not _has_elements(value):
            return None
        tensor_id = self._unused(f"constant.{_operator_name(node.target)}")
        self.constants.add(tensor_id)
        return self.builder.argument(tensor_id, tuple(value.shape), Role.OTHER, to_dtype(value.dtype))

    def _translated(self, node: torch.fx.Node) -> Value:
        values = node.meta.get("val")
        has_several = isinstance(values, list | tuple)
        call = OperatorCall(
            name=_operator_name(node.target),
            arguments=self._arguments(node),
            outputs=tuple(values) if has_several else (values,),
            builder=self.builder,
            location=self._location(node),
            constants=self.constants,
        )
        if not call.nonempty_outputs():
            return None
        result = self._emitted(call, node)
        if has_several and not isinstance(result, tuple):
            result = (result,)
        if call.first_op and call.location.phase is Phase.FORWARD and "seq_nr" in node.meta:
            self.forward_ops.setdefault(node.meta["seq_nr"], call.first_op)
        return result

    def _emitted(self, call: OperatorCall, node: torch.fx.Node) -> Value:
        """Emit a call's ops by the table that knows its operator; an operator that no table knows is opaque."""
        translate = OPERATORS.get(call.name)
        if translate is None and _is_pointwise(node):
            translate = elementwise
        if translate is not None:
            count = len(self.builder.ops)
            try:
                return translate(call)
            except Unsupported:
                self._take_back(count)
                call.first_op = ""
        outputs, inputs = call.nonempty_outputs(), call.tensors()
        if not inputs and len(outputs) == 1:  # the gradient of something empty, or a new tensor
            return call.emit(OpKind.COPY, "zeros", elementwise_rule(call.out_shape(outputs[0])), outputs=outputs)
        rule = opaque_rule(
            [call.shape(tensor_id) for tensor_id in inputs], [call.out_shape(index) for index in outputs]
        )
        return call.emit(OpKind.OPAQUE, call.name, rule, *inputs, outputs=outputs)

    def _take_back(self, count: int) -> None:
        """Take back the ops after the first `count`: a table added them before it met a form that it does not know."""
        for op in self.builder.ops[count:]:
            for tensor_id in op.outputs:
                del self.builder.tensors[tensor_id]
        del self.builder.ops[count:]

    def _arguments(self, node: torch.fx.Node) -> dict[str, object]:
        """A call's arguments by the names of the operator's schema, its defaults included."""
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        names += [f"argument_{index}" for index in range(len(names), len(node.args))]
        arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        if schema is not None:
            defaults = {
                argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
            }
            arguments = {**defaults, **arguments}
        return {name: self._argument(value) for name, value in arguments.items()}

    def _argument(self, value: object) -> object:
        if isinstance(value, torch.fx.Node):
            translated = self.value(value)
            return TensorId(translated) if isinstance(translated, str) else translated
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        return value

    def _location(self, node: torch.fx.Node) -> Location:
        phase = self._phase(node)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        module = _module_path(stack, self.called_again)
        if phase is Phase.FORWARD:
            return Location(module=module)
        if not stack and self.capture.method is not CaptureMethod.MAKE_FX:
            return Location(phase=phase)
        gradient_of = self.forward_ops.get(node.meta.get("seq_nr", -1), "")
        return Location(module=module, phase=phase, gradient_of=gradient_of)

    def _phase(self, node: torch.fx.Node) -> Phase:
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


def _has_elements(value: object) -> bool:
    """Whether a recorded value is a tensor that is not empty."""
    return hasattr(value, "shape") and math.prod(value.shape) > 0


def _ancestors(node: torch.fx.Node) -> frozenset[torch.fx.Node]:
    """The node and everything that it is computed from."""
    ancestors, waiting = set(), [node]
    while waiting:
        current = waiting.pop()
        if current not in ancestors:
            ancestors.add(current)
            waiting.extend(current.all_input_nodes)
    return frozenset(ancestors)


def _operator_name(target: torch.fx.node.Target) -> str:
    """`addmm` of aten.addmm.default, and likewise for operators of other libraries."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(target, "__name__", target)).replace("<", "").replace(">", "")


def _tags(node: torch.fx.Node) -> set[str]:
    """What torch says of an operator: `pointwise`, `nondeterministic_seeded` and so on."""
    return {str(tag).rpartition(".")[2] for tag in getattr(node.target, "tags", ())}


def _is_pointwise(node: torch.fx.Node) -> bool:
    return "pointwise" in _tags(node)


def _is_random(node: torch.fx.Node) -> bool:
    return "nondeterministic_seeded" in _tags(node)


def _modules_called_again(capture: Capture, module: torch.nn.Module) -> frozenset[str]:
    """Paths of modules that are called more than once and are made of several modules with parameters.

    A norm or an activation that a block uses twice does not count: only what could be a block by itself does.
    """
    called_again: set[str] = set()
    for node in capture.nodes:
        stack: ModuleStack = node.meta.get("nn_module_stack") or {}
        called_again.update(path_in_model(path) for key, (path, _) in stack.items() if "@" in str(key))
    return frozenset(
        name
        for name, part in module.named_modules()
        if name in called_again and sum(1 for inner in part.modules() if inner._parameters) > 1
    )


def _module_path(stack: ModuleStack | None, called_again: frozenset[str]) -> str:
    """The path of the innermost module in the model; `block@2.norm` inside the third call of `block`."""
    if not stack:
        return ""
    innermost, _ = list(stack.values())[-1]
    path = path_in_model(innermost)
    for key, (outer, _) in stack.items():
        outer_path = path_in_model(outer)
        if outer_path in called_again:
            call = str(key).rpartition("@")[2] if "@" in str(key) else "0"
            return f"{outer_path}@{call}{path[len(outer_path) :]}"
    return path
