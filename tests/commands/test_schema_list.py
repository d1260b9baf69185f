"""The published schemas hold for every document that Phaze writes, and say no less than what reads it."""

import json
import random
from typing import Any

import pytest
from forgeries import forged
from jsonschema import Draft202012Validator
from mutated_inputs import mutated_document
from readable_files import named_format

from phaze.cli import main
from phaze.commands.installation_commands import SCHEMAS
from phaze.errors import FormatError, PhazeError
from phaze.json_documents import SchemaCheck
from phaze.plan.plan import plan_from_document


def examples(kind: str) -> list[Any]:
    """Documents of a kind; of a journal, its first lines."""
    texts = named_format(kind).examples()
    return [json.loads(line) for line in texts[0].splitlines()[:3]] if kind == "journal" else [*map(json.loads, texts)]


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_a_document_that_phaze_writes_is_what_its_schema_says(kind: str) -> None:
    schema = SCHEMAS[kind]()
    Draft202012Validator.check_schema(schema)
    for document in examples(kind):
        assert list(Draft202012Validator(schema).iter_errors(document)) == []
        SchemaCheck(schema)(document, kind)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_documents_are_refused_by_our_check_where_another_validator_refuses_them(kind: str, count: int) -> None:
    """Ours is stricter with numbers: 2.0 is no whole number, and every number is finite."""
    schema, chance = SCHEMAS[kind](), random.Random(kind)
    other, check = Draft202012Validator(schema), SchemaCheck(schema)
    for _ in range(count):
        document = mutated_document(chance.choice(examples(kind)), chance)
        assert other.is_valid(document) or refusal(check, document)
        assert not refusal(check, document) or not other.is_valid(document) or "number" in refusal(check, document)


def refusal(check: SchemaCheck, document: object) -> str:
    """Why a document is refused; empty where it is not."""
    try:
        check(document, "document")
        return ""
    except FormatError as error:
        return str(error)


def test_a_plan_that_is_read_is_what_the_schema_says() -> None:
    validator, chance = Draft202012Validator(SCHEMAS["plan"]()), random.Random(0)
    refused_by_schema = 0
    for _ in range(60):
        document = forged(mutated_document(examples("plan")[0], chance))
        if not validator.is_valid(document):
            refused_by_schema += 1
            with pytest.raises(PhazeError):
                plan_from_document(document)
    assert refused_by_schema > 10


def test_the_command_prints_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "plan"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["format"] == {"const": "phaze-plan"}
