"""What is said about language modelling: likelihood of held-out code by position, with and without the aids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdm.analysis.pages import Finding, Illustration, Verdict
from sdm.analysis.plots import position_figure, position_points
from sdm.evaluation.position import Position
from sdm.evaluation.report import Point, Table
from sdm.evaluation.statistics import Difference, Mean, compare
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.recipes.small_code import DEVIATIONS, SHARED_DEVIATIONS

NAMES = {
    "code-sdm": "SDM",
    "code-gdn": "GDN, 2x16",
    "code-gdn-1x32": "GDN, 1x32",
    "code-attention": "full attention",
    "code-sdm-plain": "SDM, plain",
    "code-gdn-plain": "GDN, plain",
}
PAPER = "code, 1.4B: SDM 0.821 nats, GDN 0.849, full attention 0.798; the gap to GDN grows with position"


def findings(outcomes: Mapping[str, Outcome]) -> tuple[Finding, Finding]:
    """With the aids, and with the plain recipe."""
    return _aided(outcomes), _plain(outcomes)


def _aided(outcomes: Mapping[str, Outcome]) -> Finding:
    key, title = "code", "A longer past helps SDM more"
    claim = "On code, SDM predicts better than GDN at equal cost, the more so the further into a document."
    there = _there(outcomes, "code-sdm", "code-gdn", "code-gdn-1x32", "code-gdn-plain", "code-attention")
    forms = [name for name in there if "gdn" in name]
    if "code-sdm" not in there or not forms:
        return Finding(key, title, claim, "no result", PAPER, "failed", "The runs that it rests on have failed.")
    late = {name: there[name].measured["position"]["positions"][-1] for name in there}
    best = min(forms, key=lambda name: late[name]["nll"])
    differences = {name: _differences(there["code-sdm"], there[name]) for name in there if name != "code-sdm"}
    gap, start, stop = differences[best][-1].difference, late[best]["start"], late[best]["stop"]
    found = (
        f"SDM is {gap.value:.3f} nats per token below GDN's best form ({NAMES[best]}) at positions {start:,} to "
        f"{stop:,}; {_interval(gap)}"
    )
    shown = {name: differences[name] for name in (best, "code-attention") if name in differences}
    notes = [
        f"GDN's best form is the best of {len(forms)} at these positions: with the aids in two layouts (heads x key "
        "width), and plain with its short convolutions. Full attention has no aid, and has not learned to recall yet.",
        _documents(there["code-sdm"]),
    ]
    return Finding(
        key,
        title,
        claim,
        found,
        PAPER,
        _verdict(gap),
        illustrations=(_by_position("code", there), _gap_by_position("code-gap", shown)),
        tables=(_table("Held-out code, with the aids: nats per token to each position", there), _paired(differences)),
        deviations=DEVIATIONS,
        notes=tuple(notes),
    )


def _plain(outcomes: Mapping[str, Outcome]) -> Finding:
    key, title = "code-plain", "The plain recipe at this size"
    claim = "The same, with the paper's own recipe: no shifted keys, no tied start, GDN with its short convolutions."
    there = _there(outcomes, "code-sdm-plain", "code-gdn-plain")
    if len(there) < 2:
        return Finding(key, title, claim, "no result", PAPER, "failed", "The runs that it rests on have failed.")
    differences = {"code-gdn-plain": _differences(there["code-sdm-plain"], there["code-gdn-plain"])}
    gap = differences["code-gdn-plain"][-1].difference
    last = there["code-gdn-plain"].measured["position"]["positions"][-1]
    where = "below" if gap.value > 0 else "above"
    verdict = _verdict(gap)
    why = (
        "A million tokens are too few for a model of this size to learn recall without help: GDN's short convolutions "
        "gain at once from the tokens nearby, and SDM's memory is not used yet."
        if verdict != "agrees"
        else ""
    )
    return Finding(
        key,
        title,
        claim,
        f"SDM is {abs(gap.value):.3f} nats per token {where} GDN at positions {last['start']:,} to {last['stop']:,}; "
        f"{_interval(gap)}",
        PAPER,
        verdict,
        why,
        illustrations=(_by_position("code-plain", there),),
        tables=(_table("Held-out code, plain recipe: nats per token to each position", there), _paired(differences)),
        deviations=SHARED_DEVIATIONS,
        notes=(_documents(there["code-sdm-plain"]),),
    )


def _there(outcomes: Mapping[str, Outcome], *names: str) -> dict[str, Outcome]:
    return {name: outcomes[name] for name in names if "position" in outcomes[name].measured}


def _differences(sdm: Outcome, other: Outcome) -> list[Difference]:
    """The other's minus SDM's, document by document, for each stretch of positions."""
    found = compare(Position(), sdm.results("position"), other.results("position"))
    return [one for one in found if one.quantity.startswith("nats/token to ")]


def _verdict(gap: Mean) -> Verdict:
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return "unclear"
    return "agrees" if gap.value > 0 else "differs"


def _interval(gap: Mean) -> str:
    """Of the size of a difference, whichever way it goes."""
    seen = f"{gap.count} documents, 1 seed"
    if gap.low is None or gap.high is None:
        return seen
    low, high = sorted((gap.low, gap.high) if gap.value > 0 else (-gap.low, -gap.high))
    return f"95% interval {low:.3f} to {high:.3f}, {seen}"


def _documents(outcome: Outcome) -> str:
    summary = outcome.measured["position"]
    length = summary["positions"][-1]["stop"]
    return (
        f"The first {length:,} tokens of {summary['documents']} documents, {summary['tokens']:,} in all, that neither "
        "training nor any choice has seen. Differences are of the same documents; their intervals are Student's."
    )


def _bins(outcome: Outcome) -> list[dict[str, Any]]:
    return outcome.measured["position"]["positions"]


def _by_position(name: str, there: Mapping[str, Outcome]) -> Illustration:
    shown = {NAMES[job]: _bins(outcome) for job, outcome in there.items()}
    rows = [
        (model, one["start"], one["stop"], one["nll"], one["low"], one["high"])
        for model, bins in shown.items()
        for one in bins
    ]
    # Documents differ far more than models do: their intervals would hide what the differences show.
    curves = {model: [Point(one.x, one.y) for one in position_points(bins)] for model, bins in shown.items()}
    last = ", ".join(f"{model} {bins[-1]['nll']:.2f}" for model, bins in shown.items())
    return Illustration(
        name,
        "Nats per token by position in the document, 1 seed. Documents differ far more than models do: the table of "
        "differences has the intervals.",
        position_figure(curves),
        ("model", "start", "stop", "nll", "low", "high"),
        rows,
        f"Nats per token fall with position; in the last stretch: {last}.",
    )


def _gap_by_position(name: str, differences: Mapping[str, Sequence[Difference]]) -> Illustration:
    curves, rows = {}, []
    for job, found in differences.items():
        means = [(_stop(one), one.difference) for one in found]
        curves[NAMES[job]] = [Point(x, mean.value, mean.low, mean.high) for x, mean in means]
        rows += [(NAMES[job], x, mean.value, mean.low, mean.high) for x, mean in means]
    figure = position_figure(curves, "nats per token above SDM")
    figure.axes[0].axhline(0, color="black", linewidth=0.8)
    figure.axes[0].set_xlabel("up to position (tokens)")
    return Illustration(
        name,
        "The other model's nats per token minus SDM's on the same documents: above zero SDM is better. Bands: 95% "
        "intervals over documents.",
        figure,
        ("model", "stop", "difference", "low", "high"),
        rows,
        "The difference of each model to SDM by position.",
    )


def _stop(one: Difference) -> int:
    return int(one.quantity.split(" to ")[1].replace(",", ""))


def _table(title: str, there: Mapping[str, Outcome]) -> Table:
    bins = _bins(next(iter(there.values())))
    columns = ("model", *(f"{one['stop']:,}" for one in bins), "all", "parameters", "state")
    rows = [
        (
            NAMES[job],
            *(f"{one['nll']:.3f}" for one in _bins(outcome)),
            f"{outcome.measured['position']['nll']:.3f}",
            f"{(outcome.facts or {})['parameters']:,}",
            f"{(outcome.facts or {})['state_elements']:,}",
        )
        for job, outcome in there.items()
    ]
    return Table(title, columns, rows, "Parameters without M0, which has as many numbers as SDM's state.")


def _paired(differences: Mapping[str, Sequence[Difference]]) -> Table:
    first = next(iter(differences.values()))
    rows = []
    for job, found in differences.items():
        cells = []
        for one in found:
            mean = one.difference
            half = "" if mean.low is None or mean.high is None else f" ±{(mean.high - mean.low) / 2:.3f}"
            cells.append(f"{mean.value:+.3f}{half}")
        rows.append((NAMES[job], *cells))
    return Table(
        "Above SDM, on the same documents (nats per token to each position)",
        ("model", *(f"{_stop(one):,}" for one in first)),
        rows,
        "±: 95% interval of the mean of the differences of each document.",
    )
