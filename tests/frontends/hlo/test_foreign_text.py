"""Files as other tools and other versions write them: several modules, gzip, exports, older attributes, dialects."""

import gzip
from pathlib import Path

import jax
import jax.export
import jax_models as models
import pytest

import phaze
from phaze.errors import FormatError, ImportModelError
from phaze.frontends.hlo.parser_process import split_hlo_modules, split_stablehlo_modules, upgraded

DOT = """
{name} {{
  p0 = f32[2,16,32] parameter(0)
  p1 = f32[2,32,{width}] parameter(1)
  ROOT product = f32[2,16,{width}] dot(p0, p1),
    lhs_batch_dims={{0}}, rhs_batch_dims={{0}},
    lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}
}}
"""
SMALL, LARGE = (DOT.format(name="ENTRY main", width=width) for width in (8, 64))
FLOPS = {SMALL: 2 * 2 * 16 * 32 * 8, LARGE: 2 * 2 * 16 * 32 * 64}


def flops_of(model: object, **options: object) -> float:
    return phaze.import_graph(model, frontend="hlo", **options).matmul_flops("forward")


def test_hlo_text_without_a_header_is_read() -> None:
    assert flops_of(SMALL.encode()) == FLOPS[SMALL]


def test_without_an_entry_the_last_computation_is_the_program(tmp_path: Path) -> None:
    path = tmp_path / "fusion.hlo"
    path.write_text(DOT.format(name="helper", width=8) + DOT.format(name="fusion", width=64))
    assert flops_of(path) == FLOPS[LARGE]


def test_an_opcode_may_stand_on_the_line_behind_its_shape() -> None:
    text = "ENTRY e {\n  a = f32[2,3]{1,0:T(8,128)} parameter(0)\n  ROOT t = (f32[2,3], f32[2,3])\n    tuple(a, a)\n}"
    assert len(phaze.import_graph(text.encode(), frontend="hlo").outputs) == 1


def test_of_several_modules_the_one_with_the_most_flops_is_taken_unless_one_is_named() -> None:
    text = f"HloModule helper\n{SMALL}\nHloModule model\n{LARGE}\n// HloModule in_a_comment\n".encode()
    assert len(split_hlo_modules(text.decode())) == 2
    graph = phaze.import_graph(text, frontend="hlo")
    assert graph.matmul_flops("forward") == FLOPS[LARGE]
    assert any("took the module model" in note and "of 2 modules" in note for note in graph.notes)
    assert flops_of(text, module="helper") == FLOPS[SMALL]
    with pytest.raises(ImportModelError, match="no module 'other'; the 2 modules here are helper, model"):
        phaze.import_graph(text, frontend="hlo", module="other")


def test_a_folder_may_hold_gzipped_dumps_and_a_module_of_it_is_named_by_file_or_name(tmp_path: Path) -> None:
    for number, (name, body) in enumerate({"jit_model": LARGE, "jit_helper": SMALL + "// " + "x" * 9999}.items()):
        data = gzip.compress(f"HloModule {name}\n{body}".encode())
        (tmp_path / f"module_{number:04}.{name}.before_optimizations.txt.gz").write_bytes(data)
    assert flops_of(tmp_path) == FLOPS[LARGE]
    assert flops_of(tmp_path, module="helper") == FLOPS[SMALL]
    assert flops_of(tmp_path, module="module_0001") == FLOPS[SMALL]
    assert flops_of(tmp_path / "module_0000.jit_model.before_optimizations.txt.gz") == FLOPS[LARGE]


def exported_artifact(function: object, *arguments: object) -> bytes:
    """An artifact as jax.export lays it out: a table, and the module behind its length."""
    module = jax.export.export(jax.jit(function))(*arguments).mlir_module_serialized  # type: ignore[arg-type]
    return b"\x3c\x00\x00\x00\xff" + b"\x00" * 70_000 + len(module).to_bytes(4, "little") + module + b"\x00tail"


def test_an_artifact_of_jax_export_is_read_by_the_module_in_it(tmp_path: Path) -> None:
    path = tmp_path / "step.bin"
    path.write_bytes(exported_artifact(lambda w, x: x @ w, models.shape(4, 3), models.shape(2, 4)))
    graph = phaze.import_graph(path)
    assert graph.matmul_flops("forward") == 2 * 2 * 4 * 3
    assert "imported from jax.export artifact" in graph.notes


