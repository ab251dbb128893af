"""What was measured of several models, as findings: like beside like, and paired where the documents are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sdm.analysis.pages.page import Finding, illustration
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.registry import find
from sdm.evaluation.results import Results
from sdm.evaluation.statistics import comparison_table, weighted_mean
from sdm.run.config_file import from_json, to_json

Named = tuple[str, Results]


def measured_findings(results: Sequence[Named]) -> list[Finding]:
    """A finding for every measurement with the same settings. What cannot be shown says why, and the rest is shown."""
    groups: dict[str, list[Named]] = {}
    for name, one in results:
        groups.setdefault(json.dumps([one.measurement, one.settings], sort_keys=True), []).append((name, one))
    findings = []
    for group in groups.values():
        try:
            findings.append(_finding(group))
        except Exception as error:  # of whatever kind: results may be of another version, or have been written by hand
            what = group[0][1].measurement
            findings.append(failed(what, f"{', '.join(name for name, _ in group)}: {error}"))
    return findings


def failed(what: str, why: str) -> Finding:
    return Finding(what, what, "Its results could not be shown.", "no result", "", "failed", why)


def _finding(group: list[Named]) -> Finding:
    first = group[0][1]
    kind = find(first.measurement)
    measurement = from_json(kind, first.settings, "settings")
    done = [(name, one) for name, one in group if one.summary is not None]
    description = (kind.__doc__ or "").strip().splitlines()[0]
    notes = [
        f"{name}: {len(one.units):,} of {one.planned:,} documents or samples; `sdm eval {one.measurement} "
        f"{one.model.get('path', 'MODEL')}` measures the rest"
        for name, one in group
        if not one.complete
    ]
    if not done:
        why = "Nothing has been measured yet."
        return Finding(
            first.measurement, first.measurement, description, "no result", "", "missing", why, notes=(*notes,)
        )
    report = measurement.report({name: one.summary for name, one in done if one.summary is not None})
    tables = [*report.tables]
    if len(done) > 1:
        try:
            comparison = comparison_table(measurement, done)
            tables += [comparison] if comparison is not None else []
        except UserError as error:
            notes.append(f"no paired differences: {error}")
    pictures = [
        illustration(chart, name=_prefixed(first.measurement, chart.name))
        for chart in report.charts
        if not chart.is_empty()
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
    """The mean of the first quantity that all models have, with its interval over documents."""
    pairs = {name: measurement.pairs(one.units) for name, one in done}
    shared = [quantity for quantity in next(iter(pairs.values())) if all(quantity in one for one in pairs.values())]
    if not shared:
        return "see the table"
    parts = []
    for name, one in pairs.items():
        values, weights = zip(*one[shared[0]].values(), strict=True)
        mean = weighted_mean(values, weights)
        interval = "" if mean.low is None or mean.high is None else f" [{mean.low:.4g}, {mean.high:.4g}]"
        parts.append(f"{name} {mean.value:.4g}{interval}")
    return f"{', '.join(parts)} {shared[0]}"


def _settings(measurement: Measurement, results: Results) -> list[str]:
    """Those that are not the measurement's own choice."""
    plain = to_json(type(measurement)())
    chosen = {key: value for key, value in results.settings.items() if value != plain.get(key)}
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
    return [f"Settings: {shown}."] if shown else []
