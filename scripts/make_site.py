"""Builds the documentation site: ``make docs``, or ``python scripts/make_site.py --output DIR``.

The pages in docs/ are plain Markdown, which any viewer of the repository shows. From them this
script makes the sources of the site in ``DIR-source``: the same pages, ARCHITECTURE.md and the
other documents of the project, the files that pages link to, a reference page per package with
every public name, and a table of contents per section. Sphinx turns them into HTML, offline, and
any warning fails. Then every link, anchor and size of what it made is checked.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.project.names import packages, summary  # noqa: E402  the same packages as the page lists

MAX_PAGE_BYTES = 1_000_000
NAMES = "reference/api/index"
MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security-policy.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "docs/reference/names.md": f"{NAMES}.rst",
}
"""Where files of the repository are on the site, if not at their place within docs/."""
LEXERS = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".yaml": "yaml"}


@dataclass(frozen=True)
class Section:
    """A folder of the table of contents; pages that are not named follow those that are."""

    title: str
    folder: str
    about: str
    pages: tuple[str, ...] = ()


SECTIONS = (
    Section(
        "Tutorial",
        "tutorial",
        "A plain loop and seven lines; then seven steps, from one device to a job on a cluster.",
        ("how-to/first-training", "how-to/two-hosts", "how-to/slurm"),
    ),
    Section(
        "How-to",
        "how-to",
        "What to do for a task: start, save, survive failures, find out why a training is slow.",
        (
            "how-to/install",
            "how-to/port-a-script",
            "how-to/one-machine-with-gpus",
            "how-to/start",
            "how-to/job-scripts",
            "how-to/kubernetes",
            "how-to/notebook",
            "how-to/lightning",
            "how-to/transformers",
            "how-to/tools",
            "how-to/third-party-libraries",
            "how-to/checkpoints",
            "how-to/failures",
            "how-to/elastic",
            "how-to/spot",
            "how-to/slow",
            "how-to/record",
            "how-to/slow-links",
            "how-to/lora",
            "how-to/gradient-accumulation",
            "how-to/large-batch",
            "how-to/mixed-gpus",
            "how-to/imagenet",
            "how-to/translation",
            "coming-from-ddp",
            "coming-from-horovod",
            "coming-from-chainermn",
            "coming-from-cntk",
        ),
    ),
    Section(
        "Explanation",
        "explain",
        "How things work, why they are as they are, and when which method pays.",
        (
            "explain/beside-other-libraries",
            "explain/number-of-ranks",
            "explain/choosing",
            "explain/gpus",
            "explain/recipes",
            "explain/resume",
        ),
    ),
    Section(
        "Reference",
        "reference",
        "Every public name, option, variable, message and exit status.",
        (
            NAMES,
            "reference/communicators",
            "reference/exchange",
            "reference/data",
            "reference/readers",
            "reference/evaluation",
            "reference/training",
            "reference/links",
            "reference/functions",
            "reference/large-batch",
            "reference/checkpoint",
            "reference/preemption",
            "reference/record",
            "reference/report",
            "reference/plan",
            "reference/doctor",
            "reference/cntk",
            "reference/works-with",
            "reference/logging",
            "reference/environment",
            "reference/exit-status",
            "reference/messages",
            "glossary",
        ),
    ),
    Section(
        "Project",
        "project",
        "The design, how to change it, what has changed, what was measured, and security.",
        (
            "project/architecture",
            "project/contributing",
            "project/changelog",
            "project/benchmarks",
            "security",
        ),
    ),
    Section(
        "日本語",
        "ja",
        "日本語のチュートリアルです。前半は普通のスクリプトと7行の変更、後半は7つのステップです。",
        ("ja/how-to/first-training",),
    ),
)

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})(.*)$")
_SEARCHED = re.compile(r"^<!-- search: (.+) -->$")
_TITLED = re.compile(r"^(`{3,})(\w+) title=\"([^\"]+)\"$")


class SiteError(Exception):
    """The sources cannot become a site."""


# --------------------------------------------------------------------------------------- the pages


def place_of(file: str) -> str | None:
    """Where a file of the repository is on the site; None: it has no page of its own."""
    if file in MOVED:
        return MOVED[file]
    is_own = file.startswith("docs/") and file.endswith((".md", ".png", ".svg"))
    return file.removeprefix("docs/") if is_own else None


def site_text(text: str, file: str, link_to_file: Callable[[str], str]) -> str:
    """A page as the site has it: links lead to places on the site, titles of code are captions.

    What ``<!-- search: ... -->`` below a title names is an entry of the index: the search shows the
    page first, since it scores an entry that is the query above titles and words of the text.
    ``link_to_file`` is asked for the place of a file that is no document.
    """
    here = PurePosixPath(place_of(file) or file).parent

    def link(match: re.Match[str]) -> str:
        target, anchor = urldefrag(match[1])
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        wanted = os.path.normpath(PurePosixPath(file).parent / target)
        place = place_of(wanted)
        if place is None and (ROOT / wanted).is_file():
            place = link_to_file(wanted)
        if place is None:
            return match[0]  # leads nowhere: Sphinx says so
        return f"]({os.path.relpath(place, here)}{'#' if anchor else ''}{anchor})"

    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
            titled = _TITLED.match(line)
            if titled:
                line = f"{titled[1]}{{code-block}} {titled[2]}\n:caption: {titled[3]}\n"
        elif found and found[1].startswith(fence) and not found[2].strip():
            fence = ""
        elif not fence and (words := searched_words(line)):
            line = f"\n```{{index}} {', '.join(f'! {word}' for word in words)}\n```\n"
        elif not fence:
            line = _LINK.sub(link, line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def searched_words(line: str) -> list[str]:
    """What is searched for where a page should be found; [] for an ordinary line."""
    found = _SEARCHED.match(line)
    return [word.strip() for word in found[1].split(",")] if found else []


def file_page(file: str) -> str:
    """A page that shows a file of the repository, outside of the contents and the search."""
    text = (ROOT / file).read_text()
    fence = "`" * (3 + max(map(len, re.findall("`+", text)), default=0))
    lexer = LEXERS.get(PurePosixPath(file).suffix, "text")
    head = "---\norphan: true\nnosearch: true\n---\n"
    return f"{head}# {file}\n\n{fence}{lexer}\n{text}{fence}\n"


def write_pages(source: Path) -> None:
    """All documents, and the files that they link to."""
    files: dict[str, str] = {}

    def link_to_file(file: str) -> str:
        files[file] = f"files/{file}.md"
        return files[file]

    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in MOVED)]
    for path in sorted(set(documents)):
        file = path.relative_to(ROOT).as_posix()
        place = place_of(file)
        if path.exists() and place and file not in ("README.md", "docs/reference/names.md"):
            write(source / place, site_text(path.read_text(), file, link_to_file))
    for file, place in files.items():
        write(source / place, file_page(file))
    for folder in ("figures", "_static"):
        shutil.copytree(ROOT / "docs" / folder, source / folder)
    shutil.copy(ROOT / "docs" / "conf.py", source)


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# -------------------------------------------------------------------------------- table of contents


def natural(name: str) -> list[tuple[int, str]]:
    """A key that puts 2 before 10, and numbers before words."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return [(int(digits) if digits else sys.maxsize, word) for digits, word in parts]


