"""What ``--json`` prints, checked against the schemas of the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCHEMAS = Path(__file__).parents[1] / "docs" / "reference" / "schemas"


def checked(command: str, text: str) -> Any:
    """What a command has printed, which its schema describes."""
    jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema: 'make setup' brings it")
    found = json.loads(text)
    schema = json.loads((SCHEMAS / f"{command}.json").read_text())
    jsonschema.validate(found, schema, jsonschema.Draft202012Validator)
    return found
