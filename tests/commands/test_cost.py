"""`phaze cost`: the most expensive ops of a model on a chip."""

import json

import pytest

from phaze.cli import main

SMALL = ["cost", "gpt2", "--chip", "a100-80gb", "--sequence-length", "128"]


def test_the_table_names_ops_and_what_binds_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "gpt2 on a100-80gb, microbatch 1, bf16-adam" in out
    assert "3 of" in out
    assert "memory" in out or "compute" in out
    assert "the update takes" in out
    assert "calibration: a100, fitted to published runs." in out


def test_json_holds_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--micro-batch-size", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"] == "a100, fitted to published runs"
    assert document["total_s"] == pytest.approx(sum(row["total_s"] for row in document["rows"]))
    assert {row["binding"] for row in document["rows"]} <= {"compute", "memory", "fill", "overhead"}
    assert {row["phase"] for row in document["rows"]} == {"forward", "backward"}


def test_fusion_shortens_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for options in (["--attention", "unfused"], ["--fuse", "--attention", "unfused"], ["--fuse"]):
        assert main([*SMALL, "--json", *options]) == 0
        totals.append(json.loads(capsys.readouterr().out)["total_s"])
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 3


def test_fused_attention_says_how_many_it_fused_and_what_stayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    assert (
        "attentions fused: 12; softmaxes that stay apart (losses, routers, learned biases): 1."
        in capsys.readouterr().out
    )
    assert main([*SMALL, "--json", "--attention", "unfused"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["fused_attentions"], document["separate_softmaxes"]) == (0, 13)


def test_precision_changes_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for recipe in ("bf16-adam", "fp32-adam"):
        assert main([*SMALL, "--json", "--precision", recipe]) == 0
        totals.append(json.loads(capsys.readouterr().out)["total_s"])
    assert totals[1] > 2 * totals[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cost", "gpt2", "--chip", "a100"], "Did you mean a100-"),
        (["cost", "gpt7", "--chip", "a100-80gb"], "unknown model"),
        ([*SMALL, "--precision", "bf17"], "unknown precision"),
    ],
)
def test_unknown_names_are_one_readable_block(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err.replace("\n", " ")
    assert "Traceback" not in captured.err


def test_a_chip_must_be_named() -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["cost", "gpt2"])
    assert exit_info.value.code == 2