def pages_of(section: Section, source: Path) -> list[str]:
    """Those that exist, in order; what is in the folder and not named comes last."""
    named = [page for section in SECTIONS for page in section.pages]
    found = {
        path.relative_to(source).with_suffix("").as_posix()
        for ending in ("md", "rst")
        for path in (source / section.folder).rglob(f"*.{ending}")
    }
    rest = sorted(found - {*named, f"{section.folder}/index"}, key=natural)
    rest = [page for page in rest if not page.startswith("reference/api/")]
    exist = [p for p in section.pages if any((source / f"{p}.{e}").exists() for e in ("md", "rst"))]
    return exist + rest


def write_contents(source: Path) -> None:
    """An index per section, and the sections in the index of the site."""
    sections = []
    for section in SECTIONS:
        pages = pages_of(section, source)
        if not pages:
            continue
        index = source / section.folder / "index.md"
        has_text = index.exists()
        text = index.read_text() if has_text else f"# {section.title}\n\n{section.about}\n"
        write(index, text + toctree([f"/{page}" for page in pages], is_hidden=has_text))
        sections.append(f"{section.title} </{section.folder}/index>")
    home = source / "index.md"
    write(home, home.read_text() + toctree(sections, is_hidden=True))


def toctree(entries: list[str], *, is_hidden: bool = False) -> str:
    """Sphinx's table of contents."""
    options = ":hidden:\n" if is_hidden else ""
    return "\n```{toctree}\n:maxdepth: 1\n" + options + "\n" + "\n".join(entries) + "\n```\n"


# ------------------------------------------------------------------------------------ the reference


def public_names() -> dict[str, list[str]]:
    """By package, the names in its ``__all__``; and those of the errors, a module."""
    names = {}
    for package in [*packages(), "errors"]:
        module = f"torchmn.{package}".rstrip(".")
        names[module] = sorted(import_module(module).__all__)
    return names


def homes(names: dict[str, list[str]]) -> dict[int, str]:
    """The name under which an object is described in full, by its id.

    That of the root, else of the package that defines it, else the first one.
    """
    found: dict[int, str] = {}
    for module, members in names.items():
        for member in members:
            value = getattr(import_module(module), member)
            defined_in = getattr(value, "__module__", "") or ""
            is_better = defined_in.startswith(f"{module}.") and module != "torchmn"
            known = found.get(id(value))
            if known is None or (is_better and known.count(".") > 1):
                found[id(value)] = f"{module}.{member}"
    return found


