"""Modules as plain values: element types, and a document that is read back."""

import pytest

from phaze.errors import ImportModelError
from phaze.frontends.stablehlo.module import Module, TensorType
from phaze.ir import DType


@pytest.mark.parametrize(
    ("element", "dtype"),
    [
        ("bf16", DType.BFLOAT16),
        ("tf32", DType.FLOAT32),
        ("f8E4M3FN", DType.FLOAT8),
        ("complex<f32>", DType.COMPLEX64),
        ("i1", DType.BOOL),
        ("ui8", DType.UINT8),
        ("ui32", DType.INT32),
        ("i4", DType.INT8),
        ("!stablehlo.token", DType.INT8),
    ],
)
def test_an_element_type_that_the_ir_lacks_becomes_one_of_like_size(element: str, dtype: DType) -> None:
    assert TensorType((), element).dtype is dtype


def test_a_document_is_read_as_functions_with_their_operations() -> None:
    tensor = [[2, -1], "f32"]
    add = ["stablehlo.add", [0, 0], [1], [tensor], {}, [], "jit(f)/add"]
    end = ["func.return", [1], [], [], {}, [], ""]
    main = {
        "name": "main",
        "arguments": [[tensor, "x", ""]],
        "results": [[tensor, "", ""]],
        "body": [[0], [tensor], [add, end]],
    }
    module = Module.from_document({"name": "m", "functions": [main], "meshes": []})
    assert module.main.arguments[0].type.is_dynamic
    assert [operation.short_name for operation in module.main.body.operations] == ["add", "return"]
    assert module.main.body.operations[0].scope == "jit(f)/add"


def test_a_module_without_main_is_refused_with_the_functions_it_has() -> None:
    with pytest.raises(ImportModelError, match=r"no function 'main' \(functions: none at all\)"):
        _ = Module("m", {}).main
