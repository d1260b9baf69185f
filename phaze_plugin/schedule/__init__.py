"""Operators of a layer on the cores of one accelerator: schedules with a proof."""

from phaze.schedule.bounds import lower_bounds
from phaze.schedule.problem import Compatibility, Op, OpKind, Problem
from phaze.schedule.result import Schedule, ScheduledOp, ScheduleStatus
from phaze.schedule.solve import DEFAULT_WORK, Method, ScheduleCache, schedule_layer
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
    "breaches",
    "lower_bounds",
    "schedule_layer",
    "verify",
]
