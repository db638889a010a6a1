"""The report of a check, as JSON and as a page of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.hardware.checking.plan import Check
from forebay.hardware.checking.running import Outcome

MOST_FILES: Final = 8
MOST_BYTES: Final = 16 << 20


def write_report(check: Check, out: Path, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> None:
    """Write ``report.json``, ``report.md`` and ``log.txt``, the end of what each part printed."""
    parts = {
        outcome.name: {
            "status": outcome.status,
            "seconds": outcome.seconds,
            "problems": outcome.problems,
            "data": outcome.data,
        }
        for outcome in outcomes
    }
    text = json.dumps(dict(about) | {"parts": parts}, indent=1)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    (out / "report.md").write_text("\n".join(_page(check, outcomes, about)) + "\n", encoding="utf-8")
    logs = [f"== {outcome.name}: {outcome.status}\n{outcome.tail}\n" for outcome in outcomes]
    (out / "log.txt").write_text("\n".join(logs), encoding="utf-8")


def _page(check: Check, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> list[str]:
    lines = [f"# Check of {check.machine}", ""]
    lines += [f"**{check.dry}**", ""] if about["dry"] else []
    verdict = "ended without a fault" if about["good"] else f"NOT GOOD: {', '.join(about['bad'])}"
    lines += [f"The parts that decide: {verdict}. {about['seconds']:.0f} s in all.", ""]
    lines += ["| part | status | seconds | what is wrong or missing |", "|---|---|---|---|"]
    lines += [f"| {o.name} | {o.status} | {o.seconds} | {_cell('; '.join(o.problems))} |" for o in outcomes]
    for outcome in outcomes:
        rows = outcome.data.get("rows")
        if rows:
            lines += ["", f"## {outcome.name}", ""]
            if outcome.data.get("ceiling_gb_s") is not None:
                lines += [f"Read ceiling of the same run: {outcome.data['ceiling_gb_s']:.0f} GB/s.", ""]
            lines += _table(rows)
    return lines


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(_cell(row.get(column, '')) for column in columns)} |" for row in rows)]


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")[:300]
