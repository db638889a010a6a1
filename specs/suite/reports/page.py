"""A record as one HTML page that loads nothing: the clause x outcome matrix, the errors as a plot, what failed and why."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from forebay.specs.clauses import catalogue
from forebay.specs.suite.reports.counting import ORDER, Record, clause_matrix, declared, failed, named, ran_on, refusals

TEMPLATE: Final = "page.html.jinja"
_FLOOR: Final = 1e-10
"""Errors below, 0 among them, are drawn here: the axis is logarithmic."""


def page(record: Record) -> str:
    """HTML made from a record alone; every text of it is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    contract = catalogue().clauses
    rows = [
        {"id": clause, "title": contract[clause].title if clause in contract else "", "counts": counts}
        for clause, counts in clause_matrix(record).items()
    ]
    return environment.get_template(TEMPLATE).render(
        record=record,
        named=named(record),
        ran_on=ran_on(record),
        outcomes=ORDER,
        rows=rows,
        failed=failed(record),
        declared=declared(record),
        refusals=refusals(record),
        slowest=sorted(record["results"], key=lambda result: -result["seconds"])[:10],
        plot=error_plot(record),
    )


def error_plot(record: Record) -> str:
    """SVG: the largest error of every test that compared with the oracle, by dtype, each with its limit; ``""`` without any."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for result in record["results"]:
        for dtype, (error, limit) in result["errors"].items():
            seen.setdefault(dtype, []).append((error, limit))
    if not seen:
        return ""
    with mpl.rc_context({"svg.hashsalt": "forebay", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 1.2 + 0.8 * len(seen)), layout="constrained")
        axes = figure.subplots()
        for row, dtype in enumerate(sorted(seen)):
            pairs = seen[dtype]
            errors = [max(error, _FLOOR) for error, _ in pairs]
            spread = [row + 0.5 * (index / max(1, len(errors) - 1) - 0.5) for index in range(len(errors))]
            axes.plot(errors, spread, ".", markersize=4)
            for limit in sorted({limit for _, limit in pairs}):
                axes.plot([limit, limit], [row - 0.4, row + 0.4], "k-", linewidth=1)
        axes.set_yticks(range(len(seen)), sorted(seen))
        axes.set_xscale("log")
        axes.set_xlabel("largest error of a test, relative to the largest |V|; the bar is the limit of clause D6")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = drawn.getvalue()
    return text[text.index("<svg") :]
