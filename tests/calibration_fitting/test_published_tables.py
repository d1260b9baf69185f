"""The readers of published tables in `benchmarks/published`, on tables that are written here."""

import csv
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"
VTRAIN = "set,gpu,gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,recompute,gradient_bucket,step_ms\n"
INTERNEVO = "model,table,gpu,gpus,tp,dp,pp,micro_bsz,micro_num,seq,zero1_group,act_ckpt,tokens_per_s_per_gpu,mem_GB\n"
BRIDGE = "task,model,system,gpus,precision,gbs,mbs,seq,fsdp,tp,pp,cp,vp,ep,tokens_per_s_per_gpu\n"


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(
        "published", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "published"]:
        del sys.modules[name]


def test_every_table_has_one_reader_and_every_line_becomes_a_row_or_a_reason(
    published: ModuleType, tmp_path: Path
) -> None:
    for file, (dataset, reader) in published.READERS.items():
        (tmp_path / file).write_text("model,hw,note\nsomething,unheard of,\n", encoding="utf-8")
        rows = list(reader(tmp_path / file))
        assert {row.dataset for row in rows} == {dataset}
        assert all(row.reason for row in rows)


def test_a_vtrain_line_is_a_question_with_whole_parts_of_its_vocabulary(published: ModuleType, tmp_path: Path) -> None:
    line = "single,A100-80GB,8,32,4,1024,16,24,1024,2,2,2,full,False,219.5\n"
    many = "multi,A100-80GB,512,1536,2,8192,64,48,2048,8,32,2,full,False,14614\n"
    (tmp_path / "vtrain_a100_measured.csv").write_text(VTRAIN + line + many, encoding="utf-8")
    row, padded = published.read_rows(tmp_path)
    assert (padded.reason, padded.model["vocab_size"]) == (None, 51200)
    assert row.reason is None
    assert row.seconds == pytest.approx(0.2195)
    assert row.model["vocab_size"] == 50256
    assert row.strategy["stages"] == (13, 13)
    assert row.stack == {"hides_reductions": False}


def test_stages_of_nanotron_are_cut_by_cost_and_narrow_models_tie_their_ends(
    published: ModuleType, tmp_path: Path
) -> None:
    header = "model,arch,gpus,dp,tp,pp,mbs,gbs_sequences,seq,zero,mfu_pct,mem_GB\n"
    sizes = ("16 layers, 2048, 32 heads, 8192", "32 layers, 4096, 32 heads, 14336")
    lines = [f'x,"{text}; vocab 131072",16,8,1,2,1,256,4096,1,40,20\n' for text in sizes]
    (tmp_path / "nanotron_best_h100.csv").write_text(header + "".join(lines), encoding="utf-8")
    narrow, wide = published.read_rows(tmp_path)
    assert (narrow.strategy["stages"], wide.strategy["stages"]) == ((12, 6), (19, 15))
    assert (narrow.model["tie_word_embeddings"], wide.model["tie_word_embeddings"]) == (True, False)


def test_torchtitan_compiles_its_loss_since_2025(published: ModuleType, tmp_path: Path) -> None:
    header = "hw,model,gpus,fsdp,local_batch,seq,act_ckpt,precision,compile,tokens_per_s_per_gpu,source\n"
    lines = [
        f"H100 96GB HBM2e,llama3-8b,8,8,2,8192,selective op,bf16,{compiled},6000,pytorch/torchtitan {page} @abc\n"
        for compiled, page in (("no", "a_2025-06"), ("yes", "llama3_h100_202412"), ("yes", "a_2025-06"), ("yes", "a"))
    ]
    (tmp_path / "torchtitan_all.csv").write_text(header + "".join(lines), encoding="utf-8")
    fusions = [row.stack["fusion"] for row in published.read_rows(tmp_path)]
    assert fusions == ["none", "chains", "chains+loss", "chains+loss"]


