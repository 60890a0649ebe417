"""What the sources and the pages call ``python -m torchmn...`` can be run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"-m (torchmn(?:\.\w+)+)")


def programs() -> list[str]:
    pages = [
        *(*ROOT.glob("*.md"), *ROOT.joinpath("docs").rglob("*.md")),
        *(*ROOT.joinpath("benchmarks").glob("*.md"), *ROOT.joinpath("src").rglob("*.py")),
    ]
    return sorted({name for page in pages for name in NAMED.findall(page.read_text())})


@pytest.mark.parametrize("name", programs())
def test_a_program_is_there(name: str) -> None:
    path = ROOT / "src" / name.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert '__name__ == "__main__"' in file.read_text()
