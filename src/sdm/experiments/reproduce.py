"""`sdm reproduce quick`: the paper's claims in miniature, on two cores in minutes.

Part one is recall: SDM, GDN and full attention at equal parameters learn to keep up to 256 pairs apart. SDM and GDN
cost the same FLOPs, attention 24% more. GDN gets a sweep of its learning rate and as many steps as SDM, whose rate is
not tuned. Part two is a pair of small language models of code, compared by position in held-out documents.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sdm.analysis.run_figures import position_figure, recall_figure, save, slot_use_figure
from sdm.errors import UserError
from sdm.evaluation.position import Position
from sdm.evaluation.recall import PAIRS, Recall
from sdm.experiments.jobs import Job, Outcome, run_jobs
from sdm.experiments.progress import make_progress
from sdm.files import write_json
from sdm.recipes import small_pair
from sdm.recipes.recall import DEVIATIONS, recall
from sdm.run import Run

# Set-up takes two and a half of the ten minutes that all of it may take.
RECALL_STEPS = 500
TRAINED_PAIRS = 256
GDN_RATES = (1.5e-3, 3e-3, 6e-3)
# At SDM's 3e-3 attention does not leave chance, at 1e-3 it is late: it alone has to find out that a query looks for the
# token before the answer.
ATTENTION_RATE = 1.5e-3


def quick_jobs() -> list[Job]:
    """The longest first, so that the two processes end together."""
    position, accuracy = {"position": Position(gain=False)}, {"recall": Recall()}
    sweep = [Job(f"recall-gdn-{lr:g}", recall("gdn", lr=lr, steps=RECALL_STEPS), accuracy) for lr in GDN_RATES]
    return [
        Job("code-sdm", small_pair.small_code("sdm"), position),
        Job("code-gdn", small_pair.small_code("gdn"), position),
        Job("recall-attention", recall("full_attention", lr=ATTENTION_RATE, steps=RECALL_STEPS), accuracy),
        *sweep,
        Job("recall-sdm", recall("sdm", steps=RECALL_STEPS), accuracy),
    ]


def reproduce(output: Path, processes: int, console: Console) -> None:
    """Run everything into a folder."""
    jobs, start = quick_jobs(), time.perf_counter()
    _prepare_corpus(jobs, console)
    with make_progress(jobs, processes, console) as progress:
        outcomes = run_jobs(jobs, output, processes, progress)
    failed = [f"{name} failed:\n{one.failure}" for name, one in outcomes.items() if one.failure is not None]
    if failed:
        raise UserError("\n".join(failed))
    report({name: _flat(one) for name, one in outcomes.items()}, output, console)
    console.print(
        f"{(time.perf_counter() - start) / 60:.1f} minutes. Try:  sdm generate {output / 'code-sdm'} --prompt 'def '"
    )


def _flat(outcome: Outcome) -> dict[str, Any]:
    """What is known of a run beside what was measured."""
    found = dict(outcome.facts or {})
    for summary in outcome.measured.values():
        found |= summary
    return found


def report(results: dict[str, dict[str, Any]], output: Path, console: Console) -> None:
    """Tables into the terminal, figures and numbers into the folder."""
    sweep = {name: result for name, result in results.items() if name.startswith("recall-gdn-")}
    best = min(sweep, key=lambda name: sweep[name]["valid_loss"])
    compared = {
        "SDM": results["recall-sdm"],
        f"GDN, best of {len(sweep)}": results[best],
        "full attention": results["recall-attention"],
    }
    console.print(_recall_table(compared, sweep), _size_table(compared))
    _print_deviations(console, DEVIATIONS)
    code = {"SDM": results["code-sdm"], "GDN": results["code-gdn"]}
    console.print(_position_table(code), _size_table(code))
    _print_deviations(console, small_pair.DEVIATIONS)

    figures = Run(output).figures
    accuracy = {
        name: {int(pairs): value for pairs, value in result["accuracy"].items()} for name, result in compared.items()
    }
    bins = {
        name: [(one["start"], one["stop"], one["nll"], one["error"]) for one in result["positions"]]
        for name, result in code.items()
    }
    use = {name: results[job]["slot_use"] for name, job in (("recall", "recall-sdm"), ("code", "code-sdm"))}
    paths = [
        save(recall_figure(accuracy, TRAINED_PAIRS), figures / "recall.png"),
        save(position_figure(bins), figures / "position.png"),
        save(slot_use_figure(use), figures / "slot_use.png"),
    ]
    deviations = {"recall": DEVIATIONS, "code": small_pair.DEVIATIONS}
    content = {"results": results, "best_gdn": best, "deviations": deviations}
    write_json(output / "results.json", content)
    console.print("figures:", *map(str, paths), sep="\n  ")


def _prepare_corpus(jobs: list[Job], console: Console) -> None:
    """Tokenise once, before two processes would do it at the same time."""
    from sdm.data.config import CorpusConfig
    from sdm.data.corpus import open_corpus

    for config in {job.config.data for job in jobs if isinstance(job.config.data, CorpusConfig)}:
        open_corpus(config, "train", console.print)


def _recall_table(compared: dict[str, dict[str, Any]], sweep: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Associative recall: accuracy (%) by the number of pairs K")
    table.add_column("model")
    for name in (*(f"K={pairs}" for pairs in PAIRS), "lr"):
        table.add_column(name, justify="right")
    best = [result for name, result in compared.items() if name.startswith("GDN")]
    others = {f"  GDN at {result['lr']:g}": result for result in sweep.values() if result not in best}
    for name, result in (compared | others).items():
        accuracy = (f"{100 * result['accuracy'][str(pairs)]:.1f}" for pairs in PAIRS)
        table.add_row(name, *accuracy, f"{result['lr']:g}")
    table.caption = (
        f"All trained to K = {TRAINED_PAIRS}; larger K is beyond training. One seed. GDN's best rate is chosen on "
        "other rows than these."
    )
    return table


def _size_table(models: dict[str, dict[str, Any]]) -> Table:
    """What the compared models cost."""
    table = Table()
    table.add_column("model")
    for name in ("parameters", "FLOPs/token", "state", "steps", "seconds"):
        table.add_column(name, justify="right")
    for name, result in models.items():
        sizes = (f"{result[key]:,}" for key in ("parameters", "flops_per_token", "state_elements", "steps"))
        table.add_row(name, *sizes, f"{result['seconds']:.0f}")
    return table


def _position_table(code: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Held-out code: nats per token by position in the document")
    table.add_column("model")
    bins = next(iter(code.values()))["positions"]
    for one in bins:
        table.add_column(f"to {one['stop']}", justify="right")
    table.add_column("all", justify="right")
    for name, result in code.items():
        table.add_row(name, *(f"{one['nll']:.3f}" for one in result["positions"]), f"{result['nll']:.3f}")
    tokens, length = sum(one["tokens"] for one in bins), bins[-1]["stop"]
    table.caption = (
        f"The first {length} tokens of {tokens // length} documents, {tokens:,} tokens in all, that neither training "
        "nor any choice has seen. One seed."
    )
    return table


def _print_deviations(console: Console, deviations: tuple[str, ...]) -> None:
    console.print("Not the paper's recipe:")
    for line in deviations:
        console.print(f"  - {line}", highlight=False)
    console.print()
