"""Fine-tune a language model with LoRA over a slow link: only the adapters are exchanged and saved.

    torchmn run -n 2 examples/lm/train_lora.py --data text.gz --schedule diloco --codec int8

It needs transformers and peft. Without ``--model`` a small Llama with random weights is trained on
bytes, and nothing is downloaded; ``--model NAME`` is a folder or a name of the Hugging Face hub,
with a tokenizer. Started again with the same --out, an ended job continues.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from options import CODECS, SCHEDULES, divide, exchange_of, read_text
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import torchmn
from torchmn.train.large_batch import Cosine, GlobalBatch, GradualWarmup

NUM_VALIDATION = 64
"""Sequences, spread over the last tenth of the text."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a language model with LoRA.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="folder or hub's name of a causal language model; default: a small one")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="base model type")
    add("--data", type=Path, help="a text, maybe .gz; by default the text of a program")
    add("--rank", type=int, default=16, help="rank of the adapters of all linear layers")
    add("--schedule", default="diloco", choices=SCHEDULES, help="what is exchanged, and when")
    add("--codec", default="float32", choices=CODECS, help="form in which adapters are sent")
    add("--block", type=int, default=20, help="steps between two exchanges of adapters")
    add("--communicator", default="auto", help="route of the mean; auto encodes between hosts only")
    add("--batchsize", type=int, default=8, help="sequences of a step, over all ranks")
    add("--length", type=int, default=128, help="tokens of a sequence")
    add("--learnrate", type=float, default=3e-3, help="learning rate of AdamW, after the warm-up")
    add("--steps", type=int, default=200)
    add("--eval", type=int, default=50, help="steps between two validations")
    add("--out", type=Path, default="result", help="folder of checkpoints and adapters")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def load_base(options: argparse.Namespace) -> tuple[Any, Callable[[bytes], Tensor]]:
    """The model to be tuned, the same on all ranks, and what makes tokens of a text."""
    if options.model:
        dtype = getattr(torch, options.dtype)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        return (
            AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
            lambda text: torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"]),
        )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        initializer_range=0.1,  # as of a trained model: the head, which stays as it is, must matter
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype))
    return model, lambda text: torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Adapters:
    """The part of the model that a checkpoint holds: the base never changes."""

    def __init__(self, model: PeftModel) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The adapters."""
        return get_peft_model_state_dict(self._model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put saved adapters into the model."""
        set_peft_model_state_dict(self._model, state)


@torch.no_grad()
def validate(model: PeftModel, test: Subset[Tensor], comm: torchmn.Communicator) -> float:
    """The mean loss over the validation sequences. *Collective.*"""
    model.eval()
    loss_sum, num_tokens = 0.0, 0
    for tokens in DataLoader(torchmn.scatter_dataset(test, comm, force_equal_length=False), 16):
        tokens = tokens.to(comm.device)
        predicted = tokens.shape[0] * (tokens.shape[1] - 1)
        loss_sum += model(input_ids=tokens, labels=tokens).loss.item() * predicted
        num_tokens += predicted
    model.train()
    loss_sum, num_tokens = comm.sum_over_ranks(loss_sum, num_tokens)
    return loss_sum / num_tokens


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator(options.communicator)
    torchmn.seed_ranks(options.seed, comm)
    base, encode = load_base(options)
    train, whole = divide(encode(read_text(options.data)), options)
    test = Subset(whole, range(0, len(whole), math.ceil(len(whole) / NUM_VALIDATION)))
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora).to(comm.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batch = GlobalBatch(options.batchsize, comm=comm)
    sampler = batch.sampler(train, seed=options.seed, drop_last=True)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.AdamW(trained, options.learnrate, weight_decay=0.0),
        comm, model, weight="samples", max_grad_norm=1.0, **exchange_of(options),
    )  # fmt: skip
    num_samples = options.steps * options.batchsize
    schedule = GradualWarmup(optimizer, batch, num_samples / 20, unit="samples")
    schedule = Cosine(schedule, batch, num_samples, final=0.1, unit="samples")
    state = {
        "adapters": Adapters(model),
        "optimizer": optimizer,
        "schedule": schedule,
        "sampler": sampler,
    }
    checkpointer = torchmn.create_multi_node_checkpointer(comm, options.out, "lora")
    step = first = checkpointer.resume(state)
    if comm.rank == 0:
        numbers = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
        print(
            "{:,} of {:,} parameters are trained".format(*numbers)
            + f" ({sum(p.nbytes for p in trained) / 1e6:.2f} MB), step {step}",
            flush=True,
        )
    began = time.perf_counter()
    while step < options.steps:
        for tokens in DataLoader(train, batch_sampler=sampler):
            tokens = tokens.to(comm.device)
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % options.eval == 0 or step == options.steps:
                optimizer.flush()  # ends a block early: all ranks validate the same adapters
                loss = validate(model, test, comm)
                if comm.rank == 0:
                    print(
                        f"step {step}: validation loss {loss:.6f}, {loss / math.log(2):.3f} bits "
                        f"per token, {(step - first) / (time.perf_counter() - began):.2f} steps/s",
                        flush=True,
                    )
                checkpointer.save(step, state)
            if step == options.steps:
                break
    checkpointer.finish()
    if comm.rank == 0:
        model.save_pretrained(options.out / "adapters")
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
