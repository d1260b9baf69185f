"""Operators of a layer on the cores of one accelerator: schedules with a proof."""

from phaze.schedule.makespan_bounds import lower_bounds
from phaze.schedule.proven_schedule import (
    Schedule,
    ScheduledJob,
    ScheduleStatus,
    Utilization,
    breaches,
    exposed_link_s,
    utilization,
    verify_schedule,
)
from phaze.schedule.schedule_charts import chrome_trace, format_gantt, format_seconds
from phaze.schedule.scheduling_methods import DEFAULT_WORK, Method, ScheduleCache, schedule_layer
from phaze.schedule.scheduling_problem import Compatibility, Job, Resource, SchedulingProblem

__all__ = [
    "DEFAULT_WORK",
    "Compatibility",
    "Job",
    "Method",
    "Resource",
    "Schedule",
    "ScheduleCache",
    "ScheduleStatus",
    "ScheduledJob",
    "SchedulingProblem",
    "Utilization",
    "breaches",
    "chrome_trace",
    "exposed_link_s",
    "format_gantt",
    "format_seconds",
    "lower_bounds",
    "schedule_layer",
    "utilization",
    "verify_schedule",
]
