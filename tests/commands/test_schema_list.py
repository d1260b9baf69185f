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
from phaze.commands.schema_list import SCHEMAS
from phaze.errors import PhazeError
from phaze.plan.plan import plan_from_document


def example(kind: str) -> Any:
    return json.loads(named_format(kind).examples()[0])


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_a_document_that_phaze_writes_is_what_its_schema_says(kind: str) -> None:
    schema = SCHEMAS[kind]()
    Draft202012Validator.check_schema(schema)
    assert list(Draft202012Validator(schema).iter_errors(example(kind))) == []


def test_a_plan_that_is_read_is_what_the_schema_says() -> None:
    validator, chance = Draft202012Validator(SCHEMAS["plan"]()), random.Random(0)
    refused_by_schema = 0
    for _ in range(60):
        document = forged(mutated_document(example("plan"), chance))
        if not validator.is_valid(document):
            refused_by_schema += 1
            with pytest.raises(PhazeError):
                plan_from_document(document)
    assert refused_by_schema > 10


def test_the_command_prints_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "plan"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["format"] == {"const": "phaze-plan"}
