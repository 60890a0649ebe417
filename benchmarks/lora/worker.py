"""A rank: builds sides, and trains and validates them on request."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lora import settings
from lora.settings import BATCH, LENGTH, NUM_VALIDATION, WARM_UP_STEPS, Side


@dataclass
class Training:
    """A side: ``model`` is called, ``optimizer`` stepped; ``wait`` until nothing is under way."""

    side: Side
    model: nn.Module
    optimizer: Any
    inner: torch.optim.Optimizer
    wait: Callable[[], object]
    flush: Callable[[], object]
    step: int = 0


def serve() -> None:
    """Execute the commands on the input, one line of JSON each, with a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    texts = {part: load(settings.TUNED_ON, part) for part in ("first", "second")}
    sides: dict[str, Training] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        busy = time.process_time()
        reply = _COMMANDS[command.pop("command")](sides, texts, **command)
        print(json.dumps({**reply, "busy_s": time.process_time() - busy}), flush=True)
    os._exit(0)  # process groups would wait for each other in an orderly exit


def _build(
    sides: dict[str, Training], texts: Mapping[str, Any], side: dict[str, Any], base: str
) -> dict[str, Any]:
    """Make a side, which starts from the base model and the same adapters as all others."""
    made = Side(**side)
    model = with_adapters(base)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = torch.optim.AdamW(trained, made.learning_rate, weight_decay=0.0)
    sides[made.name] = _BUILDERS[made.build](made, model, inner)
    return {
        "trained": sum(parameter.numel() for parameter in trained),
        "all": sum(parameter.numel() for parameter in model.parameters()),
    }


def _train(
    sides: dict[str, Training], texts: Mapping[str, Any], name: str, steps: int, half: str
) -> dict[str, Any]:
    """Make some steps of a side, on this rank's rows of the batches that all sides have."""
    training, text = sides[name], texts[half][0]
    rate, rank, size = training.side.learning_rate, dist.get_rank(), dist.get_world_size()
    dist.barrier()
    began, busy = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        training.step += 1
        generator = torch.Generator().manual_seed(training.step)
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)[rank::size]
        tokens = torch.stack([text[at : at + LENGTH] for at in starts])
        for group in training.inner.param_groups:
            group["lr"] = rate * min(1.0, training.step / WARM_UP_STEPS)
        training.optimizer.zero_grad()
        training.model(input_ids=tokens, labels=tokens).loss.backward()
        training.optimizer.step()
    training.wait()
    return {
        "seconds": (time.perf_counter() - began) / steps,
        "main_thread_s": (time.thread_time() - busy) / steps,
    }


@torch.no_grad()
def _validate(
    sides: dict[str, Training], texts: Mapping[str, Any], name: str, half: str
) -> dict[str, Any]:
    """The mean loss over the validation sequences; blocks are ended before."""
    training = sides[name]
    training.flush()
    training.model.eval()
    losses = [
        training.model(input_ids=part, labels=part).loss.item() for part in texts[half][1].split(16)
    ]
    training.model.train()
    return {"loss": sum(losses) / len(losses)}


_COMMANDS = {"build": _build, "train": _train, "validate": _validate}


def _nothing() -> None:
    """Of a side that has nothing under way after a step."""


def _alone(side: Side, model: nn.Module, inner: torch.optim.Optimizer) -> Training:
    return Training(side, model, inner, inner, _nothing, _nothing)


def _ddp(side: Side, model: nn.Module, inner: torch.optim.Optimizer) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if hook := side.options.get("hook"):
        wrapped.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    return Training(side, wrapped, inner, inner, _nothing, _nothing)


def _torchmn(side: Side, model: nn.Module, inner: torch.optim.Optimizer) -> Training:
    import torchmn

    comm = torchmn.create_communicator()
    schedule: Any = side.options.get("schedule")
    if block := side.options.get("block"):
        schedule = torchmn.schedules.DiLoCo.recommended(
            block * BATCH, overlap_steps=side.options["overlap"]
        )
    optimizer = torchmn.create_multi_node_optimizer(
        inner, comm, model, schedule=schedule, codec=side.options.get("codec")
    )
    # A barrier is queued after whatever is under way; flush() would end the block early.
    return Training(side, model, optimizer, inner, comm.barrier, optimizer.flush)


_BUILDERS = {"alone": _alone, "ddp": _ddp, "torchmn": _torchmn}


def base_model() -> Any:
    """A small model of Llama's kind, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=settings.VOCABULARY,
        hidden_size=settings.WIDTH,
        intermediate_size=settings.FEED_FORWARD,
        num_hidden_layers=settings.LAYERS,
        num_attention_heads=settings.HEADS,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def with_adapters(base: str) -> nn.Module:
    """The trained base model of a file, with new adapters, the same each time."""
    from peft import LoraConfig, get_peft_model

    model = base_model()
    model.load_state_dict(torch.load(base, weights_only=True))
    torch.manual_seed(1)
    lora = LoraConfig(
        r=settings.ADAPTER_RANK,
        lora_alpha=2 * settings.ADAPTER_RANK,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    made: nn.Module = get_peft_model(model, lora)
    return made


def pretrain(path: Path) -> None:
    """Train the base model on another text with all cores, and write its parameters to a file."""
    text = _bytes_of(settings.PRETRAINED_ON)
    model = base_model()
    adamw = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(settings.PRETRAINING_STEPS):
        for group in adamw.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, (settings.PRETRAINING_STEPS - step) / 60)
        starts = torch.randint(
            len(text) - LENGTH, (settings.PRETRAINING_BATCH,), generator=generator
        )
        tokens = torch.stack([text[at : at + LENGTH] for at in starts])
        adamw.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
    print(f"the base model has a loss of {loss.item():.3f} on {settings.PRETRAINED_ON}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)


def load(name: str, half: str) -> tuple[Tensor, Tensor]:
    """The first nine tenths of half of a text, and ``(sequences, LENGTH)`` of the rest of it."""
    text = _bytes_of(name)
    middle = len(text) // 2
    own = text[:middle] if half == "first" else text[middle:]
    border = len(own) * 9 // 10
    rest = own[border:]
    stride = (len(rest) - LENGTH) // (NUM_VALIDATION - 1)
    starts = [index * stride for index in range(NUM_VALIDATION)]
    return own[:border], torch.stack([rest[at : at + LENGTH] for at in starts])


def _bytes_of(name: str) -> Tensor:
    path = Path(os.environ["TORCHMN_TEST_DATA"]) / "text-lm" / f"{name}.txt.gz"
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8).long()
