"""Which arguments are parameters, batch and optimizer state, and which results belong to them.

What the caller says by name or index holds. The rest is inferred from the module:

1. the loss is the scalar floating point result that is called so, or the first that depends on a matrix product;
2. a result belongs to the argument of the same path; where results have no names, all results but the loss (and other
   floating point scalars: metrics) must have the types of one run of consecutive arguments, and of one such run only;
3. an argument with a result of its own is a parameter where the loss depends on it, and optimizer state where it does
   not but its result depends on more than the forward;
4. an argument without one that the loss depends on is the batch, unless it is a scalar or a random key.

A module without such results is a forward: its parameters must be named, by the caller or by their path (`params...`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.errors import ImportModelError
from phaze.frontends.stablehlo.dataflow import Net
from phaze.frontends.stablehlo.interpreter import Walked
from phaze.frontends.stablehlo.name_scopes import tokens
from phaze.frontends.stablehlo.symbols import Value, tensors_of
from phaze.ir import DType, Role

__all__ = ["Parts", "Selector", "infer_parts", "read_selectors", "select"]

Selector = int | str

_PARAMETER_WORDS = frozenset({"params", "parameters", "param", "weights", "variables", "model", "state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Roles of the arguments by index, the result that is the loss, and the result of each parameter.

    `is_updated` where these results are the new parameters and not their gradients.
    """

    roles: tuple[Role, ...]
    loss: int | None
    gradients: Mapping[int, int]
    is_updated: bool = False


def read_selectors(options: Mapping[str, object], name: str) -> list[Selector] | None:
    """The option that says which arguments are parameters or batch, or None; raises ImportModelError."""
    given = options.get(name)
    if given is None:
        return None
    listed: list[Any] = list(given) if isinstance(given, list | tuple | set | frozenset | range) else [given]
    if not all(isinstance(one, int | str) and not isinstance(one, bool) for one in listed):
        raise ImportModelError(f"{name} is {given!r}; expected argument numbers or pytree paths.")
    return listed


def select(selectors: Iterable[Selector], names: Sequence[str], what: str) -> set[int]:
    """The arguments that selectors mean: an index, or a path that is theirs or leads to them."""
    found: set[int] = set()
    for selector in selectors:
        if isinstance(selector, int) and not isinstance(selector, bool):
            if not 0 <= selector < len(names):
                raise ImportModelError(f"{what} names argument {selector}, but there are {len(names)} arguments.")
            found.add(selector)
            continue
        path = tokens(str(selector))
        matching = {index for index, name in enumerate(names) if path and tokens(name)[: len(path)] == path}
        if not matching:
            raise ImportModelError(
                f"{what} names {selector!r}, but no argument has this path; they are {_listed(names)}."
            )
        found |= matching
    return found


def infer_parts(
    walked: Walked,
    names: Sequence[str],
    parameters: Sequence[Selector] | None,
    batch: Sequence[Selector] | None,
) -> Parts:
    """Roles as the caller says, and as the module shows where the caller says nothing."""
    net = Net(walked.recorder.builder.ops)
    results = [_ids(value) for value in walked.results]
    loss = _find_loss(walked, net, results)
    forward = net.ancestors(results[loss]) if loss is not None else set()
    read = net.read_by(forward) | (set(results[loss]) if loss is not None else set())
    pairs = _pairs(walked, names, loss)
    chosen = None if parameters is None else select(parameters, names, "parameters")
    given_batch = None if batch is None else select(batch, names, "batch")
    if chosen is None and not pairs:
        chosen = _by_word(names, given_batch, loss is not None)
    roles = []
    for index, value in enumerate(walked.arguments):
        is_read = bool(set(_ids(value)) & read)
        if (chosen is not None and index in chosen) or (
            chosen is None and index in pairs and is_read and value.dtype.is_float
        ):
            roles.append(Role.PARAMETER)
        elif given_batch is not None and index in given_batch:
            roles.append(Role.BATCH)
        elif index in pairs:
            depends = net.ancestors(results[pairs[index]]) - forward
            roles.append(Role.OPTIMIZER_STATE if depends and not is_read else Role.OTHER)
        elif given_batch is None and (is_read or loss is None) and not _is_small(value):
            roles.append(Role.BATCH)
        else:
            roles.append(Role.OTHER)
    gradients = {index: pairs[index] for index, role in enumerate(roles) if role is Role.PARAMETER and index in pairs}
    return Parts(
        roles=tuple(roles), loss=loss, gradients=gradients, is_updated=_is_updated(net, walked, results, gradients)
    )


def _ids(value: Value) -> list[str]:
    return [tensor.id for tensor in tensors_of((value,))]