OLD = """
func.func @main(%a: tensor<2x3xf32>, %b: tensor<2x5xf32>) -> tensor<5x3xf32> {
  %0 = "stablehlo.transpose"(%a) {permutation = dense<[1, 0]> : tensor<2xi64>} : (tensor<2x3xf32>) -> tensor<3x2xf32>
  %1 = "stablehlo.dot_general"(%0, %b) {dot_dimension_numbers = {
    lhs_batching_dimensions = dense<[]> : tensor<0xi64>, lhs_contracting_dimensions = dense<1> : tensor<1xi64>,
    rhs_batching_dimensions = dense<[]> : tensor<0xi64>, rhs_contracting_dimensions = dense<0> : tensor<1xi64>
  }} : (tensor<3x2xf32>, tensor<2x5xf32>) -> tensor<3x5xf32>
  %2 = "stablehlo.transpose"(%1) {permutation = dense<[1, 0]> : tensor<2xi64>} : (tensor<3x5xf32>) -> tensor<5x3xf32>
  return %2 : tensor<5x3xf32>
}
"""


@pytest.mark.parametrize("dialect", ["stablehlo", "mhlo"])
def test_attributes_of_older_versions_are_read(dialect: str) -> None:
    assert flops_of(OLD.replace("stablehlo", dialect).encode()) == 2 * 3 * 2 * 5


def test_text_of_today_is_not_changed() -> None:
    text = jax.jit(lambda w, x: x @ w).lower(models.shape(4, 3), models.shape(2, 4)).as_text()
    assert upgraded(text) == text
    assert split_stablehlo_modules(text) == [text]


def test_parts_that_cannot_be_read_do_not_hide_the_others_and_are_counted() -> None:
    text = f"func.func @broken() {{\n  foreign.op\n}}\n// -----\n{OLD}\n// -----\n// a comment alone\n"
    graph = phaze.import_graph(text.encode(), frontend="hlo")
    assert graph.matmul_flops("forward") == 2 * 3 * 2 * 5
    (note,) = [note for note in graph.notes if "left out" in note]
    assert note.startswith("1 of 2 modules of the text cannot be read and were left out; the first: ")
    assert "foreign" in note


def test_hlo_modules_that_cannot_be_read_do_not_hide_the_others_and_are_counted() -> None:
    whole = jax.jit(lambda w, x: x @ w).lower(models.shape(4, 3), models.shape(2, 4)).compiler_ir("hlo").as_hlo_text()
    graph = phaze.import_graph(f"{whole}\nHloModule broken\n\nENTRY main {{ x = f32[2 }}\n".encode(), frontend="hlo")
    assert graph.matmul_flops("forward") == 2 * 2 * 4 * 3
    assert any(note.startswith("1 of 2 modules of the text cannot be read") for note in graph.notes)


def test_operations_of_other_dialects_are_named_with_their_line() -> None:
    text = b"module {\n  func.func @main() -> tensor<2xf32> {\n    %0 = linalg.init_tensor [2] : tensor<2xf32>\n"
    with pytest.raises(FormatError, match=r"line 3 has linalg\.init_tensor, an operation of the dialect 'linalg'"):
        phaze.import_graph(text + b"    return %0 : tensor<2xf32>\n  }\n}\n", frontend="hlo")


TUPLES = b"""
module {
  func.func @predict(%x: tensor<4x4xf32>, %both: tuple<tensor<4x2xf32>, tuple<tensor<i32>>>) -> tensor<4x2xf32> {
    %0 = stablehlo.custom_call @lapack(%x) : (tensor<4x4xf32>) -> tuple<tensor<4x4xf32>, tensor<i32>>
    %1 = stablehlo.get_tuple_element %0[0] : (tuple<tensor<4x4xf32>, tensor<i32>>) -> tensor<4x4xf32>
    %2 = stablehlo.tuple %x, %1 : tuple<tensor<4x4xf32>, tensor<4x4xf32>>
    %3 = stablehlo.get_tuple_element %2[1] : (tuple<tensor<4x4xf32>, tensor<4x4xf32>>) -> tensor<4x4xf32>
    %4 = stablehlo.get_tuple_element %both[0] : (tuple<tensor<4x2xf32>, tuple<tensor<i32>>>) -> tensor<4x2xf32>
    %5 = func.call @helper(%3, %4) : (tensor<4x4xf32>, tensor<4x2xf32>) -> tensor<4x2xf32>
    return %5 : tensor<4x2xf32>
  }
  func.func private @helper(%x: tensor<4x4xf32>, %w: tensor<4x2xf32>) -> tensor<4x2xf32> {
    %0 = stablehlo.dot %x, %w : (tensor<4x4xf32>, tensor<4x2xf32>) -> tensor<4x2xf32>
    return %0 : tensor<4x2xf32>
  }
}
"""


