"""Lists the public names of every package.

``python -m tests.project.names`` writes the page docs/reference/names.md.
"""

import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

import torchmn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "names.md"
# Wings that users have no reason to import.
INTERNAL = {
    *("base", "cli", "control", "doctor", "observe", "submit"),
}
OTHER_NAMES = {
    **{home: name for name, home in torchmn._SUBMODULES.items() if home != f"torchmn.{name}"},
    "torchmn.nn": "torchmn.links",
    "torchmn.nn.functions": "torchmn.functions",
}
TITLE = """# Public names

The names of `torchmn` and of its packages; in brackets, another name of the same package.
`help(torchmn.scatter_loader)` prints the documentation of one, with its arguments and an example;
the site that `make docs` builds has all of them.
`python -m tests.project.names` writes this page from the source.
"""


def packages() -> list[str]:
    """The root, then all packages that say what they offer to users, in alphabetical order."""
    walk = pkgutil.walk_packages(torchmn.__path__, "torchmn.")
    found = [each.name.removeprefix("torchmn.") for each in walk if each.ispkg]
    public = [name for name in found if name.partition(".")[0] not in INTERNAL]
    return ["", *sorted(name for name in public if hasattr(_module(name), "__all__"))]


def names_of(package: str) -> list[str]:
    """What a package says that it offers."""
    return list(_module(package).__all__)  # type: ignore[attr-defined]


def _module(package: str) -> object:
    return import_module(f"torchmn.{package}".rstrip("."))


def summary(value: object) -> str:
    """The first paragraph of the documentation, or what a constant holds."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    if isinstance(value, dict | list | tuple):
        return ", ".join(f"`{each}`" for each in value)
    return f"`{value!r}`" if isinstance(value, int | str) else ""


def without_example() -> list[str]:
    """Public functions and classes whose documentation has no example that the tests run."""
    found = {}
    for package in packages():
        for name in names_of(package):
            value = getattr(_module(package), name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not is_type(value):
                found[f"{value.__module__}.{name}"] = ">>> " in (inspect.getdoc(value) or "")
    return sorted(name for name, has_example in found.items() if not has_example)


def is_type(value: object) -> bool:
    """Whether it is there for annotations only: a protocol."""
    return bool(getattr(value, "_is_protocol", False))


def page() -> str:
    """The whole text of the page."""
    parts = [TITLE]
    for package in packages():
        title = f"torchmn.{package}".rstrip(".")
        names = ", ".join(f"`{name}`" for name in names_of(package))
        other = f" ({OTHER_NAMES[title]})" if title in OTHER_NAMES else ""
        parts.append(f"## {title}{other}\n{names}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
