"""Calibrations from measured runs and traces."""

from phaze.calibration_fitting.least_squares import Fit, fit_terms, separable_terms
from phaze.calibration_fitting.measured_runs import Run, read_steps
from phaze.calibration_fitting.profiler_trace import StepTrace, TraceFit, fit_trace, read_trace
from phaze.calibration_fitting.run_prediction import PreparedRun, prepare

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
