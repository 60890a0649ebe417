"""docs/reference/messages.md holds the messages of the package."""

from __future__ import annotations

import ast

from .messages import PAGE, all_messages, messages_in, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "write it again: python -m tests.project.messages"


def test_kinds_of_messages() -> None:
    source = (
        "def f(n):\n"
        "    if n:\n"
        "        raise UsageError(f'n={n!r} is too large. ' 'Make it smaller.')\n"
        "    text = 'slow'\n"
        "    warnings.warn(text, RuntimeWarning)\n"
        "    raise error\n"
        "option = typer.Option(1, '--size', help='How many')\n"
    )
    found = [(kind, text) for _, kind, text in sorted(messages_in(ast.parse(source)))]
    assert found == [
        ("UsageError", "n={n} is too large. Make it smaller."),
        ("warning", "slow"),
        ("help of --size", "How many"),
    ]


def test_most_messages_are_found() -> None:
    assert sum(map(len, all_messages().values())) > 300
