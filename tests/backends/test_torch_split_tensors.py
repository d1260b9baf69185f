"""Split tensors in one process: functions of torch give parts of what they give on whole tensors, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from phaze.backends.torch.arrange import Cut, to_device_order, to_model_order
from phaze.backends.torch.split_collectives import Axis, chunk_sizes, local_part
from phaze.backends.torch.split_rules import reshaped
from phaze.backends.torch.split_tensor import NoRule, SplitTensor
from phaze.backends.torch.step_measurement import WholeCalls


def test_orders_of_devices_and_of_the_model_undo_each_other() -> None:
    value = torch.arange(24).reshape(2, 12)
    ordered = to_device_order(value, Cut(1, 3), 2)
    assert ordered[0].tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert torch.equal(to_model_order(ordered, Cut(1, 3), 2), value)


def test_a_view_keeps_the_cut_where_it_falls_on_chunks_of_a_dimension() -> None:
    axis = Axis(None, 2, 0)
    value = SplitTensor(torch.zeros(4, 6), axis, (4, 12), 1, 3)
    heads = reshaped(value, (4, 3, 4))
    assert (tuple(heads.local.shape), heads.split_dim, heads.outer) == ((4, 3, 2), 2, 1)
    rows = reshaped(SplitTensor(torch.zeros(2, 3, 5), axis, (2, 6, 5), 1), (12, 5))
    assert (tuple(rows.local.shape), rows.split_dim, rows.outer) == ((6, 5), 0, 2)
    with pytest.raises(NoRule):
        reshaped(SplitTensor(torch.zeros(4, 3), axis, (4, 6), 1), (4, 3, 2))


def test_changes_in_place_that_cannot_be_followed_are_refused() -> None:
    value = SplitTensor(torch.zeros(2, 2), Axis(None, 2, 0), (2, 4), 1)
    with pytest.raises(NotImplementedError, match="fill_ changes a tensor that is split over devices in place"):
        value.fill_(1.0)


def test_a_view_of_a_part_sees_changes_in_place() -> None:
    value = SplitTensor(torch.zeros(4, 3), Axis(None, 2, 0), (4, 6), 1)
    value.view(2, 2, 6).add_(1.0)
    assert value.local.sum() == 12
    with pytest.raises(NotImplementedError, match="__setitem__ changes a tensor"):
        value[0] = 0.0


def test_functions_without_a_rule_are_counted_with_what_they_gather() -> None:
    calls, value = WholeCalls(), SplitTensor(torch.ones(2, 4), Axis(None, 1, 0), (2, 4), 1)
    with calls.counted():
        value.relu()
        with pytest.raises(ValueError, match="process group"):  # one that gathers needs others to gather from
            torch.logcumsumexp(value, 0)
    report = calls.report()
    assert [(each.name, each.axis, each.calls, each.gathered_bytes) for each in report.functions] == [
        ("logcumsumexp", "tp", 1, 32)
    ]
    assert "logcumsumexp  tp       1 calls" in str(report)
    assert str(WholeCalls().report()) == "0 batches: every function ran on parts, or nothing is split"


@pytest.mark.parametrize(("dim", "is_balanced"), [(1, False), (1, True), (2, False)])
def test_rows_are_placed_by_a_mask_in_the_parts_of_devices(dim: int, is_balanced: bool) -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0], dtype=torch.bool).reshape(2, 8, 1)
    words, rows = torch.randn(2, 8, 4), torch.randn(5, 4)
    whole = words.masked_scatter(mask, rows)
    for index in range(2):
        axis = Axis(None, 2, index, is_balanced=is_balanced)
        value = SplitTensor(local_part(words, axis, dim, 1), axis, words.shape, dim)
        placed = value.masked_scatter(mask, rows)
        assert isinstance(placed, SplitTensor)
        assert torch.equal(placed.local, local_part(whole, axis, dim, 1))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_an_autograd_function_on_a_part_is_refused_before_its_gradient_is_lost() -> None:
    local = torch.ones(4, 3, requires_grad=True)
    value = SplitTensor(local, Axis(None, 2, 0), (4, 6), 1)
    with pytest.raises(NotImplementedError, match=r"an autograd.Function was applied to a tensor that is split"):
        _ = Doubled.apply(value) + 1


def test_a_hook_on_a_split_tensor_sees_and_changes_its_gradient() -> None:
    local, seen_shapes = torch.ones(4, 3, requires_grad=True), []
    value = SplitTensor(local, Axis(None, 2, 0), (4, 6), 1) * 2

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen_shapes.append(tuple(gradient.shape))
        return gradient * 3

    value.register_hook(hook)
    value.local.sum().backward()
    assert seen_shapes == [(4, 6)]
    assert local.grad is not None
    assert local.grad.tolist() == [[6.0] * 3] * 4


def test_names_of_numpy_mean_the_same_dimensions() -> None:
    value = SplitTensor(torch.ones(4, 3), Axis(None, 2, 0), (4, 6), 1)
    assert (tuple(value.sum(axis=0).shape), tuple(value.sum(axis=0).local.shape)) == ((6,), (3,))
    assert [tuple(piece.shape) for piece in value.tensor_split(2, axis=0)] == [(2, 6), (2, 6)]
    assert tuple(SplitTensor(torch.ones(4, 3, 2), Axis(None, 2, 0), (4, 6, 2), 1).T.shape) == (2, 6, 4)


Function = Callable[[torch.Tensor], Any]
HEADS, ROWS, MATRIX = (2, 4, 3, 5), (4, 6, 8), (6, 4)
MASK = torch.ones(3, 3).tril().bool()

SPLIT_RESULTS: dict[str, tuple[tuple[int, ...], Cut, Function]] = {
    "a function of each element": (ROWS, Cut(1, 1), F.gelu),
    "an operand that is stretched": (ROWS, Cut(2, 1), lambda x: x + torch.arange(8.0)),
    "an operand that lacks the split dimension": (ROWS, Cut(0, 1), lambda x: torch.where(x > 0, x, torch.ones(8))),
    "another type": (ROWS, Cut(1, 1), lambda x: x.to(torch.float64)),
    "a view that takes a dimension apart": (ROWS, Cut(2, 1), lambda x: x.view(4, 6, 4, 2)),
    "a view that joins dimensions": (ROWS, Cut(0, 1), lambda x: x.reshape(-1, 8)),
    "runs of a dimension taken apart": (ROWS, Cut(2, 2), lambda x: x.view(4, 6, 2, 4)),
    "flatten": (ROWS, Cut(0, 1), lambda x: x.flatten(0, 1)),
    "unflatten": (ROWS, Cut(2, 1), lambda x: x.unflatten(-1, (4, -1))),
    "unsqueeze": (ROWS, Cut(1, 1), lambda x: x.unsqueeze(0)),
    "squeeze": ((4, 1, 8), Cut(2, 1), lambda x: x.squeeze(1)),
    "transpose": (ROWS, Cut(1, 1), lambda x: x.transpose(-1, -2)),
    "permute": (ROWS, Cut(1, 1), lambda x: x.permute(2, 0, 1)),
    "a transposed matrix": (MATRIX, Cut(0, 1), lambda x: x.t()),
    "expand": ((1, 6), Cut(1, 1), lambda x: x.expand(3, 4, -1)),
    "an index before the split dimension": (ROWS, Cut(2, 1), lambda x: x[1, :, None]),
    "an ellipsis and a slice behind": (ROWS, Cut(0, 1), lambda x: x[..., 2:6:2]),
    "a softmax along another dimension": (ROWS, Cut(0, 1), lambda x: x.softmax(-1)),
    "a norm over other dimensions": (ROWS, Cut(1, 1), lambda x: F.layer_norm(x, (8,), torch.arange(8.0))),
    "a sum over an earlier dimension": (ROWS, Cut(1, 1), lambda x: x.sum(0)),
    "a mean that keeps its dimension": (ROWS, Cut(1, 1), lambda x: x.mean((0, 2), keepdim=True)),
    "cat": (ROWS, Cut(1, 1), lambda x: torch.cat([x, torch.ones(4, 6, 2)], -1)),
    "stack": (ROWS, Cut(1, 1), lambda x: torch.stack([x, torch.ones(4, 6, 8)], 1)),
    "repeat_interleave along the split dimension": (ROWS, Cut(1, 1), lambda x: x.repeat_interleave(3, dim=1)),
    "products of split heads": (HEADS, Cut(1, 1), lambda x: x @ torch.ones(2, 4, 5, 2)),
    "a sum and a product by the names of torch": (
        ROWS,
        Cut(0, 1),
        lambda x: torch.ones(4, 6, 2).baddbmm(batch1=x, batch2=torch.ones(4, 8, 2), alpha=0.5),
    ),
    "attention over split heads": (HEADS, Cut(1, 1), lambda x: F.scaled_dot_product_attention(x, x, x, MASK)),
    "a weight that is split by outputs": (MATRIX, Cut(0, 1), lambda x: F.linear(torch.ones(3, 4), x, torch.ones(6))),
    "rows times a whole weight": (ROWS, Cut(1, 1), lambda x: F.linear(x, torch.ones(3, 8))),
}


def whole_and_part(shape: tuple[int, ...], cut: Cut, index: int) -> tuple[torch.Tensor, SplitTensor]:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    axis = Axis(None, 2, index)
    return whole, SplitTensor(local_part(whole, axis, *cut).clone(), axis, shape, *cut)


def check_part(result: Any, expected: torch.Tensor) -> None:
    assert isinstance(result, SplitTensor)
    assert tuple(result.shape) == tuple(expected.shape)
    assert torch.allclose(result.local, local_part(expected, result.axis, result.split_dim, result.outer))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", SPLIT_RESULTS)
def test_a_function_on_a_part_gives_the_part_of_what_it_gives_on_the_whole(name: str, index: int) -> None:
    shape, cut, function = SPLIT_RESULTS[name]
    whole, part = whole_and_part(shape, cut, index)
    check_part(function(part), function(whole))


PIECES: dict[str, tuple[Cut, Function]] = {
    "split along another dimension": (Cut(1, 1), lambda x: x.split(3, dim=2)),
    "chunk along another dimension": (Cut(1, 1), lambda x: x.chunk(2, dim=0)),
    "unbind": (Cut(1, 1), lambda x: x.unbind(0)),
    "the runs of the split dimension by chunk": (Cut(2, 2), lambda x: x.chunk(2, dim=-1)),
    "the runs of the split dimension by size": (Cut(2, 2), lambda x: x.split(4, dim=-1)),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_a_part_are_parts_of_the_pieces(name: str, index: int) -> None:
    cut, function = PIECES[name]
    whole, part = whole_and_part(ROWS, cut, index)
    pieces, expected = function(part), function(whole)
    assert len(pieces) == len(expected)
    for piece, whole_piece in zip(pieces, expected, strict=True):
        check_part(piece, whole_piece)


UNKNOWN: dict[str, Function] = {
    "an index of the split dimension": lambda x: x[:, 0],
    "part of the split dimension": lambda x: x[:, 1:],
    "a softmax along the split dimension": lambda x: x.softmax(1),
    "a function without a rule": lambda x: x.flip(1),
    "a name that its rule does not have": lambda x: torch.matmul(input=x, other=torch.ones(8, 2)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_function_that_no_rule_knows_gets_the_whole_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = whole_and_part(ROWS, Cut(1, 1), 0)
    monkeypatch.setattr(SplitTensor, "whole", lambda _, **__: whole)
    result = UNKNOWN[name](part)
    assert not isinstance(result, SplitTensor)
    assert torch.equal(result, UNKNOWN[name](whole))


@pytest.mark.parametrize(("length", "sizes"), [(8, [4, 4]), (5, [3, 2]), (1, [1, 0])])
def test_devices_hold_equal_chunks_of_which_the_last_are_shorter(length: int, sizes: list[int]) -> None:
    assert chunk_sizes(length, 2) == sizes
    whole = torch.arange(length)
    parts = [local_part(whole, Axis(None, 2, index), 0, 1) for index in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_empty_vectors_are_left_out_of_a_join_as_torch_does() -> None:
    value = SplitTensor(torch.ones(2, 2, 3, 4), Axis(None, 2, 0), (2, 4, 3, 4), 1)
    joined = torch.cat([torch.tensor([]), value], dim=-2)
    assert isinstance(joined, SplitTensor)
    assert tuple(joined.shape) == (2, 4, 3, 4)
    assert torch.equal(joined.local, value.local)
