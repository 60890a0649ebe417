"""``torchmn report`` as a user calls it: text, JSON, metrics, and an error as one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.json_schemas import checked
from tests.unit.cli.test_main import run
from tests.unit.recorded_runs import ImitatedRun
from torchmn.cli.main import main
from torchmn.record.records import PHASES

NO_CLIENT = "no prometheus_client: install it with 'make setup'"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Healthy runs on 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("runs")
    return [ImitatedRun(num_ranks=n).write(folder / f"run{n}") for n in (1, 2, 4)]


def report(*words: object, status: int = 0) -> str:
    """What the command prints; it must exit with this status."""
    done = run("-m", "torchmn", "report", *map(str, words))
    assert done.returncode == status, done.stderr
    return done.stdout


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_text(tmp_path: Path) -> None:
    slow = ImitatedRun(slower={(3, "backward"): 1.5}, num_ranks=4).write(tmp_path)
    text = " ".join(report(slow, "--text").split())
    assert re.search(r"1\. 2\d % of each step|1\. 2\d% of each step", text)
    assert re.search(r"Rank 3 \(host host3\) computes in backward (49|50|51)% longer", text)
    for word in ("4 ranks on 4 hosts", "backward", "host0 to host1", "samples/s"):
        assert word in text


def test_json(runs: Sequence[Path]) -> None:
    found = checked("report", report(*runs, "--json"))
    assert [each["num_ranks"] for each in found["runs"]] == [1, 2, 4]
    assert [point["num_ranks"] for point in found["scaling"]["points"]] == [1, 2, 4]
    last = found["runs"][2]
    assert set(last["phases_s"]) == {"0", "1", "2", "3"}
    assert sum(last["phases_s"]["0"].values()) == pytest.approx(last["step_s"], rel=0.02)
    assert last["findings"] == sorted(last["findings"], key=lambda each: -each["share"])


def test_two_runs_are_compared(tmp_path: Path) -> None:
    """The exit status is for a program that tests the speed of another one."""
    before = ImitatedRun(num_ranks=2).write(tmp_path / "before")
    same = ImitatedRun(num_ranks=2, seed=1).write(tmp_path / "same")
    slow = ImitatedRun(num_ranks=2, seed=2, slower={(1, "forward"): 2.0}).write(tmp_path / "slow")
    assert "No difference can be seen within the noise" in report(before, same, "--text")
    text = " ".join(report(before, slow, "--text", status=1).split())
    assert "B is slower than A" in text
    assert "Phases that are longer in B: forward +" in text
    found = checked("report", report(slow, before, "--json"))
    assert found["comparison"]["verdict"] == "faster"
    report(before, slow, "--output", tmp_path / "page.html", status=1)
    assert "B is slower than A." in (tmp_path / "page.html").read_text()


def test_two_runs_on_different_numbers_of_ranks(runs: Sequence[Path]) -> None:
    """They are a scaling."""
    found = checked("report", report(*runs[:2], "--json"))
    assert found["comparison"] is None
    assert len(found["scaling"]["points"]) == 2


def test_metrics_file(runs: Sequence[Path], tmp_path: Path) -> None:
    """Prometheus' own parser reads it."""
    parser = pytest.importorskip("prometheus_client.parser", reason=NO_CLIENT)
    file = tmp_path / "torchmn.prom"
    report(runs[2], "--metrics", file)
    assert list(tmp_path.iterdir()) == [file]
    families = {each.name: each for each in parser.text_string_to_metric_families(file.read_text())}
    assert {name: each.type for name, each in families.items()} == {
        "torchmn_phase_seconds": "gauge",
        "torchmn_step_seconds": "gauge",
        "torchmn_late_seconds": "gauge",
        "torchmn_memory_bytes": "gauge",
        "torchmn_steps": "counter",
        "torchmn_samples_per_second": "gauge",
        "torchmn_running": "gauge",
    }
    assert len(families["torchmn_phase_seconds"].samples) == 4 * len(PHASES)
    assert [sample.value for sample in families["torchmn_steps"].samples] == [60.0] * 4
    assert all(each.documentation for each in families.values())


def test_promtool_finds_nothing(runs: Sequence[Path], tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason=NO_CLIENT)
    report(runs[2], "--metrics", tmp_path / "run.prom")
    checked_by_promtool((tmp_path / "run.prom").read_text())


def checked_by_promtool(text: str) -> None:
    """What Prometheus' own tool says of metrics; the test is skipped where it is not installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(reason="no promtool (Debian: prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_memory_is_there_however_long_ago_it_was_measured(tmp_path: Path) -> None:
    """Every 10 s, which may be thousands of steps: more than the last ones that are read."""
    parser = pytest.importorskip("prometheus_client.parser", reason=NO_CLIENT)
    folder = ImitatedRun(num_ranks=2, num_steps=400).write(tmp_path / "run")
    for file in (folder / "steps").iterdir():
        lines = file.read_bytes().splitlines(keepends=True)
        memory = [number for number, line in enumerate(lines) if b'"Memory"' in line[:40]]
        file.write_bytes(
            b"".join(line for number, line in enumerate(lines) if number not in memory[1:])
        )
    report(folder, "--metrics", tmp_path / "run.prom")
    text = (tmp_path / "run.prom").read_text()
    families = {each.name: each for each in parser.text_string_to_metric_families(text)}
    assert [
        (sample.labels["rank"], sample.labels["of"], sample.value)
        for sample in families["torchmn_memory_bytes"].samples
    ] == [
        (rank, kind, value)
        for rank in "01"
        for kind, value in (("process", 500_000_000.0), ("device", 0.0))
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{none} --text", "it does not exist"),
        ("{empty} --text", "it has no steps/rank*.jsonl"),
        ("{run} --text --json", "exclude each other"),
        ("{run} --text --output x.html", "--output is for the page"),
        ("{run} {run} --metrics file", "shows one run"),
        ("{run} --output {none}/page.html", "cannot be written"),
        ("{run} --metrics {none}/file", "cannot be written"),
    ],
)
def test_wrong_requests(
    capsys: pytest.CaptureFixture[str], runs: Sequence[Path], tmp_path: Path, words: str, said: str
) -> None:
    if "--metrics" in words:
        pytest.importorskip("prometheus_client", reason=NO_CLIENT)
    folders = {"run": runs[0], "empty": tmp_path, "none": tmp_path / "none"}
    assert said in error_of(capsys, *words.format(**folders).split())


@pytest.mark.parametrize("text", ["9100", "-3", "foo:bar"])
def test_no_port_is_served(
    capsys: pytest.CaptureFixture[str],
    runs: Sequence[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    """It would be the name of a file, which is rarely meant; then ``./`` before it says so."""
    pytest.importorskip("prometheus_client", reason=NO_CLIENT)
    monkeypatch.chdir(tmp_path)
    line = error_of(capsys, runs[0], f"--metrics={text}")
    assert "torchmn serves no port" in line
    assert list(tmp_path.iterdir()) == []
    report(runs[0], "--metrics", tmp_path / text)
    assert [path.name for path in tmp_path.iterdir()] == [text]


def test_without_prometheus_client(
    capsys: pytest.CaptureFixture[str],
    runs: Sequence[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    line = error_of(capsys, runs[0], "--metrics", tmp_path / "run.prom")
    assert "pip install 'torchmn[report]'" in line
