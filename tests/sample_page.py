"""A page with everything that a page can have. `python tests/sample_page.py FOLDER` writes it, to be looked at.

The numbers are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sdm.analysis.draw import draw
from sdm.analysis.pages import Finding, Illustration, Page, Section, write_page
from sdm.evaluation.report import Chart, Point, Table

PAIRS = (16, 32, 64, 128, 256, 512)
ACCURACY = {
    "SDM, N = 1024": (100.0, 100.0, 99.9, 99.8, 99.4, 96.7),
    "GDN, best of 12": (99.8, 98.1, 93.0, 88.2, 85.3, 51.2),
    "full attention": (100.0, 100.0, 100.0, 100.0, 99.9, 71.0),
}


def recall_illustration(name: str = "recall") -> Illustration:
    curves = {
        model: [
            Point(pairs, value / 100, max(0, value - 2) / 100, min(100, value + 2) / 100)
            for pairs, value in zip(PAIRS, values, strict=True)
        ]
        for model, values in ACCURACY.items()
    }
    chart = Chart(name, "Associative recall", "pairs to keep apart (K)", "accuracy", curves, log_x=True, percent=True)
    rows = [
        (model, pairs, value, 3)
        for model, values in ACCURACY.items()
        for pairs, value in zip(PAIRS, values, strict=True)
    ]
    return Illustration(
        name,
        "Accuracy of recall against the number of pairs; bands: 95% intervals over 3 seeds.",
        draw(chart),
        ("model", "K", "accuracy (%)", "seeds"),
        rows,
        "SDM stays above 96% up to 512 pairs, GDN falls to half, attention stands between them.",
    )


def scaling_illustration() -> Illustration:
    flops = 2.0 ** np.arange(0, 9, 2)
    rows, curves = [], {}
    for name, scale in (("SDM", 1.00), ("GDN", 1.03), ("full attention", 0.99)):
        losses = scale * (1.7 + 2.1 * flops**-0.14)
        curves[name] = [
            Point(float(x), float(y), float(y - 0.02), float(y + 0.02)) for x, y in zip(flops, losses, strict=True)
        ]
        rows += [(name, float(x), float(y)) for x, y in zip(flops, losses, strict=True)]
    chart = Chart("scaling", "A ladder of five levels", "training TFLOPs", "nats per token", curves, log_x=True)
    columns = ("model", "training TFLOPs", "nats per token")
    return Illustration(
        "scaling", "Power laws, each with its band.", draw(chart), columns, rows, "Three falling lines."
    )


def use_illustration() -> Illustration:
    steps = np.arange(0, 1001, 5)
    curves = {
        name: [Point(int(step), float(1 - floor * np.exp(-step / 200))) for step in steps]
        for name, floor in (("slots written", 0.7), ("slots read", 0.5))
    }
    chart = Chart("use", "Use of the memory in training", "step", "slots used in a batch", curves, percent=True)
    rows = [(name, point.x, point.y) for name, points in curves.items() for point in points]
    caption = "Share of the slots that a batch touches."
    return Illustration("slot-use", caption, draw(chart), ("what", "step", "share"), rows, "Both rise towards one.")


def wide_table() -> Table:
    columns = ("model", "parameters", "FLOPs/token", "state", *(f"K = {pairs}" for pairs in PAIRS), "steps", "best lr")
    rows = [
        (model, "412,161", "1,204,224", "131,072", *(f"{value:.1f} ± 0.4" for value in values), "1,000", "0.003")
        for model, values in ACCURACY.items()
    ]
    return Table("Every model at every K", columns, rows, "±: 95% interval of the mean over 3 seeds.")


def sample_page() -> Page:
    aids = (
        "Keys come from the previous token's hidden state, for every model alike (`--key-shift`).",
        "W_q starts equal to W_k (the paper: independent).",
        "Two blocks of width 128; the paper's smallest model has nine of width 768.",
    )
    findings = (
        Finding(
            "recall",
            "A larger state recalls more",
            "At equal FLOPs a larger recurrent state recalls more of its context.",
            "SDM 99.4% [98.9, 99.8], GDN's best 85.3% [82.0, 88.1] at K = 256",
            "not reported",
            "agrees",
            illustrations=(recall_illustration(),),
            tables=(wide_table(),),
            deviations=aids,
            notes=("M0 has +30% parameters; a null M0 recalls as much.", "Attention takes +24% FLOPs."),
        ),
        Finding(
            "plain",
            "The plain recipe at this scale",
            "SDM has a lower loss than GDN at every level of the ladder.",
            "SDM 3.76 [3.73, 3.79], GDN 3.59 [3.56, 3.61] nats per token",
            "2.43 against 2.47 at 1.4B",
            "differs",
            "With one or two million tokens nobody has learned recall yet, and GDN's short convolutions win locally. "
            "The order turns at about 40 million tokens: see `sdm reproduce mini`.",
            illustrations=(scaling_illustration(), use_illustration()),
            deviations=("Tiny levels of 0.1M to 3M parameters.",),
        ),
        Finding(
            "null",
            "A learned initial memory helps",
            "Learning M0 lowers the loss.",
            "-0.011 [-0.025, +0.004] nats per token",
            "-0.02",
            "unclear",
            illustrations=(use_illustration(), scaling_illustration()),
        ),
        Finding(
            "ruler",
            "RULER",
            "SDM keeps its accuracy at four times the length of training.",
            "no result",
            "61.2",
            "failed",
            "Traceback (most recent call last):\n"
            '  File "/a/rather/long/path/to/the/library/sdm/evaluation/ruler/measurement.py", line 118, in plan\n'
            "    raise UserError(message)\n"
            "sdm.errors.UserError: the tokenizer has no token for the end of a document; take another with --tokenizer",
        ),
        Finding(
            "short",
            "Short tasks",
            "Short-context tasks are as good as with attention.",
            "not measured",
            "58.1 against 57.6",
            "missing",
            "It takes the package lm-eval: `pip install 'sparse-delta-memory[eval]'`, then the same command again.",
        ),
    )
    config = "\n".join(f'  "field_{place}": {place},' for place in range(30))
    sections = (
        Section(
            "Commands",
            ("From a fresh checkout.",),
            preformatted="make run\nsdm reproduce quick --output runs/quick --processes 2 --seeds 3",
        ),
        Section("Configurations", preformatted=f"{{\n{config}\n}}"),
        Section("Environment", tables=(Table("", ("what", "value"), [("torch", "2.8.0"), ("cores", "2")]),)),
    )
    lead = (
        "A sparse delta memory keeps **256 pairs** apart where a gated delta net of the same cost keeps some. Two of "
        "five claims of the paper are tested here, in nine minutes on two cores.\n\n"
        "One agrees, one does not at this size, and the page says why."
    )
    return Page("The paper in miniature", lead.replace("*", ""), findings, sections)


if __name__ == "__main__":
    print(write_page(sample_page(), Path(sys.argv[1])))
