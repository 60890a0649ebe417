"""How values of Python's standard types and objects of a script's classes are sent.

A value is sent as the arguments that create it again (`PARTS`, `MAKE`). An object of a class (a
dataclass, NamedTuple, Enum or Namespace) is sent as the name of its class and its attributes. Like
pickle, the receiver rebuilds it without calling ``__init__`` or ``__post_init__``. Objects of other
classes are not rebuilt: nothing that is named in a message is ever called.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, defaultdict, deque
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from operator import attrgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import EllipsisType, MemberDescriptorType, SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import torch

_FOR_PICKLE = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``, the flag of classes that are not built-in."""


class Attributes(dict[str, Any]):
    """The attributes of an object, by name."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with a name such as ``float32``. Raises ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def _only(kind: type, value: Any) -> Any:
    """Return ``value`` if it is of type ``kind``. Raises TypeError otherwise."""
    # A message could name another iterable, such as a range, that is short and expands to anything.
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set)}
"""Built-in classes that can be sent themselves, as factories of a `defaultdict`."""
_TIME = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_VALUES: dict[type, tuple[Any, Any]] = {
    int: (lambda text: int(text, 16), lambda it: (hex(it),)),
    float: (float, lambda it: (repr(it),)),
    complex: (lambda *it: complex(*map(float, it)), lambda it: (repr(it.real), repr(it.imag))),
    torch.dtype: (torch_dtype, lambda it: (str(it).removeprefix("torch."),)),
    Fraction: (lambda *it: Fraction(*(_only(int, n) for n in it)), Fraction.as_integer_ratio),
    range: (range, attrgetter("start", "stop", "step")),
    slice: (slice, attrgetter("start", "stop", "step")),
    EllipsisType: (lambda: ..., lambda it: ()),
    date: (date, attrgetter("year", "month", "day")),
    time: (lambda *it: time(*it[:-1], fold=it[-1]), attrgetter(*_TIME)),
    datetime: (datetime.combine, lambda it: (it.date(), it.timetz())),
    timedelta: (timedelta, attrgetter("days", "seconds", "microseconds")),
    timezone: (timezone, lambda it: it.__getinitargs__()),
    bytearray: (lambda it: bytearray(_only(bytes, it)), lambda it: (bytes(it),)),
    deque: (lambda it, size: deque(_only(list, it), size), lambda it: (list(it), it.maxlen)),
    Counter: (lambda it: Counter(_only(dict, it)), lambda it: (dict(it),)),
    defaultdict: (
        lambda of, it: defaultdict(of["default_factory"], it),
        lambda it: (Attributes(default_factory=it.default_factory), dict(it)),
    ),
}
for _kind in (Decimal, UUID, ZoneInfo, torch.device, type(Path()), PurePosixPath, PureWindowsPath):
    _VALUES[_kind] = (_kind, lambda it: (str(it),))
PARTS = {kind: parts for kind, (_, parts) in _VALUES.items()}
"""By class: a function that returns the arguments from which `MAKE` creates the value again."""
MAKE = {kind.__name__: make for kind, (make, _) in _VALUES.items()}
"""By class name: a function that creates a value from its arguments, or raises ValueError etc."""


def is_rebuilt(cls: Any) -> bool:
    """Whether objects of a class are sent as their `content`.

    Not if the class customizes pickling, or has state other than attributes, such as a dataclass
    that is also a dict.
    """
    if issubclass(cls, Enum) or cls in (Namespace, SimpleNamespace):
        return True
    own = {getattr(getattr(cls, name, None), "__module__", None) for name in _FOR_PICKLE}
    # A subclass of a NamedTuple that has a __dict__ may hold attributes besides its items.
    if issubclass(cls, tuple):
        return own == {None} and hasattr(cls, "_make") and not cls.__dictoffset__
    is_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
    # dataclasses itself adds __getstate__ and __setstate__ to frozen classes with slots.
    return is_dataclass(cls) and is_python and own <= {None, "dataclasses"}


def content(obj: Any) -> Any:
    """What is sent of an object: value of a Flag, name of an Enum, tuple items, or `Attributes`."""
    if isinstance(obj, Enum):
        return obj.value if isinstance(obj, Flag) else obj.name
    if isinstance(obj, tuple):
        return list(obj)
    slots = {name: getattr(obj, name) for name in _slots(type(obj)) if hasattr(obj, name)}
    return Attributes(slots | getattr(obj, "__dict__", {}))


def rebuild(cls: Any, content: Any) -> Any:
    """Rebuild an object of a class from its `content`. Raises ValueError etc. if malformed."""
    if not is_rebuilt(cls):
        raise ValueError(f"objects of {cls!r} are not sent as attributes")
    if issubclass(cls, Enum):
        return cls(_only(int, content)) if issubclass(cls, Flag) else cls.__members__[content]
    if issubclass(cls, tuple):
        return cls._make(_only(list, content))
    obj = SimpleNamespace() if cls is SimpleNamespace else object.__new__(cls)
    held = dict(_only(Attributes, content))
    # Not by setattr(), which frozen dataclasses refuse.
    for name, slot in _slots(cls).items():
        if name in held:
            slot.__set__(obj, held.pop(name))
    if held:
        vars(obj).update(held)
    return obj


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    own = {name: slot for base in reversed(cls.__mro__) for name, slot in vars(base).items()}
    own.pop("__dict__", None)
    return {name: slot for name, slot in own.items() if isinstance(slot, MemberDescriptorType)}


def find_class(module: str, qualname: str) -> Any:
    """The object with a qualified name in an imported module; None if there is none.

    Does not import anything.
    """
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found
