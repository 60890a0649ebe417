"""Language models train the same on any number of workers, and resume in mid-block."""

import re
import shutil
from pathlib import Path

import pytest

from tests.all.frameworks.running import need
from tests.all.processes.test_examples import EXAMPLES, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

COMMON = ["--steps", "30", "--eval", "10", "--length", "16", "--batchsize", "6"]
SMALL = [*COMMON, "--layers", "1", "--width", "16"]


def losses(
    folder: Path,
    num_ranks: int,
    *options: str,
    script: str = "lm/train_lm.py",
    small: list[str] = SMALL,
) -> dict[int, float]:
    """The validation losses that a run prints, by step."""
    launcher = ["-m", "torchmn", "run", "-n", str(num_ranks), "--backend", "gloo"]
    command = [EXAMPLES / script, *small, "--out", folder / "result", *options]
    lines, _ = run([*launcher, "--log-dir", folder / "logs", *command])
    found = re.findall(r"step (\d+): validation loss ([0-9.]+)", "\n".join(lines))
    return {int(step): float(loss) for step, loss in found}


def test_losses_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    one, *others = (
        losses(tmp_path / str(n), n, "--schedule", "every_step", "--learnrate", "0.01")
        for n in (1, 2, 3)
    )
    assert list(one) == [10, 20, 30]
    assert one[30] < one[10]
    for other in others:
        assert other == pytest.approx(one, abs=2e-5)


def test_it_resumes_within_a_block(tmp_path: Path) -> None:
    """Fragments of 8 bits under way, the outer momentum and the order of the text included."""
    options = ["--schedule", "streaming", "--codec", "int8", "--communicator", "flat",
               "--block", "8"]  # fmt: skip
    whole = losses(tmp_path, 2, *options)
    assert list(whole) == [10, 20, 30]
    for step in (20, 30):
        shutil.rmtree(tmp_path / "result" / "lm" / f"step-{step:08d}")
    assert losses(tmp_path, 2, *options) == {20: whole[20], 30: whole[30]}


def test_adapters_do_not_depend_on_the_number_of_workers_and_resume(tmp_path: Path) -> None:
    """LoRA: a block that a validation ends, and checkpoints of the adapters alone."""
    need("transformers", "peft")
    model = tmp_path / "model"
    nbytes = make_model(model)
    words = [*COMMON, "--rank", "2", "--model", str(model)]
    lora = {"script": "lm/train_lora.py", "small": words}
    every_step = ("--schedule", "every_step", "--learnrate", "0.03")
    one, two = (losses(tmp_path / str(n), n, *every_step, **lora) for n in (1, 2))
    assert list(one) == [10, 20, 30]
    assert one[30] < one[10]
    assert two == pytest.approx(one, abs=1e-3)
    blocks = ["--schedule", "diloco", "--codec", "int8", "--communicator", "flat", "--block", "8"]
    whole = losses(tmp_path, 2, *blocks, **lora)
    adapters = tmp_path / "result/adapters/adapter_model.safetensors"
    first = adapters.read_bytes()
    for file in (tmp_path / "result/lora").rglob("*.safetensors"):
        assert file.stat().st_size < nbytes / 2
    for step in (20, 30):
        shutil.rmtree(tmp_path / "result" / "lora" / f"step-{step:08d}")
    assert losses(tmp_path, 2, *blocks, **lora) == {20: whole[20], 30: whole[30]}
    assert adapters.read_bytes() == first


def make_model(folder: Path) -> int:
    """A model and a tokenizer as from a hub; returns the bytes of the model."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = ByT5Tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())
