"""`phaze models`: models known by name, with their family, parameters and sequence length."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show

if TYPE_CHECKING:
    from phaze.hooks import Offer, PluginManager
    from phaze.interfaces import ModelFactory, ModelFacts

__all__ = ["models"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("text", nargs="?", metavar="TEXT", help="only models whose name or family has this text in it")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
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
    table = plain_table(columns, [_row(offer, facts) for offer, facts in wanted])
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


def _row(offer: Offer[ModelFactory], facts: ModelFacts | None) -> tuple[str, ...]:
    if facts is None:
        return offer.name, f"({offer.origin})", "?", "?", "?"
    active = "" if facts.active_parameters == facts.parameters else _billions(facts.active_parameters)
    sizes = (_billions(facts.parameters), active, f"{facts.sequence_length:,}")
    return offer.name, facts.family, *sizes


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 0.9995e9 else f"{count / 1e6:.3g}M"


models = Command(
    name="models",
    group=CommandGroup.MODELS,
    summary="list models known by name with family, parameters and sequence length",
    configure=configure,
    run=run,
)
