"""CTF files."""

import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.limits import limit
from tests.unit.cntk.readers.forks import forked
from torchmn.cntk.readers import ctf_index, ctf_parse
from torchmn.cntk.readers.assembly import gather
from torchmn.cntk.readers.ctf import CTFDeserializer
from torchmn.cntk.readers.deserializer import StreamDef, StreamDefs
from torchmn.cntk.readers.minibatch_source import MinibatchSource
from torchmn.errors import DataError, UnsupportedError, UsageError

pytestmark = pytest.mark.timeout(300)  # numba compiles once per machine, on one that may be busy

pytest.importorskip("numba", reason="numba is not installed")
XY = StreamDefs(x=StreamDef(shape=2), y=StreamDef(shape=4, is_sparse=True))


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "data.ctf"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def read(deserializer: CTFDeserializer) -> dict[str, list[list[list[float]]]]:
    """All sequences by stream: a list of samples each."""
    found: dict[str, list[list[list[float]]]] = {}
    for chunk_id, info in enumerate(deserializer.chunk_infos()):
        indices = np.arange(info.num_sequences)
        for name, (data, lengths) in (
            deserializer.get_chunk(chunk_id).sequences(indices, (0, 0)).items()
        ):
            sizes = [1] * len(indices) if lengths is None else lengths.tolist()
            dense = data.to_dense() if data.layout == torch.sparse_csr else data
            found.setdefault(name, []).extend(s.tolist() for s in dense.split(sizes))
    return found


class TestFormat:
    def test_dense_and_sparse_streams_with_a_line_per_sequence(self, tmp_path: Path) -> None:
        path = write(tmp_path, "|x 1 -2.5 |y 0:1 3:0.25\n|y\t1:2\t|x 3e-1 +4.\n")
        found = read(CTFDeserializer(path, XY))
        assert found == {
            "x": [[[1.0, -2.5]], [[pytest.approx(0.3), 4.0]]],
            "y": [[[1.0, 0.0, 0.0, 0.25]], [[0.0, 2.0, 0.0, 0.0]]],
        }

    def test_lines_with_the_same_id_are_a_sequence(self, tmp_path: Path) -> None:
        path = write(tmp_path, "7 |x 1 2 |y 0:1\n7 |x 3 4\n |x 5 6\n8 |y 1:1 |x 7 8\n7 |x 9 9 |y\n")
        deserializer = CTFDeserializer(path, XY)
        assert read(deserializer)["x"] == [[[1, 2], [3, 4], [5, 6]], [[7, 8]], [[9, 9]]]
        (info,) = deserializer.chunk_infos()
        assert (info.num_sequences, info.num_samples) == (3, 5)
        assert info.lengths is not None
        assert info.keys is not None
        assert (info.lengths.tolist(), list(info.keys)) == ([3, 1, 1], [7, 8, 7])

    def test_a_stream_that_defines_the_minibatch_size(self, tmp_path: Path) -> None:
        path = write(tmp_path, "1 |x 1 2 |y 0:1\n1 |x 3 4\n2 |x 5 6 |y\n")
        streams = {"x": XY["x"], "y": StreamDef(shape=4, is_sparse=True, defines_mb_size=True)}
        (info,) = CTFDeserializer(path, streams).chunk_infos()
        assert (info.num_samples, info.lengths) == (2, None)

    @pytest.mark.parametrize(
        "text",
        [
            "|x 1 2 |y 1:1",  # no newline at the end
            "|x 1 2 |y 1:1\r\n",
            b"\xef\xbb\xbf|x 1 2 |y 1:1\n",
            "\n  \n|# a comment |# with an escaped bar\n|x 1 2 |# 9 9 |y 1:1\n\n",
            "|other 1 2 3 words |x 1 2 |y 1:1 |xx 5\n",
        ],
    )
    def test_what_is_not_data(self, tmp_path: Path, text: str | bytes) -> None:
        found = read(CTFDeserializer(write(tmp_path, text), XY))
        assert found == {"x": [[[1.0, 2.0]]], "y": [[[0.0, 1.0, 0.0, 0.0]]]}

    def test_fields_and_shapes(self, tmp_path: Path) -> None:
        path = write(tmp_path, "|pixels 1 2 3 4 5 6\n")
        deserializer = CTFDeserializer(path, {"image": StreamDef(field="pixels", shape=(2, 1, 3))})
        data, lengths = deserializer.get_chunk(0).sequences(np.array([0, 0]), (0, 0))["image"]
        assert lengths is None
        assert data.tolist() == [[[[1, 2, 3]], [[4, 5, 6]]]] * 2

    def test_pairs_in_any_order_are_sorted(self, tmp_path: Path) -> None:
        path = write(tmp_path, "|y 3:3 0:1 2:2\n")
        chunk = CTFDeserializer(path, {"y": XY["y"]}).get_chunk(0)
        data = chunk.sequences(np.array([0]), (0, 0))["y"][0]
        assert data.col_indices().tolist() == [0, 2, 3]
        assert data.values().tolist() == [1, 2, 3]

    def test_chunks_hold_whole_sequences_and_name_lines(self, tmp_path: Path) -> None:
        lines = [f"{n // 3} |x {n} 0 |y 1:{n}" for n in range(60)]
        whole = read(CTFDeserializer(write(tmp_path, "\n".join(lines)), XY))
        for chunk_bytes in (1, 50, 100, 777):
            deserializer = CTFDeserializer(
                write(tmp_path, "\n".join(lines)), XY, chunk_bytes=chunk_bytes
            )
            assert read(deserializer) == whole
            assert deserializer.num_chunks() > 1
        lines[50] = "16 |x 5 word |y"
        deserializer = CTFDeserializer(write(tmp_path, "\n".join(lines)), XY, chunk_bytes=100)
        with pytest.raises(DataError, match="line 51, column 9: 'word' is not a number"):
            read(deserializer)

    def test_a_dense_sample_may_end_early_if_asked(self, tmp_path: Path) -> None:
        path = write(tmp_path, "|x 1\n|x 2 3\n")
        found = read(CTFDeserializer(path, {"x": XY["x"]}, fill_with_zeros=True))
        assert found["x"] == [[[1.0, 0.0]], [[2.0, 3.0]]]

    def test_ids_can_be_ignored(self, tmp_path: Path) -> None:
        path = write(tmp_path, "1 |x 1 2\n1 |x 3 4\n")
        assert len(read(CTFDeserializer(path, {"x": XY["x"]}, skip_sequence_ids=True))["x"]) == 2


