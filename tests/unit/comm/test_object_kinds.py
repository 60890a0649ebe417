"""Python's own values and objects of classes travel without pickle, as they are."""

from __future__ import annotations

import argparse
import enum
import json
import sys
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, asdict, dataclass, field, make_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.comm.test_object_codec import carry
from torchmn.comm import object_codec
from torchmn.comm.object_codec import Trust
from torchmn.errors import CommunicationError, DataError, UnsupportedError
from torchmn.testing import run_ranks

ZONE = timezone(timedelta(hours=9), "JST")
SECRET = Trust(secret=b"of this job")


class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # noqa: PIE796 - an alias
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any = None


Pair = namedtuple("Pair", "a b")


@dataclass
class Rates:
    """``made`` counts the objects that ``__init__`` has made."""

    warm_up: float
    steps: list[int] = field(default_factory=list)
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1

    @dataclass(frozen=True)
    class Inner:
        value: Any


@dataclass
class LongerRates(Rates):
    color: Color = Color.RED


@dataclass(frozen=True)
class Frozen:
    path: Path
    key: int | None = None


@dataclass(slots=True)
class Slots:
    value: int
    other: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: int


@dataclass
class WithMore:
    """An attribute without a field, a value that is computed once, and what only makes it."""

    value: int
    seed: InitVar[int] = 0

    def __post_init__(self, seed: int) -> None:
        self.extra = [seed]

    @cached_property
    def double(self) -> int:
        return 2 * self.value


Item = TypeVar("Item")


@dataclass
class Box(Generic[Item]):
    item: Item


def same(obj: Any) -> Any:
    """The object after a message; raises unless it is equal and of the same type, without trust."""
    got = carry(obj)
    assert type(got) is type(obj)
    assert got == obj
    assert sorted(repr(got)) == sorted(repr(obj))  # the order of a set may be another
    return got


VALUES = [
    range(2, 10, 3),
    slice(None, 3, -1),
    slice("a", (1, 2)),
    ...,
    Decimal("-0.10"),
    Decimal("1E+400"),
    Fraction(-2, 6),
    UUID("12345678-1234-5678-1234-567812345678"),
    Path("/data/日本 語"),
    PurePosixPath("a/b"),
    PureWindowsPath("C:\\a"),
    date(2020, 2, 29),
    time(1, 2, 3, 4, tzinfo=timezone.utc),
    datetime(2020, 1, 2, 3, 4, 5, 6),
    datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=ZONE),
    timedelta(days=-1, microseconds=1),
    ZONE,
    bytearray(b"ab"),
    deque([1, (2,)], maxlen=3),
    deque(),
    Counter("abca"),
    Counter({(1, 2): -1}),
    defaultdict(list, a=[1]),
    defaultdict(None, {1: 2}),
    defaultdict(int),
    {"kind": int},
    argparse.Namespace(lr=0.1, **{"not a name": [Path("x")]}),
    SimpleNamespace(a=SimpleNamespace(b=1)),
    Color.RED,
    Color.BLUE,
    Level.LOW,
    Word.YES,
    Access.READ | Access.WRITE,
    Access(0),
    Point(1, [2]),
    Pair(a=(1,), b={2}),
    Rates(0.1, [1, 2]),
    LongerRates(0.1, color=Color.BLUE),
    Rates.Inner(Point(Path("a"), Color.RED)),
    {Frozen(Path("a"), 2**60): {Color.RED}, Level.LOW: (Pair(1, 2),)},
    FrozenSlots(3),
    Box(Box("a")),
    frozenset({Point(1, 2), date(2020, 1, 1)}),
    OrderedDict(a=deque([np.float64(1.5), np.int8(3)])),
]


@pytest.mark.parametrize("obj", VALUES, ids=lambda obj: type(obj).__name__)  # sets have no order
def test_values_and_types_are_kept(obj: Any) -> None:
    same(obj)


