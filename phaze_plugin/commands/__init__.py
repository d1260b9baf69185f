"""The commands of `phaze`, one per file."""

from phaze.commands.command import Command
from phaze.commands.doctor import doctor

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (doctor,)