WRONG = {
    "1 2 |x 1 2 |y": "line 2, column 3: expected '|'",
    "|x 1 2 |y | 3": "line 2, column 11: a '|' without the name",
    "|x 1 2a |y": "line 2, column 6: '2a' is not a number",
    "|x 1 . |y": "line 2, column 6: '.' is not a number",
    "|x 1 1e |y": "line 2, column 6: '1e' is not a number",
    "|x nan 1 |y": "line 2, column 4: 'nan' is not a number",
    "|x 1 2\0 |y": r"line 2, column 6: '2\\x00' is not a number",
    "|x 1 2 |y 1": "line 2, column 11: '1' is not index:value",
    "|x 1 2 |y 1: 2": "line 2, column 11: '1:' is not index:value",
    "|x 1 2 |y -1:2": "line 2, column 11: '-1:2' is not index:value",
    "|x 1 2 |y 4:1": "line 2, column 11: the index of '4:1' is not below the stream's dimension, 4",
    "|x 1 2 |y 99999999999999999999:1": "is not below the stream's dimension",
    "|x 1 2 |y 2:1 1:1 2:1": "line 2, column 8: the index 2 occurs twice",
    "|x 1 1e39 |y": "line 2, column 6: '1e39' is too large for float32",
    "|x 1 |y": "line 2, column 1: the sample has 1 values",
    "|x 1 2 3 |y": "line 2, column 8: the sample has more than 2 values",
    "|x 1 2": "line 2, column 1: the sequence has no sample of the input 'y'",
    "0 |x 1 2 |y": "line 2, column 1: the line begins with the sequence id '0'",
}


