"""Translation: the same batches, losses and BLEU for any number of workers."""

import copy
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchmn
from torchmn.comm import Communicator
from torchmn.errors import DataError
from torchmn.testing import run_ranks
from torchmn.train import EpochLoader

EXAMPLES = Path(__file__).parents[3] / "examples"
MODULES = ("models", "beam_search", "segments", "train_seq2seq")
NETWORKS = ("lstm", "transformer")
TEXT = ["Zwei Männer – „grün“ 😀 gehen.", "A dog runs.", "  two  spaces", ""]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for package in ("tokenizers", "sacrebleu"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.syspath_prepend(EXAMPLES / "seq2seq")
    yield importlib.import_module("train_seq2seq")
    for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
        del sys.modules[name]


def network(script: ModuleType, name: str, num_tokens: int = 20, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_layers": 2, "dropout": dropout}
    return script.NETWORKS[name](num_tokens, 16, **options).double()


def random_pairs(num: int, num_tokens: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        length = int(torch.randint(2, 9, (), generator=generator))
        words = torch.randint(3, num_tokens, (length,), generator=generator)
        return torch.cat([torch.tensor([1]), words, torch.tensor([2])])

    return [(draw(), draw()) for _ in range(num)]


class Training:
    """A model and all that its checkpoints hold."""

    def __init__(
        self, script: ModuleType, comm: Communicator, model: nn.Module, pairs: list[Any]
    ) -> None:
        self.script, self.comm = script, comm
        self.model = copy.deepcopy(model)
        self.optimizer = torchmn.create_multi_node_optimizer(
            torch.optim.Adam(self.model.parameters(), 0.01), comm, self.model, max_grad_norm=1.0
        )
        lengths = [len(source) + len(target) for source, target in pairs]
        sampler = script.BucketSampler(lengths, comm, 10, seed=3, pool=2)
        loader = DataLoader(pairs, batch_sampler=sampler, collate_fn=script.collate)
        self.batches = EpochLoader(loader)
        self.state = {"model": self.model, "optimizer": self.optimizer, "batches": self.batches}

    def losses(self, num_steps: int) -> list[float]:
        """The mean over the tokens of all ranks, of each step."""
        result = []
        for _ in range(num_steps):
            batch = next(self.batches)
            seen = self.script.train_step(self.model, self.optimizer, *batch, smoothing=0.1)
            loss, num_tokens = self.comm.allreduce(seen, "sum").tolist()
            result.append(loss / num_tokens)
        return result


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_are_those_of_one_worker(script: ModuleType, name: str) -> None:
    """Epochs of 10, 10 and 3 segments, so that one of four workers has none in the last step."""
    model, pairs = network(script, name), random_pairs(23)

    def rank_main(comm: Communicator) -> list[float]:
        return Training(script, comm, model, pairs).losses(7)

    (expected,) = run_ranks(rank_main, 1)
    assert expected[-1] < expected[0]
    for size in (2, 4):
        for losses in run_ranks(rank_main, size):
            assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("size", "dropout"), [(1, 0.3), (2, 0.0)])
def test_resuming_is_bit_equal(
    script: ModuleType, tmp_path: Path, size: int, dropout: float
) -> None:
    """In the middle of an epoch. Threads share the generator of dropout, so only one has it."""
    model, pairs = network(script, "lstm", dropout=dropout), random_pairs(45)

    def rank_main(comm: Communicator) -> tuple[list[float], list[float]]:
        checkpointer = torchmn.create_multi_node_checkpointer(comm, str(tmp_path), "run")
        training = Training(script, comm, model, pairs)
        training.losses(7)
        checkpointer.save(7, training.state)
        checkpointer.finish()
        uninterrupted = training.losses(5)
        resumed = Training(script, comm, model, pairs)
        assert checkpointer.resume(resumed.state) == 7
        return uninterrupted, resumed.losses(5)

    for uninterrupted, resumed in run_ranks(rank_main, size):
        assert uninterrupted == resumed


def test_buckets_are_the_same_for_any_number_of_workers(script: ModuleType) -> None:
    lengths = torch.randint(4, 60, (517,), generator=torch.Generator().manual_seed(0)).tolist()

    def rank_main(comm: Communicator) -> list[list[list[int]]]:
        sampler = script.BucketSampler(lengths, comm, 16, seed=5)
        return [list(sampler) for _ in range(2)]

    ((first, second),) = run_ranks(rank_main, 1)
    for batches in (first, second):
        assert sorted(itertools.chain(*batches)) == list(range(517))
        assert [len(batch) for batch in batches] == [16] * 32 + [5]
    spreads = [max(k) - min(k) for k in ([lengths[i] for i in batch] for batch in first)]
    assert max(spreads) <= 4
    assert {tuple(batch) for batch in first}.isdisjoint(tuple(batch) for batch in second)
    for size in (2, 3, 4):
        parts = run_ranks(rank_main, size)
        for epoch, batches in enumerate((first, second)):
            together = [sum(step, []) for step in zip(*(p[epoch] for p in parts), strict=True)]
            assert together == batches


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("power", [0.0, 0.6, 1.0])
@torch.no_grad()
def test_a_wide_beam_finds_the_best_of_all_translations(
    script: ModuleType, name: str, power: float
) -> None:
    model = network(script, name, num_tokens=5).eval()
    model.tokens.weight.mul_(2)
    sources = [source for source, _ in random_pairs(4, num_tokens=5)]
    found = script.beam_search(model, script.pad(sources), width=81, max_length=4, power=power)

    def worth(source: Tensor, tokens: tuple[int, ...]) -> float:
        target = torch.tensor([[1, *tokens]])
        scores = model(source[None], target[:, :-1])[0].log_softmax(1)
        total = scores.gather(1, target[0, 1:, None]).sum()
        return float(total) / len(tokens) ** power

    ended = [(*each, 2) for num in range(4) for each in itertools.product((3, 4), repeat=num)]
    candidates = [*ended, *itertools.product((3, 4), repeat=4)]
    for source, tokens in zip(sources, found, strict=True):
        best = max(candidates, key=lambda candidate: worth(source, candidate))
        assert tokens == [token for token in best if token != 2]


@pytest.mark.parametrize("num_segments", [7, 3])
def test_bleu_of_all_ranks_is_that_of_one_process(script: ModuleType, num_segments: int) -> None:
    """Shards are uneven, and one of four is empty where there are three segments."""
    references = [f"a {k} dog runs over the {k * k} green hills ." for k in range(num_segments)]
    translations = [text.replace("2", "two").replace(" the", "") for text in references]

    class Evaluator(script.BleuEvaluator):  # type: ignore[misc, name-defined]
        def calc_local(self, indices: list[int], source: Tensor) -> list[tuple[int, str]]:
            assert len(indices) == len(source)
            return [(index, translations[index]) for index in indices]

    def rank_main(comm: Communicator) -> Any:
        tokenizer = script.make_tokenizer(references, 300, comm)
        pairs = [(text[: 5 * len(text) // (k + 5)], text) for k, text in enumerate(references)]
        return Evaluator(comm, nn.Identity(), tokenizer, pairs, width=1, batch_size=2)()

    bleu = script.BLEU()
    expected = bleu.corpus_score(translations, [references]).score
    assert 0 < expected < 100
    for size in (1, 2, 4):
        score, signature = run_ranks(rank_main, size)[0]
        assert (score, signature) == (expected, str(bleu.get_signature()))
        assert "nrefs:1|case:mixed|eff:no|tok:13a" in signature


def test_tokens_round_trip(script: ModuleType, tmp_path: Path) -> None:
    """Also of characters that the training set has not; the same tokenizer on all ranks."""
    segments = ["Ein Hund läuft .", "Ein grüner Hund läuft ."] * 10
    path = tmp_path / "made" / "tokenizer.json"

    def rank_main(comm: Communicator) -> str:
        return script.make_tokenizer(segments, 300, comm, path).to_str()

    texts = run_ranks(rank_main, 2)
    assert texts[0] == texts[1] == path.read_text(encoding="utf-8")
    segments.clear()  # it is read, not trained
    assert run_ranks(rank_main, 1) == texts[:1]
    tokenizer = script.Tokenizer.from_str(texts[0])
    encoded = script.encode(tokenizer, TEXT)
    assert all(tokens[0] == 1 and tokens[-1] == 2 for tokens in encoded)
    assert [tokenizer.decode(tokens[1:-1].tolist()) for tokens in encoded] == TEXT
    assert len(tokenizer.encode(" Hund").ids) == 1


def test_files_that_do_not_fit(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "val.en").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"val\.de cannot be read \(No such file .*\)\. Pass"):
        script.read_pairs(tmp_path, "val", ["en", "de"])
    (tmp_path / "val.de.gz").write_text("eins\n")
    with pytest.raises(DataError, match=r"val\.de\.gz cannot be read \(Not a gzipped file"):
        script.read_pairs(tmp_path, "val", ["en", "de"])
    (tmp_path / "val.de").write_text("eins\n")
    with pytest.raises(DataError, match="2 segments in 'en' and 1 in 'de'"):
        script.read_pairs(tmp_path, "val", ["en", "de"])
