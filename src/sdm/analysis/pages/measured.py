"""Findings of measurements: models with the same settings side by side, paired where the documents are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sdm.analysis.pages.page import Finding, illustration
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.registry import find
from sdm.evaluation.results import Results
from sdm.evaluation.statistics import comparison_charts, comparison_table, weighted_mean
from sdm.run.config_file import from_json, to_json

Named = tuple[str, Results]


def measured_findings(results: Sequence[Named]) -> list[Finding]:
    """Make a finding of the results of each measurement and settings. Results that cannot be shown say why."""
    groups: dict[str, list[Named]] = {}
    for name, result in results:
        groups.setdefault(json.dumps([result.measurement, result.settings], sort_keys=True), []).append((name, result))
    findings = []
    for group in groups.values():
        try:
            findings.append(_finding(group))
        except Exception as error:  # of whatever kind: results may be of another version, or have been written by hand
            what = group[0][1].measurement
            findings.append(failed(what, f"{', '.join(name for name, _ in group)}: {error}"))
    return findings


def failed(what: str, why: str) -> Finding:
    """Make the finding of something that cannot be shown, with the reason."""
    return Finding(what, what, "Its results could not be shown.", "no result", "", "failed", why)


def _finding(group: list[Named]) -> Finding:
    first = group[0][1]
    kind = find(first.measurement)
    measurement = from_json(kind, first.settings, "settings")
    done = [(name, result) for name, result in group if result.summary is not None]
    description = (kind.__doc__ or "").strip().splitlines()[0]
    notes = [
        f"{name}: {len(result.units):,} of {result.planned:,} documents or samples; `sdm eval {result.measurement} "
        f"{result.model.get('path', 'MODEL')}` measures the rest"
        for name, result in group
        if not result.complete
    ]
    if not done:
        why = "Nothing has been measured yet."
        return Finding(
            first.measurement, first.measurement, description, "no result", "", "missing", why, notes=(*notes,)
        )
    report = measurement.report({name: result.summary for name, result in done if result.summary is not None})
    tables, charts = [*report.tables], [*report.charts]
    if len(done) > 1:
        try:
            comparison = comparison_table(measurement, done)
            tables += [comparison] if comparison is not None else []
            charts += comparison_charts(measurement, done)
        except UserError as error:
            notes.append(f"no paired differences: {error}")
    pictures = [
        illustration(chart, name=_prefixed(first.measurement, chart.name)) for chart in charts if not chart.is_empty()
    ]
    return Finding(
        first.measurement,
        f"{first.measurement}: {', '.join(name for name, _ in done)}",
        description,
        _headline(measurement, done),
        "",
        "measured",
        illustrations=(*pictures,),
        tables=(*tables,),
        notes=(*notes, *_settings(measurement, first)),
    )


def _prefixed(measurement: str, name: str) -> str:
    return name if name.startswith(measurement) else f"{measurement}-{name}"


def _headline(measurement: Measurement, done: list[Named]) -> str:
    """Write the mean of the first quantity that all models have, with its interval over documents."""
    pairs = {name: measurement.pairs(result.units) for name, result in done}
    shared = [quantity for quantity in next(iter(pairs.values())) if all(quantity in pair for pair in pairs.values())]
    if not shared:
        return "see the table"
    parts = []
    for name, quantities in pairs.items():
        values, weights = zip(*quantities[shared[0]].values(), strict=True)
        mean = weighted_mean(values, weights)
        interval = "" if mean.low is None or mean.high is None else f" [{mean.low:.4g}, {mean.high:.4g}]"
        parts.append(f"{name} {mean.value:.4g}{interval}")
    return f"{', '.join(parts)} {shared[0]}"


def _settings(measurement: Measurement, results: Results) -> list[str]:
    """Write the settings that are not the default."""
    plain = to_json(type(measurement)())
    chosen = {key: value for key, value in results.settings.items() if value != plain.get(key)}
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
    return [f"Settings: {shown}."] if shown else []
