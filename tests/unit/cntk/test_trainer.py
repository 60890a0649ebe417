"""`torchmn.cntk.Trainer`: learners over ranks, arguments, checkpoints. See also the contracts."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmn
import torchmn.cntk as C
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.comm import Communicator
from torchmn.errors import DataError, ResultWarning, UnsupportedError, UsageError
from torchmn.nn import convert_batch_norm
from torchmn.testing import run_ranks

FEATURES, CLASSES = 5, 3
SIZES = [8, 3, 1, 12, 5]
PER_SAMPLE = C.learning_rate_schedule(0.02, C.UnitType.sample)
TIME = C.momentum_as_time_constant_schedule(20)
Minibatch = dict[str, Tensor]


class Network(nn.Module):
    """Two layers, large enough for a codec if ``width`` is."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.hidden, self.top = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        generator = torch.Generator().manual_seed(7)  # threads share the default one
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))

    def forward(self, features: Tensor) -> Tensor:
        return self.top(self.hidden(features).tanh())


def minibatches(sizes: list[int]) -> list[Minibatch]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "features": torch.randn(n, FEATURES, generator=generator),
            "labels": torch.randint(CLASSES, (n,), generator=generator),
        }
        for n in sizes
    ]


def part_of(whole: Minibatch, rank: int, size: int) -> Minibatch:
    """Each rank has about twice as much as the one before, the first one little or nothing."""
    n = len(whole["labels"])
    cuts = [round(n * (2**r - 1) / (2**size - 1)) for r in range(size + 1)]
    return {name: value[cuts[rank] : cuts[rank + 1]] for name, value in whole.items()}


def values_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(trainer: C.Trainer, data: list[Minibatch], comm: Communicator) -> None:
    for whole in data:
        assert trainer.train_minibatch(part_of(whole, comm.rank, comm.size))


def trained(
    learners: Callable[[nn.Module, Communicator], Any],
    size: int,
    *,
    model: Callable[[], nn.Module] = Network,
    criterion: Any = C.cross_entropy_with_softmax,
    data: list[Minibatch] | None = None,
) -> list[Tensor]:
    """The parameters of all ranks, which must be the same, after some minibatches."""

    def rank(comm: Communicator) -> list[Tensor]:
        network = model()
        trainer = C.Trainer(network, criterion, learners(network, comm))
        train(trainer, minibatches(SIZES) if data is None else data, comm)
        assert not trainer.train_minibatch({})
        return values_of(network)

    first, *others = run_ranks(rank, size)
    for other in others:
        assert_equal(first, other)
    return first


def on_ranks(learner: Any, comm: Communicator) -> Any:
    return C.data_parallel_distributed_learner(learner, comm=comm)


def momentum(model: nn.Module, comm: Communicator) -> Any:
    return on_ranks(C.momentum_sgd(model.parameters(), PER_SAMPLE, TIME), comm)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- learners over ranks ----

RMS: Any = {"gamma": 0.9, "inc": 1.2, "dec": 0.7, "max": 10, "min": 0.01}
LEARNERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: C.sgd(p, 0.1, l1_regularization_weight=0.01, l2_regularization_weight=0.01),
    "momentum_sgd": lambda p: C.momentum_sgd(p, PER_SAMPLE, TIME),
    "nesterov": lambda p: C.nesterov(
        p,
        PER_SAMPLE,
        TIME,
        gradient_clipping_threshold_per_sample=0.1,
        gradient_clipping_with_truncation=False,
    ),
    "adam": lambda p: C.adam(p, PER_SAMPLE, TIME, variance_momentum=TIME),
    "adagrad": lambda p: C.adagrad(p, PER_SAMPLE),
    "rmsprop": lambda p: C.rmsprop(p, PER_SAMPLE, **RMS),
    "noise": lambda p: C.sgd(p, 0.1, gaussian_noise_injection_std_dev=0.01),
    "torch's": lambda p: torch.optim.AdamW(p, 0.01),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LEARNERS)
def test_many_workers_are_as_one(name: str, size: int) -> None:
    def distributed(model: nn.Module, comm: Communicator) -> Any:
        return on_ranks(LEARNERS[name](model.parameters()), comm)

    many = trained(distributed, size)
    torch.testing.assert_close(many, trained(distributed, 1), atol=1e-5, rtol=1e-4)


def test_alone_needs_no_communicator() -> None:
    def plain(model: nn.Module, comm: Communicator) -> Any:
        return C.momentum_sgd(model.parameters, PER_SAMPLE, TIME)  # CNTK's property

    assert_equal(trained(plain, 1), trained(momentum, 1))


def test_bits_begin_after_the_warm_start() -> None:
    def distributed(bits: int, after: int) -> Callable[[nn.Module, Communicator], Any]:
        def make(model: nn.Module, comm: Communicator) -> Any:
            learner = C.sgd(model.parameters(), PER_SAMPLE)
            return C.data_parallel_distributed_learner(learner, after, bits, comm=comm)

        return make

    def after(num_minibatches: int, bits: int) -> list[Tensor]:
        return trained(
            distributed(bits, sum(SIZES[:3])),
            2,
            model=lambda: Network(width=512),
            data=minibatches(SIZES)[:num_minibatches],
        )

    assert_equal(after(3, 1), after(3, 32))
    with pytest.raises(AssertionError):
        assert_equal(after(4, 1), after(4, 32))


@pytest.mark.filterwarnings("ignore:.*'hidden.bias' require a gradient")
def test_several_learners_and_parameters_in_none() -> None:
    def two(model: nn.Module, comm: Communicator) -> Any:
        assert isinstance(model, Network)
        local = [
            C.sgd([model.hidden.weight], 0.1),
            C.momentum_sgd([model.top.weight, model.top.bias], PER_SAMPLE, TIME),
        ]
        return [on_ranks(each, comm) for each in local]

    model = Network()
    many = trained(two, 3)
    torch.testing.assert_close(many, trained(two, 1))
    assert torch.equal(many[1], model.hidden.bias)
    assert all(not torch.equal(many[i], list(model.parameters())[i]) for i in (0, 2, 3))


def test_a_loss_with_parameters_is_trained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output: Tensor, labels: Tensor) -> Tensor:
            return C.cross_entropy_with_softmax(output * self.scale, labels)

    def rank(comm: Communicator) -> float:
        model, loss = Network(), Scaled()
        learner = C.sgd([*model.parameters(), *loss.parameters()], 0.1)
        trainer = C.Trainer(model, loss, on_ranks(learner, comm))
        train(trainer, minibatches(SIZES), comm)
        return loss.scale.item()

    (one,), many = run_ranks(rank, 1), run_ranks(rank, 2)
    assert many == [pytest.approx(one), pytest.approx(one)]
    assert one != 2.0


def test_writers_count_the_ends_of_blocks() -> None:
    class Syncs(C.ProgressWriter):
        def __init__(self) -> None:
            super().__init__(distributed_freq=1)
            self.found: list[int] = []

        def on_write_distributed_sync_update(self, samples: Any, *_: Any) -> None:
            self.found.append(samples[1])

    def rank(comm: Communicator) -> list[int]:
        model, writer = Network(), Syncs()
        learner = C.sgd(model.parameters(), PER_SAMPLE)
        distributed = C.block_momentum_distributed_learner(
            learner, 12, distributed_after=8, comm=comm
        )
        trainer = C.Trainer(model, C.cross_entropy_with_softmax, distributed, [writer])
        train(trainer, minibatches([8, 8, 4, 6, 7]), comm)
        assert not trainer.train_minibatch({})
        return writer.found

    assert run_ranks(rank, 2) == [[12, 25], [12, 25]]


# ---- models ----


