"""`phaze.import_graph`: from a model to its graph, by whichever frontend knows the model, and where its loss may be.

A text that is a known model's name is that model, and so is another spelling of it, such as a hub's, where nothing else
is called so; `+lora16` behind the text of a model adds adapters of rank 16 (`phaze.ir.low_rank_adapters`). Anything
else goes to the frontends: plugins first, then the built-in
ones; the first that accepts the model imports it. A frontend that refuses with a PhazeError has answered; one that
fails in any other way is reported by its plugin's name, and the next one gets its chance.

`loss_candidates` says where the loss may be in what a model returns, the same for who captures a model and who runs it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phaze.errors import ImportModelError, PhazeError, PluginError, UnknownNameError, near_names
from phaze.installed import installed_plugins, missing_libraries
from phaze.name_spelling import hub_spellings, spelled_alike

if TYPE_CHECKING:
    from phaze.hooks import Offer, PluginManager
    from phaze.interfaces import Frontend, ModelFactory
    from phaze.ir import Graph

__all__ = ["import_graph", "import_with_plugins", "last_compiled", "load_graph", "loss_candidates", "remember_compiled"]

MOST_REMEMBERED = 64
"""How many graphs of `torch.compile` are kept: enough for the pieces of one model, few enough to forget old ones."""

_ENDINGS_OF_FILES = frozenset({".json", ".py", ".pt", ".pt2", ".hlo", ".txt", ".mlir", ".pb", ".safetensors"})
"""A text that ends so is the path of a file, and never another spelling of a model's name."""

_OTHER_MODELS = "`phaze models` lists them; any other model can be given as its config.json, a torch module or a dump."

_COMPILED: deque[Graph] = deque(maxlen=MOST_REMEMBERED)
"""The compiler calls the backend from inside itself: what it captured can reach nobody but through this record."""


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """The graph that `Graph.save` wrote; raises FormatError where the file is missing, damaged or another format."""
    from phaze.ir.graph_json import read_graph

    return read_graph(path)


def import_graph(model: object, inputs: object = None, *, frontend: str | None = None, **options: object) -> Graph:
    """The operator graph of a model.

    `model` is the name of a known model, the path of a file, or an object of a framework. `inputs` are example inputs,
    which modules and functions need. `frontend` names the frontend to use; by default it is the first one that accepts
    the model. `options` go to the frontend; a known model takes `sequence_length`.

    Raises UnknownNameError for an unknown model or frontend, ImportModelError if no frontend accepts the model, or if
    the one that does cannot import it or does not know an option, and PluginError if the named frontend fails.
    """
    return import_with_plugins(installed_plugins(), model, inputs, frontend=frontend, options=options)


def import_with_plugins(
    plugins: PluginManager,
    model: object,
    inputs: object,
    *,
    frontend: str | None,
    options: Mapping[str, object],
    needs_backward: bool = True,
) -> Graph:
    """`import_graph` with the plugins of a given manager.

    Without `needs_backward` the graph of a known model may come without one, for whoever derives it anyway.
    """
    if frontend is not None:
        return _import_by_named(plugins.frontends().offer(frontend), model, inputs, options)
    if isinstance(model, str) and model in plugins.named_models().names:
        if inputs is not None:
            raise ImportModelError(f"{model!r} describes its own inputs; pass sequence_length instead of inputs.")
        return _build_named(plugins.named_models().offer(model), options, needs_backward)
    if isinstance(model, str) and "+" in model and not os.path.exists(model):
        from phaze.ir.low_rank_adapters import add_adapters, split_adapter_text

        base, adapters = split_adapter_text(model)
        if adapters is not None:
            return add_adapters(import_with_plugins(plugins, base, inputs, frontend=None, options=options), adapters)
    failed: list[tuple[Offer[Frontend], Exception]] = []
    for offer in _accepting(plugins, model):
        _check_options(offer, options, offer.value.options)
        _check_libraries(offer)
        try:
            return _checked(offer.value.import_model(model, inputs, options))
        except (PhazeError, MemoryError):
            raise
        except Exception as error:
            plugins.report_failure(offer.origin, f"frontend {offer.name!r}", error)
            failed.append((offer, error))
    if failed:
        raise _plugin_error("frontend", *failed[0]) from failed[0][1]
    named = _spelled_otherwise(plugins, model) if inputs is None else None
    if named is not None:
        return _build_named(named, options, needs_backward)
    raise _nobody_imports(plugins, model)


def _spelled_otherwise(plugins: PluginManager, model: object) -> Offer[ModelFactory] | None:
    """The known model that a text means in another spelling, such as ``meta-llama/Llama-3.1-8B``; no file's path."""
    if not isinstance(model, str) or os.path.exists(model) or os.path.splitext(model)[1] in _ENDINGS_OF_FILES:
        return None
    offers = plugins.named_models()
    others = {other: offer.name for offer in offers for other in getattr(offer.value, "also_called", ())}
    for spelling in hub_spellings(model):
        name = spelled_alike(spelling, offers.names, others)
        if name is not None:
            return offers.offer(name)
    return None


