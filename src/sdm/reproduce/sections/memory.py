"""Sections about the memory: how evenly tokens spread their writes and reads, its use during training, and its cost."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdm.analysis import charts
from sdm.data.config import CorpusConfig
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.memory_access import AccessProbe, probe_access
from sdm.evaluation.position import Position
from sdm.evaluation.probe import cumulative_mass_chart, effective_keys_chart
from sdm.evaluation.report import AnyChart, Table
from sdm.evaluation.speed import Speed, speed_curves
from sdm.evaluation.statistics import Difference, weighted_mean
from sdm.reproduce.jobs import stored_results
from sdm.reproduce.study import SPEED_FOLDER, Claim, Exhibit, Section, StudyResults, Variant, shown
from sdm.run import Run

DOCUMENTS = 8  # the paper's number
STATISTICS = {
    "forget_gate_mean": "forget gate exp(g)",
    "input_gate_mean": "input gate β",
    "slots_written": "slots written",
    "slots_read": "slots read",
}


def _probes(folder: Path, together: bool) -> dict[str, AccessProbe]:
    """How a run spreads its writes and reads over the beginnings of the first test documents that are long enough:
    "all" of them together, or each by its number."""
    lm = open_model(folder)
    assert lm.run is not None
    (held_out,) = Position().held_out(lm)
    store, data = held_out.tokens(lm.tokenizer), lm.run.config().data
    assert isinstance(data, CorpusConfig)
    long = (store.lengths >= data.sequence_length).nonzero().squeeze(1).tolist()[:DOCUMENTS]
    rows = {str(number): [store.document(number, 0, data.sequence_length).long().unsqueeze(0)] for number in long}
    texts = {"all": [row for part in rows.values() for row in part]} if together else rows
    return {name: probe_access(lm.model, part) for name, part in texts.items()}


def access_section(deviations: tuple[str, ...], models: Sequence[Variant], shown_models: Sequence[Variant]) -> Section:
    """Effective keys of writes and reads.

    Args:
        deviations: How the models and the measurement differ from the paper's.
        models: Models that the claim is checked for, each by itself.
        shown_models: Models of the charts and the table, the first seed of each.
    """
    probes = functools.cache(_probes)

    def claim(variant: Variant) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            runs = [probes(run.folder, False) for run in results.by_seed(variant, "position").values()]
            return Difference.paired(
                [
                    {name: use.read.effective_mean - use.write.effective_mean for name, use in run.items()}
                    for run in runs
                ]
            )

        quantity = f"{variant.label}: reads - writes, effective keys of a token as a proportion of k"
        return Claim(quantity, "above zero, shown as a figure", difference, "above")

    def exhibit(results: StudyResults) -> Exhibit:
        outcomes = {variant.label: results.first(variant, "position") for variant in shown_models}
        first = {label: probes(run.folder, True)["all"] for label, run in outcomes.items() if run is not None}
        if not first:
            return Exhibit()
        uses = {label: probe.sides for label, probe in first.items()}
        rows = []
        for label, use in uses.items():
            means = (f"{side.effective_mean:.3f}" for side in use.values())
            halves = (f"{100 * side.mass[max(side.keys // 2, 1) - 1]:.0f}%" for side in use.values())
            rows.append((label, *means, *halves))
        columns = ("model", "writes: u", "reads: u", "writes: top half", "reads: top half")
        caption = (
            "u: effective keys exp(entropy) / k, mean over tokens. Top half: mass of the heavier half of the k keys."
        )
        figures: list[tuple[AnyChart, str]] = [
            (
                cumulative_mass_chart(uses, "cumulative-mass"),
                "Mass of the m heaviest keys of a token: mean, and 10% to 90% of the tokens. One seed.",
            ),
            (effective_keys_chart(uses, "effective-keys"), "Effective keys of a token as a proportion of k. One seed."),
        ]
        tokens = next(iter(first.values())).tokens
        note = f"Charts and table: {tokens:,} tokens of {DOCUMENTS} test documents, the first seed of each model."
        return Exhibit([Table("Keys in use", columns, rows, caption)], figures, [note])

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
                means = {
                    name: weighted_mean([line[f"memory/{key}"] for line in last]) for key, name in STATISTICS.items()
                }
                rows.append((variant.label, str(len(last)), *map(shown, means.values())))
                parts = (f"{name} {shown(mean, 2)}" for name, mean in means.items())
                words.append(f"{variant.label} at the last step: {', '.join(parts)}")
        if not lines:
            return Exhibit()
        columns = ("model", "seeds", *STATISTICS.values())
        about = (
            "Statistics of the last training step that has them. Slots: proportion that the tokens of one step touch."
        )
        table = Table("The memory at the end of training", columns, rows, about)
        caption = "Gates, entropies and slots in use during training."
        return Exhibit([table], [(charts.utilisation_chart(lines, "memory"), caption)], (), "; ".join(words))

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

    def times(results: StudyResults, variant: Variant) -> list[dict[str, Any]]:
        """By length, of the first seed, if its speed was measured with these settings; else nothing."""
        outcome = results.first(variant)
        folder = None if outcome is None else Run(outcome.folder).evaluations / SPEED_FOLDER
        measured = None if folder is None else stored_results(speed, folder)
        return measured.summary["lengths"] if measured and measured.summary else []

    def ratio(first: str, second: str) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            at_longest = [
                at for kind in (first, second) for at in times(results, models[kind]) if at["length"] == longest
            ]
            if len(at_longest) < 2:
                return None
            above, below = at_longest
            ends = (("decode", "decode"), ("decode_low", "decode_high"), ("decode_high", "decode_low"))
            value, low, high = (above[mine] / below[other] - 1 for mine, other in ends)
            return Difference(value, low, high, f"range of {speed.repeats} repeats")

        names = f"{models[first].label} / {models[second].label} - 1"
        quantity = f"{names}, time of a generated token behind {longest:,} tokens"
        return Claim(quantity, PAPER[first, second], difference, "above", percent=True)

    def exhibit(results: StudyResults) -> Exhibit:
        measured = {variant.label: at for variant in models.values() if (at := times(results, variant))}
        if not measured:
            return Exhibit()

        caption = (
            "Time of a generated token and the state behind the context: medians; bands: the range of the repeats."
        )
        chart = charts.cost_chart(*(speed_curves(key, measured) for key in ("decode", "state")))
        numbers = {
            (label, at["length"]): (
                f"{1e6 * at['prefill']:.1f}",
                f"{1e3 * at['decode']:.2f}",
                f"{1e-6 * at['state']:.3f}",
            )
            for label, lengths in measured.items()
            for at in lengths
        }
        columns = ("model", "context", "prefill (µs/token)", "generate (ms/token)", "state (MB)")
        rows = [(label, f"{length:,}", *cells) for (label, length), cells in numbers.items()]
        table = Table("Time and state of a token", columns, rows, "Medians. State: everything kept behind the context.")
        note = f"{speed.repeats} repeats of {speed.new_tokens} tokens, models in turns, one thread, one seed."
        last = {label: numbers[label, longest] for label in measured}
        words = ", ".join(f"{label} {decode} ms and {state} MB" for label, (_, decode, state) in last.items())
        return Exhibit([table], [(chart, caption)], [note], f"behind {longest:,} tokens: {words}")

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
