"""Train a network to translate Multi30k, with many workers, and score it by BLEU.

    pip install 'torchmn[translation]'
    torchmn run -n 2 examples/seq2seq/train_seq2seq.py --data FOLDER --target de

FOLDER is data/task1/raw of https://github.com/multi30k/dataset. ``--batchsize`` is of all workers
together, each global batch is the same set of segments for any number of workers, and every token
of it counts equally. So 1, 2 and 4 workers have the same losses to rounding, without dropout.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from beam_search import beam_search
from sacrebleu.metrics import BLEU
from segments import BucketSampler, collate, encode, make_tokenizer, pad, read_pairs
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchmn
from torchmn import MultiNodeOptimizer
from torchmn.errors import UsageError
from torchmn.train import EpochLoader
from torchmn.train.evaluation import GenericMultiNodeEvaluator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.seq2seq import PAD, AttentionLSTM, TranslationTransformer, Translator

NETWORKS = {"lstm": AttentionLSTM, "transformer": TranslationTransformer}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network to translate with many workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True, help="folder of train, val and test_2016_flickr, plain or .gz")
    add("--source", default="en", help="language to translate from: the ending of its files")
    add("--target", default="de", help="language to translate into")
    add("--model", default="lstm", choices=NETWORKS, help="network")
    add("--width", type=int, default=256, help="width of embeddings and hidden layers")
    add("--layers", type=int, help="layers of each half (default: lstm 1, transformer 3)")
    add("--dropout", type=float, default=0.3, help="probability")
    add("--vocabulary", type=int, default=6000, help="tokens of both languages together")
    add("--epoch", type=int, default=15, help="number of epochs")
    add("--batchsize", type=int, default=128, help="segments per step, of all workers together")
    add("--learnrate", type=float, default=0.001, help="highest learning rate of Adam")
    add("--warmup", type=int, default=400, help="steps until the learning rate is reached")
    add("--smoothing", type=float, default=0.1, help="label smoothing")
    add("--beam", type=int, default=5, help="width of the search on the test set")
    add("--seed", type=int, default=0, help="seed of parameters, dropout and the order of segments")
    add("--communicator", default="auto", help="route of the mean")
    add("--checkpoint", help="folder of checkpoints: resume from it and save after every epoch")
    options = parser.parse_args()
    for name in ("epoch", "batchsize", "beam", "vocabulary"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}. It must be at least 1.")
    return options


def train_step(
    model: Translator,
    optimizer: MultiNodeOptimizer,
    source: Tensor,
    target: Tensor,
    smoothing: float = 0.0,
) -> Tensor:
    """One step. The sum of this rank's losses and its number of tokens, as ``(2,)``."""
    optimizer.zero_grad()
    wanted = target[:, 1:]
    num_tokens = (wanted != PAD).sum()
    optimizer.set_weight(int(num_tokens))  # the mean over ranks is that over all tokens
    loss = torch.zeros((), device=source.device)
    if num_tokens > 0:
        scores = model(source, target[:, :-1])
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1),
            wanted.flatten(),
            ignore_index=PAD,
            reduction="sum",
            label_smoothing=smoothing,
        )
        (loss / num_tokens).backward()
    optimizer.step()
    return torch.stack([loss.detach().double(), num_tokens.double()])


class BleuEvaluator(GenericMultiNodeEvaluator):
    """BLEU of all ranks' translations, each segment once, on rank 0: what one process computes.

    Each rank translates a part of the segments; they are sorted by length, for speed only.
    """

    def __init__(
        self,
        comm: torchmn.Communicator,
        model: nn.Module,
        tokenizer: Tokenizer,
        pairs: list[tuple[str, str]],
        *,
        width: int,
        device: torch.device | None = None,
        batch_size: int = 50,
    ) -> None:
        source = encode(tokenizer, [segment for segment, _ in pairs])
        order = sorted(range(len(pairs)), key=lambda index: len(source[index]))
        order = order[comm.rank :: comm.size]
        parts = [order[k : k + batch_size] for k in range(0, len(order), batch_size)]
        batches = [(part, pad([source[index] for index in part])) for part in parts]
        super().__init__(comm, DataLoader(batches, batch_size=None), model, device)
        self.model, self.tokenizer, self.width = model, tokenizer, width
        self.references = [reference for _, reference in pairs]

    def calc_local(self, indices: list[int], source: Tensor) -> list[tuple[int, str]]:
        """Translations by the number of their segment."""
        found = beam_search(self.model, source, width=self.width)
        return list(zip(indices, self.tokenizer.decode_batch(found), strict=True))

    def aggregate(self, results: list[list[tuple[int, str]]]) -> tuple[float, str]:
        """The score and the signature that says how it was computed."""
        translations = dict(pair for part in results for pair in part)
        bleu = BLEU()
        hypotheses = [translations[index] for index in range(len(self.references))]
        score = bleu.corpus_score(hypotheses, [self.references])
        return score.score, str(bleu.get_signature())


