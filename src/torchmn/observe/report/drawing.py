"""Draw a chart as SVG within HTML, without a script: marks stretch with the page, texts do not.

A plot has a thousand units in each direction, whatever its size on the screen. Marks are in them;
the texts of the axes stand around them as HTML, so that they are as large on a telephone as on a
screen. The browser shows the ``<title>`` of a mark where the mouse is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

UNITS = 1000
_NUM_TICKS = 5
_DIGITS = 12
_ROUNDING = 1e-9
_LARGEST = 1e300


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The range of an axis, and its ticks with their texts."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str = ""

    def at(self, value: float) -> int:
        """Return the place of a value, in units."""
        return round(UNITS * (value - self.low) / (self.high - self.low))


def axis_of(values: Any, title: str = "", *, spec: str = "") -> Axis:
    """Return an axis for numbers, with ticks at round ones. ``spec`` formats their texts."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.abs(numbers) < _LARGEST]
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 1.0)
    if not high > low:
        margin = abs(high) / 10 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    multiples = range(math.ceil(low / step), math.floor(high / step + _ROUNDING) + 1)
    spec = spec or f",.{max(0, -math.floor(math.log10(step)))}f"
    ticks = [
        (place, format(place, spec)) for place in (round(n * step, _DIGITS) for n in multiples)
    ]
    return Axis(low=low, high=high, ticks=ticks, title=title)


def axis_of_names(names: Sequence[str], title: str = "", *, is_reversed: bool = False) -> Axis:
    """Return an axis on which the name with index ``i`` has the place from ``i`` to ``i + 1``.

    If there are many names, or long ones, only some are shown.
    """
    most = max(1, 48 // (2 + max(map(len, names))))
    step = -(-len(names) // most)
    ticks = [(index + 0.5, names[index]) for index in range(0, len(names), step)]
    ends = (len(names), 0) if is_reversed else (0, len(names))
    return Axis(low=ends[0], high=ends[1], ticks=ticks, title=title)


class Drawing:
    """Collects the marks of a plot. ``height`` is in pixels."""

    def __init__(self, x: Axis, y: Axis, *, height: int = 260) -> None:
        self._x, self._y, self._height = x, y, height
        self._marks: list[str] = []
        self._legend: list[str] = []

    def legend(self, name: str, color: str) -> None:
        """Name a color; ``color`` may be a gradient."""
        self._legend.append(f"<span><i style='background:{color}'></i>{escape(name)}</span>")

    def bars(self, bars: Iterable[tuple[Sequence[float], str]], color: str) -> None:
        """Draw rectangles: each has left, right, lower and upper value, and its title."""
        marks = []
        for (left, right, lower, upper), title in bars:
            x, y = sorted(map(self._x.at, (left, right))), sorted(map(self._up, (lower, upper)))
            marks.append(
                f"<rect x='{x[0]}' y='{y[0]}' width='{max(1, x[1] - x[0])}' "
                f"height='{y[1] - y[0]}'><title>{escape(title)}</title></rect>"
            )
        self._marks.append(f"<g fill='{color}'>{''.join(marks)}</g>")

    def area(self, x: Sequence[float], lower: Any, upper: Any, color: str) -> None:
        """Fill the area between two lines."""
        there = self._points(x, upper)
        back = self._points(list(reversed(x)), list(reversed(lower)))
        self._marks.append(f"<path fill='{color}' d='M{there} {back}z'/>")

    def line(self, x: Any, y: Any, color: str) -> None:
        """Draw a line through points, with gaps where a value is not finite or absurdly large."""
        pairs = [*zip(np.asarray(x, float).tolist(), np.asarray(y, float).tolist(), strict=True)]
        parts: list[list[tuple[float, float]]] = [[]]
        for pair in pairs:
            if abs(pair[1]) < _LARGEST:
                parts[-1].append(pair)
            elif parts[-1]:
                parts.append([])
        # With the stroke without length at its end, a single point is a dot.
        path = "".join(f"M{self._points(*zip(*part, strict=True))}h0" for part in parts if part)
        self._marks.append(f"<path fill='none' stroke='{color}' d='{path}'/>")

    def columns(self, x: Sequence[float], titles: Sequence[str]) -> None:
        """Show a title wherever the mouse is, that of the value that is next to it."""
        places = [self._x.at(value) for value in x]
        middles = [(one + other) // 2 for one, other in zip(places, places[1:], strict=False)]
        marks = [
            f"<rect x='{left}' width='{right - left}' height='{UNITS}'>"
            f"<title>{escape(title)}</title></rect>"
            for left, right, title in zip([0, *middles], [*middles, UNITS], titles, strict=True)
        ]
        self._marks.append(f"<g class='hover'>{''.join(marks)}</g>")

    def cells(
        self, begins: Sequence[float], rows: Sequence[Sequence[str]], titles: Sequence[str]
    ) -> None:
        """Fill rows of cells with colors, each from its begin to that of the next one.

        Each row has a title.
        """
        edges = [*map(self._x.at, begins), UNITS]
        for row, (colors, title) in enumerate(zip(rows, titles, strict=True)):
            paths: dict[str, str] = {}
            begin = 0
            for end in range(1, len(colors) + 1):  # equal cells beside each other are one
                if end == len(colors) or colors[end] != colors[begin]:
                    width = edges[end] - edges[begin]
                    part = f"M{edges[begin]} 0h{width}v1h-{width}z"
                    paths[colors[begin]] = paths.get(colors[begin], "") + part
                    begin = end
            inner = "".join(f"<path fill='{color}' d='{d}'/>" for color, d in paths.items())
            scale = UNITS / len(rows)
            self._marks.append(
                f"<g class='cells' transform='translate(0 {row * scale:.3f}) scale(1 {scale:.3f})'>"
                f"<title>{escape(title)}</title>{inner}</g>"
            )

    def html(self) -> str:
        """Return the plot with its axes and its legend."""
        grid = "".join(f"M0 {self._up(value)}h{UNITS}" for value, _ in self._y.ticks)
        texts = [
            f"<span class='y' style='bottom:{self._y.at(value) / UNITS:.2%}'>{escape(text)}</span>"
            for value, text in self._y.ticks
        ]
        texts += [
            f"<span class='x' style='left:{self._x.at(value) / UNITS:.2%}'>{escape(text)}</span>"
            for value, text in self._x.ticks
        ]
        legend = f"<p class='legend'>{''.join(self._legend)}</p>" if self._legend else ""
        return (
            f"<div class='plot' style='height:{self._height}px'>"
            f"<svg viewBox='0 0 {UNITS} {UNITS}' preserveAspectRatio='none'>"
            f"<path class='grid' d='{grid or 'M0 0'}'/>{''.join(self._marks)}</svg>"
            f"<span class='top'>{escape(self._y.title)}</span>"
            f"<span class='below'>{escape(self._x.title)}</span>"
            f"{''.join(texts)}</div>{legend}"
        )

    def _up(self, value: float) -> int:
        """Return the place of a value of the y axis as SVG counts it, from the top."""
        return UNITS - self._y.at(value)

    def _points(self, x: Sequence[float], y: Sequence[float]) -> str:
        return " ".join(
            f"{self._x.at(one)} {self._up(other)}" for one, other in zip(x, y, strict=True)
        )