def _accepting(plugins: PluginManager, model: object) -> Iterator[Offer[Frontend]]:
    for offer in plugins.frontends():
        try:
            is_accepted = offer.value.accepts(model)
        except Exception as error:
            plugins.report_failure(offer.origin, f"frontend {offer.name!r}", error)
            continue
        if is_accepted:
            yield offer


def _import_by_named(offer: Offer[Frontend], model: object, inputs: object, options: Mapping[str, object]) -> Graph:
    _check_options(offer, options, offer.value.options)
    _check_libraries(offer)
    try:
        return _checked(offer.value.import_model(model, inputs, options))
    except (PhazeError, MemoryError):
        raise
    except Exception as error:
        raise _plugin_error("frontend", offer, error) from error


def _build_named(offer: Offer[ModelFactory], options: Mapping[str, object], needs_backward: bool) -> Graph:
    _check_options(offer, options, ["sequence_length"])
    sequence_length = options.get("sequence_length")
    if sequence_length is not None and (not isinstance(sequence_length, int) or sequence_length < 1):
        raise ValueError(f"sequence_length is {sequence_length!r}; expected a positive integer")
    build = offer.value if needs_backward else getattr(offer.value, "forward", offer.value)
    try:
        return _checked(build(sequence_length=sequence_length))
    except (PhazeError, MemoryError):
        raise
    except Exception as error:
        raise _plugin_error("model", offer, error) from error


def _checked(answer: object) -> Graph:
    """The graph that a frontend answered with, with its sequence factors marked."""
    from phaze.ir import Graph
    from phaze.ir.factor_following import mark_sequences

    if not isinstance(answer, Graph):
        raise TypeError(f"it answered with a {type(answer).__name__}; expected a Graph")
    return mark_sequences(answer)


def _check_options(offer: Offer[object], options: Mapping[str, object], known: Iterable[str]) -> None:
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise ImportModelError(f"{offer.name!r} takes no option {option!r}; it takes {takes}.")


def _check_libraries(offer: Offer[Frontend]) -> None:
    missing = missing_libraries(offer.value.libraries)
    if missing:
        raise ImportModelError(
            f"frontend {offer.name!r} needs {' and '.join(missing)}, not installed here; install what is missing, for "
            f"a built-in frontend with pip install 'phaze-plugin[{missing[0].partition('.')[0]}]'."
        )


def _plugin_error(what: str, offer: Offer[object], error: Exception) -> PluginError:
    return PluginError(f"{what} {offer.name!r} ({offer.origin}) failed: {type(error).__name__}: {error}")


def _nobody_imports(plugins: PluginManager, model: object) -> PhazeError:
    error: PhazeError
    if isinstance(model, str) and not os.path.exists(model):
        names = plugins.named_models().names
        near = [near for text in hub_spellings(model) for near in near_names(text, names)][-3:]
        error = UnknownNameError("model or missing file", model, names, _OTHER_MODELS, near=list(dict.fromkeys(near)))
    elif isinstance(model, str | os.PathLike) and os.path.isdir(model):
        error = ImportModelError(
            f"the folder {os.fspath(model)!r} holds no config.json and no dump of XLA; pass a file that "
            "describes a model."
        )
    else:
        what = repr(model) if isinstance(model, str | os.PathLike) else f"an object of type {type(model).__qualname__}"
        error = ImportModelError(
            f"no frontend imports {what}. Frontends: {', '.join(plugins.frontends().names) or 'none'}. "
            f"{_advice_for(model)}"
        )
    for failure in plugins.failures:
        error.add_note(str(failure))
    return error


def _advice_for(model: object) -> str:
    """What somebody probably meant who gave something that is no model."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".py"):
        return f"A program is no model: write python:{os.fspath(model)}:NAME, NAME being a model in it; this runs it."
    if isinstance(model, type):
        return f"A class is no model: pass an instance, {model.__name__}(...)."
    if callable(model):
        return "A function is taken as a JAX loss once jax is imported; of torch pass a torch.nn.Module."
    return "Pass a known model's name, a file or an object that one of them imports, or install a plugin that does."


def last_compiled() -> tuple[Graph, ...]:
    """The graphs that `torch.compile(backend="phaze")` captured last in this process, at most 64, the oldest first.

    A model may be several graphs. The notes of a graph say which backend runs it.
    """
    return tuple(_COMPILED)


def remember_compiled(graph: Graph) -> None:
    """Keep a graph for `last_compiled`."""
    _COMPILED.append(graph)


def loss_candidates(output: Any) -> list[Any]:
    """What may be the loss, likeliest first: the output itself, what it has under `loss`, the members of a tuple.

    A caller takes the first that is a scalar with a gradient: models return (loss, logits) and (logits, loss) alike.
    """
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, tuple | list):
        candidates.extend(output)
    return candidates
