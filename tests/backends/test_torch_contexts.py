"""Contexts in one process: which positions each device has, what enters as parts, which gradients are averaged."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phaze.backends.torch import split_rules
from phaze.backends.torch.process_groups import Contexts
from phaze.backends.torch.ring_attention import _block as block_of_ring
from phaze.backends.torch.split_collectives import Axis, _in_order_of_devices, _in_own_order, local_part
from phaze.backends.torch.split_collectives import _is_made_of_parameters as is_made_of_parameters
from phaze.backends.torch.split_tensor import ContextTensor, SplitTensor
from phaze.errors import PlanError

GROUP: Any = None  # nothing is sent here
RULES = (split_rules,)  # imported for their rules, which register themselves


def axis_of(size: int, index: int, *, is_balanced: bool) -> Axis:
    return Axis(GROUP, size, index, is_context=True, is_balanced=is_balanced)


@given(size=st.integers(1, 5), part=st.integers(1, 4), outer=st.integers(1, 3), is_balanced=st.booleans())
def test_parts_of_all_devices_in_order_are_the_whole(size: int, part: int, outer: int, is_balanced: bool) -> None:
    run = 2 * size * part
    whole = torch.arange(3 * outer * run).reshape(3, outer * run)
    axes = [axis_of(size, index, is_balanced=is_balanced) for index in range(size)]
    parts = [local_part(whole, axis, 1, outer).unflatten(1, (outer, -1)) for axis in axes]
    joined = torch.cat(parts, 2).movedim(2, 0)  # as an all-gather joins them
    assert torch.equal(_in_own_order(joined, axes[0]).movedim(0, 2).flatten(1), whole)
    assert torch.equal(_in_order_of_devices(_in_own_order(joined, axes[0]), axes[0]), joined)


@given(size=st.integers(1, 6), part=st.integers(1, 4))
def test_balanced_devices_have_equally_much_of_causal_attention(size: int, part: int) -> None:
    length = 2 * size * part
    work = {
        sum(start + count for start, count in axis_of(size, index, is_balanced=True).spans(length))
        for index in range(size)
    }
    assert len(work) == 1


@given(size=st.integers(1, 5), part=st.integers(1, 3), is_balanced=st.booleans())
def test_a_ring_meets_every_earlier_key_once_with_equal_work_in_every_step(
    size: int, part: int, is_balanced: bool
) -> None:
    axes = [axis_of(size, index, is_balanced=is_balanced) for index in range(size)]
    held = [local_part(torch.arange(2 * size * part), axis, 0, 1) for axis in axes]
    met = torch.zeros(2 * size * part, 2 * size * part, dtype=torch.int)
    for step in range(size):
        work = set()
        for index, axis in enumerate(axes):
            owner = (index - step) % size
            block = block_of_ring(axis, owner, 2 * part, is_causal=True)
            if block is not None:
                rows, columns = held[index][block.rows], held[owner][block.columns]
                met[rows.unsqueeze(1), columns] += torch.ones(len(rows), len(columns), dtype=torch.int).tril(
                    0 if block.is_causal else len(columns)
                )
                work.add((len(rows) * len(columns), block.is_causal))
        assert len(work) <= 1
    assert torch.equal(met, torch.ones_like(met).tril())


def test_integer_tensors_of_batch_and_positions_enter_as_parts() -> None:
    contexts = Contexts(GROUP, 2, 1)
    batch = {
        "input_ids": torch.arange(16).reshape(2, 8),
        "labels": torch.arange(12).reshape(2, 6),
        "kinds": torch.zeros(2, dtype=torch.int64),
        "pixels": torch.zeros(2, 8),
        "name": "x",
    }
    split = contexts.split_batch(batch)
    assert isinstance(split["input_ids"], ContextTensor)
    assert tuple(split["input_ids"].shape) == (2, 8)
    assert split["input_ids"].local.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert split["labels"].local.tolist() == [[3, 4, 5], [9, 10, 11]]  # four parts do not divide it
    assert all(split[name] is batch[name] for name in ("kinds", "pixels", "name"))


def test_sequences_that_contexts_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"sequences of 9 positions, which cp 2 does not divide; pad them"):
        Contexts(GROUP, 2, 0).split_batch({"input_ids": torch.zeros(1, 9, dtype=torch.int64)})


def test_two_axes_split_one_tensor_and_functions_work_on_the_innermost_part() -> None:
    context, tensor = axis_of(2, 0, is_balanced=True), Axis(GROUP, 2, 1)
    inner = SplitTensor(torch.ones(2, 4, 3), tensor, (2, 4, 6), 2)
    value = ContextTensor(inner, context, (2, 8, 6), 1)
    result = (value * 3).transpose(1, 2).unsqueeze(0)
    assert isinstance(result, ContextTensor)
    assert (tuple(result.shape), result.split_dim) == ((1, 2, 6, 8), 3)
    assert isinstance(result.local, SplitTensor)
    assert (tuple(result.local.shape), result.local.split_dim) == ((1, 2, 6, 4), 2)
    assert torch.equal(result.local.local, torch.full((1, 2, 3, 4), 3.0))


def test_only_what_is_made_of_parameters_alone_is_averaged_later() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    arrived = torch.ones(2, 2, requires_grad=True)
    assert is_made_of_parameters(weight)
    assert is_made_of_parameters(weight.t().to(torch.bfloat16))
    assert not is_made_of_parameters(arrived)
    assert not is_made_of_parameters(weight @ arrived)
