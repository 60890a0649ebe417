"""Settings that many jobs share: queue, account, modules, environment. One field, one option.

`torchmn submit` has an option for each field with a help text, and ``torchmn.toml`` a key for each.
Everything here ends up in a line of a shell script, so every value is checked: no value may become
a second line, and none a second word where a scheduler reads one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from torchmn.base.errors import UnknownNameError, UsageError
from torchmn.cluster.environment_variables import check_variable_name

_NUMBERS = ("threads", "gpus", "signal", "grace")
Export = tuple[str, str]
Rule = tuple[Callable[[str], object], str]

_ANY: Rule = (lambda _: True, "")
_WORD: Rule = (re.compile(r"[^\s#]+").fullmatch, "one word without blanks or #")
_LINE: Rule = (
    lambda text: text.strip() and len(text.splitlines()) == 1,
    "a single line that is not empty",
)
_WALLTIME: Rule = (
    re.compile(r"(?=.*[1-9])\d+:[0-5]\d:[0-5]\d").fullmatch,
    "hours:minutes:seconds and greater than zero, such as 00:10:00 for ten minutes",
)
# directives know no quotes, and each scheduler gives %, $ or : a meaning
_PATH: Rule = (
    re.compile(r"[\w./+=@-]+").fullmatch,
    "made of letters, digits and _ . / + = @ - only, since it is written into a directive",
)


def _setting(rule: Rule | None, text: str = "", *flags: str, default: Any = None) -> Any:
    """Declare a field with its rule and, if it has an option, help text and option names."""
    metavar = {"-x": "NAME[=VALUE]"}.get("".join(flags))
    metadata = {"rule": rule, "help": text, "flags": flags, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a job besides its size and its script; None or empty if not given.

    ``chunk`` is added to every node in the select of PBS, such as ``ncpus=36:ngpus=2``. Grid Engine
    needs ``parallel_environment`` for more than one slot, and ``gpu_resource`` is its resource that
    counts GPUs for each slot. Raises UsageError: a value is invalid.
    """

    queue: str | None = _setting(_WORD, "Queue, or Slurm's partition.")
    group: str | None = _setting(_WORD, "Account or project to charge.")
    walltime: str | None = _setting(_WALLTIME, "Time limit as hours:minutes:seconds.")
    threads: int | None = _setting(None, "Number of threads of each rank.")
    gpus: int | None = _setting(None, "Number of GPUs on each node.")
    signal: int | None = _setting(
        None, "Send SIGUSR1 to the script this number of seconds before the time limit."
    )
    grace: int | None = _setting(None, "Seconds that ranks have for saving after SIGTERM.")
    chunk: str | None = _setting(_WORD)
    parallel_environment: str | None = _setting(_WORD)
    gpu_resource: str | None = _setting(_WORD)
    activate: str | None = _setting(_LINE, "Folder of a venv, or a conda environment.")
    log_dir: str | None = _setting(_PATH, "Folder for the output of the job.")
    join_output: bool | None = _setting(
        None, "Write standard output and error to one file.", "--join-output/--split-output"
    )
    modules: tuple[str, ...] = _setting(
        _LINE, "Environment module to load (repeatable).", "--module-load", default=()
    )
    directives: tuple[str, ...] = _setting(
        _LINE, "Additional directive for the scheduler (repeatable).", "--directive", default=()
    )
    exports: tuple[Export, ...] = _setting(
        None, "Environment variable to export to all ranks (repeatable).", "-x", default=()
    )

    def __post_init__(self) -> None:
        _check({each.name: getattr(self, each.name) for each in fields(self)})
        for name, _ in self.exports:
            check_variable_name(name)

    def merged_over(self, defaults: Settings) -> Settings:
        """Return these settings, with those of ``defaults`` in place of what is not given.

        Modules and directives are joined, those of ``defaults`` first. If both export a variable,
        this value counts.
        """
        own = {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) is not None and value != ()
        }
        return replace(
            defaults,
            **own
            | {
                "modules": (*defaults.modules, *self.modules),
                "directives": (*defaults.directives, *self.directives),
                "exports": tuple(dict((*defaults.exports, *self.exports)).items()),
            },
        )


def _check(values: Mapping[str, Any], *, are_options: bool = False) -> None:
    """Raise UsageError, with the name of key or option, for a value that is not valid."""
    for each in fields(Settings):
        value = values.get(each.name)
        if value is None:
            continue
        name = _option_of(each) if are_options else each.name
        is_valid, text = each.metadata["rule"] or _ANY
        for item in value if isinstance(value, tuple) else (value,):
            if not is_valid(item):
                raise UsageError(f"{name} must be {text}, got {item!r}.")
        if each.name in _NUMBERS and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}.")


def _option_of(setting: Field[Any]) -> str:
    flags = setting.metadata["flags"] or (f"--{setting.name.replace('_', '-')}",)
    return str(flags[0].partition("/")[0])


def settings_from_options(options: Mapping[str, Any]) -> Settings:
    """Make settings from options of the command line. Raises UsageError with the option."""
    _check(options, are_options=True)
    return Settings(**options)


def settings_from_table(table: Mapping[str, object], *, others: Sequence[str] = ()) -> Settings:
    """Make settings from a TOML table. Raises UsageError or UnknownNameError.

    ``others`` are further keys that the table may have, for the message.
    """
    known = {each.name: each for each in fields(Settings)}
    values = {}
    for key, value in table.items():
        if key not in known:
            raise UnknownNameError("key", key, [*known, *others])
        values[key] = _value(known[key], value)
    return Settings(**values)


def _value(setting: Field[Any], value: object) -> Any:
    """Convert a value of TOML to the field's type. Raises UsageError: it has another type."""
    if setting.name == "exports":
        # numbers too: ``NCCL_SHM_DISABLE = 1`` is what people write
        if isinstance(value, dict) and all(type(v) in (str, int, float) for v in value.values()):
            return tuple((name, str(item)) for name, item in value.items())
        rule = 'a table, as in { NCCL_SHM_DISABLE = "1" }'
    elif setting.default == ():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        rule = 'a list of strings, as in ["first", "second"]'
    else:
        kind, rule = {
            **dict.fromkeys(_NUMBERS, (int, "a whole number")),
            "join_output": (bool, "true or false"),
        }.get(setting.name, (str, "a string in quotes"))
        if type(value) is kind:
            return value
    raise UsageError(f"{setting.name} must be {rule}, got {value!r}.")
