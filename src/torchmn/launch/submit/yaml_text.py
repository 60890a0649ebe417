"""YAML as people write it, of mappings, lists, strings, numbers and booleans.

kubectl reads JSON too, but a manifest is there to be edited. Strings that could be read as anything
else are quoted as in JSON, which is YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./=-]*(:[A-Za-z0-9_./=-]+)*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
"""Of YAML 1.1, in which they are no strings."""


def documents(values: Iterable[Value]) -> str:
    """Several documents in one text.

    >>> print(documents([{"kind": "Job", "spec": {"args": ["-n", "2"]}}]), end="")
    kind: Job
    spec:
      args:
      - "-n"
      - "2"
    """
    return "---\n".join("\n".join(_lines(value)) + "\n" for value in values)


def _lines(value: Value) -> list[str]:
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in _entry(f"{_scalar(key)}:", item)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(key: str, value: Value) -> list[str]:
    if isinstance(value, str | int):
        return [f"{key} {_scalar(value)}"]
    if not value:
        return [f"{key} {'{}' if isinstance(value, Mapping) else '[]'}"]
    indent = "  " if isinstance(value, Mapping) else ""
    return [key, *(f"{indent}{line}" for line in _lines(value))]


def _item(value: Value) -> list[str]:
    first, *rest = _lines(value) or ["{}" if isinstance(value, Mapping) else "[]"]
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text)
