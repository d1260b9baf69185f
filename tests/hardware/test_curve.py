import pytest

from phaze.hardware.curve import log_log

POINTS = ((1.0, 3.0), (10.0, 7.0), (1000.0, 700.0))


def test_a_curve_goes_through_its_points_without_rounding() -> None:
    assert log_log(POINTS, [1.0, 10.0, 1000.0]).tolist() == [3.0, 7.0, 700.0]


def test_between_points_it_is_a_power_law() -> None:
    assert log_log(POINTS, 100.0) == pytest.approx(70.0)


def test_beyond_the_ends_the_last_power_law_goes_on() -> None:
    assert log_log(POINTS, 10_000.0) == pytest.approx(7000.0)
    assert log_log(POINTS, 0.1) == pytest.approx(9.0 / 7.0)
