"""`torchmn report` of real runs: whether one is slower than another, and files that others read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.all.processes.runner import Runner
from tests.json_schemas import checked
from tests.limits import limit
from tests.unit.cli.test_main import run
from tests.unit.cli.test_report import NO_CLIENT, checked_by_promtool

pytestmark = pytest.mark.processes

# It sleeps for longer than it computes, so that it takes equally long beside other programs.
SCRIPT = """
import sys, time, torch, torchmn
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 4 * 40

    def __getitem__(self, index):
        time.sleep(float(sys.argv[1]))
        return torch.ones(8)

comm = torchmn.create_communicator("naive")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)
for x in torchmn.scatter_loader(DataLoader(Images(), 4), comm):
    optimizer.zero_grad()
    loss = model(x).sum()
    time.sleep(0.2)
    loss.backward()
    optimizer.step()
    torchmn.record.report_value("loss", loss.item())
"""
RUNS = {"before": "0", "same": "0", "slow": "0.05"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three runs beside each other, since other programs then disturb all of them alike."""
    runner = Runner(tmp_path_factory.mktemp("runs"))
    script = runner.script(SCRIPT)
    try:
        started = [
            runner.start("-n", "2", "--backend", "gloo", "--log-dir", name, script, seconds)
            for name, seconds in RUNS.items()
        ]
        for process in started:
            _, err = process.communicate(timeout=limit(120))
            assert process.returncode == 0, err
    finally:
        runner.close()
    return {name: runner.folder / name / "latest" for name in RUNS}


def report(*words: object) -> subprocess.CompletedProcess[str]:
    return run("-m", "torchmn", "report", *map(str, words))


def test_the_same_training_is_not_slower(runs: dict[str, Path]) -> None:
    done = report(runs["before"], runs["same"], "--text")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "B is slower" not in done.stdout


def test_a_slower_loader_is_named(runs: dict[str, Path]) -> None:
    done = report(runs["before"], runs["slow"], "--text")
    assert done.returncode == 1, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "B is slower than A." in text
    assert "Phases that are longer in B: data +" in text
    found = checked("report", report(runs["slow"], runs["before"], "--json").stdout)
    assert found["comparison"]["verdict"] == "faster"
    (data,) = (
        each
        for each in found["comparison"]["differences"]
        if (each["statistic"], each["what"]) == ("median", "data")
    )
    assert data["a_s"] - data["b_s"] == pytest.approx(0.1, rel=0.5)  # two images a rank


def test_the_page_is_valid_html(runs: dict[str, Path], tmp_path: Path) -> None:
    html5lib = pytest.importorskip("html5lib", reason="no html5lib: install it with 'make setup'")
    report(runs["before"], runs["same"], "--output", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    html5lib.HTMLParser(strict=True).parse(text)
    assert all(word in text for word in ("B compared with A", "loss", "placement of ranks"))


def test_prometheus_reads_the_metrics(runs: dict[str, Path], tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason=NO_CLIENT)
    assert report(runs["before"], "--metrics", tmp_path / "run.prom").returncode == 0
    text = (tmp_path / "run.prom").read_text()
    samples = {each.name: each.samples for each in parser.text_string_to_metric_families(text)}
    assert [sample.value for sample in samples["torchmn_steps"]] == [40.0, 40.0]
    assert all(sample.value > 0 for sample in samples["torchmn_step_seconds"])
    assert [sample.value > 1e7 for sample in samples["torchmn_memory_bytes"]] == [True, False] * 2
    checked_by_promtool(text)
