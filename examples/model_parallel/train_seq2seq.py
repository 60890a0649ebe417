"""Train an encoder on one rank and a decoder on the next one, as a pipeline of micro-batches.

    torchmn run -n 2 examples/model_parallel/train_seq2seq.py

The task is to write a sequence of digits backwards. The encoder's rank reads the data; the
decoder's has an empty data set of the same length, and gets the digits from the encoder along with
its state. One rank does both, and an even number of ranks trains several pairs on parts of the
data. Losses are the same whichever it is.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn.errors import UsageError
from torchmn.nn import MultiNodeChainList

NUM_DIGITS, LENGTH, WIDTH = 10, 8, 64
State = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Reads a sequence; returns its state, and the sequence to write for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_DIGITS, WIDTH)
        self.network = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> tuple[State, Tensor]:
        """Digits (batch, length) to the state and the digits to write."""
        _, state = self.network(self.embedding(source))
        return state, target


class Decoder(nn.Module):
    """Writes each digit after those before it; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_DIGITS + 1, WIDTH)
        self.network = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, NUM_DIGITS)

    def forward(self, received: tuple[State, Tensor]) -> Tensor:
        """What the encoder has returned to the mean of the digits' cross entropies."""
        state, target = received
        begin = torch.full_like(target[:, :1], NUM_DIGITS)
        hidden, _ = self.network(self.embedding(torch.cat([begin, target[:, :-1]], 1)), state)
        return nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), target.flatten())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an encoder and a decoder on two ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="number of steps")
    add("--batchsize", type=int, default=128, help="sequences per step, of all ranks together")
    add("--microbatches", type=int, default=4, help="parts of the batch of a pair of ranks")
    add("--learnrate", type=float, default=0.005, help="learning rate")
    add("--seed", type=int, default=0, help="seed of parameters and data")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator()
    if comm.size > 1 and comm.size % 2:
        raise UsageError(f"{comm.size} ranks are no pairs. Start one rank or an even number.")
    stages = min(2, comm.size)
    pair = comm.split(comm.rank // stages, comm.rank)  # encoder and decoder
    data = comm.split(comm.rank % stages, comm.rank)  # the encoders, or the decoders
    encoder_rank, decoder_rank = 0, stages - 1

    torch.manual_seed(options.seed)
    encoder, decoder = Encoder(), Decoder()  # on all ranks, which draw the same numbers
    encoder.to(comm.device)
    decoder.to(comm.device)
    chain = MultiNodeChainList(pair, num_microbatches=options.microbatches)
    if pair.rank == encoder_rank:
        chain.add_link(encoder, rank_out=decoder_rank)
    if pair.rank == decoder_rank:
        chain.add_link(decoder, rank_in=encoder_rank)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.Adam(chain.parameters(), options.learnrate), data, chain
    )

    digits = torch.randint(NUM_DIGITS, (options.batchsize * options.steps, LENGTH))
    pairs = TensorDataset(digits, digits.flip(1))
    part = torch.utils.data.Subset(pairs, range(data.rank, len(pairs), data.size))
    loader = DataLoader(
        part if pair.rank == encoder_rank else torchmn.create_empty_dataset(part),
        batch_size=options.batchsize // data.size,
    )
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = chain.forward_backward(tuple(part.to(comm.device) for part in batch))
        optimizer.step()
        if loss is not None:
            loss = data.allreduce(loss, "mean")
            if data.rank == 0 and (step % 10 == 0 or step == options.steps):
                print(f"step {step}: loss {loss.item():.6f}")
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
