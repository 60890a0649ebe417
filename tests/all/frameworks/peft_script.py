"""Run on two ranks by test_checks.py: adapters of peft, in a loop of one's own and in a Trainer."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import torchmn
from tests.all.frameworks.task import run_checks
from torchmn.errors import TorchmnWarning
from torchmn.train.frameworks import ExchangeOptions, attach

comm = torchmn.create_communicator("flat", timeout_s=60)
NUM_STEPS, BATCH, LENGTH = 6, 4, 12
BLOCK = 2 * BATCH
"""Samples of two steps over both ranks."""
Make = Callable[[nn.Module], torch.optim.Optimizer]


def language_model(vocabulary: int = 40) -> GPT2LMHeadModel:
    """The same on all ranks and each time; transformers computes its loss in float32."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=2 * LENGTH, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def adapted(base: nn.Module | None = None, **options: Any) -> PeftModel:
    base = base or language_model().double()
    torch.manual_seed(2)
    return get_peft_model(base, lora(**options))


def lora(**options: Any) -> LoraConfig:
    given = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    return LoraConfig(**given)


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 40, (BATCH, LENGTH), generator=generator)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), 0.5, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), 0.01)


class Loop:
    """Training as users write it, in one process or, ``on_ranks``, with each rank's rows."""

    def __init__(
        self, model: nn.Module, make: Make = sgd, *, on_ranks: bool = True, **options: Any
    ):
        self.model, self.is_on_ranks = model, on_ranks
        self.optimizer: Any = make(model)
        if on_ranks:
            self.optimizer = torchmn.create_multi_node_optimizer(
                self.optimizer, comm, model, **options
            )

    def run(self, steps: range, before: Callable[[int], object] = lambda step: None) -> "Loop":
        for step in steps:
            before(step)
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()
        return self

    def backward(self, step: int) -> None:
        tokens = tokens_of(step)
        own = tokens[comm.rank :: comm.size] if self.is_on_ranks else tokens
        self.model(input_ids=own, labels=own).loss.backward()

    def finish(self) -> dict[str, Tensor]:
        """The adapters and whatever else was trained; the same on all ranks."""
        if self.is_on_ranks:
            self.optimizer.flush()
            self.optimizer.close()
        found = values(self.model)
        for other in comm.allgather(flat(found)):
            assert torch.equal(other, flat(found)), "ranks hold different parameters"
        return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace("_orig_mod.", ""): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" in name or "modules_to_save" in name
    }


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten().double() for value in named.values()])


def fit(make: Make = sgd, model: nn.Module | None = None, **options: Any) -> dict[str, Tensor]:
    return (
        Loop(adapted() if model is None else model, make, **options).run(range(NUM_STEPS)).finish()
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    worst = float((flat(one) - flat(other)).abs().max())
    assert worst <= tolerance, f"parameters differ by {worst}"
    assert not torch.equal(flat(one), flat(values(adapted()))), "nothing was trained"


def shared_folder() -> Path:
    return Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))


@contextlib.contextmanager
def torchmn_warns() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(each.message) for each in caught if issubclass(each.category, TorchmnWarning)]


# ---- against one process ----


