"""What the memory did: which slots were used during training, how its gates stand, how a token spreads its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdm.analysis.pages import Finding, Illustration, Verdict
from sdm.analysis.plots import cumulative_mass_figure, utilisation_figure
from sdm.data.config import CorpusConfig
from sdm.data.corpus import open_corpus
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.memory_access import AccessProbe, MemoryStats, memory_stats, probe_access
from sdm.evaluation.report import Table
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.recipes.small_code import DEVIATIONS
from sdm.run import Run

KEY, TITLE = "memory", "What the memory did"
CLAIM = (
    "All slots come to be read; writes spread over more slots as training goes on; the gates settle; a token spreads "
    "its reads over its keys more evenly than its writes."
)
PAPER = "1.4B: read slots reach 100%, written ones grow from 28% to 42%; forget gate 0.95, input gate 0.50"
JOBS = {"code-sdm": "SDM", "code-sdm-plain": "SDM, plain"}
ROWS = 8  # of held-out text that are looked at
CLOSE = 0.02  # effective keys that differ by less are about the same
WHY = (
    "256 slots and 2,048 tokens that write 16 each: all slots are in use from the first steps, so that no growth can "
    "be seen. How evenly tokens read and write depends on the recipe at this size, so both are shown."
)


@dataclass(frozen=True)
class Look:
    """What is known of the memory of one run."""

    lines: list[dict[str, float]]
    """Of its metrics, those with statistics of the memory."""
    probe: AccessProbe
    stats: MemoryStats

    @property
    def evenness(self) -> float:
        """How much more even reads are than writes, in effective keys."""
        return self.probe.read.effective_mean - self.probe.write.effective_mean


def measure(outcomes: Mapping[str, Outcome]) -> dict[str, Look]:
    """On held-out code, each run that there is by its name in figures."""
    return {name: _look(outcomes[job]) for job, name in JOBS.items() if outcomes[job].facts is not None}


def _look(outcome: Outcome) -> Look:
    run = Run(outcome.folder)
    config = run.config().data
    assert isinstance(config, CorpusConfig)
    data, model = open_corpus(config, "test"), open_model(outcome.folder).model
    texts = [data.batch(step, range(1)).input_ids for step in range(min(ROWS, data.num_steps or ROWS))]
    lines = [line for line in run.metrics() if "memory/slots_read" in line]
    return Look(lines, probe_access(model, texts), memory_stats(model, texts))


def finding(looks: Mapping[str, Look]) -> Finding:
    """From what `measure` has found."""
    if "SDM" not in looks:
        return Finding(KEY, TITLE, CLAIM, "no result", PAPER, "failed", "The run that it rests on has failed.")
    last, one = looks["SDM"].lines[-1], looks["SDM"].probe
    keys = "; ".join(
        f"{name}: writes {look.probe.write.effective_mean:.2f}, reads {look.probe.read.effective_mean:.2f}"
        for name, look in looks.items()
    )
    text = (
        f"slots read {last['memory/slots_read']:.0%}, written {last['memory/slots_written']:.0%}; forget gate "
        f"{last['memory/forget_gate_mean']:.2f}, input gate {last['memory/input_gate_mean']:.2f}; effective keys of "
        f"{one.write.keys}, as a share, {keys}"
    )
    verdict = _verdict([look.evenness for look in looks.values()])
    return Finding(
        KEY,
        TITLE,
        CLAIM,
        text,
        PAPER,
        verdict,
        "" if verdict == "agrees" else WHY,
        illustrations=(_training(looks), _keys(looks)),
        tables=(_table(looks),),
        deviations=(*DEVIATIONS, "statistics of one step, 2,048 tokens; the paper's rest on 21M tokens"),
        notes=(
            f"Effective keys and the table: {one.tokens:,} tokens of held-out code, 1 seed. Plain: without the aids.",
        ),
    )


def _verdict(evenness: Sequence[float]) -> Verdict:
    if min(evenness) > CLOSE:
        return "agrees"
    return "differs" if max(evenness) < -CLOSE else "unclear"


def _training(looks: Mapping[str, Look]) -> Illustration:
    names = sorted({name for name in looks["SDM"].lines[0] if name.startswith("memory/")})
    rows = [
        (model, line["step"], *(line.get(name) for name in names))
        for model, look in looks.items()
        for line in look.lines
    ]
    first, last = looks["SDM"].lines[0], looks["SDM"].lines[-1]
    return Illustration(
        "memory",
        "The memory during training on code: gates, how evenly slots are used, and how many of them a step of "
        "2,048 tokens touches. 1 seed.",
        utilisation_figure({name: look.lines for name, look in looks.items()}),
        ("model", "step", *(name.removeprefix("memory/") for name in names)),
        rows,
        f"SDM's slots written go from {first['memory/slots_written']:.0%} to {last['memory/slots_written']:.0%}, "
        f"read from {first['memory/slots_read']:.0%} to {last['memory/slots_read']:.0%}.",
    )


def _keys(looks: Mapping[str, Look]) -> Illustration:
    uses = {name: {"write": look.probe.write, "read": look.probe.read} for name, look in looks.items()}
    rows = [
        (name, side, number + 1, float(one.mass[number]), float(one.mass_low[number]), float(one.mass_high[number]))
        for name, use in uses.items()
        for side, one in use.items()
        for number in range(one.keys)
    ]
    half = looks["SDM"].probe.write.keys // 2
    return Illustration(
        "keys",
        "How much of a token's weight its m heaviest keys have: mean, and the 10% and 90% quantiles over tokens of "
        "held-out code.",
        cumulative_mass_figure(uses),
        ("model", "side", "keys", "mass", "low", "high"),
        rows,
        "; ".join(
            f"{name}: the heavier half of the keys has {use['write'].mass[half - 1]:.0%} of the weight of writes and "
            f"{use['read'].mass[half - 1]:.0%} of reads"
            for name, use in uses.items()
        ),
    )


def _table(looks: Mapping[str, Look]) -> Table:
    named = {
        name: {key.replace("_", " "): value for key, value in look.stats.mean.items()} for name, look in looks.items()
    }
    for name, look in looks.items():
        for side, use in (("writes", look.probe.write), ("reads", look.probe.read)):
            named[name][f"effective keys of {side}, mean"] = use.effective_mean
            named[name][f"effective keys of {side}, median"] = use.effective_median
    rows = [
        (quantity, *(f"{one[quantity]:.3f}" for one in named.values()))
        for quantity in next(iter(named.values()))
        if quantity != "tokens"
    ]
    return Table("The memory on held-out code", ("quantity", *named), rows, "Effective keys: exp(entropy) / k.")
