"""HLO text of any version is read: layouts, tuples, comments, tables, attributes that nobody knows."""

import pytest

from phaze.frontends.hlo.hlo_lowering import lower_module
from phaze.frontends.hlo.hlo_text import HloTextError, Shape, read_hlo_text, split_list

HEADER = 'HloModule m, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias) }, new_thing={a={b,c}, "x,y"}\n'
TABLES = '\nFileNames\n1 "a {b.py"\n\nFileLocations\n1 {file_name_id=1 line=4}\n\nStackFrames\n1 {file_location_id=1}\n'
BODY = """
%add.1 (a: f32[], b: f32[]) -> f32[] { // sums
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(f32[] %a, f32[] %b)
}, execution_thread="main"

ENTRY %main (x: f32[2,3]) -> (f32[], f32[2,3]) {
  %x = f32[2,3]{1,0:T(8,128)S(1)} parameter(0), metadata={op_name="params[\\'w\\']"}
  %zero = f32[] constant(0)
  %table = s32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 } })
  %sum = f32[] reduce(%x, /*index=1*/%zero), dimensions={0,1}, to_apply=%add.1, holiday="May, 1", color={red}
  ROOT %out = (f32[], f32[2,3]{1,0}) tuple(%sum, %x), color={blue}
}
"""


def test_a_module_is_read_with_its_header_tables_comments_and_layouts() -> None:
    module = read_hlo_text(HEADER + TABLES + BODY)
    assert module.name == "m"
    assert module.attributes["new_thing"] == '{a={b,c}, "x,y"}'
    entry = module.entry
    assert (entry.name, entry.root) == ("main", "out")
    x, zero, table, total, out = entry.instructions
    assert x.shape == Shape("f32", (2, 3), (1, 0))
    assert zero.argument == "0"
    assert "".join(table.argument.split()) == "{{1,2},{3,4}}"
    assert total.operands == ("x", "zero")
    assert total.integers("dimensions") == (0, 1)
    assert out.shape.leaves == (Shape("f32"), Shape("f32", (2, 3), (1, 0)))


def test_names_without_marks_and_operands_without_shapes_are_the_same_module() -> None:
    text = HEADER + BODY
    short = text.replace("%", "").replace("f32[] a,", "a,").replace("f32[] b)", "b)")
    assert lower_module(read_hlo_text(short)) == lower_module(read_hlo_text(text))


def test_attributes_that_nobody_knows_are_skipped_and_counted() -> None:
    document = lower_module(read_hlo_text(HEADER + BODY))
    assert document["notes"] == ["3 attributes that are not known were skipped: color (2), holiday (1)"]


def test_donated_arguments_are_paired_with_their_results() -> None:
    document = lower_module(read_hlo_text(HEADER + BODY))
    assert document["aliases"] == [[0, 1]]
    (main,) = document["functions"]
    assert [argument[1] for argument in main["arguments"]] == ["params['w']"]
    assert [result[0] for result in main["results"]] == [[[], "f32"], [[2, 3], "f32"]]


def test_lists_are_split_outside_of_brackets_and_quotes() -> None:
    assert split_list('a, {b, c}, "d, e", f[1,2](3,4)') == ["a", "{b, c}", '"d, e"', "f[1,2](3,4)"]
    assert split_list(" ") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line that begins with 'HloModule'"),
        ("HloModule m\n", "the module has no computations"),
        ("HloModule m\nENTRY e {\n}\n", "has no instructions"),
        ("HloModule m\nENTRY e {\n  a = f32[2] parameter(0)\n", "has no end: the text is cut"),
        ("HloModule m\nENTRY e {\n  a = f32[2] parameter(x)\n}", "line 3: the parameter 'a' has no number"),
        ("HloModule m\nENTRY e {\n  hello\n}", "line 3: expected NAME = SHAPE OPCODE"),
        ("HloModule m\nENTRY e {\n  a = f32 add(b)\n}", "line 3: expected a shape such as f32"),
        ("HloModule m\nENTRY e {\n  a = f32[2] add(b\n}", "has no end: the text is cut"),
        ("HloModule m\nENTRY e {\n  a = f32[2] tanh(b)\n}", "line 3: 'b' is used before it is made"),
        ("HloModule m\nENTRY e {\n  a = f32[2] parameter(1)\n}", "parameter numbers are not 0, 1, 2"),
        (
            "HloModule m\nENTRY e {\n a = f32[2] parameter(0)\n b = f32[3] tanh(a)\n}",
            r"tanh of f32\[2\] cannot give f32",
        ),
        ("HloModule m\nENTRY e {\n a = f32[2] parameter(0)\n a = f32[2] tanh(a)\n}", "line 4: 'a' is made twice"),
        ("HloModule m\nENTRY e {\n a = f32[] parameter(0)\n b = f32[] call(a), to_apply=f\n}", "'f' is called, but"),
        (
            "HloModule m\nf {\n p = f32[] parameter(0)\n r = f32[] reduce(p, p), dimensions={}, to_apply=f\n}\n"
            "ENTRY e {\n a = f32[] parameter(0)\n b = f32[] reduce(a, a), dimensions={}, to_apply=f\n}",
            "computations are nested more than 150 deep",
        ),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text: str, message: str) -> None:
    with pytest.raises(HloTextError, match=message):
        lower_module(read_hlo_text(text))
