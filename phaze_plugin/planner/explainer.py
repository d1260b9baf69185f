"""The explanation of a plan when somebody asks for it: `optimize` pays for nothing that nobody reads.

A fresh plan keeps the search that found it; its runners-up come out of that search, and what is missing is looked for.
A plan from a file is searched again. Either way the outcome is remembered, and saved with the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phaze.plan.plan import Change, Plan, PlanStatus, RunnerUp
from phaze.planner import explanation
from phaze.planner.device_counts import answered_question, find_answer
from phaze.planner.progress import TimeLimitError, Watch
from phaze.planner.strategy_search import Answer
from phaze.question import Question

__all__ = ["FoundSearch", "PlanExplainer", "found_search"]


@dataclass(frozen=True, slots=True, eq=False)
class FoundSearch:
    """A question and the search that answered it."""

    question: Question
    answer: Answer


def found_search(question: Question, watch: Watch) -> FoundSearch:
    """A question with its search, on the devices that its plan takes."""
    answer = find_answer(question, watch)
    return FoundSearch(answered_question(question, answer), answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What was looked for: the parts that an explanation adds to a plan."""

    runners_up: tuple[RunnerUp, ...]
    changes: tuple[Change, ...]
    unrestricted_step_time_s: float | None

    def added_to(self, plan: Plan) -> Plan:
        """The explained plan."""
        return replace(
            plan,
            runners_up=self.runners_up,
            changes=self.changes,
            provenance=replace(plan.provenance, unrestricted_step_time_s=self.unrestricted_step_time_s),
            is_explained=True,
        )


@dataclass(slots=True, eq=False)
class PlanExplainer:
    """Looks for a plan's runners-up and changes once, and remembers them.

    Attributes:
        find: the search behind the plan, given a model and its inputs; or, in words, why there is none.
        watch: is told where the work stands, and ends it.
    """

    find: Callable[[object, object], FoundSearch | str]
    watch: Watch = field(default_factory=Watch)
    outcome: _Outcome | None = None

    def known(self, plan: Plan) -> Plan:
        """The plan with what was looked for so far."""
        return plan if self.outcome is None else self.outcome.added_to(plan)

    def explained(self, plan: Plan, model: object = None, inputs: object = None) -> Plan:
        """The plan with its explanation; one that was interrupted or cannot be searched again stays as it is."""
        if plan.status is PlanStatus.INTERRUPTED:
            return plan
        if self.outcome is None:
            search = self.find(model, inputs)
            if isinstance(search, str):
                return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, search)))
            try:
                self.outcome = _look(search, self.watch)
            except (TimeLimitError, KeyboardInterrupt):
                return plan
        return self.outcome.added_to(plan)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a plan in another process has no search behind it: it explains itself as a plan from a file does.
        return type(None), ()


def _look(search: FoundSearch, watch: Watch) -> _Outcome:
    question, answer = search.question, search.answer
    return _Outcome(
        runners_up=explanation.runners_up(answer, watch),
        changes=explanation.changes(question, answer, watch),
        unrestricted_step_time_s=None if question.target.name is None else explanation.unrestricted_s(answer),
    )