def groups_and_clipping() -> None:
    """LoRA+: B has a higher rate than A; and the norm of the mean is clipped."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return torch.optim.SGD(
            [
                {"params": [p for n, p in named if "lora_A" in n], "lr": 0.2},
                {"params": [p for n, p in named if "lora_B" in n], "lr": 0.8},
            ]
        )

    alone = Loop(adapted(), make, on_ranks=False)
    for step in range(NUM_STEPS):
        alone.optimizer.zero_grad()
        alone.backward(step)
        nn.utils.clip_grad_norm_(alone.model.parameters(), 0.05)
        alone.optimizer.step()
    same(fit(make, max_grad_norm=0.05), values(alone.model), 1e-6)


def adamw_with_decay() -> None:
    same(fit(adamw), fit(adamw, on_ranks=False), 1e-4)


def accumulation() -> None:
    loop = Loop(adapted())
    for step in range(0, NUM_STEPS, 2):
        loop.optimizer.zero_grad()
        with loop.optimizer.no_sync():
            loop.backward(step)
        loop.backward(step + 1)
        loop.optimizer.step()
    alone = Loop(adapted(), on_ranks=False)
    for step in range(0, NUM_STEPS, 2):
        alone.optimizer.zero_grad()
        alone.backward(step)
        alone.backward(step + 1)
        alone.optimizer.step()
    same(loop.finish(), values(alone.model), 1e-6)


def gradient_checkpointing() -> None:
    for is_reentrant in (False, True):
        model = adapted()
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        same(fit(model=model), fit())


def bfloat16_base() -> None:
    """Adapters are float32 (peft's default), and so are the means."""
    model = adapted(language_model().bfloat16())
    assert {parameter.dtype for parameter in trained(model)} == {torch.float32}
    alone = adapted(language_model().bfloat16())
    same(fit(model=model), fit(model=alone, on_ranks=False), 0.02)


def embeddings_that_grow() -> None:
    """New tokens: embeddings are resized, and trained as a whole beside the adapters."""

    def grown() -> PeftModel:
        base = language_model().double()
        base.resize_token_embeddings(48, mean_resizing=False)
        return adapted(base, modules_to_save=["wte"], ensure_weight_tying=True)

    found = fit(model=grown())
    assert any("modules_to_save" in name for name in found)
    same(found, fit(model=grown(), on_ranks=False), 1e-6)


def compiled() -> None:
    model = torch.compile(adapted(), backend="aot_eager")
    same(fit(model=model), fit(), 1e-6)


def adapters_in_turns() -> None:
    """`set_adapter` freezes one and unfreezes the other, in the middle of training."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in model.named_parameters() if "lora_" in n], 0.5)

    def run(on_ranks: bool, **options: Any) -> dict[str, Tensor]:
        model = adapted()
        model.add_adapter("other", lora(r=2))
        loop = Loop(model, make, on_ranks=on_ranks, **options)

        def choose(step: int) -> None:
            model.set_adapter("other" if step in (1, 4, 5) else "default")

        return loop.run(range(NUM_STEPS), choose).finish()

    alone = run(False)
    same(run(True), alone, 1e-6)
    blocks = torchmn.schedules.PeriodicAverage(BATCH)  # of one step: with SGD the mean gradient
    same(run(True, schedule=blocks), alone, 1e-6)
    run(True, schedule=torchmn.schedules.DiLoCo(BLOCK), codec="int8")


# ---- blocks of local updates ----


def the_base_is_in_no_block() -> None:
    """With ``AdamW(model.parameters())``, as in peft's documentation."""

    def everything(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 0.01)

    for options in ({}, {"overlap_steps": 1}, {"num_fragments": 2}):
        found = []
        for make in (adamw, everything):
            schedule = torchmn.schedules.DiLoCo(BLOCK, **options)
            found.append(fit(make, schedule=schedule, codec="int8"))
            assert all("lora_" in name for name in schedule.anchors)
        same(*found)


def evaluation_on_rank_0_alone() -> None:
    """`generate` and a loss after `flush`: nothing waits for the others, and nothing is warned."""
    with torchmn_warns() as texts:
        loop = Loop(adapted(), adamw, schedule=torchmn.schedules.DiLoCo(BLOCK), codec="int8")
        for first in range(0, NUM_STEPS, 3):
            loop.run(range(first, first + 3))
            loop.optimizer.flush()
            if comm.rank == 0:
                loop.model.eval()
                prompt = tokens_of(99)[:, :3]
                made = loop.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
                assert made.shape[1] > 3
                loop.model.train()
        loop.finish()
    assert texts == []


# ---- saving ----


def saved_and_loaded() -> None:
    """`save_pretrained` on rank 0 writes the adapters alone, and training goes on with them."""
    folder = shared_folder()
    loop = Loop(adapted(), adamw, schedule=torchmn.schedules.DiLoCo(BLOCK), codec="int8")
    loop.run(range(3))
    with torchmn_warns() as texts:
        loop.optimizer.flush()
        if comm.rank == 0:
            loop.model.save_pretrained(folder)
        comm.barrier()
        loop.run(range(3, 4))
    assert texts == []
    [file] = folder.glob("*.safetensors")
    nbytes = sum(p.nbytes for p in loop.model.parameters())
    assert file.stat().st_size < nbytes / 2
    again = PeftModel.from_pretrained(language_model().double(), folder, is_trainable=True)
    resumed = Loop(again, adamw, schedule=torchmn.schedules.DiLoCo(BLOCK)).run(range(3, 6))
    resumed.finish()


def saved_within_a_block() -> None:
    """It is the model of one rank then, and a warning says so."""
    with torchmn_warns() as texts:
        loop = Loop(adapted(), schedule=torchmn.schedules.DiLoCo(BLOCK)).run(range(3))
        if comm.rank == 0:
            loop.model.save_pretrained(tempfile.mkdtemp())
        loop.run(range(3, 4))
    assert bool(texts) == (comm.rank == 0), texts
    assert all("in the middle of a block" in text for text in texts)
    loop.finish()


def merged() -> None:
    loop = Loop(adapted(), schedule=torchmn.schedules.DiLoCo(BLOCK)).run(range(NUM_STEPS))
    loop.finish()
    loop.model.eval()
    with torch.no_grad():
        wanted = loop.model(input_ids=tokens_of(0)).logits
        plain = loop.model.merge_and_unload()
        found = plain(input_ids=tokens_of(0)).logits
    torch.testing.assert_close(found, wanted)
    assert not any("lora_" in name for name, _ in plain.named_parameters())


class Adapters:
    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        set_peft_model_state_dict(self.model, state)


def resumed_from_adapters() -> None:
    """In the middle of a block, from checkpoints without the base."""
    for options in (
        {"codec": "int8"},
        {"schedule": lambda: torchmn.schedules.DiLoCo(BLOCK + 1), "codec": "int8"},
        {"schedule": lambda: torchmn.schedules.DiLoCo(BLOCK, overlap_steps=1)},
    ):
        make = options.get("schedule", lambda: "every_step")

        def loop(options: dict[str, Any] = options, make: Any = make) -> Loop:
            return Loop(adapted(), adamw, **{**options, "schedule": make()})

        folder = shared_folder()
        with torchmn_warns() as texts:
            whole = loop().run(range(NUM_STEPS)).finish()
            first = loop().run(range(3))
            saver = torchmn.create_multi_node_checkpointer(comm, folder, "lora")
            saver.save(3, {"adapters": Adapters(first.model), "optimizer": first.optimizer})
            saver.finish()
            first.optimizer.close()
            second = loop()
            state = {"adapters": Adapters(second.model), "optimizer": second.optimizer}
            assert saver.resume(state) == 3
            found = second.run(range(3, NUM_STEPS)).finish()
            saver.close()
        assert texts == []
        same(found, whole)
        for path in folder.rglob("*.safetensors"):
            assert not any("wte" in key or "base_layer" in key for key in load_file(path))


# ---- the Trainer ----


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def trainer(options: ExchangeOptions | None, folder: Path, **settings: Any) -> InOrder:
    rows = [{"input_ids": row, "labels": row} for step in range(8) for row in tokens_of(step)]
    own = InOrder(
        adapted(language_model()),
        TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=BATCH // 2, max_steps=8,
            learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True, **settings,
        ),
        train_dataset=rows,
        eval_dataset=rows[:5],
    )  # fmt: skip
    return own if options is None else attach(own, options)


