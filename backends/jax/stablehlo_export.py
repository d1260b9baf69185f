"""A lowered StableHLO module with the plan's layouts as Shardy annotations: a mesh, and a sharding per argument."""

from __future__ import annotations

import re

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from phaze.backends.jax.parameter_storage import choose_storage
from phaze.plan.plan import Plan

__all__ = ["annotated_module"]


def annotated_module(plan: Plan, lowered: jax.stages.Lowered) -> str:
    """The text of a lowered function, annotated; it has been verified and parsed again."""
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        axes = ", ".join(f'"{name}"={size}' for name, size in _mesh_sizes(plan).items())
        with ir.InsertionPoint.at_block_begin(copy.body):
            sdy.MeshOp("mesh", ir.Attribute.parse(f"#sdy.mesh<[{axes}]>"))
        # The name is an MLIR attribute: its text is "main" with quotes around it, perhaps with a suffix.
        main = next(op for op in copy.body.operations if "main" in str(op.attributes["sym_name"])[:7])
        main.attributes["arg_attrs"] = _argument_attributes(plan, main)
        copy.operation.verify()
        text = str(copy)
        ir.Module.parse(text).operation.verify()
    return text


def _argument_attributes(plan: Plan, main: ir.Operation) -> ir.ArrayAttr:
    """The attributes that the arguments of the main function have, with their shardings."""
    # The argument with the parameters: of the first parameter that is split, or else the first argument.
    parameters_argument = next(iter(plan.layouts.parameters), "").partition(".")[0]
    attributes = []
    for index, argument in enumerate(main.arguments):
        given = main.arg_attrs[index] if "arg_attrs" in main.attributes else ir.DictAttr.get({})
        named = {attribute.name: attribute.attr for attribute in given}
        shape = tuple(ir.RankedTensorType(argument.type).shape)
        name = _argument_name(str(argument.location))
        parameters_argument = parameters_argument or name.partition(".")[0]
        is_parameter = name.partition(".")[0] == parameters_argument
        axes = _parameter_axes(plan, name, shape) if is_parameter else _batch_axes(plan, shape)
        dims = ", ".join("{}" if axis is None else f'{{"{axis}"}}' for axis in axes)
        sharding = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{dims}]>")
        attributes.append(ir.DictAttr.get({**named, "sdy.sharding": sharding}))
    return ir.ArrayAttr.get(attributes)


def _mesh_sizes(plan: Plan) -> dict[str, int]:
    return {"dp": plan.strategy.dp, "tp": plan.strategy.tp}


def _argument_name(location: str) -> str:
    """The dotted path of an argument from where JAX says that it comes from."""
    source = re.search(r'loc\("([^"]*)"', location)
    return ".".join(re.findall(r"\w+", source[1])) if source else ""


def _batch_axes(plan: Plan, shape: tuple[int, ...]) -> list[str | None]:
    """The axis of each dimension of an argument that is no parameter: the copies divide the samples."""
    is_batch = bool(shape) and shape[0] == plan.question.global_batch_size
    return ["dp" if is_batch and dim == 0 else None for dim in range(len(shape))]


def _parameter_axes(plan: Plan, name: str, shape: tuple[int, ...]) -> list[str | None]:
    """The axis of each dimension of a parameter, as planned; none where the parameter is stored in another shape."""
    strategy, layouts = plan.strategy, plan.layouts.parameters
    splits = layouts.get(name, layouts.get(f"{name}[0]", ()))
    storage = choose_storage(
        name,
        shape,
        splits,
        is_stacked=f"{name}[0]" in layouts,
        tp=strategy.tp,
        shards=strategy.dp if strategy.zero else 1,
    )
    if storage.stored_shape != shape:
        return [None] * len(shape)
    return list(storage.partition_spec("tp", "dp") if strategy.zero == 3 else storage.partition_spec("tp"))
