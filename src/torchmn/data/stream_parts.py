"""What a stream consists of: the objects that its data set and loader hold, such as pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmn.comm import Communicator

_MAX_OBJECTS = 10_000
"""Objects that are looked at: a list of files may be long."""


def held_by(stream: object, depth: int = 20) -> Iterator[Any]:
    """The stream and what it holds in attributes, lists and tuples, the nearest first. Local."""
    level, seen = [stream], {id(stream)}
    for _ in range(depth + 1):
        yield from level
        held: list[Any] = []
        for each in level:
            if isinstance(each, (list, tuple)):
                inside = [*each[:_MAX_OBJECTS]]
            elif isinstance(each, partial):
                inside = [each.func]
            else:
                inside = [*getattr(each, "__dict__", {}).values()]
            held += [one for one in inside if id(one) not in seen]
            seen.update(map(id, inside))
        level = held[:_MAX_OBJECTS]


def share_held(stream: object, comm: Communicator) -> tuple[str, int]:
    """What shows that a data set yields the share of one rank. Local.

    That is a rank beside the number of ranks, or a function `split_by_node` as that of webdataset,
    which asks for them. Returns a description such as "rank=1 and world_size=2" and the rank;
    ("", -1) if there is nothing.
    """
    if comm.size == 1:
        return "", -1
    for each in held_by(stream, depth=2):
        held = getattr(each, "__dict__", {})
        numbers = {name: value for name, value in held.items() if type(value) is int}
        sizes = [
            name
            for name, value in numbers.items()
            if ("size" in name or "world" in name) and "batch" not in name and value == comm.size
        ]
        ranks = {
            name: value
            for name, value in numbers.items()
            if "rank" in name and "local" not in name and value in range(comm.size)
        }
        if ranks and sizes:
            name = next((name for name, rank in ranks.items() if rank == comm.rank), [*ranks][0])
            return f"{name}={ranks[name]} and {sizes[0]}={comm.size}", ranks[name]
    if any(getattr(each, "__name__", "") == "split_by_node" for each in held_by(stream)):
        return "split_by_node", comm.rank
    return "", -1


def loses_samples(stream: object) -> bool:
    """Whether the state of a stream leaves out samples that it has read ahead. Local.

    Hugging Face's state has the position of the source of a shuffle buffer, not what it holds.
    """
    return any(type(each).__name__.startswith("BufferShuffled") for each in held_by(stream))
