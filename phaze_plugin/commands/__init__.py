"""The commands of `phaze`, one per file."""

from phaze.commands.chips import chips
from phaze.commands.command import Command
from phaze.commands.cost import cost
from phaze.commands.doctor import doctor
from phaze.commands.import_model import import_model

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (import_model, chips, cost, doctor)
