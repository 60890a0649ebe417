"""Checks of objects against the OpenAPI document that Kubernetes publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS = {
    "Secret": "io.k8s.api.core.v1.Secret",
    "Service": "io.k8s.api.core.v1.Service",
    "Job": "io.k8s.api.batch.v1.Job",
}
_TYPES = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "number": (int, float),
}
_NUMBER_OR_TEXT = ("int-or-string", "quantity")


def problems(value: Any, kind: str, schema: Mapping[str, Any]) -> list[str]:
    """What the object of this kind has that the document does not allow."""
    return list(_problems(value, {"$ref": f"#/definitions/{KINDS[kind]}"}, schema, kind))


def _problems(
    value: Any, rule: Mapping[str, Any], schema: Mapping[str, Any], where: str
) -> Iterator[str]:
    if "$ref" in rule:
        name = rule["$ref"].rpartition("/")[2]
        if name.endswith((".Quantity", ".IntOrString")) and isinstance(value, str | int):
            return
        rule = schema["definitions"][name]
    expected = rule.get("type")
    is_number = isinstance(value, bool) and expected != "boolean"
    if expected and (not isinstance(value, _TYPES[expected]) or is_number):
        yield f"{where} is {value!r}, no {expected}"
        return
    if "enum" in rule and value not in rule["enum"]:
        yield f"{where} is {value!r}, not one of {rule['enum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, rule.get("items", {}), schema, f"{where}[{number}]")
    if isinstance(value, dict):
        known, others = rule.get("properties", {}), rule.get("additionalProperties")
        for name in rule.get("required", []):
            if name not in value:
                yield f"{where} has no {name}"
        for name, item in value.items():
            if name in known or others:
                yield from _problems(item, known.get(name) or others, schema, f"{where}.{name}")
            elif known:
                yield f"{where} has {name}, which is unknown"