def in_a_trainer() -> None:
    """The numbers of the Trainer's own DistributedDataParallel."""
    options = ExchangeOptions(communicator="flat")
    ours = trainer(options, shared_folder(), save_strategy="no")
    theirs = trainer(None, shared_folder(), save_strategy="no")
    ours.train()
    theirs.train()
    same(values(ours.model), values(theirs.model), 1e-4)


def a_trainer_resumes() -> None:
    """From its own checkpoint, which has the adapters alone, in the middle of a block."""
    folder = shared_folder()

    def made(**settings: Any) -> InOrder:
        schedule = torchmn.schedules.DiLoCo(3 * BATCH)
        return trainer(ExchangeOptions(codec="int8", schedule=schedule), folder, **settings)

    saves = {"save_strategy": "steps", "save_steps": 4}
    whole = made(**saves)
    whole.train()
    first = made(**saves)
    first.add_callback(StopAt(4))
    first.train()
    checkpoint = folder / "checkpoint-4"
    if comm.rank == 0:
        assert {path.name for path in checkpoint.glob("*.safetensors")} == {
            "adapter_model.safetensors"
        }
    second = made(**saves)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert second.state.global_step == 8
    same(values(second.model), values(whole.model))


CHECKS: list[Callable[[], None]] = [
    groups_and_clipping,
    adamw_with_decay,
    accumulation,
    gradient_checkpointing,
    bfloat16_base,
    embeddings_that_grow,
    compiled,
    adapters_in_turns,
    the_base_is_in_no_block,
    evaluation_on_rank_0_alone,
    saved_and_loaded,
    saved_within_a_block,
    merged,
    resumed_from_adapters,
    in_a_trainer,
    a_trainer_resumes,
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_checks({check.__name__: check for check in CHECKS})
