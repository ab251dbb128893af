"""Sections about the memory: how evenly tokens spread their writes and reads, its use during training, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sdm.analysis.charts import cost_chart, utilisation_chart
from sdm.data.config import CorpusConfig
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.memory_access import AccessProbe, probe_access
from sdm.evaluation.position import Position
from sdm.evaluation.probe import cumulative_mass_chart, effective_keys_chart
from sdm.evaluation.report import AnyChart, Point, Table
from sdm.evaluation.results import FILE, read_results
from sdm.evaluation.runner import settings_of
from sdm.evaluation.speed import Speed
from sdm.evaluation.statistics import weighted_mean
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.study import SPEED_FOLDER, Claim, Difference, Exhibit, Section, StudyResults, Variant, shown
from sdm.run import Run

ACCESS = Section(
    "access",
    "How evenly keys are used",
    "Reads are consistently more uniform than writes, in the effective number of keys of a token.",
    "shown as a figure; with 64 writes the top 32 have about 85% of the mass",
    why="W_q starts equal to W_k in the aided models, so that reads and writes start alike; the plain recipe has no "
    "such tie.",
)
UTILISATION = Section(
    "memory",
    "The memory during training",
    "The forget gate settles at 0.95 and the input gate at 0.50; all slots come to be read, 28% to 42% are written.",
    "1.4B, over 21M tokens: read 100%, written 28% to 42%; forget gate 0.95, input gate 0.50",
    why="Not compared: the proportion of slots in use grows with the tokens that it is counted over, one step of 2,048 "
    "here.",
)
COST = Section(
    "cost",
    "Time of a generated token",
    "Decoding with SDM takes about 10% more time than with GDN and a sixth of the time of full attention (1.4B).",
    "1.4B: around 10% slower than GDN, 6 times faster than full attention",
)
DOCUMENTS = 8  # the paper's number
STATISTICS = {
    "forget_gate_mean": "forget gate exp(g)",
    "input_gate_mean": "input gate β",
    "slots_written": "slots written",
    "slots_read": "slots read",
}


class AccessProbes:
    """Probes of runs, each made once, on the beginnings of the first test documents that are long enough."""

    def __init__(self) -> None:
        self._probes: dict[Path, AccessProbe] = {}
        self._evenness: dict[Path, dict[str, float]] = {}

    def probe(self, outcome: Outcome) -> AccessProbe:
        """How a run spreads the weight of its writes and reads, over all documents."""
        if outcome.folder not in self._probes:
            model, rows = self._open(outcome)
            self._probes[outcome.folder] = probe_access(model, list(rows.values()))
        return self._probes[outcome.folder]

    def evenness(self, outcome: Outcome) -> dict[str, float]:
        """By document: effective keys of reads minus those of writes, as a proportion of k."""
        if outcome.folder not in self._evenness:
            model, rows = self._open(outcome)
            probes = {name: probe_access(model, [row]) for name, row in rows.items()}
            self._evenness[outcome.folder] = {
                name: probe.read.effective_mean - probe.write.effective_mean for name, probe in probes.items()
            }
        return self._evenness[outcome.folder]

    def _open(self, outcome: Outcome) -> tuple[Any, dict[str, Tensor]]:
        lm = open_model(outcome.folder)
        assert lm.run is not None
        (held_out,) = Position().held_out(lm)
        store, data = held_out.tokens(lm.tokenizer), lm.run.config().data
        assert isinstance(data, CorpusConfig)
        length = data.sequence_length
        long = (store.lengths >= length).nonzero().squeeze(1).tolist()[:DOCUMENTS]
        return lm.model, {str(number): store.document(number, 0, length).long().unsqueeze(0) for number in long}


def access_section(
    section: Section, models: Sequence[Variant], shown_models: Sequence[Variant], paper: str = "not reported"
) -> Section:
    """Effective keys of writes and reads.

    Args:
        section: Title, text, deviations of the section.
        models: Models that the claim is checked for, each by itself.
        shown_models: Models of the charts and the table, the first seed of each.
        paper: The paper's number.
    """
    probes = AccessProbes()

    def claim(variant: Variant) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            runs = results.by_seed(variant, "position").values()
            return Difference.paired([probes.evenness(outcome) for outcome in runs])

        quantity = f"{variant.label}: reads - writes, effective keys of a token as a proportion of k"
        return Claim(quantity, paper, difference, "above")

    def exhibit(results: StudyResults) -> Exhibit:
        first = {
            variant.label: probes.probe(outcome)
            for variant in shown_models
            for outcome in [*results.by_seed(variant, "position").values()][:1]
        }
        if not first:
            return Exhibit()
        uses = {label: probe.sides for label, probe in first.items()}
        charts: list[tuple[AnyChart, str]] = [
            (
                cumulative_mass_chart(uses, "cumulative-mass"),
                "Mass of the m heaviest keys of a token: mean, and 10% to 90% of the tokens. One seed.",
            ),
            (effective_keys_chart(uses, "effective-keys"), "Effective keys of a token as a proportion of k. One seed."),
        ]
        tokens = next(iter(first.values())).tokens
        note = f"Charts and table: {tokens:,} tokens of {DOCUMENTS} test documents, the first seed of each model."
        return Exhibit([_access_table(first)], charts, [note])

    return replace(section, exhibit=exhibit, claims=[claim(variant) for variant in models], variants=tuple(models))


def _access_table(probes: Mapping[str, AccessProbe]) -> Table:
    rows = []
    for label, probe in probes.items():
        sides = (probe.write, probe.read)
        halves = (f"{100 * side.mass[max(side.keys // 2, 1) - 1]:.0f}%" for side in sides)
        rows.append((label, *(f"{side.effective_mean:.3f}" for side in sides), *halves))
    columns = ("model", "writes: u", "reads: u", "writes: top half", "reads: top half")
    caption = "u: effective keys exp(entropy) / k, mean over tokens. Top half: mass of the heavier half of the k keys."
    return Table("Keys in use", columns, rows, caption)


def utilisation_section(section: Section, models: Sequence[Variant]) -> Section:
    """Gates and slots during training. Proportions of slots grow with the tokens that they are counted over, so that
    they are not compared with the paper's."""

    def exhibit(results: StudyResults) -> Exhibit:
        lines, rows, words = {}, [], []
        for variant in models:
            runs = {
                seed: [line for line in Run(outcome.folder).metrics() if "memory/slots_written" in line]
                for seed, outcome in results.by_seed(variant).items()
            }
            runs = {seed: course for seed, course in runs.items() if course}
            if not runs:
                continue
            for seed, course in runs.items():
                lines[f"{variant.label}, seed {seed}" if variant.seeds > 1 else variant.label] = course
            means = {
                key: weighted_mean([course[-1][f"memory/{key}"] for course in runs.values()]) for key in STATISTICS
            }
            rows.append((variant.label, str(len(runs)), *map(shown, means.values())))
            parts = (f"{name} {shown(means[key], 2)}" for key, name in STATISTICS.items())
            words.append(f"{variant.label} at the last step: {', '.join(parts)}")
        if not lines:
            return Exhibit()
        table = Table(
            "The memory at the end of training",
            ("model", "seeds", *STATISTICS.values()),
            rows,
            "Statistics of the last training step that has them. Slots: proportion that the tokens of one step touch.",
        )
        caption = "Gates, entropies and slots in use during training."
        return Exhibit([table], [(utilisation_chart(lines, "memory"), caption)], (), "; ".join(words))

    return replace(section, exhibit=exhibit, claims=(), variants=tuple(models))


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