def test_degrees_that_are_not_the_devices_are_a_reason(published: ModuleType, tmp_path: Path) -> None:
    line = "single,A100-80GB,8,32,4,1024,16,24,1024,2,2,4,full,False,219.5\n"
    (tmp_path / "vtrain_a100_measured.csv").write_text(VTRAIN + line, encoding="utf-8")
    (row,) = published.read_rows(tmp_path)
    assert row.reason == "dp 2 x cp 1 x tp 2 x pp 4 are not 8 devices"


def test_seconds_of_a_bridge_line_follow_from_its_tokens_per_second(published: ModuleType, tmp_path: Path) -> None:
    dense = "Pre-Training,LLAMA3_70B,DGX-GB200,64,NVFP4,256,1,8192,0,2,4,1,5,n/a,4096\n"
    tuned = "LoRA Performance,LLAMA3_70B,DGX-GB200,8,FP8,32,1,4096,0,1,2,1,20,n/a,6206\n"
    (tmp_path / "megatron_bridge.csv").write_text(BRIDGE + dense + tuned, encoding="utf-8")
    first, second = published.read_rows(tmp_path)
    assert first.seconds == pytest.approx(256 * 8192 / (4096 * 64))
    assert (first.chip, first.recipe) == ("gb200", "nvfp4-adam-bf16-gradients")
    assert first.strategy["dp"] == 8
    assert sum(first.strategy["stages"]) == 82
    assert second.reason == "frozen parameters (LoRA) are not priced"


GOOD_LINES = {
    "vtrain_a100_measured.csv": VTRAIN + "single,A100-80GB,8,32,4,1024,16,24,1024,2,2,2,full,False,219.5\n",
    "megatron_bridge.csv": BRIDGE + "Pre-Training,LLAMA3_70B,DGX-GB200,64,NVFP4,256,1,8192,0,2,4,1,5,n/a,4096\n",
    "internevo_7b_hybrid_zero.csv": INTERNEVO + "InternLM 7B,fsdp=False,A100,16,1,16,1,2,4,2048,8,no,3900,60\n",
}
ODD_CELLS = ("", "?", "-1", "0", "1.5", "1e400", "nan", "unheard of", "64?", "OOM", "99999999999999", "2,4")


@pytest.mark.parametrize("file", GOOD_LINES)
def test_a_line_with_an_odd_cell_is_still_a_row_or_a_reason(published: ModuleType, tmp_path: Path, file: str) -> None:
    header, line = csv.reader(GOOD_LINES[file].splitlines())
    _, reader = published.READERS[file]
    odd_lines = [
        [*line[:place], odd, *line[place + 1 :]] for place, odd in itertools.product(range(len(line)), ODD_CELLS)
    ]
    with (tmp_path / file).open("w", newline="", encoding="utf-8") as written:
        csv.writer(written).writerows([header, line, *odd_lines])
    good, *rows = reader(tmp_path / file)
    assert good.reason is None
    assert len(rows) == len(odd_lines)
    assert all(row.reason is None or row.reason.strip() for row in rows)


def test_a_model_that_a_table_never_had_is_named_with_those_that_it_has(published: ModuleType, tmp_path: Path) -> None:
    line = "InternLM 104B,fsdp=False,A100,16,1,16,1,2,4,2048,8,no,3900,60\n"
    (tmp_path / "internevo_7b_hybrid_zero.csv").write_text(INTERNEVO + line, encoding="utf-8")
    (row,) = published.read_rows(tmp_path)
    assert row.reason == "not readable: model is 'InternLM 104B', which is not one of InternLM 7B, InternLM 20B"


def test_rows_that_differ_in_strategy_only_share_a_group(published: ModuleType, tmp_path: Path) -> None:
    lines = [
        f"single,A100-80GB,8,{batch},4,1024,16,24,1024,{tp},{8 // tp},1,full,False,219.5\n"
        for batch, tp in ((32, 1), (32, 2), (64, 2))
    ]
    (tmp_path / "vtrain_a100_measured.csv").write_text(VTRAIN + "".join(lines), encoding="utf-8")
    first, second, third = published.read_rows(tmp_path)
    assert first.group_key == second.group_key != third.group_key
