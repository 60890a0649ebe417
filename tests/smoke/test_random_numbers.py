"""`seed_ranks`: what scripts draw before training is one process's, and then ranks differ."""

import json
from pathlib import Path

import pytest

from tests.all.processes.test_examples import run

SCRIPT = Path(__file__).with_name("random_script.py")


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_ranks_draw_the_same_until_training_begins_and_then_their_own(tmp_path: Path) -> None:
    run([SCRIPT, tmp_path])
    run(["-m", "torchmn", "run", "-n", "2", SCRIPT, tmp_path])
    read = [
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0of1", "0of2", "1of2")
    ]
    (wanted, alone), (first, own_0), (second, own_1) = read
    trained = [seen.pop("trained") for seen in (wanted, first, second)]
    for name, value in wanted.items():
        assert first[name] == value, name
        assert second[name] == value, name
    for name, value in trained[0].items():
        for other in trained[1:]:
            assert _is_close(other[name], value), name
    for name, value in own_0.items():
        common = {*map(str, value)} & {*map(str, own_1[name])}
        assert common <= {"0.0", "2.0"}, name  # of dropout
        assert value != own_1[name], name
    for own in (own_0, own_1):
        assert own["augmented before"] != own["augmented before, again"]
    # Rank 0 goes on with the stream of one process.
    for name in ("numbers", "dropout", "forked by hand"):
        assert own_0[name] == alone[name]


def _is_close(found: object, wanted: object) -> bool:
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(_is_close, found, wanted))
    return found == pytest.approx(wanted, abs=1e-12)
