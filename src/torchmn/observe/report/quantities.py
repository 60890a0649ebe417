"""Quantities as text, in the units of people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Such as ``1.20 s``, ``3.4 ms`` and ``50 µs``."""
    if abs(seconds) >= 0.99995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) >= 0.9995e-3 else f"{seconds * 1e6:.0f} µs"


def megabytes(nbytes: float) -> str:
    """Such as ``1,234.56 MB``."""
    return f"{nbytes / 1e6:,.2f} MB"


def bits(bytes_per_s: float) -> str:
    """Such as ``9.41 Gb/s``."""
    rate = 8 * bytes_per_s
    return f"{rate / 1e9:.2f} Gb/s" if rate >= 1e8 else f"{rate / 1e6:.2f} Mb/s"


def rank_list(ranks: list[int], *, max_parts: int = 8) -> str:
    """Such as ``Ranks 0-3 and 7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    if len(words) > max_parts:
        words = [*words[:max_parts], f"others, {len(ranks)} in all"]
    return ("Rank " if len(ranks) == 1 else "Ranks ") + listed(words)


def listed(words: list[str]) -> str:
    """Such as ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