class Adversaries(nn.Module):
    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


class Critic(Adversaries):
    """The losses of a discriminator for real samples and for those of a generator."""

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.discriminator(self.generator(noise))
        return nn.functional.softplus(-self.discriminator(real)) + nn.functional.softplus(made)


class Deceiver(Adversaries):
    """The loss of a generator."""

    def forward(self, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-self.discriminator(self.generator(noise)))


def test_two_trainers_train_through_the_network_of_the_other() -> None:
    """As CNTK's GAN: gradients of the other's parameters are neither exchanged nor kept."""

    def rank(comm: Communicator) -> list[Tensor]:
        networks = Network(3), Network(1)
        generator = nn.Sequential(networks[0], nn.Linear(CLASSES, FEATURES, bias=False))
        discriminator = nn.Sequential(networks[1], nn.Linear(CLASSES, 1, bias=False))
        for top in (generator[1], discriminator[1]):
            nn.init.constant_(top.weight, 0.3)
        trainers = []
        for kind, own in ((Critic, discriminator), (Deceiver, generator)):
            model = kind(generator, discriminator)
            trainers.append(C.Trainer(model, lambda x: x.squeeze(1), momentum(own, comm)))
        for whole in minibatches(SIZES):
            part = part_of(whole, comm.rank, comm.size)["features"]
            trainers[0].train_minibatch({"real": part, "noise": part.flip(1)})
            assert all(p.grad is None for p in generator.parameters())
            trainers[1].train_minibatch({"noise": part})
            discriminator.zero_grad()
            generator.zero_grad()
        assert all(p.requires_grad for p in (*generator.parameters(), *discriminator.parameters()))
        return [*values_of(generator), *values_of(discriminator)]

    (one,) = run_ranks(rank, 1)
    for many in run_ranks(rank, 3):
        torch.testing.assert_close(many, one, atol=1e-6, rtol=1e-5)


def test_compiled_model() -> None:
    compiled = trained(momentum, 1, model=lambda: torch.compile(Network(), backend="eager"))
    torch.testing.assert_close(compiled, trained(momentum, 1))


@pytest.mark.parametrize(
    "criterion", [C.cross_entropy_with_softmax, nn.functional.cross_entropy], ids=["each", "mean"]
)
def test_layers_whose_ranks_communicate(criterion: Any) -> None:
    """A rank whose part is empty still runs them, for the others wait for it."""

    def rank(comm: Communicator) -> tuple[list[Tensor], float]:
        plain = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
        for parameter, value in zip(plain.parameters(), values_of(start), strict=True):
            parameter.data.copy_(value)
        model = convert_batch_norm(plain, comm, loss_weight="samples")
        trainer = C.Trainer(model, criterion, momentum(model, comm))
        for whole in minibatches([8, 3, 12, 2]):
            part = part_of(whole, comm.rank, comm.size)
            trainer.train_minibatch({"input": part["features"], "labels": part["labels"]})
        return values_of(model), trainer.previous_minibatch_loss_average

    start = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    ((one, loss),) = run_ranks(rank, 1)
    for many, average in run_ranks(rank, 3):
        assert average == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(many, one, atol=1e-5, rtol=1e-4)


