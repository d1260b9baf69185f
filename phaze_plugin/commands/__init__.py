"""The commands of `phaze`, one per file."""

from phaze.commands.calibrate_chip import calibrate_chip
from phaze.commands.chip_list import chips
from phaze.commands.command import Command
from phaze.commands.compare_plans import compare_plans
from phaze.commands.cost_table import cost
from phaze.commands.doctor_report import doctor
from phaze.commands.evaluate_strategy import evaluate_strategy
from phaze.commands.explain_plan import explain_plan
from phaze.commands.export_plan import export_plan
from phaze.commands.import_model import import_model
from phaze.commands.optimize_model import optimize_model
from phaze.commands.schedule_layers import schedule_command
from phaze.commands.search_designs import search_designs
from phaze.commands.verify_plan import verify_plan

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (
    import_model,
    chips,
    cost,
    schedule_command,
    calibrate_chip,
    optimize_model,
    explain_plan,
    evaluate_strategy,
    compare_plans,
    search_designs,
    verify_plan,
    export_plan,
    doctor,
)
