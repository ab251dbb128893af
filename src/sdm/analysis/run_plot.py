"""One picture of training runs: loss, slots in use and gates against the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdm.analysis.charts import loss_chart, utilisation_chart
from sdm.analysis.pages.run_page import read_source
from sdm.errors import UserError
from sdm.evaluation.report import Chart, Grid

# Of the charts of a memory those that tell a healthy run from a collapsed one; entropies are in `sdm report`.
SHOWN = ("slots-written", "slots-read", "forget_gate", "input_gate")


def run_plot(named: Sequence[tuple[str, Path]], name: str = "training") -> Grid:
    """Chart the metrics of runs, finished or not.

    Args:
        named: Names and folders of runs.
        name: Name of the chart.

    Returns:
        The loss and, if any of the runs has an SDM layer, slots and gates.

    Raises:
        UserError: If a folder holds no run, or a run has no metrics yet.
    """
    sources = [read_source(label, path) for label, path in named]
    for source, (_, path) in zip(sources, named, strict=True):
        if source.run is None:
            raise UserError(f"{str(path)!r} is not a run's folder; `sdm train` makes runs")
        if source.faults:
            raise UserError(source.faults[0])
        if not source.metrics:
            raise UserError(f"{str(path)!r} has no metrics yet; wait for its first steps")
    trained, held_out = ({source.name: source.series(key) for source in sources} for key in ("loss", "valid/loss"))
    charts: list[Chart] = [loss_chart(trained, held_out)]
    metrics = {source.name: source.metrics for source in sources}
    if any("memory/slots_written" in line for lines in metrics.values() for line in lines):
        memory = {chart.name: chart for chart in utilisation_chart(metrics).charts if isinstance(chart, Chart)}
        charts += [memory[f"memory-{kind}"] for kind in SHOWN]
    return Grid(name, "", charts, width=3 if len(charts) > 1 else 1, share_y=False)
