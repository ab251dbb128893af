"""What a generated token costs, in time and memory, against the length of the context."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import costs_figure
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.report import Point, Table
from sdm.evaluation.runner import evaluate
from sdm.evaluation.speed import Speed
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.measure import earlier
from sdm.reproduce.studies.quick.language import NAMES
from sdm.run import Run

KEY, TITLE = "cost", "The cost of a token does not grow with the context"
CLAIM = (
    "Behind a long context, SDM generates about as fast as GDN and much faster than full attention, at constant memory."
)
PAPER = "1.4B: decoding about 10% slower than GDN, 6 times faster than full attention"
MODELS = ("code-sdm", "code-gdn", "code-attention")
MEASUREMENT = Speed(lengths=(1024, 8192, 32768), repeats=2, new_tokens=64)
DEVIATIONS = (
    "the models of code, d = 64 with one global layer of four, one thread of a CPU: most of a token's time is that of "
    "calling small operations, which does not depend on the context",
    "random tokens; a context of 32,768 is sixteen times what they were trained on",
)


def measure(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """The models take turns, after all training is done: timings need a machine of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {name: outcomes[name].folder for name in MODELS if outcomes[name].facts is not None}
        subjects = []
        for folder in found.values():
            earlier(MEASUREMENT, Run(folder).evaluations / KEY)
            subjects.append((open_model(folder), Run(folder).evaluations / KEY))
        results = evaluate("speed", MEASUREMENT, subjects)
    finally:
        torch.set_num_threads(threads)
    return {name: one.summary or {} for name, one in zip(found, results, strict=True)}


def finding(summaries: Mapping[str, dict[str, Any]]) -> Finding:
    """From what `measure` has found."""
    if not {"code-sdm", "code-attention"} <= summaries.keys():
        return Finding(KEY, TITLE, CLAIM, "no result", PAPER, "failed", "The runs that it rests on have failed.")
    longest = MEASUREMENT.lengths[-1]
    decode = {name: _at(summary, longest)["decode"] for name, summary in summaries.items()}
    growth = (
        _at(summaries["code-sdm"], longest)["decode"] / _at(summaries["code-sdm"], MEASUREMENT.lengths[0])["decode"]
    )
    faster = decode["code-attention"] / decode["code-sdm"]
    found = f"behind {longest:,} tokens SDM is {faster:.1f} times as fast as full attention"
    if "code-gdn" in decode:
        found += f" and takes {decode['code-sdm'] / decode['code-gdn']:.2f} times GDN's time"
    found += f"; from {MEASUREMENT.lengths[0]:,} to {longest:,} tokens its time changes {growth:.2f} times"
    states = {name: _at(summary, longest)["state"] for name, summary in summaries.items()}
    agrees = faster > 1.1 and growth < 1.25 and states["code-attention"] > states["code-sdm"]
    return Finding(
        KEY,
        TITLE,
        CLAIM,
        found,
        PAPER,
        "agrees" if agrees else "unclear",
        "" if agrees else "At this size a token's time is that of calling small operations, whatever the context.",
        illustrations=(_figure(summaries),),
        tables=(_table(summaries),),
        deviations=DEVIATIONS,
        notes=(f"Medians of {MEASUREMENT.repeats} repeats of {MEASUREMENT.new_tokens} tokens, models in turns.",),
    )


def _at(summary: Mapping[str, Any], length: int) -> dict[str, Any]:
    return next(one for one in summary["lengths"] if one["length"] == length)


def _figure(summaries: Mapping[str, dict[str, Any]]) -> Illustration:
    time, state = (
        {
            NAMES[job]: [
                Point(one["length"], *(scale * one[part] for part in (key, f"{key}_low", f"{key}_high")))
                for one in summary["lengths"]
            ]
            for job, summary in summaries.items()
        }
        for key, scale in (("decode", 1e3), ("state", 1e-6))
    )
    rows = [
        (model, one.x, one.y, one.low, one.high, held.y)
        for model in time
        for one, held in zip(time[model], state[model], strict=True)
    ]
    ends = ", ".join(f"{model} {points[0].y:.2g} to {points[-1].y:.2g} ms" for model, points in time.items())
    return Illustration(
        "cost",
        "Time of a generated token and everything that is kept behind the context: medians, and the range of the "
        "repeats.",
        costs_figure(time, state),
        ("model", "context", "milliseconds", "low", "high", "megabytes"),
        rows,
        f"Time per generated token, from the shortest to the longest context: {ends}.",
    )


def _table(summaries: Mapping[str, dict[str, Any]]) -> Table:
    rows = [
        (
            NAMES[job],
            *(f"{1e3 * one['decode']:.2f}" for one in summary["lengths"]),
            *(f"{1e-6 * one['state']:.3f}" for one in summary["lengths"]),
            f"{statistics.mean(1e6 * one['prefill'] for one in summary['lengths']):.0f}",
        )
        for job, summary in summaries.items()
    ]
    lengths = [f"{length:,}" for length in MEASUREMENT.lengths]
    columns = (
        "model",
        *(f"ms at\n{length}" for length in lengths),
        *(f"MB at\n{length}" for length in lengths),
        "prefill\nµs/token",
    )
    return Table(
        "Cost of a generated token behind a context",
        columns,
        rows,
        "One thread. MB: everything that is kept behind the context. Prefill: mean over the contexts.",
    )
