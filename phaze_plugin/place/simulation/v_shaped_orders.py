"""Orders of passes in pipelines whose stages go down the devices and come back: ZB-V and DualPipeV.

Of S devices and m microbatches, device r runs the stages r (chunk 0) and 2S-1-r (chunk 1). F0 is a forward of chunk 0,
B the backward for inputs, W the one for weights; microbatches follow each other in each kind of pass of a chunk.

ZB-V (`_zero_bubble_v_steps`; Qi et al., ICLR 2024, section 6). With n the larger of m and 2S-1, device r runs

    F0 2(S-r)-1 times; F1 F0 r times; F1 B1 W1 S-r times; F0 B0 W0 F1 B1 W1 n-2S+1+r times; B0 W0 F1 B1 W1 S-1-r times;
    B0 B1 r times; B0 W0 S-r times; what is left of W1, and of W0

without the microbatches beyond m. It leaves no bubble but the first forwards where F, B and W take equally long.

DualPipeV (`_dual_pipe_v_steps`; DeepSeek-AI, arXiv:2412.19437, halved to one copy). X is a B with its W right behind,
one backward whose gradient is sent when both are over, and w the oldest W that is left. It needs m >= 2S:

    F0 2(S-1-r) times; F0 F1 r+1 times; B1 w F1 S-1-r times; F0 X1 F1 X0 m-2S+1+r times; X1 F1 X0 S-1-r times;
    X1 X0 r+1 times, of which the second half is B; w B0 S-1-r times; w r+1 times

Forwards and backwards that stand side by side there are run one after the other here, as torch runs them: what hiding
an exchange of experts behind them would save is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phaze.parallelism import PipelineSchedule

__all__ = ["VPass", "v_shaped_passes"]

VPass = tuple[str, int, int, bool]
"""Kind (F, B or W), chunk, microbatch, and whether a B is one pass with the W behind it."""


def v_shaped_passes(schedule: PipelineSchedule, pp: int, micro_batches: int, device: int) -> list[VPass]:
    """The passes of one device."""
    if schedule is PipelineSchedule.DUAL_PIPE_V:
        return list(_numbered(_dual_pipe_v_steps(pp, micro_batches, device)))
    numbered = _numbered(_zero_bubble_v_steps(pp, max(micro_batches, 2 * pp - 1), device))
    return [each for each in numbered if each[2] < micro_batches]


def _zero_bubble_v_steps(pp: int, micro_batches: int, device: int) -> Iterator[str]:
    """The kinds and chunks of the passes of ZB-V, where microbatches fill the pipeline."""
    ahead = pp - device
    rounds = micro_batches - 2 * pp + 1 + device
    yield from ["F0"] * (2 * ahead - 1)
    yield from ["F1", "F0"] * device
    yield from ["F1", "B1", "W1"] * ahead
    yield from ["F0", "B0", "W0", "F1", "B1", "W1"] * rounds
    yield from ["B0", "W0", "F1", "B1", "W1"] * (ahead - 1)
    yield from ["B0", "B1"] * device
    yield from ["B0", "W0"] * ahead
    yield from ["W1"] * device + ["W0"] * device


def _dual_pipe_v_steps(pp: int, micro_batches: int, device: int) -> Iterator[str]:
    """The kinds and chunks of the passes of DualPipeV; w stands for the oldest W that is left."""
    behind = pp - 1 - device
    yield from ["F0"] * (2 * behind)
    yield from ["F0", "F1"] * (device + 1)
    yield from ["B1", "w", "F1"] * behind
    yield from ["F0", "X1", "F1", "X0"] * (micro_batches - 2 * pp + 1 + device)
    yield from ["X1", "F1", "X0"] * behind
    last = [f"{chunk}" for _ in range(device + 1) for chunk in (1, 0)]
    yield from [("X" if place <= device else "B") + chunk for place, chunk in enumerate(last)]
    yield from ["w", "B0"] * behind
    yield from ["w"] * (device + 1)


def _numbered(steps: Iterable[str]) -> Iterator[VPass]:
    """The passes of some steps, with their microbatches."""
    counts: dict[str, int] = {}
    left: list[tuple[int, int]] = []

    def numbered(kind: str, chunk: int, is_whole: bool = False) -> VPass:
        micro_batch = counts.get(f"{kind}{chunk}", 0)
        counts[f"{kind}{chunk}"] = micro_batch + 1
        return kind, chunk, micro_batch, is_whole

    for step in steps:
        if step == "w":
            chunk, micro_batch = left.pop(0)
            counts[f"W{chunk}"] = counts.get(f"W{chunk}", 0) + 1
            yield "W", chunk, micro_batch, False
            continue
        kind, chunk = step[0], int(step[1])
        if kind == "X":
            yield numbered("B", chunk, is_whole=True)
            yield numbered("W", chunk)
            continue
        each = numbered(kind, chunk)
        if kind == "B":
            left.append((chunk, each[2]))
        yield each
