"""Any text in a file, a variable or a message: it is parsed, or our own error is raised, quickly.

Every parser gets text that is random, and text made of the tokens that it accepts, which gets
further. Memory is limited by what the parsers build: none may make much out of few characters.
"""

import json
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.limits import limit
from torchmn.checkpoint import manifest, shard_file
from torchmn.checkpoint.reader import SavedCheckpoint
from torchmn.cluster.allocation import allocation
from torchmn.cluster.hostlists import (
    parse_hostfile,
    parse_hosts,
    parse_node_list,
    parse_task_counts,
)
from torchmn.cluster.walltime import parse_duration
from torchmn.comm import object_codec, object_kinds
from torchmn.comm.object_codec import Trust
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import MAX_IDENTITY_BYTES, AuthenticatedListener
from torchmn.control.messages import decode, encode
from torchmn.errors import CommunicationError, DataError, TopologyError, UsageError
from torchmn.submit.site import read_site

fuzzed = settings(
    derandomize=True,
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MAX_BUILT_BYTES = 64 << 20

HOST_TOKENS = ["a", "n1", "n[1-3]", "slots=2", "max-slots=9", "slots=", "=", "#", ":", ",", "\n"]
NODE_TOKENS = [*"[](),-x", "n", "gpu", "0", "08", "1-3", "(x2)", "999999999", "1-999999999"]
TIME_TOKENS = ["1", "-", ":", "00", "99999999999", "UNLIMITED", "INVALID"]
SITE_TOKENS = [
    *("queue", "threads", "exports", "modules", "walltime", "scheduler", "[pbs]", "[slurm]"),
    *("=", '"a"', "1", "[", "]", "{", "}", "\n", "true", '"12:00:00"', '"pbs"', "."),
    "TORCHMN_SECRET",
]


def text_of(tokens: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(tokens), max_size=30).map("".join) | st.text(max_size=60)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BUILT_BYTES
    finally:
        tracemalloc.stop()


@fuzzed
@given(text_of(HOST_TOKENS))
@example("a slots=" + "9" * 5000)
@example("a slots=\u00b2")
@example("a:" + "9" * 5000)
@example("a:\u00b2")
def test_host_files_and_lists_of_hosts(text: str) -> None:
    with suppress(UsageError):
        assert parse_hostfile(text, source="hosts")
    with suppress(UsageError):
        assert parse_hosts(text)


@fuzzed
@given(text_of(NODE_TOKENS))
@example("n[0-99999999999999]")
@example("n[1-9999][1-9999][1-9999]")
@example("n[1]" * 5000)
@example(",".join(["n[1-99999]"] * 50))
@example("[" * 50_000)
@example("n[" + "9" * 5000 + "]")
@example("1(x999999999)")
@example("9" * 5000)
def test_node_lists_and_counts_of_tasks(text: str) -> None:
    for parse in (parse_node_list, parse_task_counts):
        with little_memory(), suppress(TopologyError):
            assert parse(text)


@fuzzed
@given(text_of(TIME_TOKENS))
def test_durations(text: str) -> None:
    assert parse_duration(text) is None or parse_duration(text) >= 0


@fuzzed
@given(
    st.binary(max_size=60) | text_of([*HOST_TOKENS, " ", "4 ", "q@n UNDEFINED\n"]).map(str.encode)
)
def test_files_of_schedulers(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(content)
    for names in (("PBS_NODEFILE", "PBS_JOBID"), ("PE_HOSTFILE", "JOB_ID")):
        with suppress(TopologyError, UsageError):
            assert allocation(dict(zip(names, (str(file), "7"), strict=True)))


@fuzzed
@given(st.binary(max_size=60) | text_of(SITE_TOKENS).map(str.encode))
@example(b"a = " + b"[" * 20_000)
@example(b"exports = { TORCHMN_SECRET = 'value' }")
def test_files_of_sites(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "site.toml"
    file.write_bytes(content)
    with suppress(UsageError):
        read_site(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


AS_BYTES = JSON.map(lambda value: json.dumps(value).encode())


@fuzzed
@given(
    st.binary(max_size=80)
    | AS_BYTES
    | st.tuples(
        st.sampled_from(["Terminate", "AgentHello", "StartScript", "Output", "Round", "no such"]),
        st.dictionaries(st.sampled_from(["signum", "rank", "env", "lines", "holders"]), JSON),
    ).map(lambda pair: json.dumps({"type": pair[0], **pair[1]}).encode())
)
@example(b"[" * 100_000)
@example(b'{"type": "Terminate", "signum": ' + b"[" * 100_000)
@example(b'{"type": "Terminate", "signum": ' + b"9" * 5000 + b"}")
def test_messages(line: bytes) -> None:
    with suppress(ValueError):
        assert encode(decode(line))


MANIFEST = {
    "format": 1,
    "step": 3,
    "world_size": 2,
    "route": "flat",
    "created": "now",
    "versions": {"torch": "2"},
    "metric": 0.5,
    "files": {
        "rank0000.json": {"nbytes": 1, "checksum": "0" * 64},
        "rank0000.safetensors": {"nbytes": 1, "checksum": "0" * 64, "tensors": {"w": "0" * 64}},
    },
}


def framed(body: bytes) -> bytes:
    """A manifest with a checksum that fits."""
    return b'{"checksum":"%s","manifest":%s}\n' % (manifest.digest(body).encode(), body)


FILES = st.dictionaries(
    st.sampled_from(["rank0000.json", "rank0000.safetensors", "rank1.json", "../x"]),
    st.fixed_dictionaries(
        {
            "nbytes": st.integers(-1, 2**70) | JSON,
            "checksum": st.sampled_from(["0" * 64, "0" * 63, "0" * 64 + "\n"]) | JSON,
        },
        optional={"tensors": st.dictionaries(st.text(max_size=3), st.just("a" * 64)) | JSON},
    )
    | JSON,
    max_size=2,
)


@fuzzed
@given(
    st.binary(max_size=80)
    | AS_BYTES
    | st.tuples(st.sampled_from(sorted(MANIFEST)), JSON | FILES).map(
        lambda pair: json.dumps({**MANIFEST, "format": manifest.FORMAT, pair[0]: pair[1]}).encode()
    )
)
@example(b"[" * 100_000)
def test_manifests(body: bytes) -> None:
    """Also with a checksum that is right: a writer of hostile data can compute it as well."""
    for raw in (body, framed(body)):
        with suppress(DataError):
            parsed = manifest.parse(raw)
            assert manifest.parse(parsed.to_bytes()) == parsed


def test_the_manifest_that_is_varied_is_valid() -> None:
    """So that what is varied is what is wrong."""
    assert manifest.parse(framed(json.dumps(MANIFEST).encode())).step == 3


@fuzzed
@given(
    st.binary(max_size=60)
    | AS_BYTES
    | st.lists(JSON, max_size=3).map(
        lambda ends: json.dumps({"w": {"data_offsets": ends}}).encode()
    )
)
@example(b'{"w": {"data_offsets": [0, Infinity]}}')
@example(b"[" * 100_000)
def test_headers_of_shards(header: bytes) -> None:
    with suppress(DataError):
        shard_file._places("shard", header)


KINDS = st.sampled_from(
    [
        *("list", "tuple", "set", "frozenset", "Size", "dict", "OrderedDict", "complex", "int"),
        *("float", "bytes", "tensor", "array", "scalar", "dtype", "device", "pickle", "no such"),
        *object_kinds.MAKE,
    ]
)
CLASSES = st.sampled_from(
    [
        ("os", "system"),
        ("argparse", "Namespace"),
        ("pathlib", "Path"),
        (__name__, "InMemory"),
        (1, 2),
    ]
)
DESCRIPTIONS = st.recursive(
    JSON
    | st.sampled_from(
        ["float32", "load", "__name__", "|O", "<f4", "|V0", "<M8[D]", "(1", "cpu", 2**40, "list"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(KINDS, inner).map(list)
        | st.tuples(KINDS, inner, inner).map(list)
        | st.tuples(
            st.just("tensor"), inner, st.lists(st.integers(-1, 4), max_size=3), st.just(False)
        ).map(list)
        | st.tuples(st.just("object"), CLASSES, st.just(""), inner).map(
            lambda o: [o[0], *o[1], *o[2:]]
        )
        | st.tuples(KINDS, st.lists(st.tuples(inner, inner).map(list), max_size=2)).map(list)
    ),
    max_leaves=8,
)


@settings(fuzzed, max_examples=500)
@given(st.binary(max_size=60) | DESCRIPTIONS.map(lambda body: json.dumps(["", body]).encode()))
@example(b"[" * 100_000)
@example(json.dumps(["", ["dtype", "load"]]).encode())
@example(json.dumps(["", ["array", "|O", [1]]]).encode())
@example(json.dumps(["", ["bytes", -1]]).encode())
@example(json.dumps(["", ["tensor", "float32", [2**62], False]]).encode())
@example(json.dumps(["", ["pickle", "gASVEQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOULg==", "x"]]).encode())
def test_descriptions_of_objects(head: bytes) -> None:
    for trust in (Trust(), Trust(secret=b"of this job")):
        with suppress(CommunicationError):
            _, body, tensors = object_codec.unpack_head(head, torch.device("cpu"))
            if all(tensor.numel() < 1000 for tensor in tensors):
                object_codec.unpack(body, [tensor.zero_() for tensor in tensors], trust)


class InMemory:
    """A `Storage` of one checkpoint, to read from."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def open(self, checkpoint: str, file: str) -> Any:
        if file not in self.files:
            raise DataError(f"{file} is missing")
        return _Reader(file, self.files[file])


class _Reader:
    """A `torchmn.checkpoint.storage.Reader` of bytes."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.content = content
        self.nbytes = len(content)

    def read_into(self, offset: int, memory: memoryview) -> None:
        target = memory.cast("B")
        piece = self.content[offset : offset + target.nbytes]
        if len(piece) < target.nbytes:
            raise DataError(f"{self.name} is {target.nbytes - len(piece)} bytes too short")
        target[:] = piece

    def close(self) -> None:
        """Nothing is open."""


def written(described: object, header: bytes, content: bytes) -> tuple[InMemory, manifest.Manifest]:
    """A checkpoint of one rank with these files, and checksums that fit."""
    text = json.dumps(described).encode()
    head = len(header).to_bytes(8, "little") + header
    files = {"rank0000.json": text, "rank0000.safetensors": head + content}
    tensors = {name: manifest.digest(content) for name in ("w", "v")}
    entries = {
        "rank0000.json": manifest.FileEntry(nbytes=len(text), checksum=manifest.digest(text)),
        "rank0000.safetensors": manifest.FileEntry(
            nbytes=len(head + content), checksum=manifest.digest(head), tensors=tensors
        ),
    }
    body = {**MANIFEST, "files": {name: asdict(entry) for name, entry in entries.items()}}
    return InMemory(files), manifest.parse(framed(json.dumps(body).encode()))


TENSOR = ["tensor", "float32", [2], False]
OFFSETS = st.just([0, 8]) | st.lists(JSON | st.integers(-1, 2**65), max_size=3)
OBJECTS = st.fixed_dictionaries(
    {"body": st.just(TENSOR) | DESCRIPTIONS, "parts": st.lists(st.sampled_from(["w", "v", "x"]))}
)


@settings(fuzzed, max_examples=300)
@given(
    st.fixed_dictionaries(
        {
            "objects": st.fixed_dictionaries({"model": OBJECTS | JSON}) | JSON,
            "where": st.just({"w": 0, "v": 0}) | st.just({"w": 7}) | JSON,
        }
    )
    | JSON,
    OFFSETS,
)
@example({"objects": {"model": {"body": TENSOR, "parts": ["w"]}}, "where": {"w": 0}}, [0, 8])
def test_checkpoints(described: object, offsets: list[Any]) -> None:
    """From the manifest to the state, with all checksums right: a state, or DataError."""
    header = json.dumps({"w": {"data_offsets": offsets}}).encode()
    storage, listed = written(described, header, bytes(8))
    with (
        little_memory(),
        suppress(DataError, CommunicationError),
        SavedCheckpoint(storage, "step-00000003", listed) as saved,
    ):
        for label in saved.labels(0):
            saved.state_of(0, label)
            saved.optimizer_of(0, label)
    if described == {"objects": {"model": {"body": TENSOR, "parts": ["w"]}}, "where": {"w": 0}}:
        with SavedCheckpoint(storage, "step-00000003", listed) as saved:
            if offsets == [0, 8]:
                assert saved.state_of(0, "model").tolist() == [0, 0]


def test_handshakes() -> None:
    """Random bytes, and bytes that look like a response, to one listener."""
    hexadecimal = st.text("0123456789abcdef", min_size=30, max_size=66).map(str.encode)
    answers = st.tuples(hexadecimal, hexadecimal, st.binary(max_size=40)).map(b" ".join)
    listener = channels.listen_on()
    authenticated = AuthenticatedListener(listener, secret="of this job", role="tests")

    @fuzzed
    @given(
        st.binary(max_size=MAX_IDENTITY_BYTES + 10)
        | answers
        | answers.map(lambda message: message + b"\n")
    )
    def send(message: bytes) -> None:
        with socket.create_connection(listener.getsockname(), timeout=limit(10)) as client:
            client.sendall(message)
            for _ in range(5):
                assert authenticated.accept() == []
        assert len(authenticated._pending) <= 64

    send()
    authenticated.close()
