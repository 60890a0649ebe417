"""Segments (lines of text) with their translations, as tokens and in batches by length."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchmn import Communicator, GlobalSampler
from torchmn.data.permutations import Order, keyed_permutation
from torchmn.errors import DataError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.seq2seq import BEGIN, END, PAD

Pair = tuple[Tensor, Tensor]


def read_segments(folder: str | Path, name: str) -> list[str]:
    """The lines of ``name`` or ``name.gz``. Raises DataError: there is neither."""
    path, compressed = Path(folder) / name, Path(folder) / f"{name}.gz"
    if not path.exists() and compressed.exists():
        path = compressed
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path == compressed else content).decode().splitlines()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path} cannot be read ({why}). Pass --data with the folder data/task1/raw of "
            "https://github.com/multi30k/dataset, whose files may stay compressed."
        ) from error


def read_pairs(folder: str | Path, name: str, languages: list[str]) -> list[tuple[str, str]]:
    """Segments and their translations. Raises DataError: there are more of one than the other."""
    source, target = (read_segments(folder, f"{name}.{language}") for language in languages)
    if len(source) != len(target):
        raise DataError(
            f"{name} in {folder} has {len(source)} segments in '{languages[0]}' and {len(target)} "
            f"in '{languages[1]}'. Line k of one file must be the translation of line k."
        )
    return list(zip(source, target, strict=True))


def make_tokenizer(
    segments: list[str], num_tokens: int, comm: Communicator, path: Path | None = None
) -> Tokenizer:
    """Byte pair encoding, of both languages together. Rank 0 trains it. *Collective.*

    It encodes bytes, so every text can be encoded and is decoded as it was. With ``path`` it is
    read from there if the file exists and written there if not.
    """
    text = None
    if comm.rank == 0 and path is not None and path.is_file():
        text = path.read_text(encoding="utf-8")
    elif comm.rank == 0:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=num_tokens,
            special_tokens=["<pad>", "<begin>", "<end>"],  # PAD, BEGIN, END
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(segments, trainer)
        text = tokenizer.to_str()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return Tokenizer.from_str(comm.bcast_obj(text))


def encode(tokenizer: Tokenizer, segments: list[str]) -> list[Tensor]:
    """Each segment as BEGIN, its tokens and END."""
    encoded = tokenizer.encode_batch(segments)
    return [torch.tensor([BEGIN, *each.ids, END]) for each in encoded]


def pad(segments: list[Tensor]) -> Tensor:
    """A batch ``(segments, length)``."""
    if not segments:
        return torch.empty(0, 2, dtype=torch.long)
    return pad_sequence(segments, batch_first=True, padding_value=PAD)


def collate(pairs: list[Pair]) -> Pair:
    """The batch of a list of pairs, which may be empty."""
    return pad([source for source, _ in pairs]), pad([target for _, target in pairs])


class BucketSampler(GlobalSampler):
    """Global batches of segments of similar length, the same for any number of ranks.

    An epoch's permutation is cut into pools of ``pool`` global batches. Each pool is sorted by
    length and cut into batches, and the full batches of all pools are then shuffled.
    """

    def __init__(
        self,
        lengths: list[int],
        comm: Communicator,
        global_batch: int,
        seed: int = 0,
        *,
        pool: int = 50,
    ) -> None:
        super().__init__(len(lengths), comm, global_batch, seed)
        self.lengths = np.asarray(lengths)
        self.pool = pool

    def order(self, epoch: int) -> Order:
        """The segments of an epoch; each global batch is the next slice."""
        shuffled, size = super().order(epoch), self.pool * self.global_batch
        pools = [shuffled[begin : begin + size] for begin in range(0, len(shuffled), size)]
        order = np.concatenate([p[np.argsort(self.lengths[p], kind="stable")] for p in pools])
        num_full = len(order) // self.global_batch
        full, rest = np.split(order, [num_full * self.global_batch])
        batches = full.reshape(num_full, self.global_batch)
        return np.concatenate(
            [batches[keyed_permutation(num_full, self.seed, epoch)].flatten(), rest]
        )
