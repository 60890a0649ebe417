"""``torchmn report`` as a user calls it: text, JSON, metrics, and an error as one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.cli.test_main import run
from tests.unit.recorded_runs import ImitatedRun
from torchmn.cli.main import main
from torchmn.record.records import PHASES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Healthy runs on 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("runs")
    return [ImitatedRun(num_ranks=n).write(folder / f"run{n}") for n in (1, 2, 4)]


def report(*words: object) -> str:
    """What the command prints; it must end well."""
    done = run("-m", "torchmn", "report", *map(str, words))
    assert done.returncode == 0, done.stderr
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
    found = json.loads(report(*runs, "--json"))
    assert [each["num_ranks"] for each in found["runs"]] == [1, 2, 4]
    assert [point["num_ranks"] for point in found["scaling"]["points"]] == [1, 2, 4]
    last = found["runs"][2]
    assert set(last["phases_s"]) == {"0", "1", "2", "3"}
    assert sum(last["phases_s"]["0"].values()) == pytest.approx(last["step_s"], rel=0.02)
    assert last["findings"] == sorted(last["findings"], key=lambda each: -each["share"])


def test_metrics_file(runs: Sequence[Path], tmp_path: Path) -> None:
    file = tmp_path / "torchmn.prom"
    report(runs[2], "--metrics", file)
    check_openmetrics(file.read_text())
    assert list(tmp_path.iterdir()) == [file]


def check_openmetrics(text: str) -> None:
    """Each family has a type and a help, its samples follow it, and the end is marked."""
    lines = text.splitlines()
    assert lines[-1] == "# EOF"
    families: dict[str, int] = {}
    current = ""
    for line in lines[:-1]:
        if line.startswith("# TYPE "):
            current = line.split()[2]
            assert current not in families
            families[current] = 0
        elif not line.startswith("#"):
            sample = re.fullmatch(r'(\w+)\{(\w+="[^"]*",?)+\} -?[\d.e+-]+', line)
            assert sample, line
            assert sample[1].removesuffix("_total") == current
            families[current] += 1
    assert families["torchmn_phase_seconds"] == 4 * len(PHASES)
    assert families["torchmn_steps"] == 4
    assert min(families.values()) > 0


def test_wrong_requests(
    capsys: pytest.CaptureFixture[str], runs: Sequence[Path], tmp_path: Path
) -> None:
    assert "it has no steps/rank*.jsonl" in error_of(capsys, tmp_path, "--text")
    assert "it does not exist" in error_of(capsys, tmp_path / "none", "--text")
    assert "exclude each other" in error_of(capsys, runs[0], "--text", "--json")
    assert "--output is for the page" in error_of(capsys, runs[0], "--text", "--output", "x.html")
    assert "shows one run" in error_of(capsys, *runs, "--metrics", "file")
    assert "cannot be written" in error_of(capsys, runs[0], "--metrics", tmp_path / "no" / "file")


@pytest.mark.parametrize("text", ["9100", "-3", "foo:bar"])
def test_no_port_is_served(
    capsys: pytest.CaptureFixture[str],
    runs: Sequence[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    """It would be the name of a file, which is rarely meant; then ``./`` before it says so."""
    monkeypatch.chdir(tmp_path)
    line = error_of(capsys, runs[0], f"--metrics={text}")
    assert "torchmn serves no port" in line
    assert list(tmp_path.iterdir()) == []
    report(runs[0], "--metrics", tmp_path / text)
    assert [path.name for path in tmp_path.iterdir()] == [text]


def test_a_page_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], runs: Sequence[Path], tmp_path: Path
) -> None:
    pytest.importorskip("plotly", reason="no plotly: install it with 'make setup'")
    line = error_of(capsys, runs[0], "--output", tmp_path / "none" / "page.html")
    assert "cannot be written" in line


def test_without_plotly(
    capsys: pytest.CaptureFixture[str], runs: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "pip install 'torchmn[report]'" in error_of(capsys, runs[0])
