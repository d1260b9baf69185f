"""The commands of `phaze`, in the order in which its help lists them."""

from phaze.commands.calibrate_chip import calibrate_chip
from phaze.commands.command import Command
from phaze.commands.hardware_commands import chips, cluster_command
from phaze.commands.installation_commands import completion_command, doctor, help_command, print_schema
from phaze.commands.layer_commands import cost, schedule_command
from phaze.commands.model_commands import import_model, models
from phaze.commands.plan_commands import evaluate_strategy, fit_model, optimize_model
from phaze.commands.reproduce_paper import reproduce_paper
from phaze.commands.saved_plan_commands import compare_plans, explain_plan, export_plan, verify_plan, write_report
from phaze.commands.search_designs import search_designs

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
