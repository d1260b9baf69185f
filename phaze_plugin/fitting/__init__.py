"""Calibrations from measured runs and traces."""

from phaze.fitting.least_squares import Fit, fit_terms
from phaze.fitting.runs import PreparedRun, Run, prepare

__all__ = ["Fit", "PreparedRun", "Run", "fit_terms", "prepare"]
