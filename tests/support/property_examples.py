"""How many examples tests try: few by default, many or all where the profile or the command asks for them."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int) -> settings:
    """So many of every hundred examples that the profile asks of a test that says nothing."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


def one_of_each(names: Iterable[object], variants: Sequence[object]) -> list[Any]:
    """Every name with every variant, by default each name with one of them in turn; the exhaustive tests have all."""
    return [
        pytest.param(name, variant, marks=() if place % len(variants) == index else pytest.mark.exhaustive)
        for place, name in enumerate(names)
        for index, variant in enumerate(variants)
    ]
