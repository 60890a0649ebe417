"""Train a small BERT with the Trainer of Transformers: two changed lines, marked (1) and (2).

    torchmn run -n 2 examples/frameworks/train_transformers.py

The task needs no download: does a sequence of twelve tokens hold more even than odd ones?
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

from torchmn.train.frameworks import ExchangeOptions, attach  # (1)


def sequences(number: int, seed: int) -> list[dict[str, object]]:
    """Tokens and whether most are even."""
    tokens = torch.randint(2, 50, (number, 13), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens % 2 == 0).sum(1) > 6).long()
    return [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The accuracy over the gathered predictions of all ranks."""
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "number": len(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small BERT with Transformers.")
    parser.add_argument("--codec", help="form in which gradients are sent, such as int8")
    parser.add_argument("--epoch", type=int, default=3, help="number of epochs")
    options = parser.parse_args()
    set_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=32 // size,
            num_train_epochs=options.epoch,
            learning_rate=3e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=sequences(2048, 0),
        eval_dataset=sequences(205, 1),
        compute_metrics=accuracy,
    )
    attach(trainer, ExchangeOptions(codec=options.codec))  # (2)
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {found['eval_accuracy']:.4f} of {found['eval_number']}")


if __name__ == "__main__":
    main()
