"""Operators of a layer on the cores of one accelerator: schedules with a proof."""

from phaze.schedule.bounds import lower_bounds
from phaze.schedule.gantt import format_gantt
from phaze.schedule.problem import Compatibility, Op, OpKind, Problem
from phaze.schedule.result import Schedule, ScheduledOp, ScheduleStatus
from phaze.schedule.solve import DEFAULT_WORK, Method, ScheduleCache, schedule_layer
from phaze.schedule.trace import chrome_trace
from phaze.schedule.utilization import Utilization, utilization
from phaze.schedule.verify import breaches, verify

__all__ = [
    "DEFAULT_WORK",
    "Compatibility",
    "Method",
    "Op",
    "OpKind",
    "Problem",
    "Schedule",
    "ScheduleCache",
    "ScheduleStatus",
    "ScheduledOp",
    "Utilization",
    "breaches",
    "chrome_trace",
    "format_gantt",
    "lower_bounds",
    "schedule_layer",
    "utilization",
    "verify",
]
