"""Infer which arguments of a module are parameters, batch and optimizer state, and which results are gradients.

What the caller says by name or index holds (`read_selectors`, `select`). The rest is inferred by `infer_roles`:

1. the loss is the scalar floating point result that is called so, or the first that depends on a matrix product
   (`_find_loss`), or what the caller names;
2. a result belongs to the argument of the same path, or to the one that it is written over (donated arguments); where
   results have neither names nor aliases, all results but the loss (and other floating point scalars: metrics) must
   have the types of one run of consecutive arguments, and of one such run only (`_pairs`);
3. an argument with a result of its own is a parameter where the loss depends on it, and optimizer state where it does
   not but its result depends on more than the forward;
4. an argument without one that the loss depends on is the batch, unless it is a scalar or a random key.

A module with a loss and without such results is a forward: its parameters are told by their path (`params...`), by
integers among the arguments, which are data (`_parameters_by_type`), or by the dimension that samples are counted along
(`data_arguments.py`); where neither is there, the caller must say.
A module without a loss whose results are arguments minus something that all of them depend on is a train step that
keeps its loss to itself (`_unseen_forward`). Any other is a program for inference, or a fragment: its roles are guessed
where they are not told, and a note says so (`_guessed_parameters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phaze.errors import ImportModelError
from phaze.frontends.stablehlo.data_arguments import find_data
from phaze.frontends.stablehlo.dataflow import Dataflow, find_gradient, forward_of_gradients
from phaze.frontends.stablehlo.interpreter import SymbolicRun
from phaze.frontends.stablehlo.name_scopes import path_keys
from phaze.frontends.stablehlo.symbols import Value, tensors_of
from phaze.ir import DType, OpKind, Role

__all__ = ["ModuleRoles", "Selector", "infer_roles", "read_selectors", "select", "select_result"]

Selector = int | str
"""What a caller names an argument by: its index, or a path that is its own or leads to it."""

MOST_LISTED = 8
"""The most arguments that a message lists: enough to see how they are named."""

MOST_STATES_EACH = 5
"""The most arrays that a step updates for each parameter, itself among them: more are caches and no optimizer."""

MOST_LISTED_RUNS = 5
"""The most possible places of the parameters that a message lists."""

_PARAMETER_WORDS = frozenset({"params", "parameters", "param", "weights", "variables", "model", "state"})
"""First words of paths by which JAX programs name their parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRoles:
    """What the arguments and results of a module are.

    `arguments` has the role of every argument, `loss` the index of the result that is the loss, `gradients` the result
    of each parameter. Where `is_updated`, these results are the new parameters and not their gradients. `notes` say
    what was guessed.
    """

    arguments: tuple[Role, ...]
    loss: int | None
    gradients: Mapping[int, int]
    is_updated: bool = False
    notes: tuple[str, ...] = ()


def read_selectors(options: Mapping[str, object], name: str) -> list[Selector] | None:
    """The option that says which arguments are parameters or batch, or None; raises ImportModelError."""
    given = options.get(name)
    if given is None:
        return None
    listed = list(given) if isinstance(given, list | tuple | set | frozenset | range) else [given]
    selectors = [item for item in listed if isinstance(item, int | str) and not isinstance(item, bool)]
    if len(selectors) != len(listed):
        raise ImportModelError(f"{name} is {given!r}; expected argument numbers or pytree paths.")
    return selectors


def select(selectors: Iterable[Selector], names: Sequence[str], what: str) -> set[int]:
    """The arguments that these selectors mean; `what` names the option in messages. Raises ImportModelError."""
    selected: set[int] = set()
    for selector in selectors:
        if isinstance(selector, int) and not isinstance(selector, bool):
            if not 0 <= selector < len(names):
                raise ImportModelError(f"{what} names argument {selector}, but there are {len(names)} arguments.")
            selected.add(selector)
            continue
        path = path_keys(str(selector))
        matching = {index for index, name in enumerate(names) if path and path_keys(name)[: len(path)] == path}
        if not matching:
            raise ImportModelError(
                f"{what} names {selector!r}, but no argument has this path; they are {_listed(names)}."
            )
        selected |= matching
    return selected


