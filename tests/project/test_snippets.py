"""Code in README, how-tos and explanations runs; commands have options that exist.

A page is one session: its blocks run in order, in an empty folder, with what its reader has. The
tutorials are programs that processes run: tests/all/processes/test_tutorial*.py.
"""

import linecache
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import typer.main
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn.cli.app import app
from torchmn.record import recording

from .snippets import ROOT, Block, blocks, commands, pages

NOT_HERE = ("README.md", "docs/tutorial/", "docs/ja/")  # the README is in test_examples.py
OWN = [page for page in pages() if not page.relative_to(ROOT).as_posix().startswith(NOT_HERE)]
WITH_PYTHON = [page for page in OWN if any(each.language == "python" for each in blocks(page))]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def what_readers_have() -> dict[str, Any]:
    """A network, data, an optimizer: what pages take for granted."""
    comm = torchmn.create_communicator()
    data = TensorDataset(torch.randn(32, 3), torch.randint(0, 2, (32,)))
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return {
        "__name__": "snippet",
        "torch": torch,
        "torchmn": torchmn,
        "DataLoader": DataLoader,
        "islice": islice,
        "comm": comm,
        "dataset": data,
        "train_set": data,
        "loader": DataLoader(data, 8),
        "model": model,
        "sgd": sgd,
        "adamw": torch.optim.AdamW(model.parameters()),
        "optimizer": torchmn.create_multi_node_optimizer(sgd, comm, model),
        "loss_of": torch.nn.functional.cross_entropy,
        "accuracy": 0.5,
        "step": 0,
        "first_step": 0,
        "num_steps": 2,
        "save": lambda step: None,
    }


def _trainer(names: dict[str, Any]) -> None:
    """A trainer, which trains for one epoch."""

    model = names["model"]

    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), t)

    updater = torchmn.StandardUpdater(names["loader"], names["optimizer"], model, loss_func=loss)
    names["trainer"] = torchmn.Trainer(updater, (1, "epoch"), "result")


def _no_steps(names: dict[str, Any]) -> None:
    names["num_steps"] = 0  # the loop on the page leaves out the step


def _corpus(names: dict[str, Any]) -> None:
    names |= {"num_columns": 4, "corpus": torch.arange(12).reshape(3, 4)}


def _gradients(names: dict[str, Any]) -> None:
    names["named_gradients"] = [("weight", torch.randn(8, 16))]


def _train_a_batch(names: dict[str, Any]) -> None:
    names["train"] = lambda batch: names["model"](batch[0])


# What the reader of one page has, too.
MORE: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/how-to/checkpoints.md": _trainer,
    "docs/how-to/elastic.md": _no_steps,
    "docs/how-to/record.md": _train_a_batch,
    "docs/explain/number-of-ranks.md": _corpus,
    "docs/explain/power-sgd.md": _gradients,
}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """In an empty folder; signals and generators are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    generators = torch.random.get_rng_state(), np.random.get_state()
    names = what_readers_have()
    first = names["comm"]
    yield names
    recording.end(0)
    made = [each for each in names.values() if isinstance(each, torchmn.Communicator)]
    for each in {id(each): each for each in [*made, first]}.values():
        each.finalize()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.random.set_rng_state(generators[0])
    np.random.set_state(generators[1])


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block; a traceback shows its lines on the page."""
    text = "\n" * (block.line - 1) + block.text
    linecache.cache[block.page] = (len(text), None, text.splitlines(keepends=True), block.page)
    exec(compile(text, block.page, "exec"), names)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_runs(page: Path, names: dict[str, Any]) -> None:
    MORE.get(name_of(page), lambda names: None)(names)
    ran = [each for each in blocks(page) if each.language == "python"]
    for each in ran:
        if each.reason_not_to_run is None:
            run(each, names)
    if all(each.reason_not_to_run for each in ran):
        pytest.skip(reason="; ".join(f"{b.place}: {b.reason_not_to_run}" for b in ran))


def test_a_block_that_fails_is_found(names: dict[str, Any], tmp_path: Path) -> None:
    block = Block(page="docs/x.md", line=7, info="python", text="no_such_name\n", remark="")
    with pytest.raises(NameError) as found:
        run(block, names)
    assert (str(found.traceback[-1].path), found.traceback[-1].lineno) == ("docs/x.md", 6)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_blocks_that_are_not_run_have_a_reason(page: Path) -> None:
    remarks = [each for each in blocks(page) if each.remark.startswith("not run")]
    assert [each.place for each in remarks if not each.reason_not_to_run] == []


DOCS = ROOT / "docs"
DOCUMENTS = [*pages(), *sorted(DOCS.glob("*.md")), *sorted((DOCS / "reference").glob("*.md"))]
CALLS = [
    (each.place, words)
    for page in dict.fromkeys(DOCUMENTS)
    for each in blocks(page)
    for words in commands(each)
]


def parse(words: list[str]) -> None:
    """Read a command line as `torchmn` does, without executing it."""
    group = typer.main.get_command(app)
    with group.make_context("torchmn", list(words)) as context:  # type: ignore[attr-defined]
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, rest = group.resolve_command(context, rest)  # type: ignore[attr-defined]
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("place", "words"), CALLS, ids=[f"{p} {' '.join(w)}" for p, w in CALLS])
def test_commands_have_options_that_exist(
    place: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        parse(words)
    except typer.Exit:
        pass  # --help
    except Exception as error:
        if "does not exist" not in str(error):  # a file of the reader
            raise AssertionError(f"{place}: torchmn {' '.join(words)}: {error}") from error


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parse(["run", "--no-such-option", "train.py"])
