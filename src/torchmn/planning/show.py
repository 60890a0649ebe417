"""Predictions as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from torchmn.errors import UsageError
from torchmn.planning.description import Description, Setting
from torchmn.planning.prediction import Prediction
from torchmn.planning.what_pays import Change


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


_RESULTS: dict[str, Callable[[Prediction], str]] = {
    "step, ms": lambda each: f"{each.seconds * 1e3:.1f}",
    "from .. to": lambda each: f"{each.low_s * 1e3:.0f} .. {each.high_s * 1e3:.0f}",
    "samples/s": lambda each: f"{each.samples_per_s:.4g}",
    "speed-up": lambda each: f"{each.speed_up:.2f}",
    "efficiency": lambda each: f"{each.efficiency:.1%}",
}
_PARTS: dict[str, Callable[[Prediction], str]] = {
    "compute": lambda each: f"{each.step.compute_s * 1e3:.1f}",
    "coding": lambda each: f"{each.step.coding_s * 1e3:.1f}",
    "exchange": lambda each: f"{each.step.exposed_s * 1e3:.1f}",
    "slowest rank": lambda each: f"{each.step.straggler_s * 1e3:.1f}",
}


def _setting_of(known: Description, each: Prediction) -> dict[str, str]:
    setting = each.setting
    return {
        "hosts": str(setting.hosts),
        "ranks": str(setting.num_ranks),
        "link": "-" if setting.hosts == 1 else link_text(known, setting),
        "schedule": setting.schedule,
        "codec": setting.codec,
        "batch": str(each.samples),
    }


def tables_of(known: Description, predictions: Sequence[Prediction]) -> list[Table | Text]:
    """What is predicted, and the parts of a step: a row per prediction in each.

    What is the same in all predictions stands above them: the tables fit into 80 columns.
    """
    settings = [_setting_of(known, each) for each in predictions]
    same = {
        name: value
        for name, value in settings[0].items()
        if name != "ranks" and all(other[name] == value for other in settings)
    }
    common = ", ".join(f"{name} {value}" for name, value in same.items())
    title = Text.assemble((known.title, "bold"), "\n" if known.title else "", f"all with {common}")
    tables = [_table("the step"), _table("its parts, in milliseconds")]
    for table in tables:
        for name in settings[0]:
            if name not in same:
                is_word = name in ("schedule", "codec")
                table.add_column(name, justify="left" if is_word else "right")
    for table, names in zip(tables, (_RESULTS, _PARTS), strict=True):
        for name in names:
            table.add_column(name, justify="right")
    for each, setting in zip(predictions, settings, strict=True):
        varied = [Text(value) for name, value in setting.items() if name not in same]
        for table, values in zip(tables, (_RESULTS, _PARTS), strict=True):
            table.add_row(*varied, *(text_of(each) for text_of in values.values()))
    return [title, *tables]


def changes_table(changes: Sequence[Change]) -> Table:
    """What would pay."""
    table = _table("what would pay; samples/s of all ranks, relative to now")
    table.add_column("change")
    for column in ("samples/s", "step, ms", "from .. to", "efficiency"):
        table.add_column(column, justify="right")
    for change in changes:
        each = change.prediction
        table.add_row(
            change.text,
            f"x {change.gain:.2f}",
            f"{each.seconds * 1e3:.1f}",
            f"{each.low_s * 1e3:.0f} .. {each.high_s * 1e3:.0f}",
            f"{each.efficiency:.1%}",
        )
    return table


def link_text(known: Description, setting: Setting) -> str:
    """The link of a setting."""
    if setting.rate is not None:
        return setting.rate
    if known.link is None:
        return "-"
    if known.link.bandwidth_bytes_per_s is None:
        return known.link.rate or "-"
    return f"{known.link.bandwidth_bytes_per_s * 8e-9:.3g} Gb/s"


def as_json(
    known: Description,
    predictions: Sequence[Prediction],
    changes: Sequence[Change],
    refused: Sequence[str],
) -> dict[str, Any]:
    """Everything that the tables show, as numbers, with the description."""
    return {
        "description": msgspec.to_builtins(known),
        "predictions": [_row(each) for each in predictions],
        "what_pays": [
            {"change": change.text, "gain": change.gain, **_row(change.prediction)}
            for change in changes
        ],
        "not_predicted": list(refused),
    }


def _row(each: Prediction) -> dict[str, Any]:
    return {
        "setting": msgspec.to_builtins(each.setting),
        "samples": each.samples,
        "step_s": each.seconds,
        "low_s": each.low_s,
        "high_s": each.high_s,
        "compute_s": each.step.compute_s,
        "coding_s": each.step.coding_s,
        "exposed_s": each.step.exposed_s,
        "straggler_s": each.step.straggler_s,
        "samples_per_s": each.samples_per_s,
        "speed_up": each.speed_up,
        "efficiency": each.efficiency,
        "notes": list(each.notes),
    }


def draw(known: Description, predictions: Sequence[Prediction], path: Path) -> None:
    """Efficiency over the number of ranks, a line for each other setting, with error bars.

    Raises UsageError: matplotlib is not installed, the file's ending is not a format of it, or the
    file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError(
            "Pictures need matplotlib, which is not installed: pip install matplotlib."
        ) from None
    lines: dict[str, list[Prediction]] = {}
    for each in predictions:
        setting = each.setting
        name = ", ".join(
            (setting.schedule, setting.codec, link_text(known, setting), f"batch {each.samples}")
        )
        lines.setdefault(name, []).append(each)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, of_line in lines.items():
        of_line.sort(key=lambda each: each.setting.num_ranks)
        ranks = [each.setting.num_ranks for each in of_line]
        axes.plot(ranks, [100 * each.efficiency for each in of_line], marker="o", label=name)
        axes.fill_between(
            ranks,
            [100 * each.alone_s / each.high_s for each in of_line],
            [100 * each.alone_s / each.low_s for each in of_line],
            alpha=0.15,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("speed of a rank, % of its speed alone")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(known.title or "predicted efficiency")
    axes.legend(fontsize="small")
    figure.tight_layout()
    known_endings = sorted(figure.canvas.get_supported_filetypes())
    try:
        if path.suffix[1:].lower() not in known_endings:  # without one it would be NAME.png
            raise UsageError(
                f"--picture {path} cannot be drawn: its ending is not that of a format. Write "
                f"{path.stem or 'plan'}.png, or another of {', '.join(known_endings)}."
            )
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(
            f"--picture {path} cannot be written ({error.strerror or error}): name a file in a "
            "folder that exists."
        ) from None
    finally:
        pyplot.close(figure)
