"""The source documents' tables beside the model's answers."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from record import Bar

from torchmn.planning.description import Description, Setting
from torchmn.planning.prediction import predict_setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).parent / "sources.toml"


def source_bars() -> list[Bar]:
    """A bar per row: the model's speed-up, its interval, and the stated one in the name."""
    bars = []
    for table in tomllib.loads(FILE.read_text())["table"]:
        known = msgspec.convert(table["description"], Description)
        predicted = {
            row["name"]: predict_setting(known, msgspec.convert(row["setting"], Setting))
            for row in table["rows"]
        }
        base = predicted.get(table.get("relative_to", ""))
        scale = 1.0 if base is None else base.speed_up
        for row in table["rows"]:
            each = predicted[row["name"]]
            speed_up = each.speed_up / scale
            bars.append(
                Bar(
                    f"{table['name'].split(',')[0]}: {row['name']}: the source states "
                    f"{row['stated_speed_up']:.2f} x; the model",
                    speed_up,
                    "x",
                    interval=(
                        speed_up * each.seconds / each.high_s,
                        speed_up * each.seconds / each.low_s,
                    ),
                )
            )
    return bars
