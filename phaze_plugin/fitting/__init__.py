"""Calibrations from measured runs and traces."""

from phaze.fitting.least_squares import Fit, fit_terms, separable_terms
from phaze.fitting.runs import PreparedRun, Run, prepare
from phaze.fitting.steps import read_steps
from phaze.fitting.trace import StepTrace, TraceFit, fit_trace, read_trace

__all__ = [
    "Fit",
    "PreparedRun",
    "Run",
    "StepTrace",
    "TraceFit",
    "fit_terms",
    "fit_trace",
    "prepare",
    "read_steps",
    "read_trace",
    "separable_terms",
]