def infer_roles(
    run: SymbolicRun,
    names: Sequence[str],
    parameters: Sequence[Selector] | None,
    batch: Sequence[Selector] | None,
    loss: Selector | None = None,
) -> ModuleRoles:
    """Roles as the caller says, and as the module shows where the caller says nothing."""
    dataflow = Dataflow(run.recorder.builder.ops, run.recorder.handed_on)
    results = [_ids(value) for value in run.results]
    loss_index = _find_loss(run, dataflow, results) if loss is None else select_result(loss, run)
    pairs = _pairs(run, names, loss_index)
    chosen_parameters = None if parameters is None else select(parameters, names, "parameters")
    chosen_batch = None if batch is None else select(batch, names, "batch")
    notes: tuple[str, ...] = ()
    forward = dataflow.ancestors(results[loss_index]) if loss_index is not None else set()
    if loss_index is None and chosen_parameters is None:
        forward, notes = _unseen_forward(run, dataflow, results, pairs)
    is_step = loss_index is not None or bool(forward)
    trained = {a for a, result in pairs.items() if not _is_made_forward(dataflow, results[result], forward)}
    unchanged = {a for a in trained if results[pairs[a]] == _ids(run.arguments[a])}
    trained -= unchanged
    if chosen_parameters is None and (not trained or not is_step):
        if loss is None and not _is_trainable(dataflow, results, loss_index):
            loss_index, forward, is_step = None, set(), False
        ends = [] if loss_index is None else results[loss_index]
        chosen_parameters, notes = _parameters_of_forward(run, dataflow, names, chosen_batch, ends, pairs)
    read_forward = dataflow.read_by(forward) | (set(results[loss_index]) if loss_index is not None else set())
    returned = _returned_data(run, dataflow, unchanged, trained, [] if loss_index is None else results[loss_index])
    roles = []
    for index, value in enumerate(run.arguments):
        is_read = bool(set(_ids(value)) & read_forward)
        if chosen_parameters is not None:
            is_parameter = index in chosen_parameters
        else:
            is_kept = index in trained or index in unchanged - returned
            is_parameter = is_kept and is_read and value.dtype.is_float
        if is_parameter:
            roles.append(Role.PARAMETER)
        elif chosen_batch is not None and index in chosen_batch:
            roles.append(Role.BATCH)
        elif index in pairs and index not in returned:
            is_updated_apart = not is_read and bool(dataflow.ancestors(results[pairs[index]]) - forward)
            roles.append(Role.OPTIMIZER_STATE if is_updated_apart and is_step else Role.OTHER)
        else:
            is_data = (is_read or not is_step) and not _is_scalar_or_key(value)
            roles.append(Role.BATCH if chosen_batch is None and is_data else Role.OTHER)
    gradients: dict[int, int] = {}
    if is_step:
        is_trained = [index for index, role in enumerate(roles) if role is Role.PARAMETER]
        gradients = {index: pairs[index] for index in is_trained if index in trained | unchanged}
    is_updated = _is_updated(dataflow, run, results, gradients)
    return ModuleRoles(arguments=tuple(roles), loss=loss_index, gradients=gradients, is_updated=is_updated, notes=notes)


def _unseen_forward(
    run: SymbolicRun, dataflow: Dataflow, results: Sequence[Sequence[str]], pairs: Mapping[int, int]
) -> tuple[set[str], tuple[str, ...]]:
    """The ops of the forward of a step that has no loss among its results, and a note; none where it is no step.

    It is a step where new values of arguments are computed from these element by element, and from gradients that all
    depend on products which read most of these arguments.
    """
    arrays = {a: r for a, r in pairs.items() if run.arguments[a].shape and run.arguments[a].dtype.is_float}
    updated = {a: r for a, r in arrays.items() if _reads(dataflow, results[r], set(_ids(run.arguments[a])))}
    forward = _forward_of_updates(run, dataflow, results, updated)
    read = dataflow.read_by(forward)
    is_read = [bool(set(_ids(run.arguments[argument])) & read) for argument in updated]
    has_products = any(op.kind.is_matrix for op in dataflow.ops if op.id in forward)
    if not has_products or sum(is_read) * MOST_STATES_EACH < len(updated):
        return set(), ()
    return forward, ("the step does not return its loss: what all gradients depend on counts as the forward",)


