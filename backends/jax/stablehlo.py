"""A lowered module with the plan's layouts as Shardy annotations: a mesh, and a sharding for every argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze.capabilities import Capabilities
from phaze.errors import PlanError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["StableHloTarget"]


@dataclass(frozen=True, slots=True)
class StableHloTarget:
    """Writes `model.mlir`: what `jax.jit(...).lower(...)` gave, annotated."""

    name: str = "stablehlo"
    libraries: tuple[str, ...] = ("jax",)

    @property
    def capabilities(self) -> Capabilities:
        """One stage; ZeRO as layouts of arguments."""
        return Capabilities(zero_stages=frozenset({0, 1, 2, 3}))

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The annotated module; it has been verified and parsed again."""
        if not hasattr(model, "compiler_ir"):
            raise PlanError(
                f"stablehlo annotates a lowered function, and got {type(model).__name__}; pass one: "
                "plan.export('stablehlo', jax.jit(jax.value_and_grad(loss)).lower(params, batch))."
            )
        return {"model.mlir": _annotated(plan, model)}


def _annotated(plan: Plan, lowered: Any) -> str:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        axes = ", ".join(f'"{name}"={size}' for name, size in _mesh(plan).items())
        with ir.InsertionPoint.at_block_begin(copy.body):
            sdy.MeshOp("mesh", ir.Attribute.parse(f"#sdy.mesh<[{axes}]>"))
        main = next(op for op in copy.body.operations if "main" in str(op.attributes["sym_name"])[:7])
        first = next(iter(plan.layouts.parameters), "").partition(".")[0]
        attributes = []
        for index, argument in enumerate(main.arguments):
            given = main.arg_attrs[index] if "arg_attrs" in main.attributes else ir.DictAttr.get({})
            known = {one.name: one.attr for one in given}
            shape = tuple(ir.RankedTensorType(argument.type).shape)
            name = _name(str(argument.location))
            first = first or name.partition(".")[0]
            dims = ", ".join("{}" if axis is None else f'{{"{axis}"}}' for axis in _axes(plan, name, first, shape))
            sharding = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{dims}]>")
            attributes.append(ir.DictAttr.get({**known, "sdy.sharding": sharding}))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        copy.operation.verify()
        text = str(copy)
        ir.Module.parse(text).operation.verify()
    return text


def _mesh(plan: Plan) -> dict[str, int]:
    return {"dp": plan.strategy.dp, "tp": plan.strategy.tp}


def _name(location: str) -> str:
    """The dotted path of an argument from where JAX says that it comes from."""
    found = re.search(r'loc\("([^"]*)"', location)
    return ".".join(re.findall(r"\w+", found[1])) if found else ""


def _axes(plan: Plan, name: str, first: str, shape: tuple[int, ...]) -> list[str | None]:
    """The axis of each dimension: of a parameter as planned, of other arguments dp for what the copies divide."""
    from phaze.backends.jax.stored import store

    chosen = plan.strategy
    if name.partition(".")[0] != first:
        is_batch = bool(shape) and shape[0] == plan.question.global_batch_size
        return ["dp" if is_batch and dim == 0 else None for dim in range(len(shape))]
    layers = plan.layouts.parameters
    splits = layers.get(name, layers.get(f"{name}[0]", ()))
    stored = store(
        name, shape, splits, is_stacked=f"{name}[0]" in layers, tensor=chosen.tp, data=chosen.dp if chosen.zero else 1
    )
    if stored.stored_shape != shape:
        return [None] * len(shape)
    return list(stored.spec(data="dp" if chosen.zero == 3 else "", tensor="tp"))
