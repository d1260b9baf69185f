"""The commands about models: `phaze models` and `phaze import`.

`phaze models` lists the models known by name, with their family, parameters and sequence length. `phaze import` tells
what a model is made of, before anything is planned.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, positive_integer, show
from phaze.commands.question_arguments import add_file_arguments, file_options

if TYPE_CHECKING:
    from phaze.hooks import Offer, PluginManager
    from phaze.interfaces import ModelFactory, ModelFacts
    from phaze.ir import Graph, Layer, Tensor

__all__ = ["import_model", "models"]


def _configure_models(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("text", nargs="?", metavar="TEXT", help="only models whose name or family has this text in it")
    add_json_option(parser)


def _run_models(arguments: Namespace, console: Console) -> int:
    """List the models, smallest first in each family; no graph is built."""
    from phaze.errors import UnknownNameError
    from phaze.installed import installed_plugins

    plugins = installed_plugins()
    offers = [(offer, _facts(plugins, offer)) for offer in plugins.named_models()]
    wanted = [(offer, facts) for offer, facts in offers if _matches(offer.name, facts, arguments.text)]
    if not wanted:
        raise UnknownNameError("model", arguments.text, [offer.name for offer, _ in offers])
    wanted.sort(key=lambda row: (row[1].family, row[1].parameters) if row[1] else ("~", 0))
    document = {
        "models": [
            {"name": offer.name, "origin": str(offer.origin), **(asdict(facts) if facts else {})}
            for offer, facts in wanted
        ]
    }
    columns = ["model", "family", ">parameters", ">active", ">sequence"]
    table = plain_table(columns, [_model_row(offer, facts) for offer, facts in wanted])
    legend = "active: the parameters that a token meets, of routed experts only the chosen ones.\n"
    legend += "MODEL+lora16 is a model with LoRA of rank 16, MODEL+lora16:q_proj,v_proj that of some modules only."
    show(console, arguments, document, table, legend)
    return ExitCode.FINE


def _facts(plugins: PluginManager, offer: Offer[ModelFactory]) -> ModelFacts | None:
    """What the factory says of its model; plugins need not say anything, and one that fails is reported."""
    from phaze.interfaces import ModelFacts

    describe = getattr(offer.value, "facts", None)
    if not callable(describe):
        return None
    try:
        facts = describe()
    except Exception as error:
        plugins.report_failure(offer.origin, f"model {offer.name!r}", error)
        return None
    return facts if isinstance(facts, ModelFacts) else None


def _matches(name: str, facts: ModelFacts | None, text: str | None) -> bool:
    return text is None or text.casefold() in f"{name} {facts.family if facts else ''}".casefold()


def _model_row(offer: Offer[ModelFactory], facts: ModelFacts | None) -> tuple[str, ...]:
    if facts is None:
        return offer.name, f"({offer.origin})", "?", "?", "?"
    active = "" if facts.active_parameters == facts.parameters else _billions(facts.active_parameters)
    sizes = (_billions(facts.parameters), active, f"{facts.sequence_length:,}")
    return offer.name, facts.family, *sizes


def _billions(count: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count / 1e6:.3g}M"


models = Command(
    name="models",
    group=CommandGroup.MODELS,
    summary="list models known by name with family, parameters and sequence length",
    configure=_configure_models,
    run=_run_models,
)


def _configure_import(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a known name (none: list them), a config.json or its folder, a saved graph, an HLO or StableHLO file, or "
        "a folder that XLA dumped",
    )
    parser.add_argument(
        "--sequence-length",
        type=positive_integer,
        metavar="N",
        help="positions of a sequence (default: the model's own)",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=positive_integer,
        metavar="N",
        help="sequences per microbatch (default: as saved, else 1)",
    )
    parser.add_argument("--out", metavar="FILE", help="save the graph as JSON")
    add_json_option(parser)
    add_file_arguments(parser)


def _run_import(arguments: Namespace, console: Console) -> int:
    """Import a model, show what it is made of, and save it where asked."""
    from phaze.model_import import import_graph

    if arguments.model is None:
        return models.run(Namespace(text=None, json=arguments.json), console)
    graph = import_graph(arguments.model, **_options(arguments))
    if arguments.micro_batch_size is not None:
        graph = graph.with_micro_batch(arguments.micro_batch_size)
    if arguments.out is not None:
        graph.save(arguments.out)
    document = summarize(graph) | ({} if arguments.out is None else {"saved_to": arguments.out})
    show(console, arguments, document, *_renderables(graph, arguments.out))
    return ExitCode.FINE


def _options(arguments: Namespace) -> dict[str, Any]:
    """What was asked for."""
    length = arguments.sequence_length
    return file_options(arguments) | ({} if length is None else {"sequence_length": length})


def summarize(graph: Graph) -> dict[str, object]:
    """The figures of a graph under the graph's own names; layers are counted."""
    phases = dict.fromkeys(op.phase for op in graph.ops)
    return {
        "name": graph.name,
        "micro_batch_size": graph.micro_batch_size,
        "inputs": {tensor.id: list(tensor.shape) for tensor in _inputs(graph)},
        "layers": len(graph.layers),
        "distinct_layers": len(graph.distinct_layers),
        "parameter_count": graph.parameter_count,
        "matmul_flops": {phase.value: graph.matmul_flops(phase) for phase in phases},
        "coverage": asdict(graph.coverage()),
        "notes": list(graph.notes),
    }


