"""What can be wrong in CTF text, as the parsers report it, and in words."""

from __future__ import annotations

from collections.abc import Sequence

NOT_A_SAMPLE = 1
NO_NAME = 2
NOT_A_NUMBER = 3
NOT_A_PAIR = 4
INDEX_TOO_LARGE = 5
DUPLICATE_INDEX = 6
OUT_OF_RANGE = 7
TOO_FEW = 8
TOO_MANY = 9
STREAM_MISSING = 10
UNEXPECTED_ID = 11

TOO_LARGE_FOR_FLOAT32 = (2 - 2.0**-24) * 2.0**127  # rounds to infinity from here

_MAX_QUOTED = 40


def describe(kind: int, text: bytes, number: int, fields: Sequence[str]) -> str:
    """What is wrong. ``text`` begins with the token; ``number`` is what the parser adds."""
    token = quoted(text)
    return {
        NOT_A_SAMPLE: f"expected '|' and the name of an input, found {token}",
        NO_NAME: "a '|' without the name of an input",
        NOT_A_NUMBER: f"{token} is not a number",
        NOT_A_PAIR: f"{token} is not index:value, as a sparse stream has it",
        INDEX_TOO_LARGE: f"the index of {token} is not below the stream's dimension, {number}",
        DUPLICATE_INDEX: f"the index {number} occurs twice in the sample",
        OUT_OF_RANGE: f"{token} is too large for float32",
        TOO_FEW: f"the sample has {number} values, fewer than the stream's shape; where the rest "
        "is meant to be zero, CTFDeserializer(..., fill_with_zeros=True) fills it up",
        TOO_MANY: f"the sample has more than {number} values, from {token} on",
        STREAM_MISSING: f"the sequence has no sample of the input {_field(fields, number)!r}",
        UNEXPECTED_ID: f"the line begins with the sequence id {token}, but the first line of the "
        "file has none; CTFDeserializer(..., skip_sequence_ids=True) ignores ids",
    }[kind]


def quoted(text: bytes) -> str:
    """The token that the text begins with, in quotes, cut if it is long."""
    end = next((i for i, byte in enumerate(text[: _MAX_QUOTED + 1]) if byte in b" \t\r\n|"), None)
    if end is None:
        cut = text[:_MAX_QUOTED]
        return ascii(cut.decode("utf-8", "replace")) + ("..." if len(text) > _MAX_QUOTED else "")
    return ascii(text[: max(end, 1)].decode("utf-8", "replace"))


def _field(fields: Sequence[str], number: int) -> str:
    return fields[number] if 0 <= number < len(fields) else ""
