"""Sessions do what CNTK's do, in its order.

The numbers of actions, their indices and samples are those of CNTK 2.7 on 25 samples in minibatches
of 4.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchmn.cntk as C
from torchmn.comm import Communicator, create_communicator
from torchmn.errors import ResultWarning, TorchmnWarning, UsageError
from torchmn.testing import run_ranks

from .sessions import NUM_SAMPLES, Training, is_far, source, squared

Calls = list[tuple[int, int, int]]


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """A communicator of one rank."""
    comm = create_communicator("naive")
    yield comm
    comm.finalize()


def checking(calls: Calls, *, stop_at: int | None = None, rank: int = 0) -> C.CrossValidationConfig:
    """A callback that keeps (index, samples, minibatches), and stops training at an index."""

    def callback(index: int, error: float, num_samples: int, num_minibatches: int) -> bool:
        calls.append((index, num_samples, num_minibatches))
        return index != stop_at

    return C.CrossValidationConfig(
        source(seed=1), frequency=10, minibatch_size=2, callback=callback
    )


# ---- cross validation ----


@pytest.mark.parametrize(
    ("frequency", "max_sweeps", "indices"),
    [
        (None, 1, [0]),
        (10, 1, [0, 1, 2]),
        ((10, C.DataUnit.sample), 1, [0, 1, 2]),
        ((3, C.DataUnit.minibatch), 1, [0, 1, 2]),
        ((1, C.DataUnit.sweep), 3, [0, 1, 2]),
        (3, 1, [0, 1, 2, 4, 5, 6, 8]),  # 4, 8, 12, ... samples: once where several are passed
        (25, 1, [0]),
    ],
    ids=str,
)
def test_cross_validation(
    alone: Communicator, frequency: Any, max_sweeps: int, indices: list[int]
) -> None:
    calls: Calls = []
    config = checking(calls)
    config.frequency = frequency
    training = Training(alone)
    training.run(source(max_sweeps=max_sweeps), cv_config=config)
    assert calls == [(index, NUM_SAMPLES, 13) for index in indices]
    assert training.recorder.tests == [(NUM_SAMPLES, 13)] * len(indices)


def test_cross_validation_does_not_change_the_training(alone: Communicator) -> None:
    """Source and model are as before it, also if both read one source."""

    plain, validated = Training(alone), Training(alone)
    plain.run(source(max_sweeps=2, randomize=True))
    both = source(max_sweeps=2, randomize=True)
    config = C.CrossValidationConfig(both, frequency=10, max_samples=7)
    with pytest.warns(TorchmnWarning, match="had no samples"):  # at the end of the data
        validated.run(both, cv_config=config)
    assert validated.recorder.losses == plain.recorder.losses
    assert validated.recorder.tests[0] == (7, 1)


def test_cross_validation_within_a_block_advises_what_a_session_can_do() -> None:
    def rank_main(comm, frequency):
        config = C.CrossValidationConfig(source(seed=1), frequency=frequency)
        Training(comm, "block").run(source(54), mb_size=3, cv_config=config)

    with pytest.warns(ResultWarning, match="let frequency be a multiple of block_size"):
        run_ranks(partial(rank_main, frequency=20), 2)
    run_ranks(partial(rank_main, frequency=18), 2)  # which is what it advises


def test_cross_validation_without_source_calls_the_callback_only(alone: Communicator) -> None:
    calls: list[Any] = []
    training = Training(alone)
    config = C.CrossValidationConfig(
        frequency=10, callback=lambda *arguments: calls.append(arguments)
    )
    training.run(cv_config=config)
    assert calls == [(index, 0.0, 0, 0) for index in range(3)]
    assert training.recorder.tests == []


def test_the_error_is_the_mean_over_the_samples_of_all_ranks() -> None:
    errors: dict[int, list[float]] = {}

    def rank(comm: Communicator) -> None:
        def callback(index: int, error: float, *rest: int) -> None:
            errors.setdefault(comm.size, []).append(error)

        Training(comm).run(
            cv_config=C.CrossValidationConfig(
                source(7, seed=1), None, 3, callback, criterion=squared
            )
        )

    for size in (1, 2, 4):  # the last minibatch has one sample: other ranks have none
        run_ranks(rank, size)
        assert len(set(errors[size])) == 1
    assert errors[2][0] == pytest.approx(errors[1][0], rel=1e-5)
    assert errors[4][0] == pytest.approx(errors[1][0], rel=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_a_callback_of_one_rank_stops_all(size: int) -> None:
    def rank(comm: Communicator) -> tuple[Calls, int]:
        calls: Calls = []
        is_last = comm.rank == comm.size - 1
        training = Training(comm)
        training.run(cv_config=checking(calls, stop_at=1 if is_last else None))
        return calls, training.trainer.total_number_of_samples_seen

    expected = [(0, NUM_SAMPLES, 13), (1, NUM_SAMPLES, 13)], 20
    assert run_ranks(rank, size) == [expected] * size


def test_a_session_can_be_subclassed(alone: Communicator) -> None:
    class Mine(C.TrainingSession):
        def on_cross_validation_end(self, index: int, *rest: Any) -> bool:
            return index < 1

    training = Training(alone)
    train = source()
    config = C.CrossValidationConfig(source(seed=1), frequency=10)
    Mine(training.trainer, train, 4, {"x": "x", "y": "y"}, cv_config=config).train()
    assert training.trainer.total_number_of_samples_seen == 20


# ---- progress, sizes and the end ----


@pytest.mark.parametrize(
    ("frequency", "epochs"),
    [
        (10, [12, 8, 5]),
        (3, [4, 4, 4, 4, 4, 4, 1]),
        (None, [25]),
        ((2, C.DataUnit.minibatch), [8, 8, 8, 1]),
    ],
    ids=str,
)
def test_summaries(alone: Communicator, frequency: Any, epochs: list[int]) -> None:
    training = Training(alone)
    training.run(progress_frequency=frequency)
    assert training.recorder.epochs == list(enumerate(epochs, 1))


class Own(C.io.UserMinibatchSource):
    """A source of a user's, whose ranks have unequal numbers of minibatches."""

    def __init__(self, num: int) -> None:
        self._left = num

    def stream_infos(self) -> list[C.io.StreamInformation]:
        return [
            C.io.StreamInformation(name, shape=shape) for name, shape in (("x", (3,)), ("y", (1,)))
        ]

    def next_minibatch(
        self, num_samples: int, number_of_workers: int = 1, worker_rank: int = 0, device: Any = None
    ) -> dict[Any, Any]:
        self._left -= 1
        if self._left < 0:
            return {}
        x, y = torch.ones(2, 3), torch.ones(2, 1)
        infos = self.stream_infos()
        return {
            info: C.io.MinibatchData(data, 2, 2, False)
            for info, data in zip(infos, (x, y), strict=True)
        }


