"""Units that appear in names and arguments, and numbers with their nouns in messages."""

from __future__ import annotations

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


def counted(number: float, noun: str, spec: str = "") -> str:
    """A number, formatted by ``spec``, with its noun in the singular or plural.

    >>> counted(1, "rank"), counted(2, "rank"), counted(0.46, "core", ".2g")
    ('1 rank', '2 ranks', '0.46 cores')
    """
    text = format(number, spec)
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"