class Smoothed(nn.Module):
    """A loss that smooths labels in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        self.modes.append(self.training)
        smoothing = 0.1 * self.training
        return nn.functional.cross_entropy(output, labels, label_smoothing=smoothing)


def test_evaluation_leaves_modes_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5), nn.BatchNorm1d(CLASSES))
    model[2].eval()
    loss = Smoothed()
    trainer = C.Trainer(model, (loss, C.classification_error), C.sgd(model.parameters(), 0.1))
    whole = minibatches([9])[0]
    part = {"input": whole["features"], "labels": whole["labels"]}
    first, again = trainer.test_minibatch(part), trainer.test_minibatch(part)
    assert first == again == round(first * 9) / 9
    assert [m.training for m in (*model.modules(), loss)] == [True, True, True, False, True]
    assert loss.modes == [False, False]
    assert trainer.total_number_of_samples_seen == 0


# ---- arguments ----


def alone(criterion: Any = C.cross_entropy_with_softmax) -> C.Trainer:
    model = Network()
    return C.Trainer(model, criterion, C.sgd(model.parameters(), 0.1))


def test_names_that_do_not_fit() -> None:
    whole = minibatches([4])[0]
    x, y = whole["features"], whole["labels"]
    with pytest.raises(UsageError, match=r"Network\.forward\(features\)"):
        alone().train_minibatch({"image": x, "labels": y})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'target_vector'"):
        alone().train_minibatch({"features": x})
    with pytest.raises(TypeError, match=r"cross_entropy_with_softmax\(\) takes 2"):
        alone().train_minibatch({"features": x, "labels": y, "weights": y})
    for arguments in ([x, y], "features"):
        with pytest.raises(
            UsageError, match=r"of type \w+\. They .* \{'features': \.\.\., 'labels'"
        ):
            alone().train_minibatch(arguments)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="forward hook"):
        alone().train_minibatch(whole, outputs=[])  # type: ignore[arg-type]


def test_values_that_do_not_fit() -> None:
    whole = minibatches([4])[0]
    with pytest.raises(UsageError, match=r"loss has shape \(4, 3\)"):
        alone(lambda output, labels: output).train_minibatch(whole)
    criterion = (C.cross_entropy_with_softmax, lambda output, labels: output[:2, 0])
    with pytest.raises(UsageError, match="loss has 4 values and the metric 2"):
        alone(criterion).train_minibatch(whole)
    with pytest.raises(UsageError, match=r"shape \(1,\) for 4 samples"):  # no mean of one sample
        alone(lambda *batch: nn.functional.cross_entropy(*batch)[None]).train_minibatch(whole)
    with pytest.raises(UsageError, match="The loss is float"):
        alone(lambda output, labels: 1.5).train_minibatch(whole)


def test_mean_losses_and_arrays() -> None:
    """A loss that is a mean, and NumPy arrays, give the same as values per sample and tensors."""
    data = minibatches(SIZES)
    ours, theirs = alone(nn.functional.cross_entropy), alone()
    for whole in data:
        ours.train_minibatch({name: value.numpy() for name, value in whole.items()})
        theirs.train_minibatch(whole)
        assert ours.previous_minibatch_loss_average == pytest.approx(
            theirs.previous_minibatch_loss_average
        )
    torch.testing.assert_close(values_of(ours.model), values_of(theirs.model))
    assert ours.total_number_of_samples_seen == sum(SIZES)


def test_sequences_are_passed_with_their_lengths() -> None:
    class OfSequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, words: MinibatchData) -> Tensor:
            padded, mask = words.padded()
            return self.layer(padded)[mask]

    model = OfSequences()
    trainer = C.Trainer(model, C.squared_error, C.sgd(model.parameters(), 0.1))
    lengths = torch.tensor([3, 1])
    words = MinibatchData(torch.randn(4, 2), 2, 4, lengths=lengths)
    targets = MinibatchData(torch.randn(4, 1), 2, 4, sweep_end=True, lengths=lengths)
    assert trainer.train_minibatch({"words": words, "targets": targets})
    assert trainer.previous_minibatch_sample_count == 4
    assert trainer.num_sweeps == 1


def test_sweeps_move_schedules() -> None:
    model = Network()
    learner = C.sgd(model.parameters(), C.learning_rate_schedule([0.5, 0.25], C.UnitType.sample))
    trainer = C.Trainer(model, C.cross_entropy_with_softmax, learner)
    rates = []
    for index, whole in enumerate(minibatches(SIZES)):
        rates.append(learner.learning_rate())
        trainer.train_minibatch(whole, is_sweep_end=index == 1)
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.25]


# ---- learners that are refused ----


def test_learners_that_do_not_belong_together() -> None:
    model = Network()
    with pytest.raises(UsageError, match=r"both have a parameter of shape \(4, 5\)"):
        C.Trainer(
            model,
            C.cross_entropy_with_softmax,
            [C.sgd(model.parameters(), 0.1), C.sgd([model.hidden.weight], 0.1)],
        )
    with pytest.raises(UsageError, match="needs a learner"):
        C.Trainer(model, C.cross_entropy_with_softmax, [])
    with pytest.raises(UsageError, match="is no learner"):
        C.Trainer(model, C.cross_entropy_with_softmax, [0.1])

    def rank(comm: Communicator) -> None:
        own = Network()
        learners = [on_ranks(C.sgd([own.top.bias], 0.1), comm), C.sgd([own.top.weight], 0.1)]
        with pytest.raises(
            UsageError, match="not distributed in the same way: data_parallel.*; not dist"
        ):
            C.Trainer(own, C.cross_entropy_with_softmax, learners)

    run_ranks(rank, 2)


def test_distributed_learners_that_are_refused() -> None:
    learner = C.sgd(Network().parameters(), 0.1)
    with pytest.raises(UsageError, match="num_quantization_bits=3"):
        C.data_parallel_distributed_learner(learner, num_quantization_bits=3)
    with pytest.raises(UnsupportedError, match="double_buffering"):
        C.data_parallel_distributed_learner(learner, use_async_buffered_parameter_update=True)


def test_what_the_arguments_of_distributed_learners_mean() -> None:
    learner = C.sgd(Network().parameters(), 0.1)
    names = {32: "float32", 16: "float16", 8: "int8", 4: "int4", 2: "int2", 1: "1bit"}
    for bits, codec in names.items():
        made = C.data_parallel_distributed_learner(learner, num_quantization_bits=bits)
        assert (made.codec, made.schedule().name) == (codec, "every_step")
    blocks = C.block_momentum_distributed_learner(learner, 16, 40, False, False, 0.5, 8)
    warmup: Any = blocks.schedule()
    schedule = warmup.schedule
    assert (warmup.warmup_samples, schedule.block_size, schedule.time_constant) == (8, 16, 40)
    assert (schedule.nesterov, schedule.resets_momentum) == (False, False)
    assert schedule.block_learning_rate == 0.5


def test_workers_that_train_by_themselves_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
        monkeypatch.setenv(name.replace("RANK", "WORLD_SIZE"), "4")
    with pytest.warns(ResultWarning, match="4 workers, and no learner"):
        alone()


@pytest.mark.parametrize("is_divided", [True, False])
def test_ranks_that_are_given_the_same_minibatches_are_warned(is_divided: bool) -> None:
    """A loop without num_data_partitions trains each rank on all samples, as CNTK's would."""

    def rank(comm: Communicator) -> None:
        model = Network()
        learner = on_ranks(C.sgd(model.parameters(), 0.1), comm)
        trainer = C.Trainer(model, C.cross_entropy_with_softmax, learner)
        [whole] = minibatches([9])
        source = C.MinibatchSourceFromData(whole, max_sweeps=2)
        keys = {name: source.streams[name] for name in whole}
        place = (comm.size, comm.rank) if is_divided else (None, None)
        while trainer.train_minibatch(source.next_minibatch(9, keys, None, *place)):
            pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank, 3)
    seen = [str(each.message) for each in caught if "the same first minibatch" in str(each.message)]
    ranks = sorted(int(text.split()[1]) for text in seen)
    assert ranks == ([] if is_divided else [1, 2])


