"""Fine-tune a language model with LoRA by the Trainer of Transformers, over a slow link.

    torchmn run -n 2 examples/frameworks/train_lora.py --data text.txt --codec int8

Two lines are changed, marked (1) and (2): adapters are exchanged after each block of 20 steps.
Without ``--model`` a small GPT-2 with random weights is trained on bytes, and nothing is
downloaded; ``--model NAME`` is a folder or a name of the Hugging Face hub, with a tokenizer.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import torchmn
from torchmn.train.frameworks import ExchangeOptions, attach  # (1)

BATCH, BLOCK = 8, 20


def model_and_tokens(name: str | None, text: Path) -> tuple[PreTrainedModel, torch.Tensor]:
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokens = torch.tensor(tokenizer(text.read_text())["input_ids"])
        return AutoModelForCausalLM.from_pretrained(name), tokens
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1
    )
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)
    return GPT2LMHeadModel(config), tokens.long()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune with LoRA and a Trainer.")
    parser.add_argument("--model", help="folder or hub's name; by default a small one is made")
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="a text")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--codec", help="form in which adapters are sent, such as int8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="result", help="folder of the adapters")
    options = parser.parse_args()
    set_seed(0)
    base, tokens = model_and_tokens(options.model, options.data)
    rows = [{"input_ids": row, "labels": row} for row in tokens.split(options.length)[:-1]]
    border = len(rows) * 9 // 10
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(
        get_peft_model(base, lora),
        TrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            max_steps=options.steps,
            learning_rate=5e-3,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows[:border],
        eval_dataset=rows[border:],
    )
    diloco = torchmn.schedules.DiLoCo(block_size=BLOCK * BATCH)  # in samples of all ranks
    attach(trainer, ExchangeOptions(codec=options.codec, schedule=diloco))  # (2)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # the adapters
    if trainer.is_world_process_zero():
        print(f"validation loss {loss:.4f}, {loss / math.log(2):.3f} bits per token")


if __name__ == "__main__":
    main()