def test_what_repr_does_not_show() -> None:
    got = same(datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")))
    assert (got.fold, got.tzinfo.key) == (1, "UTC")
    assert same(timezone.utc) is timezone.utc
    assert same(deque([1], maxlen=2)).maxlen == 2
    assert same(defaultdict(set)).default_factory is set
    assert same(Color.CRIMSON) is Color.RED


def test_objects_are_rebuilt_without_init() -> None:
    rates = Rates(0.1)
    rates.made = 7
    assert same(rates).made == 7  # __post_init__ would have added one

    slots = Slots(1)
    got = carry(slots)
    assert (got.value, hasattr(got, "other")) == (1, False)
    slots.other = Point(1, 2)
    assert same(slots).other == Point(1, 2)

    more = WithMore(3, seed=5)
    assert (more.double, same(more).extra) == (6, [5])
    assert vars(carry(more)) == vars(more)


def test_tensors_within() -> None:
    nested = Rates.Inner({"w": deque([Point(torch.arange(3), np.ones(2)), torch.ones(1)])})
    point, last = carry(nested).value["w"]
    assert torch.equal(point.x, torch.arange(3))
    assert (point.y == np.ones(2)).all()
    assert torch.equal(last, torch.ones(1))


KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.sampled_from(Color)
LEAVES = (
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    *(st.decimals(allow_nan=False), st.fractions(), st.uuids(), st.dates(), st.timedeltas()),
    *(st.times(timezones=st.just(ZONE)), st.datetimes(timezones=st.just(ZONE)), st.datetimes()),
    *(
        st.builds(Path, st.text()),
        st.complex_numbers(allow_nan=False),
        st.builds(range, st.integers()),
    ),
    *(st.sampled_from([Color.BLUE, Word.YES, Access.WRITE, ..., torch.int8, torch.Size([2])]),),
)


@given(
    st.recursive(
        st.one_of(LEAVES),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(KEYS, inner, max_size=3)
            | st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(dict, d))
            | st.lists(inner, max_size=3).map(deque)
            | st.tuples(inner, inner).map(lambda pair: Point(*pair))
            | inner.map(Rates.Inner)
            | st.dictionaries(st.text(), inner, max_size=3).map(lambda d: SimpleNamespace(**d))
        ),
        max_leaves=10,
    )
)
def test_any_of_them_within_any_other(obj: Any) -> None:
    same(obj)


# ---- between ranks


def test_every_collective_of_objects_without_a_secret() -> None:
    def rank_main(comm: Any) -> None:
        everyone = [Rates.Inner([Path("runs"), Point(Color.BLUE, rank)]) for rank in range(3)]
        own = everyone[comm.rank]
        assert comm.bcast_obj(own, root=1) == everyone[1]
        assert comm.allgather_obj(own) == everyone
        assert comm.gather_obj(own) == (everyone if comm.rank == 0 else None)
        assert comm.scatter_obj(everyone if comm.rank == 2 else None, root=2) == own
        assert comm.allreduce_obj(Counter(a=comm.rank)) == Counter(a=3)
        if comm.rank == 0:
            comm.send_obj(own, 1)
        elif comm.rank == 1:
            assert comm.recv_obj(0) == everyone[0]

    run_ranks(rank_main, 3, is_trusted=False)


# ---- what is refused


class Own:
    """Of no kind that has a description."""


class OwnDict(dict[str, int]):
    """A subclass, whose class must not be lost."""


@dataclass
class DictAndFields(dict[str, int]):
    value: int = 0


@dataclass
class SavesItself:
    value: int

    def __getstate__(self) -> dict[str, int]:
        return {"value": -self.value}


def local_class() -> Any:
    @dataclass
    class Local:
        value: int

    return Local(1)


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        ({"model": [1, Own()]}, r"The object\['model'\]\[1\] is an Own, which needs pickle"),
        (Rates.Inner({"f": abs}), r"The object\.value\['f'\] is a builtin_function"),
        (argparse.Namespace(args=Slots(Own())), r"The object\.args\.value is an Own"),
        ({Frozen(Path("a"), Own()): 1}, r"The object\[key\]\.key is an Own"),
        (deque([OwnDict()]), r"The object\[0\] is an OwnDict"),
        ([DictAndFields()], r"The object\[0\] is a DictAndFields"),
        ([SavesItself(1)], r"The object\[0\] is a SavesItself"),
        (defaultdict(lambda: 1), r"The object\.default_factory is a function"),
        ({"t": Own}, r"The object\['t'\] is a type"),
        (
            Point(local_class()),
            r"The object\[0\] is a .*Local, a class that other ranks cannot find",
        ),
        (make_dataclass("Made", ["x"])(1), r"a class that other ranks cannot find"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else type(value).__name__,
)
def test_the_part_that_cannot_be_sent_is_named(obj: Any, place: str) -> None:
    with pytest.raises(UnsupportedError, match=place) as caught:
        carry(obj)
    assert "a dict of its fields" in str(caught.value) or "Send what it holds" in str(caught.value)


def test_subclasses_are_kept_where_pickle_may_be_used() -> None:
    for obj in (OwnDict(a=1), DictAndFields(2), [SavesItself(1)]):
        got = carry(obj, SECRET, SECRET)
        assert type(got) is type(obj)
    assert carry([SavesItself(1)], SECRET, SECRET)[0].value == -1
    with pytest.raises(UnsupportedError, match=r"The object\['f'\] is a function and cannot be p"):
        carry({"f": lambda: 1}, SECRET, SECRET)


def test_objects_that_contain_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    parent = Rates.Inner([])
    parent.value.append(Rates.Inner(parent))
    for obj in (loop, parent):
        for trust in (Trust(), SECRET):
            with pytest.raises(
                UnsupportedError, match="The object.* contains itself, or more than 200"
            ):
                carry(obj, trust, trust)
    deep: Any = 1
    for _ in range(190):
        deep = Rates.Inner([deep]) if isinstance(deep, int) else [deep]
    assert repr(carry(deep)) == repr(deep)