class TestErrors:
    @pytest.mark.parametrize(("line", "message"), WRONG.items())
    def test_wrong_lines_are_named(self, tmp_path: Path, line: str, message: str) -> None:
        path = write(tmp_path, f"|x 1 2 |y\n{line}\n|x 3 4 |y\n")
        with pytest.raises(DataError, match=message) as caught:
            read(CTFDeserializer(path, XY))
        assert path in str(caught.value)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for name, message in (
            (".", "a folder"),
            ("absent", "No such file"),
            ("pipe", "a pipe or a device"),
        ):
            with pytest.raises(DataError, match=f"{tmp_path}.*{message}"):
                CTFDeserializer(tmp_path / name, XY).num_chunks()
        for text in (b"", b"\n\n", b"|# only a comment\n"):
            with pytest.raises(DataError, match="no samples"):
                CTFDeserializer(write(tmp_path, text), XY).num_chunks()
        with pytest.raises(DataError, match="UTF-16"):
            CTFDeserializer(write(tmp_path, "|x 1 2".encode("utf-16")), XY).num_chunks()

    def test_a_line_has_a_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ctf_index, "MAX_SEQUENCE_BYTES", 1000)
        path = write(tmp_path, "|x 1 2 |y\n" * 4 + "|x" + " 1" * 1000 + "\n|x 1 2 |y\n" * 200)
        with pytest.raises(DataError, match="line 5: the sequence .* more than 1000 bytes"):
            CTFDeserializer(path, XY, chunk_bytes=100).num_chunks()

    def test_a_sequence_has_a_limit_of_samples(self, tmp_path: Path) -> None:
        path = write(tmp_path, "0 |x 1\n" + "1 |x 1\n" * 5)
        streams = {"x": StreamDef(shape=1, max_sequence_length=4)}
        with pytest.raises(DataError, match="line 2: a sequence with 5 samples of 'x'"):
            CTFDeserializer(path, streams).num_chunks()

    def test_a_file_that_changes_is_noticed(self, tmp_path: Path) -> None:
        deserializer = CTFDeserializer(write(tmp_path, "|x 1 2 |y\n" * 3), XY)
        assert deserializer.num_chunks() == 1
        for text in ("|x 1 2 |y\n", "|x 1 2 |y" + " " * 10 + "\n|x 1 2 |y\n"):
            write(tmp_path, text)
            with pytest.raises(DataError, match="has changed"):
                deserializer.get_chunk(0)

    def test_a_file_that_was_old_is_scanned_once_until_it_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path, "|x 1 2 |y\n|x 3 4 |y\n")
        os.utime(path, (0, 0))
        deserializer = CTFDeserializer(path, XY)
        assert deserializer.num_chunks() == 1
        with monkeypatch.context() as patch:
            patch.setattr(ctf_index, "scan", None)
            assert read(deserializer)["x"] == [[[1, 2]], [[3, 4]]]
        write(tmp_path, "|x 1 2 |y |# 3 4 |y\n")
        with pytest.raises(DataError, match="has changed"):
            deserializer.get_chunk(0)

    @pytest.mark.parametrize("max_samples", [1, 3])
    def test_sequences_of_several_chunks_come_in_the_order_of_the_minibatch(
        self, tmp_path: Path, max_samples: int
    ) -> None:
        rng = random.Random(max_samples)
        lines, expected = [], []
        for number in range(40):
            xs = [[float(number), float(k)] for k in range(rng.randint(1, max_samples))]
            ys = [rng.sample(range(4), rng.randint(0, 4)) for _ in range(rng.randint(1, len(xs)))]
            expected.append((xs, [[float(number * (k in y)) for k in range(4)] for y in ys]))
            lines += [f"{number} |x {x[0]} {x[1]}\n" for x in xs]
            lines += [f"{number} |y {' '.join(f'{k}:{number}' for k in y)}\n" for y in ys]
        path = write(tmp_path, "".join(lines))
        deserializer = CTFDeserializer(path, XY, chunk_bytes=200)
        chunks = [deserializer.get_chunk(k) for k in range(deserializer.num_chunks())]
        assert len(chunks) > 3
        places = [
            (chunk, index, number)
            for number, (chunk, index) in enumerate(
                (chunk, index)
                for chunk, info in enumerate(deserializer.chunk_infos())
                for index in range(info.num_sequences)
            )
        ]
        for _ in range(5):
            chosen = rng.choices(places, k=30)
            found = gather(
                np.array([chunk for chunk, _, _ in chosen]),
                np.array([index for _, index, _ in chosen]),
                deserializer.stream_infos(),
                chunks.__getitem__,
                (0, 0),
            )
            for name, column in (("x", 0), ("y", 1)):
                data, lengths = found[name]
                sizes = [1] * 30 if lengths is None else lengths.tolist()
                dense = data.to_dense() if name == "y" else data
                wanted = [expected[number][column] for _, _, number in chosen]
                assert [rows.tolist() for rows in dense.split(sizes)] == wanted


def test_it_can_be_sent_to_a_worker_process(tmp_path: Path) -> None:
    deserializer = CTFDeserializer(write(tmp_path, "|x 1 2 |y 1:1\n"), XY)
    copies = [pickle.loads(pickle.dumps(deserializer))]
    assert deserializer.num_chunks() == 1
    copies.append(pickle.loads(pickle.dumps(deserializer)))
    assert all(read(copy) == read(deserializer) for copy in copies)


