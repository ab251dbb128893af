"""Sections about the memory: how evenly tokens spread their writes and reads, its use during training, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from sdm.analysis.charts import cost_chart, utilisation_chart
from sdm.data.config import CorpusConfig
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.measurement import settings_of
from sdm.evaluation.memory_access import AccessProbe, probe_access
from sdm.evaluation.position import Position
from sdm.evaluation.probe import cumulative_mass_chart, effective_keys_chart
from sdm.evaluation.report import AnyChart, Point, Table
from sdm.evaluation.results import FILE, read_results
from sdm.evaluation.speed import Speed
from sdm.evaluation.statistics import weighted_mean
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.study import SPEED_FOLDER, Claim, Difference, Exhibit, Section, StudyResults, Variant, shown
from sdm.run import Run

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
            lm, rows = _documents(outcome)
            self._probes[outcome.folder] = probe_access(lm.model, list(rows.values()))
        return self._probes[outcome.folder]

    def evenness(self, outcome: Outcome) -> dict[str, float]:
        """By document: effective keys of reads minus those of writes, as a proportion of k."""
        if outcome.folder not in self._evenness:
            lm, rows = _documents(outcome)
            probes = {name: probe_access(lm.model, [row]) for name, row in rows.items()}
            differences = {
                name: probe.read.effective_mean - probe.write.effective_mean for name, probe in probes.items()
            }
            self._evenness[outcome.folder] = differences
        return self._evenness[outcome.folder]


def _documents(outcome: Outcome) -> tuple[EvalModel, dict[str, Tensor]]:
    """A run's model, and the beginnings of test documents by their number."""
    lm = open_model(outcome.folder)
    assert lm.run is not None
    (held_out,) = Position().held_out(lm)
    store, data = held_out.tokens(lm.tokenizer), lm.run.config().data
    assert isinstance(data, CorpusConfig)
    long = (store.lengths >= data.sequence_length).nonzero().squeeze(1).tolist()[:DOCUMENTS]
    return lm, {str(n): store.document(n, 0, data.sequence_length).long().unsqueeze(0) for n in long}


def access_section(deviations: tuple[str, ...], models: Sequence[Variant], shown_models: Sequence[Variant]) -> Section:
    """Effective keys of writes and reads.

    Args:
        deviations: How the models and the measurement differ from the paper's.
        models: Models that the claim is checked for, each by itself.
        shown_models: Models of the charts and the table, the first seed of each.
    """
    probes = AccessProbes()

    def claim(variant: Variant) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            runs = results.by_seed(variant, "position").values()
            return Difference.paired([probes.evenness(outcome) for outcome in runs])

        quantity = f"{variant.label}: reads - writes, effective keys of a token as a proportion of k"
        return Claim(quantity, "above zero, shown as a figure", difference, "above")

    def exhibit(results: StudyResults) -> Exhibit:
        outcomes = {variant.label: results.first(variant, "position") for variant in shown_models}
        first = {label: probes.probe(outcome) for label, outcome in outcomes.items() if outcome is not None}
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

    return Section(
        "access",
        "How evenly keys are used",
        "Reads are consistently more uniform than writes, in the effective number of keys of a token.",
        "shown as a figure; with 64 writes the top 32 have about 85% of the mass",
        deviations,
        "W_q starts equal to W_k in the aided models, so that reads and writes start alike; the plain recipe has no "
        "such tie.",
        exhibit,
        [claim(variant) for variant in models],
        models,
    )


def _access_table(probes: Mapping[str, AccessProbe]) -> Table:
    rows = []
    for label, probe in probes.items():
        sides = (probe.write, probe.read)
        halves = (f"{100 * side.mass[max(side.keys // 2, 1) - 1]:.0f}%" for side in sides)
        rows.append((label, *(f"{side.effective_mean:.3f}" for side in sides), *halves))
    columns = ("model", "writes: u", "reads: u", "writes: top half", "reads: top half")
    caption = "u: effective keys exp(entropy) / k, mean over tokens. Top half: mass of the heavier half of the k keys."
    return Table("Keys in use", columns, rows, caption)