# ---- what a message may name


def unpack(body: Any, trust: Trust) -> Any:
    return object_codec.unpack(json.loads(json.dumps(body)), [], trust)


@pytest.mark.parametrize(
    ("module", "name", "content"),
    [
        ("os", "system", "true"),
        ("subprocess", "Popen", ["Attributes", [["args", "true"]]]),
        ("pathlib", "Path", "x"),
        ("builtins", "dict", ["Attributes", []]),
        ("builtins", "tuple", ["list", []]),
        (__name__, "Own", ["Attributes", []]),
        (__name__, "SavesItself", ["Attributes", [["value", 1]]]),
        (__name__, "Rates", ["list", [1]]),
        (__name__, "Slots", ["Attributes", [["unknown", 1]]]),
        (__name__, "Color", "__class__"),
        (__name__, "Color", ["list", []]),
        (__name__, "Access", "READ"),
        (__name__, "Point", ["list", [1]]),
        (__name__, "Point", ["range", 0, 2**60, 1]),
        (__name__, "VALUES", ["Attributes", []]),
        (__name__, "no such", ["Attributes", []]),
        (__name__, "Rates.no.such", ["Attributes", []]),
        (7, ["list", []], ["Attributes", []]),
    ],
)
@pytest.mark.parametrize("trust", [Trust(), SECRET], ids=["none", "secret"])
def test_a_message_can_make_objects_of_data_only(
    module: Any, name: Any, content: Any, trust: Trust
) -> None:
    with pytest.raises(CommunicationError):
        unpack(["object", module, name, "", content], trust)


@pytest.mark.parametrize(
    "body",
    [
        ["deque", ["range", 0, 2**60, 1], None],
        ["Counter", ["range", 0, 2**60, 1]],
        ["bytearray", 2**60],
        ["Fraction", "1e999999999"],
        ["timedelta", 2**50],
        ["date", 0, 0, 0],
        ["ZoneInfo", "../../etc/passwd"],
        ["type", "object"],
        ["defaultdict", ["Attributes", [["default_factory", "list"]]], ["dict", []]],
    ],
    ids=lambda body: body[0],
)
def test_values_out_of_range_are_not_read(body: Any) -> None:
    with pytest.raises(CommunicationError, match="cannot be read"):
        unpack(body, Trust())


def test_a_module_is_imported_for_a_rank_of_the_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_the_root_imports_me.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    lr: float\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_the_root_imports_me as module

    private = Trust(is_private=True)
    sent = {
        trust: json.loads(object_codec.pack(module.Config(0.1), trust).head)[1]
        for trust in (Trust(), SECRET, private)
    }
    for sender, receiver in (
        *((Trust(), Trust()), (Trust(), SECRET), (SECRET, Trust())),
        (SECRET, Trust(secret=b"of another")),
    ):
        monkeypatch.delitem(sys.modules, module.__name__)
        with pytest.raises(
            CommunicationError, match="class Config of only_the_root_imports_me has"
        ):
            unpack(sent[sender], receiver)
        assert module.__name__ not in sys.modules
        monkeypatch.undo()
        monkeypatch.syspath_prepend(tmp_path)
    for trust in (SECRET, private):
        sys.modules.pop(module.__name__)
        assert asdict(unpack(sent[trust], trust)) == {"lr": 0.1}
    sys.modules.pop(module.__name__)


def test_a_script_of_multiprocessing_is_found_by_its_usual_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spawned process has it as ``__mp_main__`` and ``__main__``, its parent as the latter."""
    script = SimpleNamespace(Frozen=Frozen)
    monkeypatch.setitem(sys.modules, "__main__", script)  # type: ignore[arg-type]
    monkeypatch.setattr(Frozen, "__module__", "__mp_main__")
    assert json.loads(object_codec.pack(Frozen(Path("a")), Trust()).head)[1][1] == "__main__"
    same(Frozen(Path("a")))


def test_a_scheduler_with_a_counter_is_described_for_a_checkpoint() -> None:
    """`MultiStepLR` has its milestones as a Counter."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]).state_dict()
    body, parts = object_codec.describe(state)
    assert object_codec.build(json.loads(json.dumps(body)), [p.tensor for p in parts]) == state
    assert type(state["milestones"]) is Counter
    for refused in (Rates(0.1), Color.RED, argparse.Namespace()):
        with pytest.raises(UnsupportedError, match=r"state\['a'\] is a .*nothing in a checkpoint"):
            object_codec.describe({"a": refused})
        with pytest.raises(DataError, match="'object' is not a kind of value"):
            object_codec.build(["object", __name__, "Rates", "", ["Attributes", []]], [])
