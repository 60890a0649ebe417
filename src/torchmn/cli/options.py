"""Make the options of a subcommand from the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Command = Callable[..., None]
Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The training script, or a module with -m.")
]
Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")]
SiteFile = Annotated[
    Path | None,
    typer.Option(help="Site file (default: torchmn.toml, else ~/.config/torchmn/site.toml)."),
]


def add_options(kind: type[Any]) -> Callable[[Command], Command]:
    """Give a command that takes ``**options`` an option for each field of a dataclass.

    The metadata of a field has ``help`` if it gets an option, and may have ``flags``, the names of
    the option, ``metavar``, ``values`` that a shell completes, ``variable``, the environment
    variable that replaces the option, ``is_text`` if the command itself parses the value, and
    ``is_hidden`` if the help does not list the option. A field that holds a tuple gets a repeatable
    option.
    """

    def add(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        hints = get_type_hints(kind)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for each in fields(kind):
            if not each.metadata.get("help"):
                continue
            is_repeatable = each.default == ()
            option = typer.Option(
                *(each.metadata.get("flags") or (f"--{each.name.replace('_', '-')}",)),
                metavar=each.metadata.get("metavar"),
                envvar=each.metadata.get("variable"),
                show_envvar=False,
                hidden=each.metadata.get("is_hidden", False),
                help=each.metadata["help"],
                autocompletion=values_of(values)
                if (values := each.metadata.get("values"))
                else None,
            )
            kind_of_value = str | None if each.metadata.get("is_text") else hints[each.name]
            parameters.append(
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None if is_repeatable else each.default,
                    annotation=Annotated[
                        list[str] | None if is_repeatable else kind_of_value, option
                    ],
                )
            )
        setattr(command, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
        return command

    return add


def values_of(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes these values in a shell."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, with lists converted to tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }
