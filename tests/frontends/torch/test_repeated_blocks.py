"""Models with repeated blocks: few blocks are captured, and the graph is that of the whole capture."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch_models as models
from torch import nn

from phaze.frontends.torch import importing
from phaze.frontends.torch.block_copies import Entry, Irregular, Repeat, add_copies
from phaze.frontends.torch.importing import import_module
from phaze.frontends.torch.repeated_blocks import choose_repeats, find_containers, shortened
from phaze.frontends.torch.trial_run import TrialRun
from phaze.ir import Graph

WIDTH, BLOCKS = 8, 9

FAMILIES = {"gpt2": {"n_layer": 8}, "t5": {"num_layers": 8, "num_decoder_layers": 7}}
"""Blocks of one kind in one list, and in two lists, the blocks of one of which read from the other."""


class Residual(nn.Module):
    """A block: a linear map with a residual connection, its result scaled."""

    def __init__(self, scale: float = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=bias), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.linear(self.norm(x)).relu()


class Chain(nn.Module):
    """Blocks one after another, with an addition between them, and the mean of the squares as the loss."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = start = self.first(x)
        for block in self.blocks:
            x = self.step(block, x) + start
        return x.square().mean()

    def step(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class Reading(Chain):
    """Two lists of blocks: those of the second also read what the first ends with, as a decoder reads its encoder."""

    def __init__(self, blocks: Sequence[nn.Module], readers: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.readers = nn.ModuleList(readers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x = self.first(x)
        for block in self.blocks:
            memory = block(memory)
        for reader in self.readers:
            x = reader(x + memory)
        return x.square().mean()


class Concatenating(Chain):
    """A chain whose loss reads the output of every block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.cat(outputs).square().mean()


class Crossing(Chain):
    """A chain in which each block of the second half also reads the output of its mirror image in the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x + outputs[-index] if 2 * index > len(self.blocks) else x)
            outputs.append(x)
        return x.square().mean()


class HalfGradient(Chain):
    """A chain in which a hook halves the gradient of one block in the middle, which its forward does not show."""

    def step(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = block(x)
        if len(self.blocks) > 6 and block is self.blocks[5]:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x


class Counted(Chain):
    """A chain that was written for nine blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(BLOCKS):
            x = self.blocks[index](x)
        return x.square().mean()


def alternating() -> Chain:
    """One block in two has no bias."""
    return Chain([Residual(bias=index % 2 == 0) for index in range(15)])


def other_ends() -> Chain:
    """The first two blocks and the last one are of other kinds."""
    return Chain([Residual(bias=False), *(Residual(scale=2.0 if i in (0, 9) else 1.0) for i in range(10))])


def frozen_start() -> Chain:
    """The first three blocks do not train."""
    chain = Chain([Residual() for _ in range(11)])
    for block in chain.blocks[:3]:
        block.requires_grad_(False)
    return chain


REPEATING: dict[str, Callable[[], nn.Module]] = {
    "equal": lambda: Chain([Residual() for _ in range(BLOCKS)]),
    "alternating": alternating,
    "other ends": other_ends,
    "frozen start": frozen_start,
    "two lists": lambda: Reading([Residual() for _ in range(BLOCKS)], [Residual(bias=False) for _ in range(8)]),
}

NOT_REPEATING: dict[str, Callable[[], nn.Module]] = {
    "too few": lambda: Chain([Residual() for _ in range(6)]),
    "each of its own": lambda: Chain([Residual(scale=1.0 + index) for index in range(BLOCKS)]),
    "tied": lambda: Chain([Residual()] * BLOCKS),
    "all read by the loss": lambda: Concatenating([Residual() for _ in range(BLOCKS)]),
    "read across": lambda: Crossing([Residual() for _ in range(BLOCKS)]),
    "another backward in the middle": lambda: HalfGradient([Residual() for _ in range(BLOCKS)]),
    "a number of blocks that is fixed": lambda: Counted([Residual() for _ in range(BLOCKS)]),
}


def captured_blocks(model: nn.Module, inputs: object, monkeypatch: pytest.MonkeyPatch) -> tuple[Graph, bool]:
    """The graph of a model, and whether blocks were left out of its capture."""
    left_out = []
    capture = importing.capture_repeated

    def noting(*arguments: object) -> object:
        captured = capture(*arguments)
        left_out.append(True)
        return captured

    monkeypatch.setattr(importing, "capture_repeated", noting)
    return import_module(model, inputs, {}), bool(left_out)


def assert_equal(copied: Graph, whole: Graph) -> None:
    """Ops, ids, order, arguments, gradients, notes: everything is the same."""
    assert copied.ops == whole.ops
    assert copied == whole
    assert list(copied.tensors) == list(whole.tensors)
    assert [layer.key for layer in copied.layers] == [layer.key for layer in whole.layers]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.exhaustive)])
def test_copied_blocks_of_known_models_give_the_graph_of_the_whole_capture(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = models.FAMILIES[name]
    model = replace(family, fields={**family.fields, **FAMILIES[name]}).build()
    graph, are_left_out = captured_blocks(model, family.inputs(), monkeypatch)
    assert are_left_out
    assert_equal(graph, import_module(model, family.inputs(), {}, copies_blocks=False))


@pytest.mark.parametrize("name", REPEATING)
def test_copied_blocks_give_the_graph_of_the_whole_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = REPEATING[name]()
    graph, are_left_out = captured_blocks(model, (4, WIDTH), monkeypatch)
    assert are_left_out
    assert_equal(graph, import_module(model, (4, WIDTH), {}, copies_blocks=False))


@pytest.mark.parametrize("name", NOT_REPEATING)
def test_blocks_that_differ_anywhere_are_all_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, are_left_out = captured_blocks(NOT_REPEATING[name](), (4, WIDTH), monkeypatch)
    assert not are_left_out
    assert graph.parameter_count == sum(parameter.numel() for parameter in NOT_REPEATING[name]().parameters())


def test_a_model_is_whole_again_after_it_was_shortened() -> None:
    chain = Chain([Residual() for _ in range(BLOCKS)])
    blocks = list(chain.blocks)
    containers = find_containers(chain)
    with shortened(containers, [Repeat(path="blocks", first=0, period=1, groups=BLOCKS)]):
        assert list(chain.blocks) == [*blocks[:3], *blocks[-2:]]
    assert list(chain.blocks) == blocks


def forward_of(kinds: str) -> TrialRun:
    """A record of blocks in which each letter is a kind of its own."""
    record = tuple(Entry(kind, (), (f"blocks.{index}",), "forward") for index, kind in enumerate(kinds))
    return TrialRun(record, (), has_own_gradients=False, is_whole=True)


@pytest.mark.parametrize(
    ("kinds", "first", "period", "groups"),
    [("aaaaaaa", 0, 1, 7), ("xaaaaaaaay", 1, 1, 8), ("abababababababc", 0, 2, 7), ("aaaaaabbbbbbbb", 6, 1, 8)],
)
def test_the_run_that_leaves_out_the_most_blocks_is_chosen(kinds: str, first: int, period: int, groups: int) -> None:
    containers = {"blocks": nn.ModuleList(nn.Identity() for _ in kinds)}
    expected = Repeat(path="blocks", first=first, period=period, groups=groups)
    assert choose_repeats(forward_of(kinds), containers) == [expected]


@pytest.mark.parametrize("kinds", ["aaaaaa", "abcdefghij", "ababababab"])
def test_nothing_is_chosen_where_too_few_blocks_would_be_left_out(kinds: str) -> None:
    containers = {"blocks": nn.ModuleList(nn.Identity() for _ in kinds)}
    assert choose_repeats(forward_of(kinds), containers) == []


def chain_of(blocks: int) -> list[Entry]:
    """A start, a chain of blocks that each read it, the block before and a parameter of their own, and an end."""
    entries = [Entry("parameter", (), (f"blocks.{index}.weight",), "parameter") for index in range(blocks)]
    start = len(entries)
    entries.append(Entry("start", (), (), "forward"))
    for index in range(blocks):
        reads = (start, len(entries) - 1, index)
        entries.append(Entry("block", reads, (f"blocks.{index}",), "forward"))
    return [*entries, Entry("end", (len(entries) - 1,), (), "forward")]


@pytest.mark.parametrize("blocks", [6, 7, 40])
def test_copies_read_what_the_blocks_of_the_whole_trace_read(blocks: int) -> None:
    short, whole = chain_of(5), chain_of(blocks)
    copies = add_copies(short, [Repeat(path="blocks", first=0, period=1, groups=blocks)])
    copied = [Entry(short[copy.source].key, copy.reads, copy.names, short[copy.source].section) for copy in copies]
    assert copied == whole


def test_a_block_inside_that_is_read_from_outside_is_refused() -> None:
    entries = chain_of(5)
    entries[-1] = replace(entries[-1], reads=(8,))
    with pytest.raises(Irregular, match="read from outside"):
        add_copies(entries, [Repeat(path="blocks", first=0, period=1, groups=9)])


def test_a_block_inside_that_does_something_else_is_refused() -> None:
    entries = chain_of(5)
    entries[8] = replace(entries[8], key="another")
    with pytest.raises(Irregular, match="differ"):
        add_copies(entries, [Repeat(path="blocks", first=0, period=1, groups=9)])


def test_a_trace_that_does_not_say_in_which_blocks_it_runs_is_refused() -> None:
    entries = [replace(entry, names=() if entry.section == "forward" else entry.names) for entry in chain_of(5)]
    with pytest.raises(Irregular, match="no operator says"):
        add_copies(entries, [Repeat(path="blocks", first=0, period=1, groups=9)])
