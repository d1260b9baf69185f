"""Whether a device holds its stage: it fits, it is marginal, or it is over."""

from dataclasses import replace

from placement_problems import chain_problem, with_memory

from phaze.place import Fit, find_placement


def test_a_stage_within_the_margin_is_marginal() -> None:
    problem = replace(chain_problem(), memory_margin=0.2, allows_marginal=True)
    best = find_placement(problem).best
    assert best is not None
    peak = max(memory.total_bytes for memory in best.memory)
    tight = find_placement(with_memory(problem, int(peak / 0.9))).best
    assert tight is not None
    assert tight.fit is Fit.MARGINAL
