"""Findings about tasks: RULER in short contexts, and the short-context tasks."""

from __future__ import annotations

from typing import Any

from sdm.analysis.pages import Finding
from sdm.evaluation.report import Table
from sdm.reproduce.recipes.mini import DEVIATIONS
from sdm.reproduce.studies.mini.language import models
from sdm.reproduce.studies.mini.results import Cells, percent
from sdm.reproduce.studies.mini.showing import NOT_YET, why


def retrieval_finding(cells: Cells) -> Finding:
    """RULER, which models of this size cannot answer."""
    missing = cells.missing(models(), "ruler")
    found = _ruler_words(cells)
    return Finding(
        "retrieval",
        "Retrieval in text",
        "A larger memory retrieves more: SDM is far above GDN on RULER.",
        found or NOT_YET,
        "RULER at level 8, 4k to 131k: SDM 31.2%, GDN 20.0%, attention 32.5%",
        "unclear" if found else "missing",
        why(missing),
        (),
        (_ruler_table(cells),),
        DEVIATIONS,
        (
            "RULER's prompts are English. The models of code have seen a vocabulary of 1,024 and a million tokens: "
            "that they answer next to nothing says nothing about their memories. What memories of this size retrieve "
            "is shown by the recall of pairs.",
        ),
    )


def _ruler_words(cells: Cells) -> str:
    means = {one.label: cells.mean(one, _ruler, "ruler") for one in models().values()}
    return ", ".join(f"{label} {percent(mean)}" for label, mean in means.items() if mean)


def _ruler(summary: dict[str, Any]) -> float:
    """The mean over the tasks, each over the lengths that it fits into."""
    found = [one["accuracy"] for one in summary["tasks"].values() if one["accuracy"] is not None]
    return sum(found) / len(found)


def _ruler_table(cells: Cells) -> Table:
    rows = []
    for variant in models().values():
        mean = cells.mean(variant, _ruler, "ruler")
        rows.append((variant.label, percent(mean), str(0 if mean is None else mean.count)))
    return Table(
        "RULER, six tasks at 1,024 and 2,048 tokens",
        ("global layers", "accuracy", "seeds"),
        rows,
        "Eight samples of each task and length. Needles are hidden in the built-in text: not comparable with published "
        "numbers.",
    )


def short_finding(cells: Cells) -> Finding:
    """The short-context tasks that need no download."""
    variants = models()
    rows = []
    for variant in variants.values():
        mean = cells.mean(variant, _tasks, "harness")
        rows.append((variant.label, percent(mean), str(0 if mean is None else mean.count)))
    asked = any("harness" in variant.measurements for variant in variants.values())
    missing = (
        cells.missing(variants, "harness") if asked else ["lm-evaluation-harness is not installed (the extra `eval`)"]
    )
    measured = any(cells.summaries(variant, "harness") for variant in variants.values())
    return Finding(
        "short-context",
        "Short-context tasks",
        "SDM's average over 15 tasks of reasoning and knowledge is above GDN's.",
        "; ".join(f"{label} {accuracy}" for label, accuracy, _ in rows) if measured else NOT_YET,
        "level 8: SDM 38.5%, GDN 37.9%, attention 38.0%; level 13: 56.8%, 55.7%, 56.7%",
        "unclear" if measured else "missing",
        why(missing),
        (),
        (Table("A few questions that come with this package", ("global layers", "accuracy", "seeds"), rows),),
        DEVIATIONS,
        ("The paper's 15 datasets cannot be shipped; these questions only show that the path works.",),
    )


def _tasks(summary: dict[str, Any]) -> float:
    """The mean accuracy over the tasks."""
    found = [one["metrics"]["acc"]["value"] for one in summary["tasks"].values() if "acc" in one["metrics"]]
    return sum(found) / len(found)
