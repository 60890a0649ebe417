"""Arguments, streams, states, threads and errors of `MinibatchSource`."""

import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.contracts.suites.source_contracts import NUMBER, Numbers
from tests.limits import limit
from torchmn.cntk.readers import (
    FULL_DATA_SWEEP,
    MinibatchSource,
    MinibatchSourceFromData,
    StreamDef,
    StreamDefs,
    StreamInformation,
)
from torchmn.errors import DataError, UnknownNameError, UsageError


def ids(minibatch: dict[Any, Any]) -> list[float]:
    return minibatch["n"].data.flatten().tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_samples": 5, "max_sweeps": 1}, "max_samples=5 and max_sweeps=1 exclude"),
        (
            {"randomization_window_in_chunks": 4, "randomization_window_in_samples": 9},
            "in_chunks=4 and randomization_window_in_samples=9 exclude",
        ),
        ({"frame_mode": True, "truncation_length": 3}, "frame_mode=True.*truncation_length=3"),
        ({"max_samples": 0}, "max_samples=0 must be an integer, at least 1"),
        ({"max_sweeps": 1.5}, "max_sweeps=1.5 must be an integer"),
        ({"randomization_seed": -1}, "randomization_seed=-1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MinibatchSource(Numbers(), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "minibatch_size_in_samples=0 must be at least 1"),
        ((4, NUMBER, None, 2, 2), "partition_index=2 must be from 0 to .* 1"),
        ((4, NUMBER, None, None, 1), "num_data_partitions=comm.size"),
    ],
)
def test_wrong_requests(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MinibatchSource(Numbers()).next_minibatch(*arguments)


def test_streams() -> None:
    source = MinibatchSourceFromData({"x": torch.ones(4, 2), "y": torch.arange(4)})
    assert source.streams.x == StreamInformation("x", 0, shape=(2,))
    assert [info.name for info in source.stream_infos()] == ["x", "y"]
    assert source["y"].dtype == np.int64
    by_stream = source.next_minibatch(2)
    assert by_stream[source.streams.x].data.shape == (2, 2)
    named = source.next_minibatch(2, {"input": source.streams.x, 7: "y"})
    assert list(named) == ["input", 7]
    with pytest.raises(UnknownNameError, match="'z'. Known: x, y"):
        source.next_minibatch(2, {"input": "z"})
    with pytest.raises(UnknownNameError):
        source["z"]
    with pytest.raises(AttributeError, match="There are: x, y"):
        _ = source.streams.z


def test_stream_definitions() -> None:
    definitions = StreamDefs(a=StreamDef(field="image", shape=(3, 4, 4)), b=StreamDef(shape=10))
    assert definitions.b.sample_shape == (10,)
    assert list(definitions) == ["a", "b"]
    assert pickle.loads(pickle.dumps(definitions)) == definitions
    with pytest.raises(UsageError, match="sparse stream 's'.*shape=\\(12,\\)"):
        StreamInformation("s", storage_format="sparse", shape=(3, 4))
    with pytest.raises(UsageError, match="at least 1"):
        StreamInformation("s", shape=(0,))


def test_infinite_and_finite_sources() -> None:
    assert MinibatchSource(Numbers()).is_infinite
    assert not MinibatchSource(Numbers(), max_samples=5).is_infinite
    assert not MinibatchSource(Numbers(), max_samples=FULL_DATA_SWEEP).is_infinite
    source = MinibatchSource(Numbers(3), max_samples=FULL_DATA_SWEEP)
    assert source.num_samples_of_sweep == 12
    assert len(ids(source.next_minibatch(100, NUMBER))) == 12
    assert source.next_minibatch(100, NUMBER) == {}
    assert source.next_minibatch(100, NUMBER) == {}
    assert source.global_num_samples == 0
    assert source.current_position == 12
    source.close()


def test_a_state_of_another_source_is_refused() -> None:
    state = MinibatchSource(Numbers(), randomization_seed=3).get_checkpoint_state()
    with pytest.raises(UsageError, match="saved with seed=3 and the source has 4"):
        MinibatchSource(Numbers(), randomization_seed=4).restore_from_checkpoint(state)
    with pytest.raises(UsageError, match="num_chunks=9 and the source has 5"):
        MinibatchSource(Numbers(5), randomization_seed=3).restore_from_checkpoint(state)
    with pytest.raises(UsageError, match="lacks sweep, block"):
        MinibatchSource(Numbers()).restore_from_checkpoint({})
    with pytest.raises(UsageError, match="outside of the data"):
        MinibatchSource(Numbers(), randomization_seed=3).restore_from_checkpoint(
            {**state, "sequence": 1000}
        )


def test_a_state_after_the_end_of_the_source_has_no_minibatch() -> None:
    longer = MinibatchSource(Numbers(), max_sweeps=5)
    longer.go_to_sweep(3)
    longer.next_minibatch(4)
    source = MinibatchSource(Numbers(), max_sweeps=2)
    source.restore_from_checkpoint(longer.get_checkpoint_state())
    assert source.next_minibatch(4) == {}
    longer.close()


# ---- lengths


def test_pieces_of_sequences_continue_their_rows() -> None:
    def pieces(num_partitions: int) -> list[list[tuple[list[float], bool]]]:
        sources = [
            MinibatchSource(Numbers(lengths=lambda n: 3 + n % 5), truncation_length=4, max_sweeps=1)
            for _ in range(num_partitions)
        ]
        rows: list[list[tuple[list[float], bool]]] = [[] for _ in range(3)]
        while True:
            parts = [
                s.next_minibatch(12, NUMBER, None, num_partitions, r) for r, s in enumerate(sources)
            ]
            if not parts[0]:
                assert not any(parts)
                break
            found = [
                (piece.flatten().tolist(), first)
                for part in parts
                for piece, first in zip(
                    part["n"].as_sequences(), part["n"].is_first.tolist(), strict=True
                )
            ]
            assert len(found) == 3
            for row, piece in zip(rows, found, strict=True):
                row.append(piece)
        for source in sources:
            source.close()
        return rows

    rows = pieces(1)
    assert pieces(2) == rows
    assert pieces(4) == rows
    seen = []
    for row in rows:
        for values, is_first in row:
            assert len(values) <= 4
            if values:
                assert is_first == (values[0] % 100 == 0)
                if not is_first:
                    assert values[0] == seen[-1] + 1  # it continues where the row was
                seen.extend(values)
    numbers = Numbers(lengths=lambda n: 3 + n % 5)
    assert sorted(seen) == [
        100.0 * n + k for n, size in enumerate(numbers.lengths) for k in range(size)
    ]


def test_frames_of_streams_of_other_lengths_are_refused() -> None:
    source = MinibatchSourceFromData(
        {"a": [np.ones((2, 1), np.float32)] * 3, "b": np.ones((3, 1), np.float32)}
    )
    frames = MinibatchSource(source._deserializer, frame_mode=True)
    with pytest.raises(DataError, match="'b' has 3 samples where .* counts 6"):
        frames.next_minibatch(4)
    pieces = MinibatchSource(source._deserializer, truncation_length=2)
    with pytest.raises(DataError, match="'b' has 1 samples in a sequence where .* counts 2"):
        pieces.next_minibatch(4)
    frames.close()
    pieces.close()


# ---- threads


def test_reading_ahead_is_bounded() -> None:
    numbers = Numbers(40)
    source = MinibatchSource(numbers, randomize=False, randomization_window_in_chunks=4)
    source.next_minibatch(3, NUMBER)
    ahead = source._ahead
    ahead._threads.run(lambda: None).result()  # all that was asked for has been done
    ahead._loader.run(lambda: None).result()
    assert len(ahead._begun) == 2
    assert 1 <= len(numbers.num_reads) <= 4
    source.close()


def test_a_training_thread_that_is_interrupted_loses_nothing() -> None:
    wanted = MinibatchSource(Numbers(40))
    source = MinibatchSource(Numbers(40))

    class Interrupted:
        def result(self) -> Any:
            raise KeyboardInterrupt

        def cancel(self) -> bool:
            return True

    assert ids(source.next_minibatch(4, NUMBER)) == ids(wanted.next_minibatch(4, NUMBER))
    object.__setattr__(source._ahead._begun[0], "streams", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        source.next_minibatch(4, NUMBER)
    assert ids(source.next_minibatch(4, NUMBER)) == ids(wanted.next_minibatch(4, NUMBER))
    source.close()
    wanted.close()


def test_an_error_on_the_way_to_the_device_loses_nothing() -> None:
    source, wanted = MinibatchSource(Numbers(9)), MinibatchSource(Numbers(9))
    with pytest.raises(RuntimeError):
        source.next_minibatch(4, NUMBER, "no-such-device")
    assert source.current_position == 0
    assert ids(source.next_minibatch(4, NUMBER)) == ids(wanted.next_minibatch(4, NUMBER))
    source.close()
    wanted.close()


def test_threads_end_with_the_source() -> None:
    def names() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("torchmn-")}

    before = names()
    source = MinibatchSource(Numbers(), multithreaded_deserializer=True)
    source.next_minibatch(4, NUMBER)
    assert len(names() - before) >= 2
    del source
    assert names() - before == set()


EXIT = """
import threading, time, sys
sys.path.insert(0, "@")
from tests.contracts.suites.source_contracts import NUMBER, Numbers
from torchmn.cntk.readers import MinibatchSource, read_ahead
read_ahead.EXIT_TIME_S = 0.2

class Hangs(Numbers):
    def get_chunk(self, chunk_id):
        if chunk_id > 2:
            time.sleep(1000)
        return super().get_chunk(chunk_id)

source = MinibatchSource(Hangs(), randomize=False)
print(len(source.next_minibatch(4, NUMBER)["n"]))
{end}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise SystemExit(3)", 3), ("raise KeyboardInterrupt", -2)]
)
def test_a_read_that_hangs_does_not_hold_the_end_of_a_script(end: str, status: int) -> None:
    root = __file__.rsplit("/tests/", 1)[0]
    code = EXIT.replace("{end}", end).replace("@", root)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60)
    )
    assert result.stdout == "4\n"
    assert result.returncode == status, result.stderr
    assert "Fatal" not in result.stderr
