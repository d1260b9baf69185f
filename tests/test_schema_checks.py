"""Checks of documents against schemas: every keyword refuses what it should, and names the field."""

from typing import Any

import pytest

from phaze.errors import FormatError
from phaze.json_documents import SchemaCheck

REFUSED: list[tuple[dict[str, Any], object, str]] = [
    ({"type": "integer"}, True, "x is True; expected a whole number"),
    ({"type": "integer"}, 2.0, "x is 2.0; expected a whole number"),
    ({"type": "number"}, float("nan"), "x is nan; expected a finite number"),
    ({"type": "number"}, 10**400, "expected a finite number"),
    ({"type": "boolean"}, 1, "x is 1; expected true or false"),
    ({"type": "string"}, None, "x is None; expected text"),
    ({"type": "null"}, 0, "x is 0; expected null"),
    ({"const": 1}, True, "x is True; expected 1"),
    ({"enum": ["a", "b"]}, "c", "x is 'c'; expected one of a, b"),
    ({"enum": ["a", "b"]}, ["a"], "expected one of a, b"),
    ({"type": "array", "items": {"type": "string"}}, ["a", 1], r"x\[1\] is 1; expected text"),
    ({"type": "array", "minItems": 2, "maxItems": 2}, [1], "x has 1 items; expected 2"),
    ({"type": "array", "minItems": 2}, [1], "x has 1 items; expected at least 2"),
    ({"type": "array", "maxItems": 1}, [1, 2], "x has 2 items; expected at most 1"),
    ({"type": "object", "required": ["a"], "properties": {}}, {}, "x lacks 'a'"),
    ({"type": "object", "properties": {}, "additionalProperties": False}, {"b": 1}, "x has an unknown field 'b'"),
    ({"type": "object", "additionalProperties": {"type": "null"}}, {"b": 1}, "x.b is 1; expected null"),
    ({"anyOf": [{"type": "null"}, {"type": "number"}]}, "1", "x is '1'; expected a finite number"),
    (
        {
            "anyOf": [
                {"type": "object", "additionalProperties": False},
                {"type": "object", "properties": {"a": {"type": "null"}}},
            ]
        },
        {"a": 1},
        r"x\.a is 1; expected null",
    ),
    ({"type": "number", "minimum": 1}, 0.5, "x is 0.5; expected at least 1"),
    ({"type": "number", "exclusiveMinimum": 0}, 0, "x is 0; expected more than 0"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, 1, "x is 1; expected null"),
]


@pytest.mark.parametrize(("schema", "document", "told"), REFUSED, ids=lambda part: str(part)[:40])
def test_what_a_schema_does_not_allow_is_refused_by_name(schema: dict[str, Any], document: object, told: str) -> None:
    with pytest.raises(FormatError, match=told):
        SchemaCheck(schema)(document, "x")


def test_a_schema_may_refer_to_itself() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}
    check = SchemaCheck({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    check({"next": {"next": None}}, "x")
    with pytest.raises(FormatError, match=r"x\.next\.next is 3; expected an object"):
        check({"next": {"next": 3}}, "x")


def test_a_keyword_that_is_not_checked_is_no_schema_of_ours() -> None:
    with pytest.raises(ValueError, match="'pattern', which is not checked"):
        SchemaCheck({"type": "string", "pattern": "a"})
