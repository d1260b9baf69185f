"""Networks as an axis of the search: each is searched with the best of those before it as something to beat.

A network changes what slices are fastest, what collectives in a layer take, and what placement pays for links, so that
every network has bounds of its own. What the networks share is the value to beat (`BestFirstSearch.floor`): a box of
accelerators is closed on one network when nothing in it beats, by more than the gap, what was found on another. The
largest bound that is left on any of them holds for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from phaze.errors import PlanError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.search_question import SearchQuestion
from phaze.explore.search_result import NetworkRow, SearchResult

__all__ = ["search_networks"]


def search_networks(
    questions: Sequence[SearchQuestion],
    prepare: Callable[[SearchQuestion, float], BestFirstSearch],
    settle: Callable[[BestFirstSearch, float], SearchResult],
) -> SearchResult:
    """The best accelerator with the best of several networks; `questions` differ in their networks only.

    `prepare` makes the search of a question with a value to beat, `settle` runs it from a time on. Raises PlanError
    where nothing fits on any network.
    """
    started_s, floor = time.monotonic(), 0.0
    results: list[tuple[SearchQuestion, SearchResult]] = []
    rows: list[NetworkRow] = []
    reasons: list[str] = []
    for question in questions:
        try:
            # Where the best few are wanted, others than the best of another network count as well.
            result = settle(prepare(question, floor if question.top == 1 else 0.0), started_s)
        except PlanError as error:
            # Nothing fits, or nothing that was looked at beats the other networks: both leave no more than the floor.
            reasons.append(f"{question.network}: {error}")
            rows.append(NetworkRow(network=question.network, value=None, bound=floor * (1 + question.gap), name=""))
            continue
        results.append((question, result))
        floor = max(floor, result.best.value)
        rows.append(
            NetworkRow(
                network=question.network,
                value=result.best.value,
                bound=result.certificate.bound,
                name=result.best.name,
            )
        )
    if not results:
        raise PlanError(" ".join(reasons))
    return _joined(results, rows)


def _joined(results: Sequence[tuple[SearchQuestion, SearchResult]], rows: Sequence[NetworkRow]) -> SearchResult:
    """The result of the best network, with what is proven about all of them."""
    question, best = max(results, key=lambda pair: pair[1].best.value)
    proofs = [(other.network, result.certificate) for other, result in results]
    bound = max(best.best.value, *(row.bound for row in rows))
    certificate = replace(
        best.certificate,
        bound=bound,
        gap=bound / best.certificate.value - 1,
        points=sum(proof.points for _, proof in proofs),
        scheduled=sum(proof.scheduled for _, proof in proofs),
        placed=sum(proof.placed for _, proof in proofs),
        bounds=sum(proof.bounds for _, proof in proofs),
        is_finished=all(proof.is_finished for _, proof in proofs),
        scope=f"on {', '.join(row.network for row in rows)}, {best.certificate.scope}",
        pruned=tuple(replace(box, name=f"{name}/{box.name}") for name, proof in proofs for box in proof.pruned),
    )
    explored = tuple(
        replace(row, name=f"{row.name}@{other.network}") for other, result in results for row in result.explored
    )
    designs = [replace(design, network=other.network) for other, result in results for design in result.top]
    top = sorted(designs, key=lambda design: -design.value)[: question.top]
    asked = {**best.question, "network": [row.network for row in rows]}
    design = replace(best.best, network=question.network)
    return replace(
        best,
        question=asked,
        best=design,
        certificate=certificate,
        networks=tuple(rows),
        top=tuple(top),
        explored=explored,
        seconds=max(result.seconds for _, result in results),
    )