def _forward_of_updates(
    run: SymbolicRun, dataflow: Dataflow, results: Sequence[Sequence[str]], updated: Mapping[int, int]
) -> set[str]:
    """The ops that the gradients behind the new values of arguments have in common; `updated` has their results."""
    arguments = frozenset(tensor_id for value in run.arguments for tensor_id in _ids(value))
    found = [find_gradient(dataflow, tensor_id, arguments) for r in updated.values() for tensor_id in results[r]]
    return forward_of_gradients(dataflow, [gradient for gradient in found if gradient is not None])


def _returned_data(
    run: SymbolicRun, dataflow: Dataflow, unchanged: set[int], trained: set[int], loss: Sequence[str]
) -> set[int]:
    """The arguments that come back unchanged and are data: torch_xla returns its inputs, JAX what is frozen."""
    if not unchanged or not loss:
        return set()
    data = find_data(run, dataflow, loss, trained) or set()
    return {index for index in unchanged if index in data or not run.arguments[index].dtype.is_float}


def select_result(selector: Selector, run: SymbolicRun) -> int:
    """The result that the caller names as the loss, by its index or a word of its path; raises ImportModelError."""
    names = [result.name for result in run.function.results]
    if isinstance(selector, int) and 0 <= selector < len(names):
        return selector
    matching = [index for index, name in enumerate(names) if str(selector) in path_keys(name)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(
        f"{index} {name or 'unnamed'} {list(run.results[index].shape)}"
        for index, name in enumerate(names[:MOST_LISTED])
    )
    raise ImportModelError(f"loss names {selector!r}, which is not one of the {len(names)} results: {listed}.")


def _is_made_forward(dataflow: Dataflow, result: Sequence[str], forward: set[str]) -> bool:
    """Whether a result is made on the way to the loss: a cache that is written, and no gradient."""
    made_by = dataflow.ancestors(result)
    return bool(made_by) and made_by <= forward


def _is_trainable(dataflow: Dataflow, results: Sequence[Sequence[str]], loss: int | None) -> bool:
    """Whether a scalar result comes out of matrix products, as a loss does; a counter or a norm does not."""
    return loss is not None and any(
        op.kind.is_matrix for op in dataflow.ops if op.id in dataflow.ancestors(results[loss])
    )


def _ids(value: Value) -> list[str]:
    return [tensor.id for tensor in tensors_of((value,))]


def _is_scalar_or_key(value: Value) -> bool:
    """Whether a value is a scalar or a random key, which is two or four integers, and so no data."""
    return not value.shape or (value.dtype is DType.INT32 and value.shape in ((2,), (4,)))


def _find_loss(run: SymbolicRun, dataflow: Dataflow, results: Sequence[Sequence[str]]) -> int | None:
    """The result that is the loss; a scalar that depends on no product is taken only where there is no other.

    One that is called so goes first. Where none is, and new values of arguments tell the gradients, it is no metric of
    these (the norm of all gradients): what it is made of made every gradient, and of such results it has most products.
    """
    scalars = [i for i, value in enumerate(run.results) if not value.shape and value.dtype.is_float and results[i]]
    named = [index for index in scalars if "loss" in run.function.results[index].name.lower()]
    named.sort(key=lambda index: path_keys(run.function.results[index].name)[-1:] != ("loss",))
    matrix = {op.id for op in dataflow.ops if op.kind.is_matrix}
    products = {index: dataflow.ancestors(results[index]) & matrix for index in (*named, *scalars)}
    computed = [index for index, product_ids in products.items() if product_ids]
    if not computed:
        return scalars[0] if scalars else None
    if computed[0] in named or len({len(products[index]) for index in computed}) == 1:
        return computed[0]
    updated = {argument: result for argument, result in run.aliases if run.arguments[argument].shape}
    forward = _forward_of_updates(run, dataflow, results, updated)
    made_forward = [index for index in computed if products[index] <= forward]
    return max(made_forward, key=lambda index: len(products[index]), default=computed[0])


def _pairs(run: SymbolicRun, names: Sequence[str], loss: int | None) -> dict[int, int]:
    """The result that belongs to each argument: by name, else by a run of equal types."""
    kinds = [(value.shape, value.dtype) for value in run.arguments]
    results = {i: (value.shape, value.dtype) for i, value in enumerate(run.results) if i != loss}
    if not results:
        return {}
    by_name = _pairs_by_name(run, names, kinds, results)
    if by_name:
        return by_name
    aliased = {argument: result for argument, result in run.aliases if results.get(result) == kinds[argument]}
    if aliased:
        return aliased
    matched = list(results)
    starts = _runs_of(kinds, list(results.values()))
    if not starts:  # once more without metrics
        matched = [index for index, (shape, dtype) in results.items() if shape or not dtype.is_float]
        starts = _runs_of(kinds, [results[index] for index in matched])
    if len(starts) > 1 and loss is None:
        return {}
    if len(starts) > 1:
        raise ImportModelError(
            f"it is ambiguous which arguments the {len(matched)} results belong to (they fit those from "
            f"{', '.join(map(str, starts[:MOST_LISTED_RUNS]))}); pass parameters= and batch= by name or index: "
            f"{_readings(starts, len(matched), len(names))}. Arguments: {_listed(names)}."
        )
    return {starts[0] + offset: index for offset, index in enumerate(matched)} if starts else {}


def _readings(starts: Sequence[int], count: int, argument_count: int) -> str:
    """The first two ways to read which arguments are parameters, as options of the command line."""
    readings = []
    for start in starts[:2]:
        inside = range(start, start + count)
        parameters = " ".join(f"--parameters {index}" for index in inside[:MOST_LISTED])
        others = [index for index in range(argument_count) if index not in inside]
        batch = " ".join(f"--batch {index}" for index in others[:MOST_LISTED])
        readings.append(f"{parameters} {batch}".strip())
    return ", or ".join(readings)


def _runs_of(kinds: Sequence[object], wanted: Sequence[object]) -> list[int]:
    """Where among the types of arguments the wanted ones stand one after another."""
    count = len(wanted)
    return [start for start in range(len(kinds) - count + 1) if count and kinds[start : start + count] == wanted]


def _pairs_by_name(
    run: SymbolicRun, names: Sequence[str], kinds: Sequence[object], results: Mapping[int, object]
) -> dict[int, int]:
    """Pairs of arguments and results of the same path.

    The name of the argument does not count, nor do `result` and the number of the item in what the function returns.
    """
    by_path: dict[tuple[tuple[str, ...], object], list[int]] = {}
    for index, name in enumerate(names):
        by_path.setdefault((path_keys(name)[1:], kinds[index]), []).append(index)
    pairs: dict[int, int] = {}
    for index, kind in results.items():
        keys = path_keys(run.function.results[index].name)
        for skipped in (1, 2):
            matching = by_path.get((keys[skipped:], kind), ())
            if len(keys) > skipped and len(matching) == 1 and matching[0] not in pairs:
                pairs[matching[0]] = index
                break
    return pairs


def _parameters_of_forward(
    run: SymbolicRun,
    dataflow: Dataflow,
    names: Sequence[str],
    batch: set[int] | None,
    loss: Sequence[str],
    pairs: Mapping[int, int],
) -> tuple[set[int], tuple[str, ...]]:
    """The parameters of a module without gradients, and a note where they are guessed; raises where a loss needs more.

    They are everything that is not batch, what the first words of paths tell, all floats beside integers, or all that
    do not have the dimension of samples. `loss` is empty where there is none.
    """
    if batch is not None:
        return set(range(len(names))) - batch, ()
    named = {
        index for index, name in enumerate(names) if path_keys(name)[:1] and path_keys(name)[0] in _PARAMETER_WORDS
    }
    if named and len(named) < len(names):  # XLA calls every argument `param` where it knows no name
        return named, ()
    typed = _parameters_by_type(run, pairs)
    if typed is not None:
        told = f"{len(typed)} floating point arguments beside integers are taken for the parameters"
        return typed, (f"{told}; pass parameters= or batch= if they are not",)
    data = find_data(run, dataflow, loss) if loss else None
    if data is not None:
        listed = ", ".join(names[index] for index in sorted(data)[:MOST_LISTED])
        told = f"{listed} are taken for the batch, because their first dimension goes through all products"
        floats = {index for index, value in enumerate(run.arguments) if value.dtype.is_float and index not in pairs}
        return floats - data, (f"{told}; pass parameters= or batch= if they are not",)
    if loss:
        raise ImportModelError(_ambiguous_forward(run, names))
    return _guessed_parameters(run, pairs)


def _parameters_by_type(run: SymbolicRun, pairs: Mapping[int, int]) -> set[int] | None:
    """All floating point arrays that are not written over, where integers of several dimensions are the data."""
    arrays = {index: value for index, value in enumerate(run.arguments) if not _is_scalar_or_key(value)}
    has_ids = any("int" in value.dtype.value and len(value.shape) > 1 for value in arrays.values())
    floats = {index for index, value in arrays.items() if value.dtype.is_float and index not in pairs}
    return floats if has_ids and floats else None


def _guessed_parameters(run: SymbolicRun, pairs: Mapping[int, int]) -> tuple[set[int], tuple[str, ...]]:
    """A guess for a module that trains nothing: arguments with the leading size of a result are data."""
    sizes = {value.shape[0] for value in run.results if value.shape}
    arrays = [i for i, value in enumerate(run.arguments) if value.shape and value.dtype.is_float and i not in pairs]
    guessed = {index for index in arrays if run.arguments[index].shape[0] not in sizes}
    if len(guessed) == len(arrays):
        guessed -= {min(guessed, default=-1)}
    note = (
        f"the module has no loss; {len(guessed)} of its {len(run.arguments)} arguments are taken for parameters by "
        "their shapes, which is a guess: pass parameters= or batch= to say"
    )
    return guessed, (note,)


def _ambiguous_forward(run: SymbolicRun, names: Sequence[str]) -> str:
    """Two readings of a loss whose parameters are not told, with the flags for each."""
    arrays = [index for index, value in enumerate(run.arguments) if not _is_scalar_or_key(value)]
    readings = ""
    if len(arrays) > 1:
        first, last = arrays[0], arrays[-1]
        readings = (
            f"It could be a step on the data {last} {names[last]} (--batch {last}), or on {first} {names[first]} "
            f"(--batch {first}), all others being parameters. "
        )
    return (
        "the module has no gradients among its results, so its parameters cannot be told from its batch. "
        f"{readings}To say so, pass parameters= or batch= by name or index. Arguments: {_listed(names)}."
    )


def _is_updated(
    dataflow: Dataflow, run: SymbolicRun, results: Sequence[Sequence[str]], gradients: Mapping[int, int]
) -> bool:
    """Whether most results of parameters are computed from the parameter itself, element by element."""
    count = sum(
        _reads(dataflow, results[result], set(_ids(run.arguments[argument]))) for argument, result in gradients.items()
    )
    return count * 2 > len(gradients)


def _reads(dataflow: Dataflow, results: Sequence[str], parameter: set[str]) -> bool:
    """Whether these results are computed from a parameter without products or reductions on the way."""
    waiting, seen = list(results), set(results)
    while waiting:
        op = dataflow.producers.get(waiting.pop())
        if op is None or op.kind not in (OpKind.ELEMENTWISE, OpKind.COPY, OpKind.VIEW):
            continue
        for tensor_id in op.inputs:
            if tensor_id in parameter:
                return True
            if tensor_id not in seen:
                seen.add(tensor_id)
                waiting.append(tensor_id)
    return False


def _listed(names: Sequence[str]) -> str:
    shown = [f"{index} {name}" for index, name in enumerate(names)]
    more = f" and {len(shown) - MOST_LISTED} more" if len(shown) > MOST_LISTED else ""
    return ", ".join(shown[:MOST_LISTED]) + more
