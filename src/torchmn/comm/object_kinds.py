"""Python's own values and the classes of a script, as parts that a message can describe.

A value is sent as the arguments that make it again (`PARTS`, `MAKE`). An object of a class (a
dataclass, NamedTuple, Enum or Namespace) is sent as the name of its class and its attributes, and
rebuilt as pickle does it, without ``__init__`` and ``__post_init__``. Objects of other classes are
not rebuilt: nothing that a message names is called.
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
"""The flag of classes that are not built-in (``Py_TPFLAGS_HEAPTYPE``)."""


class Attributes(dict[str, Any]):
    """The attributes of an object, by name."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``float32``. Raises ValueError: there is no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def _only(kind: type, value: Any) -> Any:
    """The value. Another iterable can be short to describe and have no end."""
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set)}
"""Classes that are sent themselves, as a `defaultdict` has one."""
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
"""By class: the arguments that make the value again, described in turn."""
MAKE = {kind.__name__: make for kind, (make, _) in _VALUES.items()}
"""By name: what makes the value of these arguments; ValueError and its like for others."""


def is_rebuilt(cls: Any) -> bool:
    """Whether an object of this class is sent as its `content`.

    Not where the class tells pickle how to save it, or holds more than Python's attributes, such as
    a dataclass that is a dict as well.
    """
    if issubclass(cls, Enum) or cls in (Namespace, SimpleNamespace):
        return True
    own = {getattr(getattr(cls, name, None), "__module__", None) for name in _FOR_PICKLE}
    if issubclass(cls, tuple):
        return own == {None} and hasattr(cls, "_make") and not cls.__dictoffset__
    is_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
    return is_dataclass(cls) and is_python and own <= {None, "dataclasses"}


def content(obj: Any) -> Any:
    """The value of a Flag, the name of an Enum, the items of a tuple, or the `Attributes`."""
    if isinstance(obj, Enum):
        return obj.value if isinstance(obj, Flag) else obj.name
    if isinstance(obj, tuple):
        return list(obj)
    slots = {name: getattr(obj, name) for name in _slots(type(obj)) if hasattr(obj, name)}
    return Attributes(slots | getattr(obj, "__dict__", {}))


def rebuild(cls: Any, content: Any) -> Any:
    """The object of a class with this `content`. Raises ValueError and its like for others."""
    if not is_rebuilt(cls):
        raise ValueError(f"objects of {cls!r} are not sent as attributes")
    if issubclass(cls, Enum):
        return cls(_only(int, content)) if issubclass(cls, Flag) else cls.__members__[content]
    if issubclass(cls, tuple):
        return cls._make(_only(list, content))
    obj = SimpleNamespace() if cls is SimpleNamespace else object.__new__(cls)
    held = dict(_only(Attributes, content))
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
    """What has this name in a module that is imported; None if nothing has."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found
