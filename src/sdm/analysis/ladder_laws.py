"""Scaling laws of ladders of runs: finished runs as points, a fit for each architecture, and a held-out level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdm.analysis.charts import scaling_chart
from sdm.analysis.scaling import PARAMETERS, Form, PowerLaw, Prediction, fit_power_law
from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.report import Chart, Table
from sdm.evaluation.results import FILE, Results, read_results
from sdm.models import SDMConfig, cost
from sdm.models.layer_types import LAYER_TYPES
from sdm.run import Run
from sdm.run.config_file import differences, to_json
from sdm.run.model import SavedModel

Loss = Literal["valid", "train", "test"]
LAST_LINES = 10  # of the training loss, as the paper has it
_NAMES = {
    "sdm": "SDM",
    "gdn": "GDN",
    "full_attention": "full attention",
    "mamba2": "Mamba2",
    "kda": "KDA",
    "raven": "Raven",
    "fwpkm": "FwPKM",
}
_SAME_TEXT = ("batch_size", "seed", "cache_dir", "verify")  # fields of the data that may differ within a ladder
_SAME_MODEL = ("kind", "backend", "layer_types", "global_layer", "initializer_range")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its compute, its loss and its configuration."""

    name: str
    architecture: str
    """Kinds of its global layers; `ladders` adds the options in which runs of one architecture differ."""
    flops: float
    """FLOPs of the whole training: forward and backward of all tokens."""
    tokens: int
    parameters: int
    loss: float
    options: dict[str, Any]
    """Fields of the model that are no sizes."""
    sizes: dict[str, Any]
    training: dict[str, Any]
    """Optimizer and schedule."""
    data: dict[str, Any]


def trained_run(path: Path, loss: Loss = "valid", name: str | None = None) -> TrainedRun:
    """Read what a finished run has cost and reached.

    Args:
        path: The folder of the run.
        loss: "valid" is its last held-out loss, "train" the mean of the last ten lines of its training loss, "test"
            what `sdm eval nll` measured.
        name: Name of the run, by default that of its folder.

    Raises:
        UserError: If the folder is no run, the run is not finished, or it has no such loss.
    """
    run = Run(path)
    if not run.exists():
        raise UserError(f"{str(path)!r} is not a run's folder; name the folders that `sdm train` made")
    if not run.is_finished():
        raise UserError(
            f"the run in {path} is not finished, so its loss is not its last: `sdm train {path}` trains the rest"
        )
    config, model = run.config(), SavedModel(path).config()
    data, (length, _) = config.data, config.data_sizes()
    tokens = config.schedule.steps * data.batch_size * length
    costs = cost(model)
    test = _test_results(run) if loss == "test" else None
    fields = to_json(config.model)
    # Whole numbers are sizes, which grow along a ladder; anything else is a choice.
    options = {
        key: value
        for key, value in fields.items()
        if key not in _SAME_MODEL and isinstance(value, (bool, str, float, dict))
    }
    sizes = {key: getattr(model, key, None) for key in fields if key not in options and key not in _SAME_MODEL}
    return TrainedRun(
        name=name or path.resolve().name,
        architecture=architecture_of(model),
        flops=float(costs.training_flops_per_token(length)) * tokens,
        tokens=tokens,
        parameters=costs.parameters,
        loss=_loss(run, loss) if test is None else float((test.summary or {})["nll"]),
        options=options,
        sizes=sizes,
        training={"optim": to_json(config.optim), "schedule": to_json(config.schedule.resolved())},
        data={key: value for key, value in to_json(data).items() if key not in _SAME_TEXT}
        | ({} if test is None else {"nll": test.settings}),
    )


def architecture_of(config: SDMConfig) -> str:
    """Name the kinds of the global layers as figures call them."""
    kinds = [kind for kind in dict.fromkeys(config.layer_types or ()) if LAYER_TYPES[kind].scope == "global"]
    if sorted(kinds) == ["full_attention", "sdm"]:
        return "mixed"
    return " + ".join(_NAMES.get(kind, kind) for kind in kinds) or "local layers alone"


def ladders(runs: Sequence[TrainedRun]) -> dict[str, list[TrainedRun]]:
    """Group runs by architecture, and by the options in which runs of one architecture differ.

    Raises:
        UserError: If losses are not of the same data, or runs of one size differ in more than the seed.
    """
    for other in runs[1:]:
        for field, first, second in differences(runs[0].data, other.data, "data")[:1]:
            raise UserError(
                f"{runs[0].name} and {other.name} were trained on different data, so their losses cannot be compared: "
                f"{field} is {first!r} and {second!r}"
            )
    groups: dict[str, list[TrainedRun]] = {}
    for run in runs:
        kin = [other for other in runs if other.architecture == run.architecture]
        varied = [key for key in run.options if any(other.options[key] != run.options[key] for other in kin)]
        name = ", ".join((run.architecture, *(f"{key} = {_text(run.options[key])}" for key in varied)))
        groups.setdefault(name, []).append(replace(run, architecture=name))
    for name, group in groups.items():
        _check_levels(name, group)
    return groups


def _check_levels(name: str, group: Sequence[TrainedRun]) -> None:
    """Raise unless runs of one width and depth have cost the same and were trained alike, as seeds of one level are."""
    seen: dict[tuple[Any, Any], TrainedRun] = {}
    for run in group:
        first = seen.setdefault((run.sizes["hidden_size"], run.sizes["num_hidden_layers"]), run)
        if first.flops != run.flops:
            changed = [key for key in run.sizes if run.sizes[key] != first.sizes[key]]
            what = (
                f"{changed[0]} is {first.sizes[changed[0]]} and {run.sizes[changed[0]]}"
                if changed
                else (f"tokens are {first.tokens:,} and {run.tokens:,}")
            )
            raise UserError(
                f"{name}: {first.name} and {run.name} have the same width and depth but not the same cost ({what}): "
                "they are no levels of one ladder; leave one out"
            )
        for field, mine, other in differences(first.training, run.training)[:1]:
            raise UserError(
                f"{name}: {first.name} and {run.name} have the same size but were not trained alike, as seeds of one "
                f"level are: {field} is {mine!r} and {other!r}; leave one out"
            )


def _test_results(run: Run) -> Results:
    """The complete result of `sdm eval nll` for the run's model as it is now; a run that was extended may have others.

    Results of other settings are beside each other: evaluations/nll and evaluations/nll-CHECKSUM.
    """
    folders = sorted(path.parent for path in run.evaluations.glob(f"nll*/{FILE}"))
    if not folders:
        raise UserError(f"{run.folder} has no evaluations/nll/{FILE}: `sdm eval nll {run.folder}` makes it")
    weights = open_model(run.folder).fingerprint["weights"]
    complete = [results for folder in folders if (results := read_results(folder)).complete and results.summary]
    for results in complete:
        if (results.model.get("fingerprint") or {}).get("weights") == weights:
            return results
    if complete:
        raise UserError(
            f"{run.evaluations}/nll is of other weights than the run has now; `sdm eval nll {run.folder}` measures it"
        )
    raise UserError(f"{folders[0] / FILE} is not complete: `sdm eval nll {run.folder}` measures the rest")


def _loss(run: Run, loss: Loss) -> float:
    key = "valid/loss" if loss == "valid" else "loss"
    values = [line[key] for line in run.metrics() if key in line]
    if not values:
        other = "train" if loss == "valid" else "valid"
        raise UserError(f"{run.metrics_file} has no {key!r}; take --loss {other}")
    last = values[-1:] if loss == "valid" else values[-LAST_LINES:]
    return sum(last) / len(last)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
