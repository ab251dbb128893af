"""Findings about cost: time and memory of a token, and what backward keeps of old rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import costs_figure
from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.report import Point, Table
from sdm.evaluation.results import FILE
from sdm.evaluation.runner import evaluate
from sdm.evaluation.speed import Speed
from sdm.files import read_json
from sdm.ops.triton.availability import missing_because, version
from sdm.reproduce.recipes.mini import DEVIATIONS
from sdm.reproduce.studies.mini.language import models
from sdm.reproduce.studies.mini.results import Cells
from sdm.reproduce.studies.mini.showing import NOT_YET
from sdm.run import Run

SPEED = Speed(lengths=(512, 2048, 8192, 32768), repeats=3, new_tokens=32)
SNAPSHOTS = "snapshots.json"


def measure_speed(cells: Cells) -> None:
    """Of the models of the last level, one seed each, in turns; those that are measured are not measured again."""
    folders = [one[0].folder for variant in models().values() if (one := cells.outcomes(variant, "position"))]
    if any(not (Run(folder).evaluations / "speed" / FILE).is_file() for folder in folders):
        subjects = [(open_model(folder), Run(folder).evaluations / "speed") for folder in folders]
        evaluate("speed", SPEED, subjects)


def speed_finding(cells: Cells) -> Finding:
    summaries: dict[str, dict[str, Any]] = {}
    for variant in models().values():
        for outcome in cells.outcomes(variant, "position")[:1]:
            if (Run(outcome.folder).evaluations / "speed" / FILE).is_file():
                summaries[variant.label] = outcome.results("speed").summary or {}
    curves = {
        key: {
            label: [
                Point(one["length"], scale * one[key], scale * one[f"{key}_low"], scale * one[f"{key}_high"])
                for one in summary["lengths"]
            ]
            for label, summary in summaries.items()
        }
        for key, scale in (("decode", 1e3), ("state", 1e-6))
    }
    figures: tuple[Illustration, ...] = ()
    if summaries:
        rows = [
            (label, int(one.x), one.y, one.low, one.high, state.y)
            for label, points in curves["decode"].items()
            for one, state in zip(points, curves["state"][label], strict=True)
        ]
        figures = (
            Illustration(
                "cost",
                "Time and state of a generated token against the context; bands: the range of three repeats.",
                costs_figure(curves["decode"], curves["state"]),
                ("global layers", "context", "ms/token", "fastest", "slowest", "state (MB)"),
                rows,
                "Attention's time and state grow with the context, the others' do not.",
            ),
        )
    decode = {label: {one["length"]: one["decode"] for one in found["lengths"]} for label, found in summaries.items()}
    longest = SPEED.lengths[-1]
    ratio = {name: decode[name][longest] / decode["SDM"][longest] for name in decode} if "SDM" in decode else {}
    return Finding(
        "speed",
        "Cost of a token",
        "Decoding with SDM is about as fast as with GDN, and far faster than with attention in long contexts.",
        f"behind {longest:,} tokens, time of a token against SDM's: "
        + ", ".join(f"{name} {value:.2f}x" for name, value in ratio.items() if name != "SDM")
        if len(ratio) > 1
        else NOT_YET,
        "decoding at 1.4B: about 10% slower than GDN, 6 times faster than attention; training 1.49x slower at 8B",
        "missing" if "full attention" not in ratio else "agrees" if ratio["full attention"] > 1 else "differs",
        "" if len(summaries) == len(models()) else "Not all models of the last level are finished.",
        figures,
        (_speed_table(summaries),) if summaries else (),
        (*DEVIATIONS, "on the cores of this machine, which may do other things at the same time; one seed"),
    )


def _speed_table(summaries: dict[str, dict[str, Any]]) -> Table:
    rows = [
        (
            label,
            f"{one['length']:,}",
            f"{1e6 * one['prefill']:.1f}",
            f"{1e3 * one['decode']:.2f}",
            f"{1e-6 * one['state']:.3f}",
        )
        for label, summary in summaries.items()
        for one in summary["lengths"]
    ]
    return Table(
        "Time and state of a token",
        ("global layers", "context", "read (µs)", "generate (ms)", "state (MB)"),
        rows,
        "Medians.",
    )


def measure_snapshots(folder: Path) -> None:
    """In a process of its own: Triton reads the variable for its interpreter when it is first imported."""
    path = folder / SNAPSHOTS
    if path.is_file() or missing_because(version()):
        return
    command = [sys.executable, "-P", "-m", "sdm.reproduce.studies.mini.snapshots", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"snapshots: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}")


def snapshot_finding(cells: Cells) -> Finding:
    """Errors of gradients by the format in which backward keeps old rows."""
    problem = missing_because(version())
    path = cells.folder / SNAPSHOTS
    found: dict[str, Any] = {}
    if path.is_file():
        try:
            found = read_json(path)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is damaged; delete it to measure again") from error
    names = {
        "planned": "inverted by plan (ours)",
        "bf16": "all rows, bf16",
        "fp8": "all rows, fp8",
        "int4": "all rows, int4",
    }
    rows = [(names[kind], f"{one['error']:.1e}", f"{one['bytes']:,}") for kind, one in found.get("kinds", {}).items()]
    errors = {kind: one["error"] for kind, one in found.get("kinds", {}).items()}
    return Finding(
        "snapshots",
        "What backward keeps",
        "Backward restores old memories from saved rows, at long context in 8 or 4 bits.",
        f"largest relative error of a gradient: inverted by plan {errors['planned']:.1e}, bf16 {errors['bf16']:.1e}, "
        f"fp8 {errors['fp8']:.1e}, int4 {errors['int4']:.1e}"
        if errors
        else NOT_YET,
        "fp8 and int4 snapshots are used at long context; their error is not reported",
        "missing" if not errors else "agrees" if errors["planned"] < errors["bf16"] else "differs",
        "" if errors else f"Not measured: {problem or 'not yet'}.",
        (),
        (Table("Old rows in backward", ("kept", "error of gradients", "bytes"), rows, found.get("problem", "")),)
        if rows
        else (),
        ("kernels run by Triton's interpreter on the CPU, on a small problem with random tokens",),
        ("The agreement is with the paper's aim, a backward that is nearly exact at little memory, by another way.",),
    )