def learning_rate(step: int, num_steps: int, options: argparse.Namespace) -> float:
    """Rises over the first steps, and falls to zero along half a cosine."""
    rise = min(1.0, (step + 1) / max(1, options.warmup))
    return options.learnrate * rise * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator(options.communicator)
    device, is_first = comm.device, comm.rank == 0
    languages = [options.source, options.target]
    train, validation, test = (
        read_pairs(options.data, name, languages) for name in ("train", "val", "test_2016_flickr")
    )
    folder = Path(options.checkpoint) if options.checkpoint else None
    texts = [segment for pair in train for segment in pair]
    path = folder / "tokenizer.json" if folder else None
    tokenizer = make_tokenizer(texts, options.vocabulary, comm, path)
    sources, targets = (encode(tokenizer, [pair[side] for pair in train]) for side in (0, 1))
    pairs = list(zip(sources, targets, strict=True))

    torch.manual_seed(options.seed)
    layers = {"num_layers": options.layers} if options.layers else {}
    model = NETWORKS[options.model](
        tokenizer.get_vocab_size(), options.width, dropout=options.dropout, **layers
    ).to(device)
    torchmn.seed_ranks(options.seed, comm)  # dropout differs between workers
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.Adam(model.parameters(), options.learnrate, betas=(0.9, 0.98)),
        comm,
        model,
        max_grad_norm=1.0,
    )
    lengths = [len(source) + len(target) for source, target in pairs]
    sampler = BucketSampler(lengths, comm, options.batchsize, options.seed)
    batches = EpochLoader(DataLoader(pairs, batch_sampler=sampler, collate_fn=collate))
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    checkpointer, begin = None, 0
    if folder:
        checkpointer = torchmn.create_multi_node_checkpointer(comm, str(folder), options.model)
        begin = checkpointer.resume(state)
    if is_first:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{comm.size} worker(s), {len(pairs)} pairs, {tokenizer.get_vocab_size()} tokens")
        print(f"{options.model} with {num_parameters} parameters", flush=True)

    def bleu(name: str, pairs: list[tuple[str, str]], width: int) -> None:
        result = BleuEvaluator(comm, model, tokenizer, pairs, width=width, device=device)()
        if result is not None:  # on rank 0
            print(f"{name}: BLEU {result[0]:.2f}, beam {width} ({result[1]})", flush=True)

    steps_per_epoch = len(sampler)
    num_steps = options.epoch * steps_per_epoch
    seen = torch.zeros(2, dtype=torch.float64, device=device)
    for step in range(begin, num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, options)
        source, target = (part.to(device) for part in next(batches))
        seen += train_step(model, optimizer, source, target, options.smoothing)
        if (step + 1) % steps_per_epoch and (step + 1) % 50:
            continue
        loss, num_tokens = comm.allreduce(seen, "sum").tolist()
        seen.zero_()
        if is_first:
            epoch = (step + 1) / steps_per_epoch
            print(f"epoch {epoch:.2f}, step {step + 1}: loss {loss / num_tokens:.9f}", flush=True)
        if (step + 1) % steps_per_epoch == 0:
            bleu("validation", validation, width=1)
            if checkpointer:
                checkpointer.save(step + 1, state)
    bleu("test_2016_flickr", test, width=options.beam)
    if checkpointer:
        checkpointer.finish()
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
