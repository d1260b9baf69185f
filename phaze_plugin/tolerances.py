"""Tolerances of floating-point comparisons: how large a difference counts as rounding, and how far a bound steps back.

Sums of the same numbers in another order differ in their last digits (a double holds about 16; sums of a few thousand
terms agree to about 13). Every comparison that must not turn on those digits uses one of these constants. All are
relative shares unless their name or sentence says otherwise. A tolerance that guards a proof (a bound, a dominance
test) is small, because what it forgives is lost from the proof; one that only decides what people are told is larger.
"""

from __future__ import annotations

__all__ = [
    "BOUND_MARGIN",
    "CLAIM_MARGIN",
    "CLOSING_MARGIN",
    "EQUAL_CLAIMS",
    "EQUAL_CLAIMS_ABSOLUTE",
    "EQUAL_COPIES",
    "EQUAL_COPIES_ABSOLUTE",
    "EQUAL_DESIGNS",
    "EQUAL_RESULTS",
    "EQUAL_SEARCH_TIMES",
    "EQUAL_STATES",
    "GREEDY_MARGIN",
    "MEMORY_MARGIN",
    "NEARLY_EQUAL_RATES",
    "NOTHING_LEFT",
    "NO_SECONDS",
    "PASS_BOUND_MARGIN",
    "SHORTER_SCHEDULE",
    "SOLVER_BREACH",
    "SOLVER_GAP",
    "SOLVER_OBJECTIVE",
    "WHOLE_COEFFICIENT",
    "WHOLE_NUMBER",
]

# What counts as equal.

EQUAL_RESULTS = 1e-9
"""Two finished results (step times, gaps, makespans) that differ by no more than this share are the same: the plan is
called optimal, a remedy is not called faster. It is far above rounding and far below anything that people would act on.
"""

EQUAL_SEARCH_TIMES = 1e-11
"""Two step times inside the search over stages that differ by no more than this share are the same, so that ties end
the search. It is tighter than `EQUAL_RESULTS`, since what it closes early is lost from the proof."""

EQUAL_STATES = 1e-13
"""A partial schedule dominates another if it is later in nothing by more than this, in units of the best makespan so
far. It is just above the rounding of one sum of latencies, because a wrongly dominated state is never looked at again.
"""

SHORTER_SCHEDULE = 1e-10
"""A schedule of a layer counts as better than the best so far if it is shorter by more than this share. It keeps the
search from spending a pass on a gain of rounding."""

EQUAL_DESIGNS = 3e-6
"""Two accelerators of a search whose values differ by no more than this share tie: the smaller area wins, then the
order of the space. A smaller share would let rounding in schedules and placements decide, a larger one would hide real
gains."""

NEARLY_EQUAL_RATES = 1e-6
"""Accelerators whose estimated rate is within this share of the highest are equally promising starts of a search; the
smallest of them is taken. It only chooses where to begin."""

# How a plan or schedule is compared with the same facts derived again.

EQUAL_CLAIMS = 1e-6
"""A number that independent code derives again may differ from the claimed one by this share: its sums run in another
order and over other groupings."""

EQUAL_CLAIMS_ABSOLUTE = 1e-12
"""Numbers derived again that differ by no more than this (seconds, joules, bytes) are equal even where both are nearly
zero and their ratio says nothing."""

EQUAL_COPIES = 1e-12
"""A float that was written to a file and read again differs by no more than this share from the one in memory."""

EQUAL_COPIES_ABSOLUTE = 1e-15
"""As `EQUAL_COPIES`, for values near zero."""

# How far bounds and limits step back, so that rounding never refutes an optimum.

BOUND_MARGIN = 1e-11
"""Lower bounds on step times are lowered by this share before something is discarded for them."""

PASS_BOUND_MARGIN = 1e-12
"""Lower bounds on one pass of one layer are lowered by this share. Such a bound is a sum of few terms and rounds less
than a whole step's."""

GREEDY_MARGIN = 1e-10
"""Greedy fillings of stages accept targets and memories that are exceeded by this share, and lower their bounds by it:
they add and take away the same layers many times, which rounds more than one sum does."""

CLAIM_MARGIN = 1e-9
"""Bounds that a search keeps in a table, or that come with a value, may exceed what they bound by this share, or are
lowered by it."""

CLOSING_MARGIN = 1e-12
"""A box of accelerators whose upper bound exceeds what closes it by no more than this share is closed: cutoffs are
found by bisection, so that a bound which reaches its cutoff lies just there."""

MEMORY_MARGIN = 1e-9
"""Where choices are discarded for their memory before it is summed exactly, the limit is raised by this share (and a
bound on bytes lowered by it), so that a choice which fits to the last byte is never lost."""

# Linear and constraint solvers.

SOLVER_BREACH = 1e-5
"""The largest relative breach of a row that a solver's solution may have: ten times what the solvers promise."""

SOLVER_GAP = 1e-5
"""A linear solver that calls a schedule optimal proves it up to its own rounding: a relative gap up to this counts as
none."""

SOLVER_OBJECTIVE = 1e-6
"""How far (in absolute terms) a solver may miss a small problem's known objective and still be called sound."""

WHOLE_NUMBER = 1e-9
"""A scaled time or bound this near to a whole number (absolutely, or relative to a value above 1) is that number: it
was a decimal before it was scaled."""

WHOLE_COEFFICIENT = 1e-12
"""A scaled coefficient counts as whole if it misses a whole number by no more than this share of itself. A coefficient
is copied and not summed, so that this is tighter than `WHOLE_NUMBER`."""

# What counts as nothing.

NOTHING_LEFT = 1e-12
"""A remaining share of work (of 1) or a held time (in units of the makespan) that is no larger than this is used up."""

NO_SECONDS = 1e-12
"""A bound in seconds that says nothing but is positive, so that ratios and logarithms of it exist."""
