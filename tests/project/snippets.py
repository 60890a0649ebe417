"""The blocks of code in the documents, with the remark before each.

An HTML comment before a block, ``<!-- not run: reason -->``, exempts it from the tests.
``python -m tests.project.snippets`` lists the blocks that are exempt, and why.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- (?P<remark>[^\n]*?) -->\n+)?^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
SHELL = ("", "sh", "bash", "console")
# Options that act while the command line is read; `tests/unit/cli/test_main.py` tries them.
CHANGES_THE_SHELL = ("--install-completion", "--show-completion")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of code, where it stands, and why it is not run."""

    page: str
    line: int
    info: str
    text: str
    remark: str

    @property
    def language(self) -> str:
        return (self.info.split() or [""])[0]

    @property
    def file(self) -> str | None:
        """The name under which the reader saves it."""
        found = re.search(r'title="([\w.]+)"', self.info)
        return found[1] if found else None

    @property
    def reason_not_to_run(self) -> str | None:
        return self.remark.partition(":")[2].strip() if self.remark.startswith("not run") else None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page=page.relative_to(ROOT).as_posix(),
            line=text.count("\n", 0, found.start("text")) + 1,
            info=found["info"],
            text=found["text"],
            remark=found["remark"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


def pages() -> list[Path]:
    """README, the first page, tutorials, how-tos and explanations, in both languages."""
    docs = ROOT / "docs"
    folders = (docs / "tutorial", docs / "how-to", docs / "explain", docs / "ja")
    return [
        *(ROOT / "README.md", docs / "index.md"),
        *(page for folder in folders for page in sorted(folder.rglob("*.md"))),
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each call of ``torchmn`` in a block of shell commands, without the first."""
    if block.language not in SHELL:
        return
    lines = block.text.replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in typed or lines:
        found = re.match(r"(?:[A-Z_]+=\S+ )*(?:(?:mpirun|srun|torchrun) .*)?\btorchmn (.*)", line)
        if found and "<" not in line and not line.startswith("torchmn:"):
            # a caption such as `torchmn run  ...  what it does` has no words that are optional
            words = shlex.split(re.split(r" [|&>]|;", found[1])[0], comments=True)
            if not set(words) & {*CHANGES_THE_SHELL}:
                yield words


if __name__ == "__main__":
    for page in pages():
        for each in blocks(page):
            if each.reason_not_to_run is not None:
                print(f"{each.place}: {each.reason_not_to_run}")
