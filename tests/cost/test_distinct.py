import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phaze.cost.distinct
from phaze.cost.distinct import distinct_rows


@pytest.mark.parametrize("largest", [1, 2**24])
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.floats(0, 1)), min_size=1))
def test_rows_are_equal_exactly_where_their_numbers_are(largest: int, rows: list[tuple[int, int, float]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phaze.cost.distinct, "_LARGEST_TABLE", largest)
        first, at = distinct_rows(columns)
    assert [rows[first[number]] for number in at] == rows
    assert len({rows[index] for index in first}) == len(first)