def test_a_fork_while_a_thread_holds_its_lock(tmp_path: Path) -> None:
    path = write(tmp_path, "|x 1 2 |y 1:1\n" * 5)
    deserializer = CTFDeserializer(path, XY)
    source = MinibatchSource(deserializer)
    held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with deserializer._lock:
            held.set()
            may_end.wait(limit(60))

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(limit(10))
    assert forked(lambda: sum(m["x"].num_samples for m in source.minibatches_of_sweep(2))) == 5
    may_end.set()
    holder.join()


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ({}, "without streams"),
        ({"x": StreamDef()}, "no shape"),
        ({"x": StreamDef(shape=2**31)}, "more than"),
        ({"x": StreamDef(shape=1), "y": StreamDef(field="x", shape=1)}, "Two streams read"),
        ({"x": StreamDef(field="#x", shape=1)}, "cannot be an input"),
        ({"x": StreamDef(field="a b", shape=1)}, "cannot be an input"),
        ({"x": StreamDef(shape=1, scp="f")}, "has scp"),
        (
            {n: StreamDef(shape=1, defines_mb_size=True) for n in "xy"},
            "More than one stream has defines_mb_size",
        ),
    ],
)
def test_streams_that_text_cannot_have(streams: dict[str, StreamDef], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CTFDeserializer("any", streams)


def test_without_numba_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    ctf_parse.kernels.cache_clear()
    deserializer = CTFDeserializer(write(tmp_path, "|x 1 2\n"), {"x": XY["x"]})
    with pytest.raises(UnsupportedError, match=r"CTF text needs numba.*torchmn\[compression\]"):
        deserializer.num_chunks()


# ---- any bytes, in small chunks and in a large one

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ctf")


def outcomes(folder: Path, text: bytes) -> list[object]:
    """What is made of a text in small chunks and in one: values, or a message."""
    path = write(folder, text)
    found: list[object] = []
    for chunk_bytes in (16, 10**6):
        try:
            outcome: object = read(CTFDeserializer(path, XY, chunk_bytes=chunk_bytes))
        except DataError as error:
            outcome = str(error)
        assert isinstance(outcome, dict) or str(outcome).startswith(path)
        found.append(outcome)
    return found


@given(
    values=st.lists(NUMBERS, min_size=2, max_size=2), style=st.sampled_from(["%r", "%e", "%.9g"])
)
def test_numbers_are_rounded_to_float32(folder: Path, values: list[float], style: str) -> None:
    text = "|x " + " ".join(style % value for value in values) + " |y"
    expected = np.array([float(style % value) for value in values]).astype(np.float32)
    for outcome in outcomes(folder, text.encode()):
        np.testing.assert_array_max_ulp(np.float32(outcome["x"][0][0]), expected, maxulp=1)


def mutated(rng: random.Random) -> bytes:
    """Valid lines with a few bytes changed, inserted or lost."""
    lines = []
    for n in range(rng.randint(1, 6)):
        number = f"{n // 2} " if rng.random() < 0.5 else ""
        lines.append(f"{number}|x {rng.random():.3f} {n} |y {n % 4}:1.5 |# text\n")
    text = bytearray("".join(lines).encode())
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(text))
        piece = rng.choice(
            [b"|", b"#", b":", b" ", b"\n", b"\r", b"\0", b"e", b"-", b"9" * 30, b"\xff"]
        )
        if rng.random() < 0.5:
            text[at : at + rng.randint(0, 3)] = piece
        else:
            text[at:at] = piece
    return bytes(text[: rng.randint(1, len(text))] if rng.random() < 0.3 else text)


def parse_mutated(folder: Path) -> None:
    rng = random.Random(0)
    seen_error = seen_value = False
    for _ in range(400):
        text = mutated(rng)
        in_small_chunks, in_one = outcomes(folder, text)
        assert in_small_chunks == in_one, text
        seen_error |= isinstance(in_one, str)
        seen_value |= isinstance(in_one, dict)
    assert seen_error
    assert seen_value


def test_mutated_text_gives_values_or_a_named_place(folder: Path) -> None:
    parse_mutated(folder)


@pytest.mark.slow
def test_mutated_text_is_read_within_bounds(tmp_path: Path) -> None:
    """Compiled with checks of each index, in a process of its own."""
    code = (
        "import pathlib, sys; from tests.unit.cntk.readers.test_ctf import parse_mutated; "
        "parse_mutated(pathlib.Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[4]
    variables = {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": f"{root}:{root / 'src'}",
    }
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, **variables}, check=True
    )


@pytest.mark.parametrize("chunk_bytes", [20, 1000])
def test_a_stream_has_lengths_in_all_parts_or_in_none(tmp_path: Path, chunk_bytes: int) -> None:
    """Also where a part has no sequence, and a chunk only those of one sample."""
    lines = [f"{n} |x {n} {k}" + " |y 1:1" * (k == 0) for n in range(7) for k in range(1 + n // 5)]
    deserializer = CTFDeserializer(write(tmp_path, "\n".join(lines)), XY, chunk_bytes=chunk_bytes)
    for partition in range(3):
        source = MinibatchSource(deserializer, max_sweeps=1, randomize=False)
        while parts := source.next_minibatch(2, None, None, 3, partition):
            x, y = parts.values()
            assert x.lengths is not None
            assert (len(x.lengths), y.lengths) == (x.num_sequences, None)
            assert y.num_samples == y.num_sequences
        source.close()
