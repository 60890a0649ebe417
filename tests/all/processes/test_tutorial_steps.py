"""Both halves of the tutorial, the plain loop and seven steps: what they say to type runs.

English and Japanese pages have the same blocks.

Blocks of a page: ``python title="FILE"`` is a file to save (``toml`` as well), ``sh`` are commands,
run in order in the folder of the files, and a block without a language is their output. An HTML
comment before a block, ``<!-- not run: reason -->`` or ``<!-- needs: mpirun -->``, exempts it.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.all.processes.runner import AS_ROOT, MARK, PYTHON_PATH, Runner, skip_without_mpi
from tests.limits import limit

DOCS = Path(__file__).parents[3] / "docs"
ENGLISH, JAPANESE = DOCS / "tutorial", DOCS / "ja" / "tutorial"
STEPS = sorted(path.name for path in ENGLISH.glob("[0-9]-*.md"))
HOW_TO = [DOCS / "how-to" / f"{name}.md" for name in ("first-training", "two-hosts", "slurm")]
# Pages that use the files of those before them.
IN_JAPANESE = [HOW_TO[0], *(ENGLISH / step for step in STEPS)]
SERIES = ([ENGLISH / step for step in STEPS], HOW_TO)
PAGES = [page for series in SERIES for page in series]
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
TITLED = re.compile(r'(?:python|toml) title="([\w.]+)"')
RUNNABLE = ("", "needs: mpirun")
SHOWN = ("", "sh", "diff")  # blocks that are no files: output, commands, the seven lines
# So that a page takes less time, and does the same at any speed.
SHORTER = {
    "--epoch 4": "--epoch 2",
    "--epoch 16": "--epoch 3",
    "+ 16))": "+ 1))",  # the time limit has been reached when the first step ends
}

CODECS = ("float32", "float16", "int8", "1bit")
LINE = r"(?m)^(\[0\] )?2 +\d"  # the last line of the table of results
# What the commands of each page print, at least.
PRINTED = {
    "1-one-device.md": [LINE, r"Throughput: [\d.]+ \[images/sec.\]"],
    "2-several-devices.md": [LINE, r"Throughput: [\d.]+ \[images/sec.\]"],
    "3-chainermn-style.md": [
        LINE,
        r"rank=1 intra_rank=1 inter_rank=0",
        r"Num process \(COMM_WORLD\): 2, single_node",
    ],
    "4-profile.md": [r"runs/1.*runs/2.*speed-up", r"Rank 1", r"trace\.json\.gz"],
    "5-slow-link.md": [r"exit status [034]\n"],
    "6-codecs.md": [rf"{codec}: [\d.]+ MB sent" for codec in CODECS],
    "7-cluster-job.md": [
        r"#SBATCH --nodes=2",
        r"#PBS -l select=2:.*mpiprocs=2",
        r"exit status 85.*starting after iteration [1-9].*exit status 0",
    ],
    "first-training.md": [],  # test_first_training.py compares all that it prints
    "two-hosts.md": [],
    "slurm.md": [r"#SBATCH --nodes=2", r"#SBATCH --partition=gpu"],
}


@dataclass(frozen=True)
class Block:
    mark: str
    info: str
    text: str

    @property
    def file(self) -> str | None:
        found = TITLED.fullmatch(self.info)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    return [
        Block(found["mark"] or "", found["info"], found["text"])
        for found in BLOCK.finditer(page.read_text())
    ]


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def run(runner: Runner, commands: str) -> str:
    """Run commands as bash does; their output. Those that print their exit status may fail."""
    stops = [] if "exit status $?" in commands else ["-e"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", *stops, "-c", commands],
        cwd=runner.folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": PYTHON_PATH, MARK: runner.mark, **AS_ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit(280),
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


def test_there_are_seven_steps_in_both_languages() -> None:
    assert len(STEPS) == 7
    assert sorted(path.name for path in JAPANESE.glob("*.md")) == STEPS


@pytest.mark.parametrize("page", IN_JAPANESE, ids=lambda page: page.name)
def test_both_languages_have_the_same_blocks(page: Path) -> None:
    assert blocks(DOCS / "ja" / page.relative_to(DOCS)) == blocks(page) != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_a_file_a_command_or_output(page: Path) -> None:
    found = blocks(page)
    assert [each for each in found if each.info not in SHOWN and not each.file] == []
    marks = {each.mark for each in found} - set(RUNNABLE)
    assert [mark for mark in marks if not re.fullmatch(r"not run: \w.+", mark)] == []


@pytest.mark.processes
@pytest.mark.timeout(560)
@pytest.mark.parametrize("page", [p for p in PAGES if PRINTED[p.name]], ids=lambda page: page.name)
def test_commands_run(runner: Runner, page: Path) -> None:
    [series] = [series for series in SERIES if page in series]
    for earlier in series[: series.index(page) + 1]:
        for each in blocks(earlier):
            if each.file:
                (runner.folder / each.file).write_text(each.text)
    printed = ""
    for each in blocks(page):
        if each.info == "sh" and each.mark in RUNNABLE:
            if each.mark == "needs: mpirun":
                skip_without_mpi()
            printed += run(runner, shortened(each.text))
    missing = [wanted for wanted in PRINTED[page.name] if not re.search(wanted, printed, re.DOTALL)]
    assert missing == [], printed
