"""Streams of libraries on two ranks: no sample is lost or read twice, also after a resume."""

import json
from pathlib import Path

import pytest

from tests.all.frameworks.running import TORCHMN_RUN, need, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("library", ["datasets", "webdataset", "torchdata", "litdata"])
def test_library(library: str, tmp_path: Path) -> None:
    need(library)
    data = tmp_path / "data"
    data.mkdir()
    text = start(
        *("stream_script.py", library, data),
        by=TORCHMN_RUN,
        cwd=tmp_path,
        PYTHONWARNINGS="ignore",
        HF_HOME=str(tmp_path),
    )
    (line,) = [line for line in text.splitlines() if "found [" in line]
    assert json.loads(line[line.index("[", line.index("found")) :]) == []
