"""`sdm eval ruler`: accuracy on RULER's tasks by the length of the context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sdm.data.tokenization import Tokenizer
from sdm.errors import UserError, check_size
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit
from sdm.evaluation.report import Chart, Grid, Point, Report, Table
from sdm.evaluation.ruler.sample import BUILT_IN, Generator, Sources, counter, score
from sdm.evaluation.ruler.tasks import SIX, TASKS, check_tasks, text_source
from sdm.evaluation.statistics import mean_of_means, wilson

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)  # as published


@dataclass(frozen=True)
class Ruler(Measurement):
    """RULER: retrieval, tracing, counting and answering in contexts of a chosen length, by 13 synthetic tasks."""

    free: ClassVar[tuple[str, ...]] = ("batch_size",)

    tasks: tuple[str, ...] = tuple(TASKS)
    """Which of the 13 tasks."""
    lengths: tuple[int, ...] = LENGTHS
    """Tokens of prompt and answer together; prompts fill them to 1%."""
    samples: int = 500
    """Of each task at each length."""
    seed: int = 42
    """Of the samples."""
    essays: str = Sources.essays
    """The text that needles are hidden in: files of the user's, such as RULER's PaulGrahamEssays.json, or a built-in
    corpus (text, code), which is not comparable with published results."""
    squad: Path | None = None
    """SQuAD 2.0's development set for qa_1. Without it, questions are made from templates, which is not comparable."""
    hotpot: Path | None = None
    """HotpotQA's development set, distractor setting, for qa_2. Without it, as above."""
    skip_short: bool = False
    """Leave out lengths that a task does not fit into, instead of refusing."""
    batch_size: int = 8
    """Prompts that are answered side by side. Answers do not depend on it."""

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        check_size(samples=self.samples, batch_size=self.batch_size)
        if not self.lengths or len(set(self.lengths)) < len(self.lengths) or min(self.lengths) < 1:
            raise UserError(f"lengths: name at least one, each once, got {' '.join(map(str, self.lengths))}")

    def generator(self, tokenizer: Tokenizer) -> Generator:
        """The generator of the samples for a tokenizer."""
        return Generator(counter(tokenizer), self.seed, Sources(self.essays, self.squad, self.hotpot))

    def plan(self, lm: EvalModel) -> Plan:
        """Check that the lengths hold the tasks; a unit is a sample."""
        lm.check_length(max(self.lengths), "leave out longer --lengths")
        generator = self.generator(lm.tokenizer)
        units = [
            Unit(f"{task} {length} {index}", f"{task} {length}", (task, length, index), cost=length)
            for task, length in self.held(generator)
            for index in range(self.samples)
        ]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            samples = [generator.sample(*unit.payload) for unit in batch]
            outputs = lm.answer([sample.prompt for sample in samples], samples[0].new_tokens)
            for sample, output in zip(samples, outputs, strict=True):
                yield {
                    "task": sample.task,
                    "length": sample.length,
                    "index": sample.index,
                    "tokens": sample.prompt_tokens,
                    "answers": list(sample.answers),
                    "output": output,
                    "score": score(TASKS[sample.task].metric, output, sample.answers),
                }

        return Plan(units, measure, generator.manifest(self.tasks), batch=self.batch_size)

    def held(self, generator: Generator) -> list[tuple[str, int]]:
        """The tasks and the lengths that hold them, shorter ones first."""
        held: list[tuple[str, int]] = []
        refused: dict[int, list[str]] = {}
        for length in sorted(self.lengths):
            for task in self.tasks:
                smallest = generator.smallest_length(task, length, self.samples)
                if smallest <= length:
                    held.append((task, length))
                else:
                    refused.setdefault(length, []).append(f"{task} (takes {smallest})")
        if refused and not (held and self.skip_short):
            lines = [f"{length} tokens do not hold {', '.join(tasks)}" for length, tasks in refused.items()]
            raise UserError(
                f"{'; '.join(lines)}. Leave out the tasks or the lengths, or leave out such pairs with --skip-short"
            )
        return held

    def comparable(self, task: str) -> bool:
        """Whether the task's text is what the user says is RULER's own; some tasks need none."""
        match text_source(task):
            case "essays":
                return self.essays not in BUILT_IN
            case "squad":
                return self.squad is not None
            case "hotpot":
                return self.hotpot is not None
        return True

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Accuracy by task and length, and the averages."""
        return summarise(results, {task: self.comparable(task) for task in self.tasks})

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """A table per model, and a chart per task and average."""
        return ruler_report(summaries)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """Scores of each sample, over all, by length and by task."""
        return ruler_pairs(results)


NOT_COMPARABLE = "* not comparable with published results: its text is not RULER's"
# Averages by their names: over which tasks.
AVERAGES = {"all 13": tuple(TASKS), "the paper's 6": SIX}


def summarise(results: Mapping[str, Result], comparable: Mapping[str, bool]) -> dict[str, Any]:
    """Accuracy by task and length; the mean of each task over lengths; and the averages, at the lengths at which all of
    their tasks have been measured.

    comparable: whether each task's text is RULER's own. Tasks that nothing has been measured of stand there empty.
    """
    scores: dict[str, dict[int, dict[int, float]]] = {}
    for result in results.values():
        scores.setdefault(result["task"], {}).setdefault(result["length"], {})[result["index"]] = result["score"]
    tasks: dict[str, Any] = {}
    for task in (name for name in TASKS if name in comparable):
        lengths = {str(length): _cell(by_index.values()) for length, by_index in sorted(scores.get(task, {}).items())}
        mean = _mean(cell["accuracy"] for cell in lengths.values()) if lengths else None
        tasks[task] = {"lengths": lengths, "accuracy": mean, "comparable": comparable[task]}
    averages = {name: _average(scores, names) for name, names in AVERAGES.items()}
    if len(scores) > 1 and not any(scores.keys() == {*names} for names in AVERAGES.values()):
        averages[f"these {len(scores)}"] = _average(scores, [name for name in TASKS if name in scores])
    averages = {
        name: average | {"comparable": all(comparable[task] for task in average["tasks"])}
        for name, average in averages.items()
        if average["lengths"]
    }
    return {
        "tasks": tasks,
        "averages": averages,
        "samples": len(results),
        "comparable": all(comparable.values()),
    }


def _cell(scores: Iterable[float]) -> dict[str, Any]:
    values = list(scores)
    mean = _mean(values)
    low, high = wilson(mean, len(values))
    return {"accuracy": mean, "low": low, "high": high, "samples": len(values)}


def _average(scores: dict[str, dict[int, dict[int, float]]], names: Sequence[str]) -> dict[str, Any]:
    """The mean over tasks at each length that all of them have, and over these lengths."""
    shared = [
        length
        for length in sorted({length for by_length in scores.values() for length in by_length})
        if all(length in scores.get(name, {}) for name in names)
    ]
    lengths: dict[str, Any] = {}
    for length in shared:
        mean = mean_of_means([list(scores[name][length].values()) for name in names])
        lengths[str(length)] = {"accuracy": mean.value, "low": mean.low, "high": mean.high}
    average: dict[str, Any] = {"tasks": list(names), "lengths": lengths}
    if shared:
        # An index asks the same at every length: its mean over lengths is one draw.
        draws = [
            [
                _mean(scores[name][length][index] for length in shared)
                for index in scores[name][shared[0]]
                if all(index in scores[name][length] for length in shared)
            ]
            for name in names
        ]
        average["accuracy"] = _mean(cell["accuracy"] for cell in lengths.values())
        if all(draws):
            mean = mean_of_means(draws)
            average |= {"low": mean.low, "high": mean.high}
    return average


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def ruler_report(summaries: Mapping[str, dict[str, Any]]) -> Report:
    """Tables and the grid of charts, from the summaries of models."""
    lengths = sorted(
        {int(length) for summary in summaries.values() for task in _rows(summary) for length in task["lengths"]}
    )
    tables = [_table(name, summary, lengths) for name, summary in summaries.items()]
    tasks = [task for task in TASKS if any(_measured(summary, task) for summary in summaries.values())]
    charts = [_chart(task, summaries, "tasks", task) for task in tasks]
    names = dict.fromkeys(name for summary in summaries.values() for name in summary["averages"])
    charts += [_chart(f"mean of {name}", summaries, "averages", name) for name in names]
    title = "RULER: accuracy by the length of the context, with 95% intervals"
    if not all(summary["comparable"] for summary in summaries.values()):
        title += f"\n{NOT_COMPARABLE}"
    return Report(tables, [Grid("ruler", title, charts)])


def _measured(summary: dict[str, Any], task: str) -> bool:
    return bool(summary["tasks"].get(task, {}).get("lengths"))


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [*summary["tasks"].values(), *summary["averages"].values()]


def _table(name: str, summary: dict[str, Any], lengths: Sequence[int]) -> Table:
    rows = [_row(_label(task, entry), entry, lengths) for task, entry in summary["tasks"].items()]
    rows += [_row(_label(f"mean of {name}", entry), entry, lengths) for name, entry in summary["averages"].items()]
    counts = {cell["samples"] for entry in summary["tasks"].values() for cell in entry["lengths"].values()}
    caption = f"{min(counts)} to {max(counts)} samples" if len(counts) > 1 else f"{min(counts)} samples"
    caption += " of each task at each length."
    if not summary["comparable"]:
        caption += f" {NOT_COMPARABLE}."
    return Table(
        f"RULER: accuracy (%) of {name}", ("task", *(f"{length:,}" for length in lengths), "mean"), rows, caption
    )


def _row(label: str, entry: dict[str, Any], lengths: Sequence[int]) -> tuple[str, ...]:
    cells = [entry["lengths"].get(str(length), {}).get("accuracy") for length in lengths]
    return (label, *("-" if value is None else f"{100 * value:.1f}" for value in (*cells, entry["accuracy"])))


def _label(name: str, entry: dict[str, Any]) -> str:
    return name if entry["comparable"] else f"{name} *"


def _chart(title: str, summaries: Mapping[str, dict[str, Any]], kind: str, name: str) -> Chart:
    title = next(_label(title, summary[kind][name]) for summary in summaries.values() if name in summary[kind])
    curves = {
        model: [
            Point(int(length), cell["accuracy"], cell["low"], cell["high"])
            for length, cell in summary[kind][name]["lengths"].items()
        ]
        for model, summary in summaries.items()
        if name in summary[kind]
    }
    return Chart(f"ruler-{name}", title, "tokens", "accuracy", curves, log_x=True, percent=True)


def ruler_pairs(results: Mapping[str, Result]) -> Pairs:
    """Models are compared on all samples, at each length and by task. An index asks the same at every length, so where
    lengths are put together it is one draw, and weighs what it has of them."""
    by_quantity: dict[str, dict[str, list[float]]] = {}
    for result in results.values():
        index = f"{result['task']} {result['index']}"
        for quantity in ("accuracy", f"accuracy at {result['length']:,}", f"accuracy on {result['task']}"):
            by_quantity.setdefault(quantity, {}).setdefault(index, []).append(result["score"])
    order = sorted(by_quantity, key=lambda quantity: ("at" in quantity.split(), "on" in quantity.split()))
    return {
        quantity: {
            key: (sum(scores) / len(scores), float(len(scores))) for key, scores in by_quantity[quantity].items()
        }
        for quantity in order
    }