def _is_small(value: Value) -> bool:
    """A scalar or a random key, not data."""
    return not value.shape or (value.dtype is DType.INT32 and value.shape in ((2,), (4,)))


def _find_loss(walked: Walked, net: Net, results: Sequence[Sequence[str]]) -> int | None:
    scalars = [i for i, value in enumerate(walked.results) if not value.shape and value.dtype.is_float and results[i]]
    named = [index for index in scalars if "loss" in walked.function.results[index].name.lower()]
    matrix = {op.id for op in net.ops if op.kind.is_matrix}
    computed = [index for index in (*named, *scalars) if net.ancestors(results[index]) & matrix]
    return computed[0] if computed else scalars[0] if scalars else None


def _pairs(walked: Walked, names: Sequence[str], loss: int | None) -> dict[int, int]:
    """The result that belongs to each argument."""
    kinds = [(value.shape, value.dtype) for value in walked.arguments]
    results = {i: (value.shape, value.dtype) for i, value in enumerate(walked.results) if i != loss}
    if not results:
        return {}
    by_name = _pairs_by_name(walked, names, kinds, results)
    if by_name:
        return by_name
    order, starts = _run(kinds, list(results), walked)
    if not starts:
        order, starts = _run(
            kinds, [i for i in results if walked.results[i].shape or not results[i][1].is_float], walked
        )
    if len(starts) > 1:
        raise ImportModelError(
            f"it is ambiguous which arguments the {len(order)} results belong to (they fit those from "
            f"{', '.join(map(str, starts[:5]))}); pass parameters= and batch= by name or index. Arguments: "
            f"{_listed(names)}."
        )
    return {starts[0] + place: index for place, index in enumerate(order)} if starts else {}


def _run(kinds: Sequence[object], order: list[int], walked: Walked) -> tuple[list[int], list[int]]:
    """Where among the arguments the types of these results stand one after another."""
    wanted = [(walked.results[index].shape, walked.results[index].dtype) for index in order]
    count = len(wanted)
    return order, [start for start in range(len(kinds) - count + 1) if count and kinds[start : start + count] == wanted]


def _pairs_by_name(
    walked: Walked, names: Sequence[str], kinds: Sequence[object], results: Mapping[int, object]
) -> dict[int, int]:
    """By the path behind the name of an argument, and behind `result` and the place in what a function returns."""
    by_path: dict[tuple[tuple[str, ...], object], list[int]] = {}
    for index, name in enumerate(names):
        by_path.setdefault((tokens(name)[1:], kinds[index]), []).append(index)
    found: dict[int, int] = {}
    for index, kind in results.items():
        words = tokens(walked.function.results[index].name)
        for skipped in (1, 2):
            matching = by_path.get((words[skipped:], kind), ())
            if len(words) > skipped and len(matching) == 1 and matching[0] not in found:
                found[matching[0]] = index
                break
    return found


def _by_word(names: Sequence[str], batch: set[int] | None, has_loss: bool) -> set[int]:
    """Parameters of a forward: everything that is not batch, or what the first word of a path tells."""
    if batch is not None:
        return set(range(len(names))) - batch
    told = {index for index, name in enumerate(names) if tokens(name)[:1] and tokens(name)[0] in _PARAMETER_WORDS}
    if told:
        return told
    what = "has no gradients among its results" if has_loss else "has no scalar loss among its results"
    raise ImportModelError(
        f"the module {what}, so its parameters cannot be told from its batch; pass parameters= or batch= by name or "
        f"index. Arguments: {_listed(names)}."
    )


def _is_updated(net: Net, walked: Walked, results: Sequence[Sequence[str]], gradients: Mapping[int, int]) -> bool:
    """Whether most results of parameters are computed from the parameter itself, element by element."""
    count = 0
    for argument, result in gradients.items():
        shape = walked.arguments[argument].shape
        own = set(_ids(walked.arguments[argument]))
        count += _reads_itself(net, results[result], own, shape)
    return count * 2 > len(gradients)


def _reads_itself(net: Net, start: Sequence[str], own: set[str], shape: tuple[int, ...]) -> bool:
    waiting, seen = list(start), set(start)
    while waiting:
        op = net.producers.get(waiting.pop())
        if op is None or (op.kind not in ("elementwise", "copy", "view")):
            continue
        for tensor_id in op.inputs:
            if tensor_id in own:
                return True
            if tensor_id not in seen:
                seen.add(tensor_id)
                waiting.append(tensor_id)
    return False


def _listed(names: Sequence[str]) -> str:
    shown = [f"{index} {name}" for index, name in enumerate(names)]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
