"""`phaze import`: summaries for people and machines, saved graphs, refusals."""

import json
from pathlib import Path

import pytest

import phaze
from phaze.cli import main


def test_the_summary_has_the_figures_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "gpt2-xl"]) == 0
    out = capsys.readouterr().out
    assert "gpt2-xl: 1,557,611,200 parameters, 50 layers (3 distinct), microbatch 1" in out
    assert "matmul flops: 3.507 Tflop forward, 7.013 Tflop backward" in out
    assert "coverage: 100.0% of flops, 100.0% of bytes in 2,225 ops" in out


def test_json_holds_the_graph_s_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "gpt3-175b", "--json", "--micro-batch-size", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    graph = phaze.import_graph("gpt3-175b").with_micro_batch(2)
    assert document["parameter_count"] == graph.parameter_count
    assert document["matmul_flops"] == {phase: graph.matmul_flops(phase) for phase in ("forward", "backward")}
    assert (document["layers"], document["distinct_layers"], document["micro_batch_size"]) == (98, 3, 2)
    assert document["coverage"]["flops_share"] == 1.0


def test_a_saved_graph_imports_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "graph.json")
    assert main(["import", "gpt2", "--sequence-length", "128", "--out", path]) == 0
    assert f"saved to {path}" in capsys.readouterr().out.replace("\n", "")
    assert main(["import", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameter_count"] == 124_439_808
    assert phaze.load_graph(path) == phaze.import_graph("gpt2", sequence_length=128)


@pytest.mark.parametrize(
    "arguments", [["--micro-batch-size", "0"], ["--sequence-length", "-3"], ["--micro-batch-size", "many"]]
)
def test_impossible_numbers_are_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["import", "gpt2", *arguments])
    assert ended.value.code == 2
    assert "is not a positive integer" in capsys.readouterr().err


def test_an_unknown_model_is_one_readable_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "gpt2-xxl"]) == 1
    err = capsys.readouterr().err
    assert "Did you mean gpt2-xl" in err
    assert "Traceback" not in err


def test_without_a_model_the_known_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--json"]) == 0
    names = [model["name"] for model in json.loads(capsys.readouterr().out)["models"]]
    assert {"gpt2-xl", "gpt3-175b", "t5-large"} <= set(names)


def test_what_decides_the_numbers_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}
    config |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512, "sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["import", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "inputs: input_ids [1, 512], labels [1, 512]" in out
    assert "note: sequences of 512 positions (the model's own; pass sequence_length to change it)" in out
    assert "note: 2 of 2 layers see a window of 128 positions; matmul flops count all of them" in out


def test_shared_parameters_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert out.count("39,383,808*") == 1
    assert "* with parameters that several layers share: transformer.wte.weight" in out


def test_a_folder_without_a_config_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().err


def test_a_stablehlo_file_is_imported_with_roles_by_path_or_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "module.mlir"
    path.write_text(
        'module @jit_f { func.func @main(%a: tensor<8x6xf32> loc("w"), %b: tensor<4x6xf32> loc("x")) -> tensor<f32> {\n'
        "%0 = stablehlo.dot_general %b, %a, contracting_dims = [1] x [1] : "
        "(tensor<4x6xf32>, tensor<8x6xf32>) -> tensor<4x8xf32>\n"
        "%c = stablehlo.constant dense<0.0> : tensor<f32>\n"
        "%1 = stablehlo.reduce(%0 init: %c) applies stablehlo.add across dimensions = [0, 1] : "
        "(tensor<4x8xf32>, tensor<f32>) -> tensor<f32>\n"
        "return %1 : tensor<f32> } }"
    )
    assert main(["import", str(path)]) == 1
    assert "pass parameters= or batch= by name or index" in " ".join(capsys.readouterr().err.split())
    for option in (["--parameters", "w"], ["--parameters", "0"], ["--batch", "x"]):
        assert main(["import", str(path), *option, "--json", "--micro-batch-size", "8"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["parameter_count"], document["inputs"]) == (48, {"x": [8, 6]})
        assert document["matmul_flops"] == {"forward": 2 * 8 * 6 * 8, "backward": 2 * 8 * 6 * 8}
