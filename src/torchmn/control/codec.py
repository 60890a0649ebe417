"""Encode messages as lines of JSON, and decode lines into messages of the expected type.

Used for everything that torchmn's own processes send each other: the messages of the control plane
(`torchmn.control.messages`) and the order that a program reads
from its standard input. A type is declared once, as a subclass of `Record`; `decode` checks every
field against it. Sizes are bounded, and peers authenticated, by whoever reads the line.

`json` does the text, since argv, paths and environment variables may hold bytes that are no UTF-8,
as lone surrogates, which `msgspec.json` rejects. `msgspec` does the types.

Other formats stay as they are: the frames of the parameter server, of object exchanges and of TCP
streams describe tensors between ranks in fixed binary headers, on the path of every step, and the
ranks' collective checks compare rows of one fixed size.
"""

import json
import threading
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")
# msgspec crashes where several threads are the first to need what it knows of a type.
_in_turn = threading.Lock()


class Record(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of what is sent: immutable, tagged with its type, no undeclared fields."""


def encode(value: object) -> bytes:
    """Encode a record or a dataclass as one line of JSON."""
    return json.dumps(msgspec.to_builtins(value)).encode() + b"\n"


def decode(line: bytes | str, kind: type[Value]) -> Value:
    """Decode a value of this type. Raises ValueError: the line has something else."""
    value: Value = decode_union(line, kind)
    return value


def decode_union(line: bytes | str, kinds: Any) -> Any:
    """Decode a value of a union of records, told apart by their tags; see `decode`."""
    try:
        content = json.loads(line)
        with _in_turn:
            return msgspec.convert(content, kinds)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"Not a message: {line[:80]!r} ({str(error)[:200]})") from None
