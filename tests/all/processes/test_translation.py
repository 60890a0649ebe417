"""The translation example under `torchmn run`, on a few segments."""

import re
from pathlib import Path

import pytest

from tests.all.processes.test_examples import EXAMPLES, run

SCRIPT = EXAMPLES / "seq2seq/train_seq2seq.py"


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_two_workers_train_and_one_scores_what_they_saved(tmp_path: Path) -> None:
    for package in ("tokenizers", "sacrebleu"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    for name in ("train", "val", "test_2016_flickr"):
        for language, verb in (("en", "runs"), ("de", "läuft")):
            lines = [f"{k} dog {verb} {'very ' * (k % 5)}fast .\n" for k in range(20)]
            (tmp_path / f"{name}.{language}").write_text("".join(lines), encoding="utf-8")
    launcher = ["-m", "torchmn", "run", "-n", "2", "--log-dir", "logs"]
    options = ["--data", ".", "--vocabulary", "280", "--width", "16", "--batchsize", "8"]
    options += ["--epoch", "2", "--checkpoint", "saved"]

    (first, _), (second, _) = (
        run([*before, SCRIPT, *options], cwd=tmp_path) for before in (launcher, [])
    )
    assert first[0] == "2 worker(s), 20 pairs, 280 tokens"
    assert [line.split(":")[0] for line in first[2:]] == [
        "epoch 1.00, step 3",
        "validation",
        "epoch 2.00, step 6",
        "validation",
        "test_2016_flickr",
    ]
    assert re.search(r"BLEU \d+\.\d\d, beam 5 \(nrefs:1\|.*\|version:[\d.]+\)$", first[-1])
    assert second[0] == "1 worker(s), 20 pairs, 280 tokens"
    assert second[1:] == [first[1], first[-1]]  # nothing was left to train; BLEU is the same
