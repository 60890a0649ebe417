"""Every command with ``--json`` has a schema, which describes every field that it prints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.json_schemas import SCHEMAS
from torchmn.cli.app import app

FILES = sorted(SCHEMAS.glob("*.json"))


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The descriptions of objects with fields in a schema."""
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            yield schema
        for each in schema.values():
            yield from objects(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from objects(each)


def test_each_command_that_prints_json_has_a_schema() -> None:
    found = {
        command.name
        for command in app.registered_commands
        if command.callback and '"--json"' in inspect.getsource(inspect.unwrap(command.callback))
    }
    assert found == {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_schema_is_valid_and_complete(path: Any) -> None:
    """A new field fails the tests of its command until the schema names it."""
    jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema: 'make setup' brings it")
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"] == f"torchmn {path.stem} --json"
    found = [*objects(schema)]
    assert found
    for each in found:
        assert each["additionalProperties"] is False, each
        if each.get("description") != "By check, and there by host.":  # not all are made
            assert each["required"] == [*each["properties"]], each
