from collections.abc import Sequence

import numpy as np
import pytest

from phaze.calibration_fitting import fit_terms, separable_terms
from phaze.cost import Calibration
from phaze.errors import QuestionError

PARTS = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.1], [2.0, 2.0, 2.0], [0.5, 0.2, 3.0], [5.0, 0.1, 0.3]])
"""Tensor, memory and link seconds of five imagined runs."""
TRUTH = Calibration(name="truth", matrix=0.62, memory=0.81, link=0.45)
START = Calibration(name="start", matrix=0.9, memory=0.9, link=0.9)


def predict(calibrations: Sequence[Calibration]) -> np.ndarray:
    return np.array(
        [PARTS @ [1 / calibration.matrix, 1 / calibration.memory, 1 / calibration.link] for calibration in calibrations]
    )


def test_a_fit_finds_the_calibration_that_made_the_data() -> None:
    fit = fit_terms(predict, predict([TRUTH])[0].tolist(), START, ("matrix", "memory", "link"))
    for term in fit.terms:
        assert getattr(fit.calibration, term) == pytest.approx(getattr(TRUTH, term), rel=1e-2)
    assert fit.mean_error < 1e-2
    assert fit.unseen == fit.inseparable == ()


def test_a_run_that_nothing_explains_does_not_drag_the_others_along() -> None:
    measured = predict([TRUTH])[0]
    measured[2] *= 1.6
    fit = fit_terms(predict, measured.tolist(), START, ("matrix", "memory"))
    assert np.median(np.abs(fit.errors)) < 0.25 * abs(fit.errors[2])


def test_a_term_that_changes_nothing_is_called_unseen_and_kept() -> None:
    fit = fit_terms(predict, predict([TRUTH])[0].tolist(), START, ("matrix", "memory", "link", "network"))
    assert fit.unseen == ("network",)
    assert fit.calibration.network == START.network


def test_terms_that_always_go_together_are_called_inseparable() -> None:
    def together(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.array([PARTS[:, 0] / calibration.matrix / calibration.memory for calibration in calibrations])

    fit = fit_terms(together, together([TRUTH])[0].tolist(), START, ("matrix", "memory"))
    assert fit.inseparable == (("matrix", "memory"),)
    assert fit.mean_error < 1e-2


def test_terms_are_chosen_by_what_runs_show_and_the_others_have_a_reason() -> None:
    def hardly(calibrations: Sequence[Calibration]) -> np.ndarray:
        return predict(calibrations) * [
            [calibration.vector**-0.5 * calibration.network**-0.01] for calibration in calibrations
        ]

    candidates = ("network", "matrix", "overlap", "memory", "link")
    assert separable_terms(hardly, START, candidates, 2) == (
        ("matrix", "link"),
        {
            "memory": "there are too few runs for it",
            "network": "the runs hardly show it",
            "overlap": "the runs say nothing about it",
        },
    )

    def together(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.array([PARTS[:, 0] / calibration.matrix / calibration.memory for calibration in calibrations])

    chosen, left = separable_terms(together, START, ("matrix", "memory"), 2)
    assert (chosen, left) == (("matrix",), {"memory": "the runs cannot separate it from matrix"})


def test_a_term_back_at_its_start_leaves_its_part_of_the_error() -> None:
    fit = fit_terms(predict, predict([TRUTH])[0].tolist(), START, ("matrix", "memory"))
    assert fit.start_errors["matrix"] > fit.start_errors["memory"] > fit.mean_error


def test_too_few_runs_are_refused_with_the_two_terms_that_they_separate_least() -> None:
    with pytest.raises(QuestionError, match=r"2 measured runs for 3 terms .* They cannot separate \w+ from \w+\."):
        fit_terms(lambda calibrations: predict(calibrations)[:, :2], [1.0, 2.0], START, ("matrix", "memory", "link"))


def test_with_a_prior_terms_need_not_be_told_apart_and_share_what_the_runs_ask_by_their_spreads() -> None:
    start = Calibration(name="start", attention=0.5, memory=0.5)

    def together(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.array([[1 / (calibration.attention * calibration.memory)] * 3 for calibration in calibrations])

    chosen, left = separable_terms(together, start, ("attention", "memory"), 2, has_prior=True)
    assert (chosen, left) == (("attention", "memory"), {})
    fit = fit_terms(together, [3.2] * 3, start, chosen, prior_error=0.03)
    moved = [np.log(getattr(fit.calibration, term) / 0.5) for term in chosen]
    assert moved[0] > 10 * moved[1] > 0
    assert fit.inseparable == ()


def test_a_prior_keeps_what_the_runs_do_not_show_and_moves_what_they_do() -> None:
    """Seconds are 1 / matrix + 0.001 / memory: three runs show matrix, and memory hardly."""

    def predict(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.array([[size / one.matrix + 0.001 / one.memory for size in (1, 2, 3)] for one in calibrations])

    start = Calibration(matrix=0.8, memory=0.7)
    measured = [1.02 * seconds for seconds in predict([Calibration(matrix=0.6, memory=0.7)])[0]]
    free = fit_terms(predict, measured, start, ("matrix", "memory"))
    held = fit_terms(predict, measured, start, ("matrix", "memory"), prior_error=0.03)
    assert held.calibration.matrix == pytest.approx(0.6 / 1.02, rel=0.04)
    assert held.calibration.memory == pytest.approx(0.7, rel=0.01)
    assert abs(held.calibration.memory - 0.7) <= abs(free.calibration.memory - 0.7)


def test_with_a_prior_one_run_may_fit_two_terms_and_many_runs_outweigh_it() -> None:
    def predict(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.array([[1 / one.matrix + 1 / one.memory] * runs for one in calibrations])

    found = []
    for runs in (1, 50):
        measured = [1 / 0.6 + 1 / 0.6] * runs
        start = Calibration(matrix=0.8, memory=0.8)
        found.append(fit_terms(predict, measured, start, ("matrix", "memory"), prior_error=0.03))
    few, many = (abs(fit.errors[0]) for fit in found)
    assert many < few < 0.25
    assert many < 0.01


def test_a_prior_that_is_right_stays() -> None:
    def predict(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.array([[size / one.matrix for size in (1, 2)] for one in calibrations])

    start = Calibration(matrix=0.8)
    fit = fit_terms(predict, predict([start])[0].tolist(), start, ("matrix",), prior_error=0.03)
    assert fit.calibration.matrix == pytest.approx(0.8, rel=1e-6)
