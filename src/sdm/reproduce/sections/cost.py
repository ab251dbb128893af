"""The section about cost: time and state of a generated token against the length of the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdm.analysis.charts import cost_chart
from sdm.evaluation.report import Point, Table
from sdm.evaluation.results import FILE, read_results
from sdm.evaluation.runner import settings_of
from sdm.evaluation.speed import Speed
from sdm.reproduce.study import SPEED_FOLDER, Claim, Difference, Exhibit, Section, StudyResults, Variant
from sdm.run import Run

Summaries = Mapping[str, Mapping[int, Mapping[str, float]]]
"""By architecture and by the length of the context: times in seconds, sizes in bytes, with the range of the repeats."""


def cost_section(section: Section, models: Mapping[str, Variant], speed: Speed) -> Section:
    """Time of a generated token behind the longest context.

    Args:
        section: Title, text, deviations of the section.
        models: By architecture; "sdm" and "full_attention" are compared.
        speed: What the study measures, the first seed of each model.
    """
    longest = max(speed.lengths)

    def ratio(first: str, second: str) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            summaries = _summaries(results, models, speed)
            if first not in summaries or second not in summaries:
                return None
            above, below = summaries[first][longest], summaries[second][longest]
            low, high = above["decode_low"] / below["decode_high"], above["decode_high"] / below["decode_low"]
            interval = f"range of {speed.repeats} repeats"
            return Difference(above["decode"] / below["decode"] - 1, low - 1, high - 1, interval)

        names = f"{models[first].label} / {models[second].label} - 1"
        quantity = f"{names}, time of a generated token behind {longest:,} tokens"
        return Claim(quantity, PAPER[first, second], difference, "above", percent=True)

    def exhibit(results: StudyResults) -> Exhibit:
        summaries = _summaries(results, models, speed)
        if not summaries:
            return Exhibit()
        charts = {
            key: {
                models[kind].label: [
                    Point(length, *(scale * times[f"{key}{end}"] for end in ("", "_low", "_high")))
                    for length, times in lengths.items()
                ]
                for kind, lengths in summaries.items()
            }
            for key, scale in (("decode", 1e3), ("state", 1e-6))
        }
        last = {models[kind].label: lengths[longest] for kind, lengths in summaries.items()}
        words = [
            f"{name} {1e3 * times['decode']:.2f} ms and {1e-6 * times['state']:.3f} MB" for name, times in last.items()
        ]
        caption = (
            "Time of a generated token and the state behind the context: medians; bands: the range of the repeats."
        )
        note = f"{speed.repeats} repeats of {speed.new_tokens} tokens, models in turns, one thread, one seed."
        chart = cost_chart(charts["decode"], charts["state"])
        summary = f"behind {longest:,} tokens: {', '.join(words)}"
        return Exhibit([_table(summaries, models)], [(chart, caption)], [note], summary)

    claims = [ratio("full_attention", "sdm"), ratio("sdm", "gdn")]
    return replace(section, exhibit=exhibit, claims=claims, variants=tuple(models.values()))


PAPER = {
    ("full_attention", "sdm"): "SDM decodes 6 times faster than full attention at 1.4B",
    ("sdm", "gdn"): "SDM decodes around 10% slower than GDN at 1.4B",
}


def _summaries(results: StudyResults, models: Mapping[str, Variant], speed: Speed) -> dict[str, dict[int, Any]]:
    """Of the first seed of each model, if its speed was measured with these settings."""
    summaries = {}
    for kind, variant in models.items():
        for outcome in [*results.by_seed(variant).values()][:1]:
            folder = Run(outcome.folder).evaluations / SPEED_FOLDER
            if (folder / FILE).is_file():
                measured = read_results(folder)
                if measured.settings == settings_of(speed) and measured.summary:
                    summaries[kind] = {times["length"]: times for times in measured.summary["lengths"]}
    return summaries


def _table(summaries: Summaries, models: Mapping[str, Variant]) -> Table:
    rows = [
        (
            models[kind].label,
            f"{length:,}",
            f"{1e6 * times['prefill']:.1f}",
            f"{1e3 * times['decode']:.2f}",
            f"{1e-6 * times['state']:.3f}",
        )
        for kind, lengths in summaries.items()
        for length, times in lengths.items()
    ]
    columns = ("model", "context", "prefill (µs/token)", "generate (ms/token)", "state (MB)")
    return Table("Time and state of a token", columns, rows, "Medians. State: everything kept behind the context.")
