"""A lowered StableHLO module with the plan's layouts: by Shardy's mesh and shardings, or by XLA's older annotations.

Arguments have the plan's layouts. A result that has the path and the shape of an argument (a gradient, a new parameter)
has that argument's layout; a scalar is whole on all devices; any other result is left to the compiler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import jax
from jaxlib._hlo import hlo_module_from_text
from jaxlib._jax.mlir import mlir_module_to_xla_computation
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from phaze.backends.jax.parameter_storage import choose_storage
from phaze.plan.plan import Plan

__all__ = ["annotated_module", "hlo_text"]


def annotated_module(plan: Plan, lowered: jax.stages.Lowered, *, uses_shardy: bool = True) -> str:
    """The text of a lowered function, annotated; it has been verified and parsed again."""
    module = lowered.compiler_ir("stablehlo")
    sizes = _mesh_sizes(plan)
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        # The name is an MLIR attribute: its text is "main" with quotes around it, perhaps with a suffix.
        main = next(op for op in copy.body.operations if "main" in str(op.attributes["sym_name"])[:7])
        arguments = _argument_axes(plan, main)
        for kind, layouts in (
            ("arg_attrs", [axes for _, axes in arguments]),
            ("res_attrs", _result_axes(main, arguments)),
        ):
            main.attributes[kind] = _attributes(main, kind, layouts, sizes, uses_shardy)
        if uses_shardy:
            axes = ", ".join(f'"{name}"={size}' for name, size in sizes.items())
            with ir.InsertionPoint.at_block_begin(copy.body):
                sdy.MeshOp("mesh", ir.Attribute.parse(f"#sdy.mesh<[{axes}]>"))
        partitions = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), math.prod(sizes.values()))
        copy.operation.attributes["mhlo.num_partitions"] = partitions
        copy.operation.verify()
        text = str(copy)
        ir.Module.parse(text).operation.verify()
    return text


def hlo_text(plan: Plan, module: str) -> str:
    """An annotated module as HLO text; Shardy's annotations stand there as attributes for the frontend."""
    text = mlir_module_to_xla_computation(module, use_tuple_args=False, return_tuple=False).as_hlo_text()
    head, _, body = text.partition("\n")
    # The translation leaves the number of partitions out.
    partitioned = f"{head}, num_partitions={math.prod(_mesh_sizes(plan).values())}\n{body}"
    hlo_module_from_text(partitioned)
    return partitioned


def _argument_axes(plan: Plan, main: ir.Operation) -> list[tuple[str, list[str | None]]]:
    """The path of each argument of the main function, and the mesh axis of each of its dimensions."""
    # The argument with the parameters: of the first parameter that is split, or else the first argument.
    parameters_argument = next(iter(plan.layouts.parameters), "").partition(".")[0]
    axes = []
    for argument in main.arguments:
        shape = tuple(ir.RankedTensorType(argument.type).shape)
        name = _argument_name(str(argument.location))
        parameters_argument = parameters_argument or name.partition(".")[0]
        is_parameter = name.partition(".")[0] == parameters_argument
        axes.append((name, _parameter_axes(plan, name, shape) if is_parameter else _batch_axes(plan, shape)))
    return axes


def _result_axes(
    main: ir.Operation, arguments: Sequence[tuple[str, list[str | None]]]
) -> list[list[str | None] | None]:
    """The mesh axis of each dimension of each result; None for a result that is left to the compiler."""
    shapes = [tuple(ir.RankedTensorType(argument.type).shape) for argument in main.arguments]
    known = {
        (name.partition(".")[2], shape): axes for (name, axes), shape in zip(arguments, shapes, strict=True) if shape
    }
    layouts: list[list[str | None] | None] = []
    for index, result in enumerate(ir.FunctionType(main.type).results):
        shape = tuple(ir.RankedTensorType(result).shape)
        told = main.res_attrs[index] if "res_attrs" in main.attributes else ir.DictAttr.get({})
        words = re.findall(r"\w+", str(told["jax.result_info"])) if "jax.result_info" in told else []
        # A path such as result[1]['layers']['q'] ends like the argument's.
        paths = [".".join(words[start:]) for start in range(len(words))]
        alike = next((known[path, shape] for path in paths if (path, shape) in known), None)
        layouts.append([] if not shape else alike)
    return layouts


def _attributes(
    main: ir.Operation,
    kind: str,
    layouts: Sequence[list[str | None] | None],
    sizes: Mapping[str, int],
    uses_shardy: bool,
) -> ir.ArrayAttr:
    """The attributes of the arguments or results of the main function, with their layouts."""
    attributes = []
    for index, axes in enumerate(layouts):
        given = ir.ArrayAttr(main.attributes[kind])[index] if kind in main.attributes else ir.DictAttr.get({})
        named = {attribute.name: attribute.attr for attribute in ir.DictAttr(given)}
        if axes is not None and uses_shardy:
            dims = ", ".join("{}" if axis is None else f'{{"{axis}"}}' for axis in axes)
            named["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{dims}]>")
        elif axes is not None:
            named["mhlo.sharding"] = ir.StringAttr.get(_tiles(axes, sizes))
        attributes.append(ir.DictAttr.get(named))
    return ir.ArrayAttr.get(attributes)


def _tiles(axes: Sequence[str | None], sizes: Mapping[str, int]) -> str:
    """A layout as XLA wrote it before Shardy: tiles per dimension, and the order of the devices that hold them."""
    used = [axis for axis in axes if axis is not None and sizes[axis] > 1]
    if not used:
        return "{replicated}"
    mesh = [name for name, size in sizes.items() if size > 1]
    order = [*used, *(name for name in mesh if name not in used)]
    tiles = [1 if axis is None else sizes[axis] for axis in axes]
    copies = math.prod(sizes[name] for name in mesh if name not in used)
    tiles += [copies] if copies > 1 else []
    dims = ",".join(str(sizes[name]) for name in mesh)
    turned = f"T({','.join(str(mesh.index(name)) for name in order)})" if order != mesh else ""
    devices = f"[{dims}]{turned}" if turned else f"[{math.prod(sizes.values())}]"
    rest = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]<={devices}{rest}}}"


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