def utilisation_section(deviations: tuple[str, ...], models: Sequence[Variant]) -> Section:
    """Gates and slots during training. Proportions of slots grow with the tokens that they are counted over, so that
    they are not compared with the paper's."""

    def exhibit(results: StudyResults) -> Exhibit:
        lines, rows, words = {}, [], []
        for variant in models:
            last = []
            for seed, outcome in results.by_seed(variant).items():
                if course := [line for line in Run(outcome.folder).metrics() if "memory/slots_written" in line]:
                    lines[f"{variant.label}, seed {seed}" if variant.seeds > 1 else variant.label] = course
                    last.append(course[-1])
            if last:
                means = {key: weighted_mean([line[f"memory/{key}"] for line in last]) for key in STATISTICS}
                rows.append((variant.label, str(len(last)), *map(shown, means.values())))
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

    return Section(
        "memory",
        "The memory during training",
        "The forget gate settles at 0.95 and the input gate at 0.50; all slots come to be read, 28% to 42% are "
        "written.",
        "1.4B, over 21M tokens: read 100%, written 28% to 42%; forget gate 0.95, input gate 0.50",
        deviations,
        "Not compared: the proportion of slots in use grows with the tokens that it is counted over, one step of 2,048 "
        "here.",
        exhibit,
        variants=models,
    )


Times = Mapping[int, Mapping[str, float]]
"""By the length of the context: times in seconds, sizes in bytes, with the range of the repeats."""
PAPER = {
    ("full_attention", "sdm"): "SDM decodes 6 times faster than full attention at 1.4B",
    ("sdm", "gdn"): "SDM decodes around 10% slower than GDN at 1.4B",
}


def cost_section(deviations: tuple[str, ...], models: Mapping[str, Variant], speed: Speed) -> Section:
    """Time of a generated token behind the longest context.

    Args:
        deviations: How the models and the measurement differ from the paper's.
        models: By architecture; "sdm" and "full_attention" are compared.
        speed: What the study measures, the first seed of each model.
    """
    longest = max(speed.lengths)

    def ratio(first: str, second: str) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            times = [_times(results, models[kind], speed).get(longest) for kind in (first, second)]
            if times[0] is None or times[1] is None:
                return None
            above, below = times[0], times[1]
            low, high = above["decode_low"] / below["decode_high"], above["decode_high"] / below["decode_low"]
            interval = f"range of {speed.repeats} repeats"
            return Difference(above["decode"] / below["decode"] - 1, low - 1, high - 1, interval)

        names = f"{models[first].label} / {models[second].label} - 1"
        quantity = f"{names}, time of a generated token behind {longest:,} tokens"
        return Claim(quantity, PAPER[first, second], difference, "above", percent=True)

    def exhibit(results: StudyResults) -> Exhibit:
        measured = {variant.label: _times(results, variant, speed) for variant in models.values()}
        measured = {label: times for label, times in measured.items() if times}
        if not measured:
            return Exhibit()

        def curves(key: str, scale: float) -> dict[str, list[Point]]:
            ends = [f"{key}{end}" for end in ("", "_low", "_high")]
            return {
                label: [Point(length, *(scale * at[end] for end in ends)) for length, at in times.items()]
                for label, times in measured.items()
            }

        caption = (
            "Time of a generated token and the state behind the context: medians; bands: the range of the repeats."
        )
        chart = cost_chart(curves("decode", 1e3), curves("state", 1e-6))
        rows = [
            (
                label,
                f"{length:,}",
                f"{1e6 * at['prefill']:.1f}",
                f"{1e3 * at['decode']:.2f}",
                f"{1e-6 * at['state']:.3f}",
            )
            for label, times in measured.items()
            for length, at in times.items()
        ]
        columns = ("model", "context", "prefill (µs/token)", "generate (ms/token)", "state (MB)")
        about = "Medians. State: everything kept behind the context."
        note = f"{speed.repeats} repeats of {speed.new_tokens} tokens, models in turns, one thread, one seed."
        last = {label: times[longest] for label, times in measured.items()}
        words = [f"{label} {1e3 * at['decode']:.2f} ms and {1e-6 * at['state']:.3f} MB" for label, at in last.items()]
        summary = f"behind {longest:,} tokens: {', '.join(words)}"
        return Exhibit([Table("Time and state of a token", columns, rows, about)], [(chart, caption)], [note], summary)

    return Section(
        "cost",
        "Time of a generated token",
        "Decoding with SDM takes about 10% more time than with GDN and a sixth of the time of full attention (1.4B).",
        "1.4B: around 10% slower than GDN, 6 times faster than full attention",
        deviations,
        exhibit=exhibit,
        claims=[ratio(*pair) for pair in PAPER],
        variants=list(models.values()),
    )


def _times(results: StudyResults, variant: Variant, speed: Speed) -> Times:
    """Of the first seed, if its speed was measured with these settings; else nothing."""
    outcome = results.first(variant)
    folder = None if outcome is None else Run(outcome.folder).evaluations / SPEED_FOLDER
    if folder is None or not (folder / FILE).is_file():
        return {}
    measured = read_results(folder)
    if measured.settings != settings_of(speed) or not measured.summary:
        return {}
    return {times["length"]: times for times in measured.summary["lengths"]}
