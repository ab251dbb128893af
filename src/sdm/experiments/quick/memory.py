"""What the memory did: which slots were used during training, how its gates stand, how a token spreads its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdm.analysis.access import AccessProbe, MemoryStats, memory_stats, probe_access
from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import cumulative_mass_figure, utilisation_figure
from sdm.data.config import CorpusConfig
from sdm.data.corpus import open_corpus
from sdm.evaluation.report import Table
from sdm.evaluation.subject import open_subject
from sdm.experiments.jobs import Outcome
from sdm.recipes.small_pair import DEVIATIONS
from sdm.run import Run

KEY, TITLE = "memory", "What the memory did"
CLAIM = (
    "All slots come to be read; writes spread over more slots as training goes on; the gates settle; a token spreads "
    "its reads over its keys more evenly than its writes."
)
PAPER = "1.4B: read slots reach 100%, written ones grow from 28% to 42%; forget gate 0.95, input gate 0.50"
JOB = "code-sdm"
ROWS = 8  # of held-out text that is looked at


def measure(outcomes: Mapping[str, Outcome]) -> tuple[AccessProbe, MemoryStats] | None:
    """On held-out code; None if the run has failed."""
    outcome = outcomes[JOB]
    if outcome.facts is None:
        return None
    config = Run(outcome.folder).config().data
    assert isinstance(config, CorpusConfig)
    data, model = open_corpus(config, "test"), open_subject(outcome.folder).model
    texts = [data.batch(step, range(1)).input_ids for step in range(min(ROWS, data.num_steps or ROWS))]
    return probe_access(model, texts), memory_stats(model, texts)


def finding(outcomes: Mapping[str, Outcome], found: tuple[AccessProbe, MemoryStats] | None) -> Finding:
    if found is None:
        return Finding(KEY, TITLE, CLAIM, "no result", PAPER, "failed", "The run that it rests on has failed.")
    probe, stats = found
    lines = [line for line in Run(outcomes[JOB].folder).metrics() if "memory/slots_read" in line]
    first, last = lines[0], lines[-1]
    more_even = probe.read.effective_mean > probe.write.effective_mean
    spread = last["memory/slots_written"] > first["memory/slots_written"]
    text = (
        f"slots written {first['memory/slots_written']:.0%} at step {first['step']}, "
        f"{last['memory/slots_written']:.0%} at the end, read {last['memory/slots_read']:.0%}; forget gate "
        f"{last['memory/forget_gate_mean']:.2f}, input gate "
        f"{last['memory/input_gate_mean']:.2f}; effective keys: writes {probe.write.effective_mean:.2f}, reads "
        f"{probe.read.effective_mean:.2f} of {probe.write.keys}"
    )
    why = "" if more_even else "W_q starts equal to W_k here, and reads and writes keep choosing alike."
    return Finding(
        KEY,
        TITLE,
        CLAIM,
        text,
        PAPER,
        "agrees" if more_even and spread else "unclear",
        why,
        illustrations=(_training(lines), _keys(probe)),
        tables=(_table(stats, probe),),
        deviations=(*DEVIATIONS, "statistics of one step, 2,048 tokens; the paper's rest on 21M tokens"),
        notes=(f"Effective keys and the table: {probe.tokens:,} tokens of held-out code, 1 seed.",),
    )


def _training(lines: list[dict[str, float]]) -> Illustration:
    names = sorted({name for line in lines for name in line if name.startswith("memory/")})
    rows = [(line["step"], *(line.get(name) for name in names)) for line in lines]
    return Illustration(
        "memory",
        "The memory during training on code: gates, how evenly slots are used, and how many of them a step of "
        "2,048 tokens touches. 1 seed.",
        utilisation_figure({"SDM": lines}),
        ("step", *(name.removeprefix("memory/") for name in names)),
        rows,
        f"Slots written go from {lines[0]['memory/slots_written']:.0%} to {lines[-1]['memory/slots_written']:.0%}, "
        f"read from {lines[0]['memory/slots_read']:.0%} to {lines[-1]['memory/slots_read']:.0%}.",
    )


def _keys(probe: AccessProbe) -> Illustration:
    use = {"SDM": {"write": probe.write, "read": probe.read}}
    rows = [
        (side, number + 1, float(one.mass[number]), float(one.mass_low[number]), float(one.mass_high[number]))
        for side, one in use["SDM"].items()
        for number in range(one.keys)
    ]
    half = probe.write.keys // 2
    return Illustration(
        "keys",
        "How much of a token's weight its m heaviest keys have: mean, and the 10% and 90% quantiles over tokens of "
        "held-out code.",
        cumulative_mass_figure(use),
        ("side", "keys", "mass", "low", "high"),
        rows,
        f"The heavier half of the keys has {probe.write.mass[half - 1]:.0%} of the weight of writes and "
        f"{probe.read.mass[half - 1]:.0%} of reads.",
    )


def _table(stats: MemoryStats, probe: AccessProbe) -> Table:
    rows: list[tuple[str, ...]] = [(name, f"{value:.3f}") for name, value in _named(stats.mean).items()]
    for name, use in (("writes", probe.write), ("reads", probe.read)):
        rows.append((f"effective keys of {name}: mean", f"{use.effective_mean:.3f}"))
        rows.append((f"effective keys of {name}: median", f"{use.effective_median:.3f}"))
    return Table("The memory on held-out code", ("quantity", "value"), rows, "Effective keys: exp(entropy) / k.")


def _named(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix("memory/").replace("_", " "): float(value) for name, value in numbers.items()}
