"""Tuples, loops, branches, asynchronous operations, fusions and kernels of HLO become ops of the graph."""

import phaze
from phaze.ir import Graph

STEP = """
HloModule jit_step

body {
  state = (s32[], f32[4,8], f32[8,8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = f32[4,8] get-tuple-element(state), index=1
  w = f32[8,8] get-tuple-element(state), index=2
  y = f32[4,8] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT new = (s32[], f32[4,8], f32[8,8]) tuple(next, y, w)
}

condition {
  state = (s32[], f32[4,8], f32[8,8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(i, three), direction=LT
}

sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  arguments = ((f32[8,8]), f32[4,8]) parameter(0), metadata={op_name="params"}
  params = (f32[8,8]) get-tuple-element(arguments), index=0
  w = f32[8,8] get-tuple-element(params), index=0
  x = f32[4,8] get-tuple-element(arguments), index=1
  zero = s32[] constant(0)
  state = (s32[], f32[4,8], f32[8,8]) tuple(zero, x, w)
  held = (s32[], f32[4,8], f32[8,8]) opt-barrier(state)
  loop = (s32[], f32[4,8], f32[8,8]) while(held), condition=condition, body=body
  y = f32[4,8] get-tuple-element(loop), index=1
  none = f32[] constant(0)
  ROOT loss = f32[] reduce(y, none), dimensions={0,1}, to_apply=sum
}
"""


def imported(text: str, **options: object) -> Graph:
    return phaze.import_graph(text.encode(), **options)


def entry(*lines: str, computations: str = "") -> str:
    return f"HloModule m\n{computations}\nENTRY main {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"


def test_tuples_of_parameters_and_of_the_state_of_a_loop_are_taken_apart() -> None:
    graph = imported(STEP, parameters=[0])
    assert graph.parameter_count == 64
    assert graph.matmul_flops("forward") == 3 * 2 * 4 * 8 * 8
    assert graph.matmul_flops("backward") == 5 * 2 * 4 * 8 * 8  # the batch needs no gradient
    assert [tensor.shape for tensor in graph.tensors.values() if tensor.role == "batch"] == [(4, 8)]


def test_asynchronous_pairs_are_what_they_start() -> None:
    wrapped = """
other {
  p = f32[4,8] parameter(0)
  q = f32[8,8] parameter(1)
  ROOT d = f32[4,8] dot(p, q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""
    text = entry(
        "x = f32[4,8] parameter(0)",
        "w = f32[8,8] parameter(1)",
        "s = ((f32[4,8], f32[8,8]), f32[4,8], u32[]) async-start(x, w), calls=other",
        "u = ((f32[4,8], f32[8,8]), f32[4,8], u32[]) async-update(s)",
        "d = f32[4,8] async-done(u)",
        "rs = f32[4,8] all-reduce-start(d), replica_groups={{0,1}}, to_apply=add",
        "r = f32[4,8] all-reduce-done(rs)",
        "gs = (f32[4,8], f32[8,8]) all-gather-start(r), replica_groups={{0,1}}, dimensions={0}",
        "g = f32[8,8] all-gather-done(gs)",
        "ps = (f32[8,8], f32[8,8], u32[], u32[]) collective-permute-start(g), source_target_pairs={{0,1},{1,0}}",
        "p = f32[8,8] collective-permute-done(ps)",
        "cs = (f32[8,8], f32[8,8], u32[]) copy-start(p)",
        "c = f32[8,8] copy-done(cs)",
        "ss = ((f32[8,8]), f32[4,8], s32[]) slice-start(c), slice={[0:4], [0:8]}",
        "e = f32[4,8] slice-done(ss)",
        "z = f32[] constant(0)",
        "ROOT l = f32[] reduce(e, z), dimensions={0,1}, to_apply=add",
        computations=wrapped,
    )
    graph = imported(text, parameters=[1])
    assert graph.matmul_flops("forward") == 2 * 4 * 8 * 8
    functions = [op.function for op in graph.ops if op.phase == "forward" and op.kind == "collective"]
    assert functions == ["all_reduce", "all_gather", "collective_permute"]
    assert graph.coverage().unknown == ()


def test_a_branch_with_its_own_operands_is_run_where_it_is_known_and_the_longest_otherwise() -> None:
    branches = """