def test_tuples_of_stablehlo_are_taken_apart_and_the_only_function_that_nobody_calls_is_the_entry() -> None:
    graph = phaze.import_graph(TUPLES, frontend="hlo")
    assert graph.matmul_flops("forward") == 2 * 4 * 4 * 2
    assert [unknown.function for unknown in graph.coverage().unknown] == ["lapack"]


def test_functions_that_jump_between_blocks_and_programs_of_constants_alone_say_so() -> None:
    jumps = b"func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n  cf.br ^bb1(%a : tensor<2xf32>)\n"
    with pytest.raises(FormatError, match="jumps between blocks"):
        phaze.import_graph(jumps + b"^bb1(%b: tensor<2xf32>):\n  return %b : tensor<2xf32>\n}\n", frontend="hlo")
    constant = b"func.func @main() -> tensor<2xf32> {\n  %0 = stablehlo.constant dense<1.0> : tensor<2xf32>\n"
    with pytest.raises(ImportModelError, match="takes no arguments and computes from constants of the module alone"):
        phaze.import_graph(constant + b"  return %0 : tensor<2xf32>\n}\n", frontend="hlo")


def test_constants_are_the_data_of_a_program_that_takes_no_arguments() -> None:
    text = b"""func.func @main() -> tensor<2x2xf32> {
      %0 = stablehlo.constant dense<[[1.0, 2.0], [3.0, 4.0]]> : tensor<2x2xf32>
      %1 = stablehlo.dot %0, %0 : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
      return %1 : tensor<2x2xf32>\n}"""
    assert flops_of(text) == 2 * 2 * 2 * 2


def test_modules_inside_a_module_are_modules_of_their_own() -> None:
    text = "module @small {{\n{}}}\nmodule @large {{\n{}}}\n".format(OLD, OLD.replace("5", "7"))
    assert flops_of(text.encode()) == 2 * 3 * 2 * 7
    assert flops_of(text.encode(), module="small") == 2 * 3 * 2 * 5


def test_a_window_with_zeros_between_elements_is_a_batch_dimension_where_it_meets_each_once() -> None:
    window = "window={size=4x16 stride=3x1 lhs_dilate=4x1}, dim_labels=0bf1_0oi1->0bf1"
    text = f"""ENTRY main {{
      x = f32[4,3,5,16] parameter(0)
      w = f32[4,7,5,16] parameter(1)
      ROOT y = f32[4,3,7,1] convolution(x, w), {window}\n}}"""
    assert flops_of(text.encode()) == 2 * 4 * 3 * 7 * 5 * 16


def test_a_shape_that_is_not_written_follows_from_the_operands() -> None:
    graph = phaze.import_graph(
        b"ENTRY e {\n  a = f32[2,3] parameter(0)\n  b = tanh(a)\n  ROOT t = tuple(b, a)\n}", frontend="hlo"
    )
    assert [op.function for op in graph.ops] == ["tanh"]
    with pytest.raises(FormatError, match=r"line 3: expected a shape such as f32\[2,3\] before 'reshape'"):
        phaze.import_graph(b"ENTRY e {\n  a = f32[2,3] parameter(0)\n  ROOT b = reshape(a)\n}", frontend="hlo")


def test_attributes_and_generic_operations_of_other_dialects_are_read() -> None:
    text = b"""#mark = #other.mark<a|b>
    func.func @main(%a: tensor<2x3xf32>) -> tensor<2x3xf32> {
      %0 = stablehlo.tanh %a {kept = #mark} : tensor<2x3xf32>
      %1 = "other.op"(%0) : (tensor<2x3xf32>) -> tensor<2x3xf32>
      return %1 : tensor<2x3xf32>\n}"""
    assert [op.origin for op in phaze.import_graph(text, frontend="hlo").ops] == ["tanh", "op"]


def test_arguments_of_torch_xla_that_a_module_moved_to_the_device_are_its_parameters() -> None:
    def metadata(file: str) -> str:
        return f'metadata={{op_type="xla__device_data" op_name="xla__device_data" source_file="{file}" source_line=1}}'

    text = f"""HloModule SyncTensorsGraph.9
      add {{\n a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b)\n }}
      ENTRY SyncTensorsGraph.9 {{
        p0.1 = f32[4,3] parameter(0), {metadata("site-packages/torch/nn/modules/module.py")}
        p1.2 = f32[8,4] parameter(1), {metadata("train.py")}
        dot.3 = f32[8,3] dot(p1.2, p0.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        zero = f32[] constant(0)
        ROOT loss = f32[] reduce(dot.3, zero), dimensions={{0,1}}, to_apply=add\n }}"""
    graph = phaze.import_graph(text.encode(), frontend="hlo")
    assert (graph.parameter_count, graph.micro_batch_size) == (12, 8)