def test_multi_node_optimizers_are_learners() -> None:
    def older(model: nn.Module, comm: Communicator) -> Any:
        return torchmn.create_multi_node_optimizer(
            C.momentum_sgd(model.parameters(), PER_SAMPLE, TIME), comm, model, weight="samples"
        )

    assert_equal(trained(older, 2), trained(momentum, 2))


# ---- checkpoints ----


def one_bit(model: nn.Module, comm: Communicator) -> Any:
    learner = C.momentum_sgd(model.parameters(), PER_SAMPLE, TIME)
    return C.data_parallel_distributed_learner(learner, 8, 1, comm=comm)


def blocks(model: nn.Module, comm: Communicator) -> Any:
    learner = C.momentum_sgd(model.parameters(), PER_SAMPLE, TIME)
    return C.block_momentum_distributed_learner(learner, 10, comm=comm)


def several(model: nn.Module, comm: Communicator) -> Any:
    """Of every kind of state."""
    assert isinstance(model, Network)
    local = [
        C.adam([model.hidden.weight], PER_SAMPLE, TIME, gaussian_noise_injection_std_dev=0.01),
        C.rmsprop([model.hidden.bias], PER_SAMPLE, **RMS),
        C.adagrad([model.top.weight], C.learning_rate_schedule([0.1, 0.01], C.UnitType.sample, 9)),
        torch.optim.SGD([model.top.bias], 0.1, momentum=0.5),
    ]
    return [on_ranks(each, comm) for each in local]