@pytest.mark.parametrize("learner", ["plain", "block"])
def test_unequal_ranks_end_together(learner: str) -> None:
    def rank(comm: Communicator) -> Any:
        training = Training(comm, learner)
        result = training.run(
            Own(2 + 3 * comm.rank), test_config=C.TestConfig(Own(4 - comm.rank), minibatch_size=8)
        )
        assert result is not None
        return training.trainer.total_number_of_samples_seen, result, training.state()

    first, *others = run_ranks(rank, 3)
    assert first[0] == 2 * (2 + 5 + 8)
    assert (first[1].num_samples, first[1].num_minibatches) == (2 * (4 + 3 + 2), 4)
    for other in others:
        assert other[:2] == first[:2]
        assert torch.equal(other[2]["weight"], first[2]["weight"])


def test_a_schedule_of_sizes_and_the_last_partial_minibatch() -> None:
    def rank(comm: Communicator) -> list[int]:
        sizes: list[int] = []
        training = Training(comm)
        training.trainer.progress_writers.append(_Sizes(sizes))
        schedule = C.minibatch_size_schedule([2, 4, 8], epoch_size=8)
        training.run(source(max_sweeps=2), schedule, max_samples=29)
        return sizes

    assert run_ranks(rank, 2) == [[2, 2, 2, 2, 4, 4, 8, 5]] * 2


