import pytest

from phaze.hardware.hardware_numbers import packaged_table


@pytest.mark.parametrize("name", ["area", "chips", "energy", "networks"])
def test_a_table_is_read_once_and_cannot_be_changed(name: str) -> None:
    table = packaged_table(name)
    assert packaged_table(name) is table
    with pytest.raises(TypeError):
        table["version"] = 2  # type: ignore[index]
    inner = next(value for value in table.values() if not isinstance(value, int | float | str))
    with pytest.raises(TypeError):
        inner[next(iter(inner)) if hasattr(inner, "keys") else 0] = None
