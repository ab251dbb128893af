"""Scaling laws of ladders of runs: a fit for each architecture, and a held-out level that it predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdm.analysis.charts import scaling_chart
from sdm.analysis.scaling import PARAMETERS, Form, PowerLaw, Prediction, fit_power_law
from sdm.analysis.trained_runs import TrainedRun
from sdm.errors import UserError
from sdm.evaluation.report import Chart, Table

LAST = "last"


@dataclass(frozen=True)
class LadderLaw:
    """The law of one architecture, with the runs that it was fitted to and those that were held out."""

    name: str
    fitted: tuple[TrainedRun, ...]
    held_out: tuple[TrainedRun, ...]
    law: PowerLaw

    @property
    def measured(self) -> float:
        """Loss of the held-out level: the geometric mean over its runs, which is what is predicted."""
        return math.exp(sum(math.log(run.loss) for run in self.held_out) / len(self.held_out))

    @property
    def prediction(self) -> Prediction:
        """What the law predicts for the held-out level."""
        return self.law.predict(self.held_out[0].flops, len(self.held_out))

    def describe(self) -> dict[str, Any]:
        """Return the law, its runs and its prediction as plain JSON."""
        described: dict[str, Any] = {"law": self.law.describe(), "runs": [_point(run) for run in self.fitted]}
        if self.held_out:
            guess = self.prediction
            described["held_out"] = {
                "runs": [_point(run) for run in self.held_out],
                "measured": self.measured,
                "predicted": guess.value,
                "low": guess.low,
                "high": guess.high,
                "inside": guess.contains(self.measured),
            }
        return described


def fit_ladders(
    ladders: Mapping[str, Sequence[TrainedRun]],
    hold_out: str | None = None,
    form: Form = "power",
    bootstrap: int | None = None,
) -> list[LadderLaw]:
    """Fit a law to each ladder.

    Args:
        ladders: Runs by architecture.
        hold_out: A level that no fit sees: its number from 1 in the order of compute, "last", or the name of one of its
            runs, which holds out nothing of other ladders.
        form: Form of the law, as in `fit_power_law`.
        bootstrap: Samples of the bootstrap, as in `fit_power_law`.

    Raises:
        UserError: If there is no such level, or too few levels are left to fit.
    """
    known = {run.name for ladder in ladders.values() for run in ladder}
    if hold_out is not None and hold_out != LAST and hold_out not in known and not hold_out.isdecimal():
        raise UserError(
            f'--hold-out must be the number of a level, "{LAST}" or a run among {_some(known)}: {hold_out!r}'
        )
    laws = []
    for name, ladder in ladders.items():
        levels = sorted({run.flops for run in ladder})
        out = _level(name, ladder, levels, hold_out)
        fitted = tuple(run for run in ladder if run.flops != out)
        left = len(levels) - (out is not None)
        if left <= PARAMETERS[form]:
            raise UserError(
                f"{name} has {left} level{'s' * (left != 1)} to fit (sizes of different compute), but --form {form} "
                f"takes at least {PARAMETERS[form] + 1}: train more sizes" + (", or hold none out" if out else "")
            )
        try:
            law = fit_power_law(
                [run.flops for run in fitted], [run.loss for run in fitted], form=form, bootstrap=bootstrap
            )
        except ValueError as error:  # such as a loss that is not a number
            raise UserError(f"{name}: {error}") from error
        laws.append(LadderLaw(name, fitted, tuple(run for run in ladder if run.flops == out), law))
    return laws


def _level(name: str, ladder: Sequence[TrainedRun], levels: list[float], hold_out: str | None) -> float | None:
    if hold_out is None:
        return None
    for run in ladder:
        if run.name == hold_out:
            return run.flops
    if hold_out == LAST:
        return levels[-1]
    if not hold_out.isdecimal():
        return None
    if not 1 <= int(hold_out) <= len(levels):
        raise UserError(f"--hold-out: {name} has levels 1 to {len(levels)}, got {hold_out}")
    return levels[int(hold_out) - 1]


def law_tables(laws: Sequence[LadderLaw]) -> list[Table]:
    """Make tables of the laws, and of how they predicted what was held out."""
    rows = []
    for ladder in laws:
        law = ladder.law
        cells = [f"{_number(getattr(law, key))} ({_interval(*law.intervals[key])})" for key in law.intervals]
        rows.append((ladder.name, f"{len(law.levels)}/{len(ladder.fitted)}", *cells, f"{law.r_squared:.4f}"))
    heads = ("model", "levels/runs", *(f"{key}, 95%" for key in laws[0].law.intervals), "R²")
    formula = "L = a C^-b" if laws[0].law.form == "power" else "L = e + a C^-b"
    caption = "R² of the levels, in log L. Intervals by bootstrap."
    tables = [Table(f"Scaling laws, {formula} (C in FLOPs)", heads, rows, caption)]
    rows = []
    for ladder in laws:
        if ladder.held_out:
            guess, measured = ladder.prediction, ladder.measured
            inside = "yes" if guess.contains(measured) else "no"
            numbers = (f"{measured:.4f}", f"{guess.value:.4f}", f"{guess.low:.4f}-{guess.high:.4f}", inside)
            rows.append((ladder.name, f"{ladder.held_out[0].flops:.2e}", str(len(ladder.held_out)), *numbers))
    if rows:
        heads = ("model", "FLOPs", "runs", "measured", "predicted", "95% interval", "inside")
        tables.append(Table("The level that was held out", heads, rows))
    return tables


def law_chart(laws: Sequence[LadderLaw], y: str) -> Chart:
    """Runs, laws and held-out runs of every ladder; `y` is the label of the losses."""
    fitted = {ladder.name: [(run.flops, run.loss) for run in ladder.fitted] for ladder in laws}
    held_out = {ladder.name: [(run.flops, run.loss) for run in ladder.held_out] for ladder in laws}
    return scaling_chart(fitted, {ladder.name: ladder.law for ladder in laws}, held_out, y)


def _point(run: TrainedRun) -> dict[str, Any]:
    return {key: getattr(run, key) for key in ("name", "flops", "tokens", "parameters", "loss")}


def _interval(low: float, high: float) -> str:
    return f"{_number(low)}-{_number(high)}" if low >= 0 else f"{_number(low)} ... {_number(high)}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}"


def _some(names: set[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (" ..." if len(names) > len(shown) else "")
