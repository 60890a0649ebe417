"""The sdist and the wheel: the same bytes from the same commit, with what should be in them."""

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.limits import limit
from torchmn import __version__

ROOT = Path(__file__).parents[2]
# What hosts of repositories and continuous integration read, and no one else.
LEFT_OUT = (".ci/", ".github/", ".pre-commit-config.yaml", ".gitattributes")
FOR_DEVELOPERS = {"test", "dev", "dist", "docs"}
FOR_A_CHECKOUT = {"examples", "translation"}  # extras of programs that are in no wheel
# Extras that bring a framework, for those who have chosen it.
FOR_FRAMEWORKS = {"lightning", "accelerate", "transformers", "ignite"}
COMMIT_TIME = "1700000000"

pytestmark = pytest.mark.processes


def _tracked() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip(reason="no git, or no checkout")
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def _copy_to(folder: Path, mode: int) -> None:
    for name in _tracked():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, path)
        path.chmod(mode | (0o100 if os.access(ROOT / name, os.X_OK) else 0))


def _build(source: Path, out: Path, *options: str, umask: int = 0o022, **env: str) -> list[Path]:
    for module in ("build", "hatchling", "hatch_fancy_pypi_readme"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(reason=f"no {module}: install it with 'make setup'")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source],
        env={**os.environ, "SOURCE_DATE_EPOCH": COMMIT_TIME, **env},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=limit(100),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(out.iterdir())


def _hashes(paths: list[Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("first")
    _copy_to(folder / "torchmn", 0o644)
    _build(folder / "torchmn", folder / "dist")
    return folder / "dist"


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    with zipfile.ZipFile(built / f"torchmn-{__version__}-py3-none-any.whl") as wheel:
        text = wheel.read(f"torchmn-{__version__}.dist-info/METADATA").decode()
    return Parser().parsestr(text)


def test_same_bytes_from_another_folder_at_another_time_with_another_umask(
    built: Path, tmp_path: Path
) -> None:
    source = tmp_path / "another folder" / "elsewhere"
    _copy_to(source, 0o600)
    for path in source.rglob("*"):
        os.utime(path, (1, 1_234_567_890))
    (source / "src" / "torchmn" / "__pycache__").mkdir()
    (source / "src" / "torchmn" / "__pycache__" / "left.pyc").write_bytes(b"by a test")
    again = _build(source, tmp_path / "dist", umask=0o077, TZ="Asia/Tokyo", LC_ALL="C")
    assert _hashes(again) == _hashes(sorted(built.iterdir()))


def test_the_sdist_has_what_git_tracks(built: Path) -> None:
    with tarfile.open(built / f"torchmn-{__version__}.tar.gz") as sdist:
        prefix = f"torchmn-{__version__}/"
        names = {name.removeprefix(prefix) for name in sdist.getnames()}
    expected = {name for name in _tracked() if not name.startswith(LEFT_OUT)}
    assert names - {"PKG-INFO"} == expected


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / f"torchmn-{__version__}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/") for name in _tracked() if name.startswith("src/torchmn/")}
    assert "torchmn/py.typed" in names
    assert names == expected


def test_all_is_every_extra_that_torchmn_itself_can_use(metadata: Message) -> None:
    """A new extra belongs into ``all``, or into one of the sets above."""
    extras: dict[str, set[str]] = {name: set() for name in metadata.get_all("Provides-Extra", [])}
    for text in metadata.get_all("Requires-Dist", []):
        found = re.fullmatch(r"(.*?)(?:; | and )extra == '(.+)'", text)
        if found:
            extras[found[2]].add(found[1])
    for_users = extras.keys() - FOR_DEVELOPERS - FOR_A_CHECKOUT - FOR_FRAMEWORKS - {"all"}
    assert {"compression", "mpi", "report"} <= for_users
    assert extras["all"] == set().union(*(extras[name] for name in for_users))


def test_the_description_is_whole_without_the_files_beside_it(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert "docs/" not in "".join(re.findall(r"\]\(([^)]*)\)", text))
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link] == []
    assert "![" not in text
    # What is left out are figures and addresses: all other words of the README are there.
    words = set(
        re.findall(r"\w+", re.sub(r"!\[.*|\]\([^)]*\)", "", (ROOT / "README.md").read_text()))
    )
    captions = re.findall(
        r"^!\[.*\n\n\*((?:.+\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    missing = words - set(re.findall(r"\w+", text)) - set(re.findall(r"\w+", "".join(captions)))
    assert missing == set()


def test_a_package_index_can_show_the_description(metadata: Message) -> None:
    markdown = pytest.importorskip("readme_renderer.markdown", reason="no twine: 'make setup'")
    payload = metadata.get_payload()
    assert isinstance(payload, str)
    warnings = io.StringIO()
    html = markdown.render(payload, stream=warnings)
    assert html is not None, warnings.getvalue()
    assert ">torchmn<" in html