def write_reference(source: Path) -> None:
    """A page per package with every public name, and a page that lists them."""
    names = public_names()
    home = homes(names)
    tables = ["Public names\n============\n\nWith the beginning of the documentation of each.\n"]
    modules = "\n".join(f"   {module}" for module in names)
    tables.append(f".. toctree::\n   :maxdepth: 1\n   :hidden:\n\n{modules}\n")
    for module, members in names.items():
        entries = [entry(module, member, home) for member in members]
        head = f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n\n"
        write(source / "reference" / "api" / f"{module}.rst", head + "\n".join(entries))
        tables.append(table(module, members))
    write(source / f"{NAMES}.rst", "\n".join(tables))


def entry(module: str, member: str, home: dict[int, str]) -> str:
    """The directive that describes a name; in full only at its home."""
    value = getattr(import_module(module), member)
    name = f"{module}.{member}"
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        text = summary(value).replace("`", "``") or f"``{value!r}``"
        return f".. py:data:: {member}\n   :module: {module}\n\n   {text}\n"
    kind = "autofunction"
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    if home[id(value)] != name:
        return (
            f'.. raw:: html\n\n   <span id="{name}"></span>\n\n'
            f".. {kind}:: {name}\n   :no-index:\n\n"
            f"   The same as :py:obj:`{home[id(value)]}`.\n"
        )
    options = ""
    if kind == "autoclass":
        options = f"   :members:\n   :inherited-members: {first_foreign_class(value)}\n"
        if any(base.__name__ == "Enum" for base in value.__mro__):
            options = "   :members:\n   :undoc-members:\n"
    return f".. {kind}:: {name}\n{options}"


def first_foreign_class(value: type) -> str:
    """The first base that is not ours: methods from there on are described elsewhere."""
    foreign = [b.__name__ for b in value.__mro__ if not b.__module__.startswith("torchmn")]
    return foreign[0]


def table(module: str, members: list[str]) -> str:
    """The names of a package with the beginning of their documentation."""
    rows = []
    for member in members:
        text = summary(getattr(import_module(module), member))
        text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
        address = re.sub("_$", r"\_", f"{module}.html#{module}.{member}")  # x_ would be a reference
        link = f"`{member} <{address}>`__"
        rows.append(f"   * - {link}\n     - {text}\n")
    head = f"{module}\n{'-' * len(module)}\n\n.. list-table::\n   :widths: 30 70\n\n"
    return head + "".join(rows)


# -------------------------------------------------------------------------------------- the checks


class Page(HTMLParser):
    """The links of a page, the names of its places, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and "href" in found and found.get("rel") != "canonical":
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])


def faults_of(site: Path) -> Iterator[str]:
    """What is wrong with a built site: dead links and anchors, foreign parts, large pages."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        size = path.stat().st_size
        if size > MAX_PAGE_BYTES:
            yield f"{name}: {size} bytes, at most {MAX_PAGE_BYTES} are allowed"
        for part in page.loaded:
            if re.match(r"(https?:)?//", part):
                yield f"{name}: loads {part} from elsewhere"
        for link in [*page.links, *page.loaded]:
            if re.match(r"(\w+:|//)", link):
                continue
            address, anchor = urldefrag(link)
            address = unquote(address.partition("?")[0])
            target = (path.parent / address).resolve() if address else path
            if not target.exists():
                yield f"{name}: {link} does not exist"
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                yield f"{name}: {link} has no such anchor"


def build(site: Path) -> list[str]:
    """Make the site; returns what is wrong with it."""
    source = site.with_name(f"{site.name}-source")
    for folder in (site, source):
        shutil.rmtree(folder, ignore_errors=True)
    if not (ROOT / "docs" / "index.md").exists():
        raise SiteError("docs/index.md does not exist: it is the first page of the site.")
    write_pages(source)
    write_reference(source)
    write_contents(source)
    doctrees = source / ".doctrees"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-j", "auto", "-d", str(doctrees)]
    command += ["-D", f"html_baseurl={address()}"]
    done = subprocess.run([*command, str(source), str(site)])
    if done.returncode:
        return ["Sphinx warned: see above"]
    return list(faults_of(site))


def address() -> str:
    """Where the site is published: the Documentation address of pyproject.toml."""
    found = re.search(r'^Documentation = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    if not found:
        raise SiteError("pyproject.toml has no Documentation among [project.urls].")
    return found[1]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    site = parser.parse_args().output.resolve()
    try:
        faults = build(site)
    except SiteError as error:
        faults = [str(error)]
    for fault in faults:
        print(f"docs: {fault}", file=sys.stderr)
    if not faults:
        print(f"docs: open {site / 'index.html'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