def _renderables(graph: Graph, saved_to: str | None) -> list[RenderableType]:
    coverage = graph.coverage()
    flops = ", ".join(
        f"{_flops(graph.matmul_flops(phase))} {phase}" for phase in dict.fromkeys(op.phase for op in graph.ops)
    )
    shares = f"{coverage.flops_share:.1%} of flops, {coverage.bytes_share:.1%} of bytes"
    lines = [
        f"{graph.name}: {graph.parameter_count:,} parameters, {len(graph.layers)} layers "
        f"({len(graph.distinct_layers)} distinct), microbatch {graph.micro_batch_size}",
        f"inputs: {', '.join(f'{tensor.id} {list(tensor.shape)}' for tensor in _inputs(graph))}",
        f"matmul flops: {flops}",
        f"coverage: {shares} in {coverage.op_count:,} ops",
        *(f"no rule: {op.function} x{op.count}, {op.bytes_share:.2%} of bytes" for op in coverage.unknown),
        "",
    ]
    columns = ["layer", ">count", ">parameters", ">forward", ">backward", ">kept for backward", ">ops"]
    counts = Counter(layer.key for layer in graph.layers)
    table = plain_table(columns, [_layer_row(graph, layer, counts[layer.key]) for layer in graph.distinct_layers])
    ends = [f"* with parameters that several layers share: {name}" for name in graph.layer_graph.tied_parameters]
    ends += [f"note: {note}" for note in graph.notes]
    ends += [f"saved to {saved_to}"] if saved_to is not None else []
    return ["\n".join(lines), table, "", *ends]


def _inputs(graph: Graph) -> list[Tensor]:
    from phaze.ir import Role

    return [tensor for tensor in graph.tensors.values() if tensor.role is Role.BATCH]


def _layer_row(graph: Graph, layer: Layer, count: int) -> list[str]:
    from phaze.ir import stashed_bytes

    return [
        layer.name,
        str(count),
        f"{sum(graph.tensors[name].elements for name in layer.parameters):,}{_shared_mark(graph, layer)}",
        _flops(sum(op.matmul_flops for op in layer.forward)),
        _flops(sum(op.matmul_flops for op in layer.backward)),
        f"{stashed_bytes(graph, layer) / 2**20:,.1f} MiB",
        f"{len(layer.forward)} + {len(layer.backward)}",
    ]


def _shared_mark(graph: Graph, layer: Layer) -> str:
    return "*" if graph.layer_graph.tied_parameters.keys() & set(layer.parameters) else ""


def _flops(count: int) -> str:
    scaled, unit = next(
        ((count / 10**p, u) for p, u in ((15, "P"), (12, "T"), (9, "G")) if count >= 10**p), (count, "")
    )
    return f"{scaled:.4g} {unit}flop" if unit else f"{count:,} flop"


import_model = Command(
    name="import",
    group=CommandGroup.MODELS,
    summary="show what a model is made of, and save its graph",
    configure=_configure_import,
    run=_run_import,
)
