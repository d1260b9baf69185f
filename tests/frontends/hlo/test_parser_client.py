"""Damaged and foreign input ends in an error that says what is wrong; it never takes this process down."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hlo_forms
import pytest

import phaze
from phaze.cli import main
from phaze.errors import FormatError, ImportModelError, PhazeError
from phaze.frontends.hlo.dumps import Form, find_form
from phaze.frontends.hlo.importing import ModuleBytes, import_bytes
from phaze.frontends.hlo.parser_client import Parser

LIMIT_S = 20.0
_FORMS = {
    "text": Form.STABLEHLO_TEXT,
    "bytecode": Form.STABLEHLO_BYTECODE,
    "hlo text": Form.HLO_TEXT,
    "hlo proto": Form.HLO_PROTO,
}


@pytest.fixture(scope="module")
def parser() -> Iterator[Parser]:
    parser = Parser()
    yield parser
    parser.close()


@pytest.fixture(scope="module")
def forms() -> hlo_forms.Forms:
    return hlo_forms.small_forms()


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_every_damaged_dump_ends_in_a_graph_or_an_error(count: int, forms: hlo_forms.Forms, parser: Parser) -> None:
    ends: Counter[str] = Counter()
    for name, data in hlo_forms.damaged(forms, count):
        form = _FORMS[name.rpartition(" ")[0]]
        try:
            graph = import_bytes(ModuleBytes(data, name, form), {"time_limit_s": LIMIT_S}, parser)
            ends["graph"] += len(graph.ops) > 0
        except PhazeError as error:
            ends[type(error).__name__] += 1
    assert ends.total() == count
    assert ends["graph"] > count / 20
    assert ends["FormatError"] > count / 2


def test_a_parser_that_dies_is_started_anew(forms: hlo_forms.Forms) -> None:
    parser = Parser()
    source = ModuleBytes(forms["text"], "text", Form.STABLEHLO_TEXT)
    first = import_bytes(source, {}, parser)
    assert import_bytes(source, {}, parser) == first
    assert parser.starts == 1
    assert parser._child is not None
    os.kill(parser._child.process.pid, signal.SIGSTOP)
    with pytest.raises(FormatError, match=r"reading it as StableHLO text takes longer than 0\.5 s"):
        import_bytes(source, {"time_limit_s": 0.5}, parser)
    assert import_bytes(source, {}, parser) == first
    os.kill(parser._child.process.pid, signal.SIGKILL)
    parser._child.process.wait()
    assert import_bytes(source, {}, parser) == first
    assert parser.starts == 3
    parser.close()


def test_text_that_aborts_the_parser_of_xla_is_read_by_ours(parser: Parser) -> None:
    text = b"HloModule m\nENTRY main {\n  p = f32[2,2]{1,0} parameter(0), sharding={devices=[0]}\n"
    text += b"  ROOT t = f32[2,2] tanh(p)\n}\n"
    options = {"time_limit_s": LIMIT_S, "parameters": 0}
    graph = import_bytes(ModuleBytes(text, "text", Form.HLO_TEXT), options, parser)
    assert [op.function for op in graph.ops] == ["tanh"]


EMPTY = "module {}"
NO_MAIN = "module @m { "
NO_MAIN += "func.func @other(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> } "
NO_MAIN += "func.func @more(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> } }"
DYNAMIC = (
    'module { func.func @main(%a: tensor<2xf32>, %b: tensor<?x3xf32> loc("batch")) -> tensor<?x3xf32> '
    "{ return %b : tensor<?x3xf32> } }"
)
UNKNOWN = "module { func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { %0 = foo.bar %a : "
UNKNOWN += "tensor<2xf32>\n return %0 : tensor<2xf32> } }"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (EMPTY, ImportModelError, r"has no function 'main' \(functions: none at all\); nothing to import"),
        ("", ImportModelError, "has no function 'main'"),
        ("\0\0\0\0", ImportModelError, "has no function 'main'"),
        (NO_MAIN, ImportModelError, r"has no function 'main' \(functions: other, more\); name the one to import"),
        (DYNAMIC, ImportModelError, r"argument 1 \('batch'\) has the dynamic shape \[\?, 3\]; export the model with"),
        (UNKNOWN, FormatError, r"as StableHLO text: line 1 has foo\.bar, an operation of the dialect 'foo'"),
        ("module { this is not MLIR", FormatError, "could not be read as StableHLO text"),
        ("once upon a time", FormatError, "could not be read as StableHLO text"),
    ],
)
def test_what_is_wrong_with_a_module_is_said(text: str, error: type[PhazeError], message: str, tmp_path: Path) -> None:
    path = tmp_path / "module.mlir"
    path.write_text(text)
    with pytest.raises(error, match=message):
        phaze.import_graph(path)


def test_a_loop_without_end_is_refused() -> None:
    text = b"""
module { func.func @main(%w: tensor<2xf32> loc("params")) -> tensor<2xf32> {
  %c = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%i = %c, %v = %w) : tensor<i32>, tensor<2xf32>
    cond { %t = stablehlo.constant dense<true> : tensor<i1>
           stablehlo.return %t : tensor<i1> }
    do { %n = stablehlo.tanh %v : tensor<2xf32>
         stablehlo.return %i, %n : tensor<i32>, tensor<2xf32> }
  return %r#1 : tensor<2xf32> } }
"""
    with pytest.raises(
        ImportModelError, match="a loop of the module runs more than 2,147,483,648 trips, or never ends"
    ):
        phaze.import_graph(text)


def test_files_that_are_no_hlo_are_refused_by_name(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(ImportModelError, match="no frontend imports"):
        phaze.import_graph(str(image))
    with pytest.raises(FormatError, match=r"image.png is no HLO: .* it begins with b'\\x89PNG"):
        phaze.import_graph(str(image), frontend="hlo")
    with pytest.raises(ImportModelError, match="an object of type int is no HLO file"):
        phaze.import_graph(3, frontend="hlo")
    with pytest.raises(ImportModelError, match="an HLO module has its own inputs"):
        phaze.import_graph(b"HloModule m", (1,), frontend="hlo")
    with pytest.raises(ImportModelError, match="time_limit_s is -1; expected a positive number"):
        phaze.import_graph(b"HloModule m", time_limit_s=-1)


def test_a_folder_without_dumps_says_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FormatError, match=r"holds no dump of XLA or JAX; expected files such as module_0000"):
        phaze.import_graph(tmp_path, frontend="hlo")
    assert main(["import", str(tmp_path)]) == 1
    assert "holds no config.json and no dump of XLA" in " ".join(capsys.readouterr().err.split())


def test_forms_are_told_apart_by_their_first_bytes(forms: hlo_forms.Forms) -> None:
    assert {name: find_form(data) for name, data in forms.items()} == _FORMS
    assert find_form(b"") is None
    assert find_form(b"\n# Title\n\nSome text about the main thing.\n") is None
    assert find_form(bytes(1000)) is None
