"""Dumps of a step on eight devices, before and after partitioning and optimisation, are the function itself."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import partitioned_dumps
import pytest
from repository import ROOT

import phaze
from phaze.errors import QuestionError
from phaze.frontends.stablehlo.partitioned_modules import group_size, read_tiles
from phaze.ir import Graph, Phase

STRATEGIES = {
    "8x1": {"dp": 8, "tp": 1, "zero": 0},
    "1x8": {"dp": 1, "tp": 8},
    "2x4": {"dp": 2, "tp": 4, "zero": 0},
    "4x2f": {"dp": 4, "tp": 2, "zero": 3},
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    script = ROOT / "tests" / "support" / "partitioned_dumps.py"
    subprocess.run([sys.executable, str(script), str(folder), *STRATEGIES], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def function() -> Graph:
    ids = jax.ShapeDtypeStruct((partitioned_dumps.SAMPLES, partitioned_dumps.LENGTH), jnp.int32)
    return phaze.import_graph(partitioned_dumps.loss, (partitioned_dumps.parameters(), ids, ids))


def found(dumps: Path, mesh: str, ending: str) -> Path:
    (path,) = [path for path in (dumps / mesh).iterdir() if path.name.endswith(ending)]
    return path


BEFORE, DURING, AFTER = "before_optimizations", "before_control-dep-rewriter", "cpu_after_optimizations"


@pytest.mark.parametrize("mesh", ["8x1", "1x8", "2x4"])
@pytest.mark.parametrize("stage", [BEFORE, DURING, AFTER])
def test_every_dump_of_a_step_on_devices_is_the_function_and_shows_its_strategy(
    mesh: str, stage: str, dumps: Path, function: Graph
) -> None:
    batch = partitioned_dumps.SAMPLES
    expected = function.with_micro_batch(batch)
    for ending in (f"{stage}.txt", f"{stage}.hlo.pb"):
        graph = phaze.import_graph(found(dumps, mesh, ending))
        assert graph.runs_as == STRATEGIES[mesh], ending
        assert graph.parameter_count == expected.parameter_count, ending
        assert graph.micro_batch_size == batch, ending
        assert len(graph.layers) == len(expected.layers), ending
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert graph.matmul_flops(phase) == expected.matmul_flops(phase), (ending, phase)


def test_parameters_divided_over_copies_are_zero_3_and_parts_that_make_no_whole_are_said(dumps: Path) -> None:
    for stage in (BEFORE, DURING, AFTER):
        graph = phaze.import_graph(found(dumps, "4x2f", f"{stage}.txt"))
        assert graph.runs_as == STRATEGIES["4x2f"]
        assert "this runs dp 4 x tp 2 on 8 devices, ZeRO-3" in graph.notes
        is_of_one_device = any("these are the shapes of one device" in note for note in graph.notes)
        assert is_of_one_device == (stage != BEFORE)  # what XLA makes of it sends parts in rings


def test_a_dump_is_priced_as_it_runs(dumps: Path, tmp_path: Path) -> None:
    path = found(dumps, "2x4", f"{AFTER}.txt")
    evaluation = phaze.evaluate(path, cluster="a100-80gb:8", compares=False, target=None)
    strategy = evaluation.plan.strategy
    assert (strategy.dp, strategy.tp, strategy.pp, strategy.zero, strategy.micro_batch_size) == (2, 4, 1, 0, 8)
    with pytest.raises(QuestionError, match="the program runs on 8 devices, but the cluster has 4"):
        phaze.evaluate(path, cluster="a100-80gb:4")
    with pytest.raises(QuestionError, match="strategy is not given, and the model does not show one"):
        phaze.evaluate("gpt2", cluster="a100-80gb:4")
    graph = phaze.import_graph(path)
    graph.save(tmp_path / "graph.json")
    assert phaze.load_graph(tmp_path / "graph.json") == graph


def test_shardings_say_which_tile_each_device_has() -> None:
    tiles = read_tiles("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", 2, 8)
    assert tiles is not None
    assert (tiles.parts, tiles.tile_of_device) == ((4, 1), (0, 1, 2, 3, 0, 1, 2, 3))
    listed = read_tiles("{devices=[2,1]1,0}", 2, 2)
    assert listed is not None
    assert listed.tile_of_device == (1, 0)
    assert read_tiles("{replicated}", 1, 4) == read_tiles("{maximal device=0}", 1, 4)
    for wrong in ("", "{devices=[3]<=[3]}", "{devices=[2]0,0}", "{devices=[0]}", "{manual}"):
        assert read_tiles(wrong, 1, 2) is None, wrong


def test_shardings_by_axes_of_a_mesh_say_the_same_as_those_by_tiles() -> None:
    meshes = ('sdy.mesh @other = <["a"=8]>', 'sdy.mesh @mesh = <["data"=2, "model"=4]>')
    for axes, tiles in {
        '{"data"}, {}': "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
        '{}, {"model", ?}': "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        '{"model", "data"}, {}': "{devices=[8,1]<=[2,4]T(1,0)}",
        '{"data"}, {"model"}': "{devices=[2,4]<=[8]}",
        "{}, {}": "{replicated}",
    }.items():
        text = f"#sdy.sharding<@mesh, [{axes}]>"
        assert read_tiles(text, 2, 8, meshes) == read_tiles(tiles, 2, 8), axes
    for wrong in ('@mesh, [{"data":(1)2}, {}]', '@absent, [{"data"}, {}]', '@mesh, [{"data"}]', "@mesh"):
        assert read_tiles(f"#sdy.sharding<{wrong}>", 2, 8, meshes) is None, wrong


@pytest.mark.parametrize("axes", [(8, 1), (1, 8), (2, 4)])
def test_stablehlo_with_shardings_shows_its_strategy(axes: tuple[int, int]) -> None:
    text = f"""
module @step attributes {{mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32}} {{
  sdy.mesh @mesh = <["data"={axes[0]}, "model"={axes[1]}]>
  func.func public @main(%w: tensor<16x32xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{}}, {{"model"}}]>}},
      %x: tensor<64x16xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"data"}}, {{}}]>}}) -> tensor<f32> {{
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<64x16xf32>, tensor<16x32xf32>) -> tensor<64x32xf32>
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %c) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<64x32xf32>, tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }}
}}"""
    graph = phaze.import_graph(text.encode())
    assert (graph.runs_as["dp"], graph.runs_as["tp"]) == axes
    assert f"this runs dp {axes[0]} x tp {axes[1]} on 8 devices" in graph.notes


def test_groups_of_collectives_have_a_size_in_every_way_of_writing_them() -> None:
    texts = {"{{0,1,2},{3,4,5}}": 3, "[2,4]<=[8]": 4, "[4,2]<=[2,4]T(1,0)": 2, "{}": 8, "garbage": None}
    texts |= {"mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}": 4}
    assert {text: group_size(text, 8) for text in texts} == texts
