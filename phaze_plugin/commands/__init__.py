"""The commands of `phaze`, in the order in which its help lists them."""

from phaze.commands.calibrate_chip import calibrate_chip
from phaze.commands.chip_list import chips
from phaze.commands.cluster_drawing import cluster_command
from phaze.commands.command import Command
from phaze.commands.cost_table import cost
from phaze.commands.doctor_report import doctor
from phaze.commands.export_files import export_plan
from phaze.commands.fit_model import fit_model
from phaze.commands.help_pages import help_command
from phaze.commands.import_model import import_model
from phaze.commands.model_list import models
from phaze.commands.plan_commands import evaluate_strategy, optimize_model
from phaze.commands.report_page import write_report
from phaze.commands.reproduce_paper import reproduce_paper
from phaze.commands.saved_plan_commands import compare_plans, explain_plan, verify_plan
from phaze.commands.schedule_layers import schedule_command
from phaze.commands.schema_list import print_schema
from phaze.commands.search_designs import search_designs
from phaze.commands.shell_completion import completion_command

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (
    import_model,
    models,
    chips,
    cluster_command,
    cost,
    schedule_command,
    calibrate_chip,
    optimize_model,
    explain_plan,
    evaluate_strategy,
    compare_plans,
    fit_model,
    write_report,
    search_designs,
    reproduce_paper,
    verify_plan,
    export_plan,
    help_command,
    print_schema,
    completion_command,
    doctor,
)
