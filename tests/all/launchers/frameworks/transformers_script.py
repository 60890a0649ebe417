"""Train a small BERT with the Trainer of Transformers, as its documentation shows."""

import os
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

SIZE = int(os.environ.get("WORLD_SIZE", "1"))

torch.manual_seed(0)
tokens = torch.randint(1, 50, (48, 10))
labels = (tokens.sum(1) % 2).tolist()
dataset = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=os.path.join(os.path.dirname(sys.argv[1]), "output"),
        per_device_train_batch_size=8 // SIZE,
        num_train_epochs=2,
        optim="sgd",  # Adam makes much of a gradient that is 0 but for rounding
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        seed=3,
    ),
    train_dataset=dataset,
)
assert trainer.args.world_size == SIZE
trainer.train()
if trainer.is_world_process_zero():
    trained = trainer.accelerator.unwrap_model(trainer.model)
    torch.save([p.detach().clone() for p in trained.parameters()], sys.argv[1])
