"""The examples under launchers of all kinds, and what is reported of ranks that fail or hang."""

import re
from pathlib import Path

import pytest

from tests.all.frameworks.running import TORCHMN_RUN, TORCHRUN, need, run, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"
ACCELERATE_LAUNCH = (
    *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--num_cpu_threads_per_process", "1"),
)
PACKAGES = {"fabric": "lightning", "ignite": "ignite"}


def accuracy(text: str) -> float:
    """The example says it once: rank 0 prints."""
    (found,) = re.findall(r"accuracy ([0-9.]+)", text)
    return float(found)


@pytest.mark.parametrize(
    ("name", "by", "arguments"),
    [
        ("lightning", TORCHMN_RUN, ["--codec", "float16"]),
        ("lightning", (), ["--devices", "2"]),  # it starts the second process itself
        ("fabric", TORCHMN_RUN, []),
        ("accelerate", TORCHMN_RUN, []),
        ("accelerate", ACCELERATE_LAUNCH, []),
        ("transformers", TORCHMN_RUN, []),
        ("transformers", TORCHRUN, ["--codec", "float16"]),
        ("ignite", TORCHMN_RUN, []),
    ],
    ids=lambda value: (" ".join(value)[:24] or "alone") if isinstance(value, tuple) else None,
)
def test_examples_learn(
    tmp_path: Path, name: str, by: tuple[str, ...], arguments: list[str]
) -> None:
    need(PACKAGES.get(name, name))
    script = EXAMPLES / f"train_{name}.py"
    text = start(script, *arguments, by=by, cwd=tmp_path, PYTHONWARNINGS="ignore")
    assert accuracy(text) > 0.8, text


def test_ranks_that_lightning_does_not_know_of(tmp_path: Path) -> None:
    """With devices=1 each rank would train on all of the data. Newer versions refuse it, too."""
    need("lightning")
    done = run(EXAMPLES / "train_lightning.py", "--devices", 1, by=TORCHMN_RUN, cwd=tmp_path)
    assert done.returncode
    text = done.stdout + done.stderr
    assert "as many devices as there are ranks" in text or "match the world size" in text, text


@pytest.mark.parametrize("fault", ["raise", "sleep"])
def test_a_fault_of_one_rank_is_named(tmp_path: Path, fault: str) -> None:
    need("lightning")
    done = run("faulty_script.py", fault, by=TORCHMN_RUN, cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-3:]
    assert done.returncode, done.stdout
    if fault == "raise":
        assert "rank 1" in last[-1], done.stderr
        assert "ValueError: the cause" in last[-1], done.stderr
    else:
        report = " ".join(last)
        assert "rank 1 did not reach" in report, done.stderr
        assert "faulty_script.py" in report, done.stderr


def test_adapters_in_a_trainer(tmp_path: Path) -> None:
    """Blocks in 8 bits lower the loss, and what is saved is the adapters alone."""
    need("transformers", "peft")
    found = []
    for steps in ("1", "60"):
        out = tmp_path / steps
        words = ("--codec", "int8", "--steps", steps, "--out", out)
        text = start(EXAMPLES / "train_lora.py", *words, by=TORCHMN_RUN, cwd=tmp_path)
        found += [float(loss) for loss in re.findall(r"validation loss ([0-9.]+)", text)]
        assert [path.name for path in out.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert len(found) == 2
    assert found[1] < found[0] - 0.5, found
