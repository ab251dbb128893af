"""How runs went and what they cost, as findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sdm.analysis.charts import loss_chart, utilisation_chart
from sdm.analysis.pages.measured import Named
from sdm.analysis.pages.page import Finding, Illustration
from sdm.evaluation.report import Table
from sdm.models import cost
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.model import SavedModel

POINTS = 300  # of a curve
CONTEXT = 2048  # tokens at which FLOPs are given where the data does not say


@dataclass(frozen=True)
class Source:
    """A folder that the page is about."""

    name: str
    run: Run | None = None
    """None: results alone."""
    config: TrainConfig | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)
    results: list[Named] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What of it cannot be read."""

    @property
    def reached(self) -> int:
        """The step of the newest metrics."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def is_finished(self) -> bool:
        return self.config is not None and self.reached >= self.config.schedule.steps

    def last(self, key: str) -> float | None:
        """The newest value of a metric."""
        return next((line[key] for line in reversed(self.metrics) if key in line), None)

    def series(self, key: str) -> list[tuple[float, float]]:
        """A metric by the step: means of so many lines that no more than POINTS are left."""
        found = [(line["step"], line[key]) for line in self.metrics if math.isfinite(line.get(key, math.inf))]
        width = -(-len(found) // POINTS) or 1
        groups = [found[start : start + width] for start in range(0, len(found), width)]
        return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def training_finding(runs: Sequence[Source]) -> Finding:
    what = "The loss while the model was trained, and what the run has cost."
    notes = tuple(
        f"{one.name}: {one.reached:,} of {one.config.schedule.steps:,} steps; `sdm train {one.run.folder}` trains the "
        "rest"
        for one in runs
        if one.run is not None and one.config is not None and not one.is_finished()
    )
    trained, held_out = ({one.name: one.series(key) for one in runs} for key in ("loss", "valid/loss"))
    if not any(trained.values()):
        why = "There are no metrics yet."
        return Finding("training", "Training", what, "no result", "", "missing", why, notes=notes)
    rows = [
        (name, kind, step, value)
        for kind, series in (("batches", trained), ("held out", held_out))
        for name, points in series.items()
        for step, value in points
    ]
    last = {name: points[-1][1] for name, points in (held_out if any(held_out.values()) else trained).items() if points}
    values = ", ".join(f"{name} {value:.4g}" for name, value in last.items())
    picture = Illustration(
        "training",
        "The loss of the batches, and of held-out ones.",
        loss_chart(trained, held_out),
        ("run", "of", "step", "nats per token"),
        rows,
        f"Loss against the step. At the end: {values}.",
    )
    found = f"{values} nats per token{', held out,' if any(held_out.values()) else ''} at the end"
    return Finding("training", "Training", what, found, "", "measured", "", (picture,), (_costs(runs),), notes=notes)


def _costs(runs: Sequence[Source]) -> Table:
    rows = [(one.name, *_sizes(one), f"{one.reached:,}", *_speed(one)) for one in runs]
    columns = ("run", "parameters", "of them M0", "state", "FLOPs/token", "steps", "tokens/s", "seconds")
    return Table("Cost", columns, rows, "State: numbers that a sequence keeps, whatever its length, or for each token.")


def _sizes(source: Source) -> list[str]:
    assert source.run is not None
    try:
        sizes = cost(SavedModel(source.run.folder, announce=lambda message: None).config())
    except (OSError, ValueError):  # no model yet, or one that cannot be read
        return ["-"] * 4
    context = getattr(source.config.data, "sequence_length", CONTEXT) if source.config is not None else CONTEXT
    state = f"{sizes.state_elements:,}" if sizes.state_elements else f"{sizes.kv_elements_per_token:,} a token"
    flops = sizes.flops_per_token(context).total
    return [f"{sizes.parameters:,}", f"{sizes.initial_state_parameters:,}", state, f"{flops:,}"]


def _speed(source: Source) -> list[str]:
    values = [source.last(key) for key in ("tokens_per_second", "seconds")]
    return ["-" if value is None else f"{value:,.0f}" for value in values]


def memory_findings(runs: Sequence[Source]) -> list[Finding]:
    """None for runs without a sparse delta memory."""
    metrics = {one.name: [line for line in one.metrics if "memory/slots_written" in line] for one in runs}
    watched = {name: lines[:: -(-len(lines) // POINTS)] for name, lines in metrics.items() if lines}
    if not watched:
        return []
    keys = sorted({key for lines in watched.values() for line in lines for key in line if key.startswith("memory/")})
    rows = [(name, line["step"], *(line.get(key) for key in keys)) for name, lines in watched.items() for line in lines]
    shares = {
        name: (lines[-1]["memory/slots_written"], lines[-1]["memory/slots_read"])
        for name, lines in metrics.items()
        if lines
    }
    found = "; ".join(
        f"{name} {100 * written:.0f}% written, {100 * read:.0f}% read" for name, (written, read) in shares.items()
    )
    picture = Illustration(
        "memory",
        "Gates, how evenly slots are used, and how many of them a batch uses: means over the layers.",
        utilisation_chart(watched),
        ("run", "step", *(key.removeprefix("memory/") for key in keys)),
        rows,
        f"Four panels against the step. Slots that a batch uses at the end: {found}.",
    )
    what = "How many slots a batch uses, how evenly, and how the gates stand."
    return [
        Finding(
            "memory",
            "The memory during training",
            what,
            f"slots of a batch, at the end: {found}",
            "",
            "measured",
            "",
            (picture,),
        )
    ]
