"""`rheoscope compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rheoscope.cli.console import err, out
from rheoscope.cli.inputs import Overwrite
from rheoscope.storage import refuse_output, refuse_replaced, replacing

if TYPE_CHECKING:
    from rheoscope.report.comparison import Comparison


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run file that `rheoscope measure` wrote.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another: after an edit, or a later checkpoint.")],
    report_file: Annotated[Path | None, typer.Option("--report", help="Write a page of the differences.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Print what differs between two runs, second less first, with errors; paired where the text is the same."""
    if report_file is not None:
        refuse_output(report_file, overwrite=overwrite)
        refuse_replaced(report_file, first, second)
    from rheoscope.report.comparison import compared
    from rheoscope.report.comparison_page import comparison_html, pairing
    from rheoscope.run import Run

    comparison = compared(Run.load(first), Run.load(second))
    if report_file is not None:
        with replacing(report_file, overwrite=overwrite) as part:
            part.write_text(comparison_html(comparison), encoding="utf-8", errors="backslashreplace")
    for instrument in comparison.instruments:
        out.print(f"\n[bold]{escape(instrument)}[/]")
        out.print(difference_table(comparison, instrument))
    if comparison.left_out:
        err.print(f"not compared: {', '.join(comparison.left_out)}", markup=False, soft_wrap=True)
    if not comparison.paired:
        err.print(pairing(comparison), markup=False, soft_wrap=True)
    if report_file is not None:
        out.line(report_file)


def difference_table(comparison: Comparison, instrument: str) -> Table:
    """One row per quantity."""
    from rheoscope.report.comparison_page import HEADINGS, row

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place < 2 else "right")
    for one in comparison.of(instrument):
        table.add_row(*(escape(cell) for cell in row(one)))
    return table