product {
  p = (f32[4,8], f32[8,8]) parameter(0)
  x = f32[4,8] get-tuple-element(p), index=0
  w = f32[8,8] get-tuple-element(p), index=1
  ROOT d = f32[4,8] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
same { ROOT x = f32[4,8] parameter(0)
}
"""
    for condition, flops in (("constant(false)", 0), ("constant(true)", 512), ("parameter(2)", 512)):
        text = entry(
            "x = f32[4,8] parameter(0)",
            "w = f32[8,8] parameter(1)",
            f"c = pred[] {condition}",
            "t = (f32[4,8], f32[8,8]) tuple(x, w)",
            "y = f32[4,8] conditional(c, t, x), true_computation=product, false_computation=same",
            "ROOT n = f32[4,8] negate(y)",
            computations=branches,
        )
        assert imported(text, parameters=[1]).matmul_flops("forward") == flops


def test_a_bitcast_between_layouts_is_a_transpose() -> None:
    text = entry(
        "x = f32[4,8]{1,0} parameter(0)",
        "w = f32[4,6]{1,0} parameter(1)",
        "t = f32[8,4]{0,1} bitcast(x)",
        "d = f32[8,6]{1,0} dot(t, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT r = f32[2,4,6]{2,1,0} bitcast(d)",
    )
    graph = imported(text, parameters=[1])
    assert [op.function for op in graph.ops] == ["transpose", "einsum", "reshape"]


def test_kernels_of_compilers_are_the_products_and_convolutions_that_their_configuration_says() -> None:
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
    config += '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
    text = entry(
        "x = f32[8,4] parameter(0)",
        "w = f32[8,6] parameter(1)",
        f'g = (f32[4,6], s8[1024]) custom-call(x, w), custom_call_target="__cublas$gemm", backend_config={config}',
        "y = f32[4,6] get-tuple-element(g), index=0",
        "i = f32[2,5,5,6] parameter(2)",
        "k = f32[3,3,6,7] parameter(3)",
        "c = (f32[2,3,3,7], u8[0]) custom-call(i, k), window={size=3x3}, dim_labels=b01f_01io->b01f, "
        'custom_call_target="__cudnn$convForward"',
        "z = f32[2,3,3,7] get-tuple-element(c), index=0",
        'm = f32[4,6] custom-call(y), custom_call_target="mystery"',
        "ROOT t = (f32[4,6], f32[2,3,3,7]) tuple(m, z)",
    )
    graph = imported(text, parameters=[1, 3])
    products = {op.kind.value: op.matmul_flops for op in graph.ops if op.kind.is_matrix}
    assert products == {"contraction": 2 * 4 * 6 * 8, "convolution": 2 * 2 * 3 * 3 * 7 * 9 * 6}
    assert [entry.function for entry in graph.coverage().unknown] == ["mystery"]


def test_text_that_jaxlib_does_not_parse_is_read() -> None:
    """Opcodes and attributes that no version has yet."""
    text = entry(
        "x = f8e9m9[4,8]{1,0:X(7)} parameter(0), future={a=1}",
        "w = f32[8,6] parameter(1)",
        "f = f32[4,8] frobnicate(x), level=3",
        "ROOT d = f32[4,6] dot(f, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    graph = imported(text, parameters=[1])
    assert graph.matmul_flops("forward") == 2 * 4 * 6 * 8
    assert [entry.function for entry in graph.coverage().unknown] == ["frobnicate"]
    assert any("1 attributes that are not known were skipped: level (1)" in note for note in graph.notes)