class _Sizes(C.ProgressWriter):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__(1)
        self._sizes = sizes

    def on_write_training_update(self, samples: Any, *rest: Any) -> None:
        self._sizes.append(samples[1] - samples[0])


def test_the_test_is_at_the_end_also_when_training_stopped_early(alone: Communicator) -> None:
    training = Training(alone)
    config = C.TestConfig(source(10, seed=2), minibatch_size=4, criterion=(squared, is_far))
    result = training.run(cv_config=checking([], stop_at=0), test_config=config)
    assert result is not None
    assert (result.num_samples, result.num_minibatches) == (10, 3)
    assert training.recorder.tests == [(25, 13), (10, 3)]


def test_a_test_with_inputs_of_its_own() -> None:
    def rank(comm: Communicator) -> C.Evaluation | None:
        other = source(10, seed=2)
        config = C.TestConfig(other, model_inputs_to_streams={"x": other["x"], "y": other["y"]})
        return Training(comm).run(test_config=config)

    assert len(set(run_ranks(rank, 2))) == 1


# ---- checkpoints ----


def folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("learner", ["plain", "1bit", "block"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_session_that_was_stopped_resumes_bit_equal(
    learner: str, size: int, tmp_path: Path
) -> None:
    """Stopped by an exception in the middle of blocks and sweeps; lines continue, too."""

    def rank(comm: Communicator) -> None:
        def train(name: str, *, fail_at: int | None = None) -> Training:
            training = Training(comm, learner)
            if fail_at is not None:
                training.trainer.progress_writers.append(_Failing(fail_at))
            training.run(
                source(max_sweeps=3, randomize=True),
                5,
                progress_frequency=10,
                checkpoint_config=C.CheckpointConfig(tmp_path / name, 20),
                cv_config=C.CrossValidationConfig(source(seed=1), 20),
            )
            return training

        whole = train("whole")
        with pytest.raises(ZeroDivisionError):
            train("model", fail_at=9)
        resumed = train("model")
        assert torch.equal(resumed.model.weight, whole.model.weight)
        assert resumed.recorder.losses == whole.recorder.losses[8:]  # from 40 samples on
        assert resumed.recorder.epochs == whole.recorder.epochs[4:]

    run_ranks(rank, size)


class _Failing(C.ProgressWriter):
    def __init__(self, num: int) -> None:
        super().__init__()
        self._left = num

    def on_training_update_end(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise ZeroDivisionError


@pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 2)])
def test_another_number_of_workers_continues_with_the_next_sample(
    before: int, after: int, tmp_path: Path
) -> None:
    def rank(comm: Communicator, max_samples: int | None, folder: str) -> list[float]:
        training = Training(comm)
        training.run(
            source(max_sweeps=2, randomize=True),
            5,
            max_samples=max_samples,
            checkpoint_config=C.CheckpointConfig(tmp_path / folder),
        )
        return training.recorder.losses

    whole = run_ranks(lambda comm: rank(comm, None, "whole"), 1)[0]
    first = run_ranks(lambda comm: rank(comm, 20, "parts"), before)[0]
    last = run_ranks(lambda comm: rank(comm, None, "parts"), after)[0]
    assert first + last == pytest.approx(whole, rel=1e-4)


