"""Constants follow from constants: numbers are computed as StableHLO says, others known by how they are made."""

from typing import Any

import pytest

from phaze.frontends.stablehlo.constant_folding import fold
from phaze.frontends.stablehlo.module import Operation, TensorType
from phaze.frontends.stablehlo.symbols import Broadcast, Constant, Number, Recorder, Value
from phaze.ir import DType

SCALAR = TensorType((), "i32")


def operation(name: str, kind: TensorType = SCALAR, **attributes: Any) -> Operation:
    return Operation(f"stablehlo.{name}", (), (0,), (kind,), attributes, (), "")


def folded(recorder: Recorder, op: Operation, *numbers: Number) -> Value:
    values = tuple(recorder.constant("", (), DType.INT32, number) for number in numbers)
    (result,) = fold(recorder, op, values)
    return result


@pytest.mark.parametrize(
    ("op", "numbers", "expected"),
    [
        (operation("add"), (3, 4), 7),
        (operation("divide"), (-7, 2), -3),
        (operation("remainder"), (-7, 2), -1),
        (operation("divide"), (7, 0), None),
        (operation("not"), (True,), False),
        (operation("not"), (5,), -6),
        (operation("clamp"), (0, 9, 4), 4),
        (operation("select"), (False, 1, 2), 2),
        (operation("convert", TensorType((), "f32")), (3,), 3.0),
        (operation("compare", comparison_direction="#stablehlo<comparison_direction LT>"), (1, 2), True),
        (operation("compare", comparison_direction="GE"), (1, 2), False),
        (operation("multiply"), (2**40, 2**40), None),
        (operation("sine"), (1,), None),
        (operation("constant", value={"splat": 5}), (), 5),
        (operation("constant", value={"values": [6]}), (), 6),
        (operation("constant", value={"size": 100}), (), None),
    ],
)
def test_numbers_are_computed_where_they_follow(op: Operation, numbers: tuple[Number, ...], expected: object) -> None:
    result = folded(Recorder("m"), op, *numbers)
    assert isinstance(result, Constant)
    assert result.value == expected
    assert type(result.value) is type(expected)


def test_constants_that_are_made_alike_are_one_but_random_ones_are_not() -> None:
    recorder = Recorder("m")
    assert folded(recorder, operation("sine"), 1) == folded(recorder, operation("sine"), 1)
    assert folded(recorder, operation("sine"), 1) != folded(recorder, operation("sine"), 2)
    assert folded(recorder, operation("rng"), 0, 1) != folded(recorder, operation("rng"), 0, 1)


def test_a_repeated_number_is_a_number_and_a_repeated_table_is_read_where_it_is() -> None:
    recorder = Recorder("m")
    spread = operation("broadcast_in_dim", TensorType((4, 3), "i32"), broadcast_dimensions=[])
    assert folded(recorder, spread, 2) == recorder.constant("", (4, 3), DType.INT32, 2)
    table = recorder.constant("table", (3,), DType.INT32)
    by_rows = operation("broadcast_in_dim", TensorType((4, 3), "i32"), broadcast_dimensions=[1])
    (rows,) = fold(recorder, by_rows, (table,))
    assert rows == Broadcast(table, (1,), (4, 3), DType.INT32)
    moved = operation("broadcast_in_dim", TensorType((5, 4, 3), "i32"), broadcast_dimensions=[1, 2])
    assert fold(recorder, moved, (rows,)) == (Broadcast(table, (2,), (5, 4, 3), DType.INT32),)
