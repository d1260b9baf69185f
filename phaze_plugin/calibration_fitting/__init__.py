"""Calibrations fitted to measurements: to the step times of runs, or to the profiler trace of one step."""

from phaze.calibration_fitting.least_squares import Fit, fit_terms, prior_error_of, separable_terms
from phaze.calibration_fitting.measured_runs import Run, read_steps
from phaze.calibration_fitting.profiler_trace import StepTrace, TraceFit, fit_trace, read_trace
from phaze.calibration_fitting.run_prediction import PreparedLayers, PreparedRun, prepare_run

__all__ = [
    "Fit",
    "PreparedLayers",
    "PreparedRun",
    "Run",
    "StepTrace",
    "TraceFit",
    "fit_terms",
    "fit_trace",
    "prepare_run",
    "prior_error_of",
    "read_steps",
    "read_trace",
    "separable_terms",
]