@pytest.mark.parametrize("learners", [one_bit, blocks, several])
def test_resumed_bit_for_bit(
    learners: Callable[[nn.Module, Communicator], Any], tmp_path: Path
) -> None:
    data = minibatches([6, 5, 4, 7, 9, 2])

    def rank(comm: Communicator) -> None:
        model = Network(width=512)
        trainer = C.Trainer(model, C.cross_entropy_with_softmax, learners(model, comm))
        train(trainer, data[:3], comm)
        trainer.save_checkpoint(tmp_path / "model", {"position": [11, 2.5], "name": "x"})
        train(trainer, data[3:], comm)

        again = Network(width=512)
        with torch.no_grad():
            again.top.bias.fill_(9)
        resumed = C.Trainer(again, C.cross_entropy_with_softmax, learners(again, comm))
        state = resumed.restore_from_checkpoint(tmp_path / "model")
        assert state == {"position": [11, 2.5], "name": "x"}
        assert resumed.total_number_of_samples_seen == 15
        train(resumed, data[3:], comm)
        assert_equal(values_of(model), values_of(again))
        assert resumed.total_number_of_samples_seen == trainer.total_number_of_samples_seen

    run_ranks(rank, 2)


def test_checkpoints_that_are_not_there(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> None:
        model = Network()
        trainer = C.Trainer(model, C.cross_entropy_with_softmax, blocks(model, comm))
        with pytest.raises(DataError, match=r"no checkpoint in .*missing"):
            trainer.restore_from_checkpoint(tmp_path / "missing")
        with pytest.raises(UnsupportedError, match="external"):
            trainer.save_checkpoint(tmp_path / "model", {"source": object()})

    run_ranks(rank, 1)


@pytest.mark.parametrize(
    "metric",
    [
        lambda output, labels: output.argmax(1) != labels,
        lambda output, labels: (output.argmax(1) != labels).int(),
        lambda output, labels: (output.argmax(1) != labels).float().mean().item(),
        lambda output, labels: (output.argmax(1) != labels).numpy(),
    ],
    ids=["bool", "int", "number", "array"],
)
def test_metrics_of_any_type(metric: Any) -> None:
    whole = minibatches([8])[0]
    ours = alone((C.cross_entropy_with_softmax, metric))
    theirs = alone((C.cross_entropy_with_softmax, C.classification_error))
    for trainer in (ours, theirs):
        trainer.train_minibatch(whole)
    assert 0 < theirs.previous_minibatch_evaluation_average < 1
    assert ours.previous_minibatch_evaluation_average == pytest.approx(
        theirs.previous_minibatch_evaluation_average
    )