def test_a_session_that_has_ended_only_tests_again(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> list[Any]:
        results = []
        for _ in range(2):
            calls: Calls = []
            training = Training(comm)
            result = training.run(
                progress_frequency=10,
                checkpoint_config=C.CheckpointConfig(tmp_path / "m", 10),
                cv_config=checking(calls),
                test_config=C.TestConfig(source(10, seed=2)),
            )
            results.append((result, len(calls), training.recorder.epochs))
        return results

    first, again = run_ranks(rank, 2)[0]
    assert again == (first[0], 0, [])
    assert first[1] == 3


def test_frequency_none_is_one_checkpoint_at_the_end(alone: Communicator, tmp_path: Path) -> None:
    Training(alone).run(checkpoint_config=C.CheckpointConfig(tmp_path / "m"))
    assert [name for name in folders(tmp_path / "m") if name != ".owner"] == ["step-00000007"]


def test_preserved_checkpoints_have_the_names_of_cntk(alone: Communicator, tmp_path: Path) -> None:
    config = C.CheckpointConfig(tmp_path / "m", 10, preserve_all=True)
    whole, resumed = Training(alone), Training(alone)
    whole.run(progress_frequency=10, checkpoint_config=config)
    assert folders(tmp_path) == ["m", "m0", "m1", "m2"]

    for name in ("m", "m2"):  # as in CNTK: what is removed is not restored
        shutil.rmtree(tmp_path / name)
    (tmp_path / "m11.txt").touch()
    (tmp_path / "mine").mkdir()
    resumed.run(progress_frequency=10, checkpoint_config=config)
    assert resumed.recorder.losses == whole.recorder.losses[5:]  # from 20 samples on
    assert resumed.recorder.epochs == [(3, 5)]
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert {"m", "m0", "m1", "m2"} <= set(folders(tmp_path))


def test_a_preserved_checkpoint_is_restored_by_its_name(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> list[int]:
        config = C.CheckpointConfig(tmp_path / "m", 10, preserve_all=True)
        Training(comm).run(checkpoint_config=config)
        seen = []
        for name in ("m0", "m1", "m2", "m"):
            training = Training(comm)
            training.trainer.restore_from_checkpoint(tmp_path / name)
            seen.append(training.trainer.total_number_of_samples_seen)
        named = Training(comm)
        named.run(checkpoint_config=C.CheckpointConfig(tmp_path / "m0"))
        return [*seen, len(named.recorder.losses)]

    assert run_ranks(rank, 2) == [[12, 20, 25, 25, 4]] * 2


def test_a_checkpoint_of_a_trainer_has_no_position_of_the_source(
    alone: Communicator, tmp_path: Path
) -> None:
    Training(alone).trainer.save_checkpoint(tmp_path / "m")
    with pytest.raises(UsageError, match="was not saved by a session"):
        Training(alone).run(checkpoint_config=C.CheckpointConfig(tmp_path / "m"))


def test_an_evaluation_without_samples_is_nan(alone: Communicator) -> None:
    train, errors = source(), []
    with pytest.warns(TorchmnWarning, match="cross validation had no samples"):
        Training(alone).run(
            train, cv_config=C.CrossValidationConfig(train, callback=lambda *a: errors.append(a))
        )
    assert [str(each[1]) for each in errors] == ["nan"]


def test_a_session_that_trains_nothing_warns(alone: Communicator) -> None:
    training, train = Training(alone), source()
    training.run(train)
    with pytest.warns(TorchmnWarning, match="trained nothing"):
        training.run(train)
    with pytest.warns(TorchmnWarning, match="max_samples=25 is not above the 25 samples"):
        training.run(source(), max_samples=25)


def test_what_begins_again_in_a_folder_is_what_resumes(alone: Communicator, tmp_path: Path) -> None:
    """Not the checkpoints of the training before, which had made more minibatches."""

    def run(sweeps: int, *, restore: bool) -> Training:
        training = Training(alone)
        config = C.CheckpointConfig(tmp_path / "m", 4, restore=restore)
        training.run(source(max_sweeps=sweeps), checkpoint_config=config)
        return training

    run(3, restore=True)
    begun = run(1, restore=False)
    resumed = run(2, restore=True)
    assert len(begun.recorder.losses) == 7
    assert resumed.trainer.num_minibatches == 14
    assert len(resumed.recorder.losses) == 7


def test_the_checkpoint_of_another_name_is_not_a_preserved_one(
    alone: Communicator, tmp_path: Path
) -> None:
    for name in ("net2", "net"):
        training = Training(alone)
        training.run(checkpoint_config=C.CheckpointConfig(tmp_path / name))
        assert len(training.recorder.losses) == 7


def test_sizes_by_sweeps(alone: Communicator) -> None:
    training = Training(alone)
    sizes = C.minibatch_size_schedule([5, 25], epoch_size=None)
    training.run(source(max_sweeps=2), sizes)
    assert training.trainer.num_minibatches == 6


# ---- wrong arguments ----


def test_infinite_sources_are_refused_unless_samples_are_limited(alone: Communicator) -> None:
    infinite = source(max_samples=C.INFINITELY_REPEAT)
    with pytest.raises(UsageError, match="source of the training is infinite"):
        Training(alone).run(infinite)
    training = Training(alone)
    training.run(infinite, max_samples=30)
    assert training.trainer.total_number_of_samples_seen == 30
    with pytest.raises(UsageError, match="source of the cross validation is infinite"):
        C.CrossValidationConfig(infinite)
    with pytest.raises(UsageError, match="source of the test is infinite"):
        C.TestConfig(infinite)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: C.CheckpointConfig(None, 10), "a frequency and no filename"),
        (lambda: C.CheckpointConfig("m", 0), "frequency of 0 must be"),
        (lambda: C.CheckpointConfig("m", (1, "sweep")), "must be a positive int"),
        (lambda: C.CrossValidationConfig(), "needs a minibatch_source, a callback"),
        (lambda: C.CrossValidationConfig(source(), minibatch_size=0), "minibatch size"),
        (lambda: C.CrossValidationConfig(source(), source=source()), "earlier name"),
        (lambda: C.TestConfig(), "needs a minibatch_source"),
    ],
)
def test_wrong_configurations(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("inputs", [["x", "y"], "x"], ids=["list", "str"])
def test_streams_must_be_a_dict(alone: Communicator, inputs: Any) -> None:
    """Found at once, not when the first evaluation begins."""
    train = source()
    match = rf"of type {type(inputs).__name__}\. .* {{'x': source\.streams\.x, 'y'"
    with pytest.raises(UsageError, match=match):
        train.next_minibatch(4, inputs)
    for config in (C.CrossValidationConfig, C.TestConfig):
        with pytest.raises(UsageError, match=match):
            config(train, model_inputs_to_streams=inputs)

    with pytest.raises(UsageError, match=match):
        C.training_session(Training(alone).trainer, train, 4, inputs)


@pytest.mark.parametrize("wrong", [{"x": np.ones((4, 3))}, "train.ctf"], ids=["dict", "str"])
def test_what_is_no_source(alone: Communicator, wrong: Any) -> None:
    match = rf"source is of type {type(wrong).__name__}\. .* MinibatchSourceFromData"
    for config in (C.CrossValidationConfig, C.TestConfig):
        with pytest.raises(UsageError, match=match):
            config(wrong)

    for options in ({}, {"max_samples": 8}):
        with pytest.raises(UsageError, match=match):
            C.training_session(Training(alone).trainer, wrong, 4, {"x": "x"}, **options)


def test_earlier_names() -> None:
    data = source()
    config = C.CrossValidationConfig(source=data, mb_size=7)
    assert (config.minibatch_source, config.minibatch_size) == (data, 7)
    assert C.TestConfig(source=data, mb_size=7).minibatch_size == 7


@pytest.mark.parametrize("max_samples", [0, -1, 1.5])
def test_max_samples_must_be_positive(alone: Communicator, max_samples: Any) -> None:
    with pytest.raises(UsageError, match="max_samples="):
        Training(alone).run(max_samples=max_samples)
