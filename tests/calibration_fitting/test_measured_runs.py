from pathlib import Path

import pytest

from phaze.calibration_fitting import read_steps
from phaze.errors import FormatError

TABLE = """model,cluster,global_batch,seconds,dp,tp,recompute,sequence_parallel,memory_gib,name
gpt2,a100-80gb:8,64,0.5,4,2,full,yes,20,first

gpt2,a100-80gb:8,64,0.25,,,,,,
"""

HEAD = "model,cluster,global_batch,seconds"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    return path


def test_a_table_of_steps_is_read_with_its_strategies(tmp_path: Path) -> None:
    first, second = read_steps(written(tmp_path, TABLE))
    assert (first.name, first.seconds, first.global_batch_size, first.memory_bytes) == ("first", 0.5, 64, 20 * 2**30)
    assert first.strategy == {"dp": 4, "tp": 2, "recompute": "full", "sequence_parallel": True}
    assert second.strategy == {}
    assert second.name == "line 4: gpt2 on a100-80gb:8"


def test_a_table_may_say_how_sequences_experts_and_states_were_divided(tmp_path: Path) -> None:
    columns, cells = f"{HEAD},dp,cp,ep,tp,expert_tp,zero,shard", "mixtral-8x7b,h100:32,64,1,8,2,4,2,1,1,8"
    (run,) = read_steps(written(tmp_path, f"{columns}\n{cells}\n"))
    assert run.strategy == {"dp": 8, "cp": 2, "ep": 4, "tp": 2, "expert_tp": 1, "zero": 1, "shard": 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model,seconds\ngpt2,1\n", "lacks cluster, global_batch"),
        (
            "model,cluster,global_batch,seconds,micro_batch\n",
            "unknown column 'micro_batch'. Did you mean micro_batch_size",
        ),
        (f"{HEAD}\n", "has no rows"),
        (
            f"{HEAD}\ngpt2,cpu:1,x,1\n",
            "line 2: global_batch is 'x'; expected a whole number",
        ),
        (
            f"{HEAD}\ngpt2,cpu:1,8,-1\n",
            "line 2: seconds is '-1'; expected a positive number",
        ),
        (f"{HEAD}\n,cpu:1,8,1\n", "line 2: model or cluster is empty"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FormatError) as error:
        read_steps(written(tmp_path, text))
    assert words in str(error.value)


def test_a_table_that_is_not_there_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        read_steps(tmp_path / "none.csv")
