"""Where the project says that it is, and the workflow that publishes the site there."""

import re
from pathlib import Path

import pytest
import yaml

from scripts import make_site

from .metadata import PROJECT, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_addresses_belong_to_one_repository() -> None:
    urls = PROJECT["urls"]
    owner, name = urls["Source"].removeprefix("https://github.com/").split("/")
    assert urls["Issues"] == f"{urls['Source']}/issues"
    assert urls["Documentation"] == f"https://{owner}.github.io/{name}/" == make_site.address()
    assert urls["Changelog"].startswith(urls["Source"])
    assert (ROOT / urls["Changelog"].rpartition("/")[2]).is_file()


def test_the_release_notes_are_those_of_this_version() -> None:
    """Their page is on the site."""
    page = PROJECT["urls"]["Release notes"].removeprefix(make_site.address())
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/torchmn/__init__.py").read_text())
    assert version
    assert page == f"project/release-{version[1]}.html"
    notes = (ROOT / "docs" / page).with_suffix(".md").read_text()
    assert notes.startswith(f"# Release notes: {version[1]}\n")


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    is_python = "Programming Language :: Python :: "
    versions = [c.removeprefix(is_python) for c in PROJECT["classifiers"] if is_python in c]
    first, last = versions[0], versions[-1]
    following = f"3.{int(last.partition('.')[2]) + 1}"
    assert PROJECT["requires-python"] == f">={first},<{following}"
    assert f"PYTHONS:-{' '.join(versions)}}}" in (ROOT / "scripts" / "check_pythons.sh").read_text()
    said = {
        found
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "scripts/setup.sh"]
        for found in re.findall(r"Python (3\.\d+ to 3\.\d+)", page.read_text())
    }
    assert said == {f"{first} to {last}"}


@pytest.mark.skipif(not WORKFLOWS, reason="the sdist has no workflows")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_there_is(path: Path) -> None:
    """Commands are targets of the Makefile, and actions have a version."""
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    assert {command.removeprefix("make ") for command in commands} <= targets
    actions = [step["uses"] for step in steps if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"actions/[\w-]+@v\d+", action)] == []
    assert workflow["permissions"] == {"contents": "read"}, "more only where it is needed"


@pytest.mark.skipif(not WORKFLOWS, reason="the sdist has no workflows")
def test_the_site_that_is_built_is_the_one_that_is_published() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/site.yml").read_text())["jobs"]
    built = steps["build"]["steps"]
    [upload] = [step for step in built if "upload-pages-artifact" in step.get("uses", "")]
    assert {"run": "make docs"} in built
    assert ROOT / upload["with"]["path"] == ROOT / "build" / "site"
    assert steps["publish"]["needs"] == "build"
