"""`sdm eval harness`: the short-context tasks of the paper's table, and any other task of lm-evaluation-harness.

A unit is a question. The harness decides what it is asked with, and how the answers are judged; the model's answers and
their metrics are stored, so that an interrupted measurement resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdm.errors import UserError, check_not_negative, check_size, require
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.harness.tasks import PAPER, Loaded, load
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit
from sdm.evaluation.report import Report, Table
from sdm.evaluation.statistics import weighted_mean, wilson
from sdm.files import Json

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from transformers import PreTrainedTokenizerBase

    from sdm.evaluation.harness.model import HarnessModel

UNLIMITED = 2**20  # tokens, for models that have no limit themselves
QUESTIONS = 16  # at a time


@dataclass(frozen=True)
class Harness(Measurement):
    """The paper's 15 short-context tasks, and any other task of lm-evaluation-harness (the extra `eval`)."""

    # Where a dataset is does not matter, but what is in it: its checksums belong to the result.
    free: ClassVar[tuple[str, ...]] = ("data_dir", "download", "batch_size", "run_code")

    tasks: tuple[str, ...] = tuple(PAPER)
    """Tasks or groups of the harness, or small: a few questions that come with this package."""
    data_dir: Path | None = None
    """A folder of datasets: DATA_DIR/TASK/SPLIT.jsonl, .parquet or saved; docs/evaluation-tasks.md says more."""
    download: bool = False
    """Let absent datasets be downloaded from the Hugging Face Hub."""
    shots: int | None = None
    """Examples before each question; none: the task's own number."""
    batch_size: int = 16
    """Rows that are computed side by side."""
    run_code: bool = False
    """Run the programs that the model writes, as humaneval_plus must. They run as you: on a machine with nothing to
    lose."""

    def __post_init__(self) -> None:
        check_size(batch_size=self.batch_size)
        if self.shots is not None:
            check_not_negative(shots=self.shots)
        if not self.tasks:
            raise UserError("--tasks must name at least one task")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(f"--data-dir: {self.data_dir} is not a folder")

    def plan(self, lm: EvalModel) -> Plan:
        """Load tasks and their datasets; a unit is a question."""
        require("lm_eval", "eval", "sdm eval harness")
        tokenizer = harness_tokenizer(lm)
        if "humaneval_plus" in self.tasks:
            self._check_code("humaneval_plus")  # before anything is loaded
        tasks = load(dict.fromkeys(self.tasks), self.data_dir, self.download, self.shots)
        for loaded in tasks:
            if any(getattr(task, "UNSAFE_CODE", False) for task in loaded.parts.values()):
                self._check_code(loaded.name)
        units = [
            Unit(_key(loaded.name, part, number), part, (loaded.name, part, number))
            for loaded in tasks
            for part, task in loaded.parts.items()
            for number in range(len(task.eval_docs))
        ]
        asking = _Asking(lm, tokenizer, tasks, self.batch_size)
        return Plan(units, asking, _manifest(tasks), batch=QUESTIONS)

    def _check_code(self, task: str) -> None:
        if not self.run_code:
            raise UserError(
                f"{task} runs programs that the model writes, as you and not sandboxed; allow it with --run-code, or "
                "leave the task out of --tasks"
            )

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Metrics of each task, and the average of the paper's tasks."""
        return harness_summary(results)

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """A table with a row per task and metric."""
        return harness_report(summaries)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """Metrics that are means over questions, by question."""
        pairs: Pairs = {}
        for key, result in results.items():
            for metric, value in result["metrics"].items():
                if isinstance(value, (int, float)) and metric not in result["aggregation"]:
                    pairs.setdefault(f"{result['task']}, {metric}", {})[key] = (float(value), 1.0)
        return pairs


def harness_tokenizer(lm: EvalModel) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers knows it, which the harness asks for."""
    from transformers import AutoTokenizer

    from sdm.files import explained

    _ = lm.tokenizer  # or why there is none
    with explained(f"cannot load the tokenizer in {lm.tokenizer_folder}"):
        return AutoTokenizer.from_pretrained(lm.tokenizer_folder, local_files_only=True)


class _Asking:
    """Asks a model the questions of some tasks."""

    def __init__(
        self, lm: EvalModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Loaded], batch_size: int
    ) -> None:
        from sdm.evaluation.harness.model import HarnessModel

        self._questions = {part: Questions(task) for loaded in tasks for part, task in loaded.parts.items()}
        rows = 1 if lm.is_length_dependent else batch_size
        self._model = HarnessModel(lm.model, tokenizer, rows, lm.context_limit or UNLIMITED)

    def __call__(self, units: Sequence[Unit]) -> Iterator[Result]:
        name, part, _ = units[0].payload
        questions = self._questions[part]
        asked = [questions[unit.payload[2]] for unit in units]
        answer(self._model, [request for requests in asked for request in requests])
        for requests in asked:
            yield {"task": name, "part": part, **questions.judged(requests)}


class Questions:
    """The requests of a task's documents, made when they are asked for.

    Examples are drawn one document after the other, as the harness does it: what a document gets does not depend on
    which are measured.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._made: list[list[Any]] = []
        self._documents = iter(task.doc_iterator())
        self.aggregation = _aggregation(task)

    def __getitem__(self, number: int) -> list[Any]:
        task = self.task
        while len(self._made) <= number:
            place, document = next(self._documents)
            context = task.fewshot_context(
                document,
                num_fewshot=task.config.num_fewshot or 0,
                system_instruction=None,
                apply_chat_template=False,
                fewshot_as_multiturn=False,
                chat_template=None,
                gen_prefix=task.doc_to_prefix(document),
            )
            made = task.construct_requests(
                doc=document,
                ctx=context,
                metadata=(task.config.task, place, task.config.repeats),
                apply_chat_template=False,
                chat_template=None,
            )
            self._made.append(made if isinstance(made, list) else [made])
        return self._made[number]

    def judged(self, requests: Sequence[Any]) -> Result:
        """Metrics by their name and filter, from requests that have been answered."""
        task = self.task
        task._instances = list(requests)
        task.apply_filters()
        metrics: dict[str, Any] = {}
        for name in requests[0].filtered_resps:
            answers = [request.filtered_resps[name] for request in requests]
            for metric, value in task.process_results(requests[0].doc, answers).items():
                metrics[metric_name(metric, name)] = _plain(value)
        how = {metric: self.aggregation.get(metric.split(",")[0], "mean") for metric in metrics}
        return {
            "metrics": metrics,
            "aggregation": {metric: name for metric, name in how.items() if name != "mean"},
            "answers": [_plain(request.resps[0]) for request in requests],
        }


def answer(model: HarnessModel, requests: Sequence[Any]) -> None:
    """Let the model answer requests of one or more kinds."""
    kinds: dict[str, list[Any]] = {}
    for request in requests:
        request.resps, request.filtered_resps = [], {}
        kinds.setdefault(request.request_type, []).extend([request] * request.repeats)
    for kind, asked in kinds.items():
        for request, response in zip(asked, getattr(model, kind)(asked, disable_tqdm=True), strict=True):
            request.resps.append(response)


def metric_name(metric: str, filter_name: str) -> str:
    """As the harness calls it, less the filter that does nothing."""
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _aggregation(task: Task) -> dict[str, str]:
    """The names of the functions that make one number of the values of a metric."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    names = {function: name for name, function in AGGREGATION_REGISTRY.items()}
    aggregation = {}
    for metric, function in task.aggregation().items():
        if function not in names:
            raise UserError(f"{task.config.task}: how {metric} is put together is not known by a name")
        aggregation[metric] = names[function]
    return aggregation


def _plain(value: object) -> Json:
    """As JSON has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def _key(name: str, part: str, number: int) -> str:
    return f"{name}/{number}" if name == part else f"{name}/{part}/{number}"


def _manifest(tasks: Sequence[Loaded]) -> dict[str, Any]:
    """What is asked: documents by their checksum, behind which examples."""
    import lm_eval

    documents = {}
    for loaded in tasks:
        for part, task in loaded.parts.items():
            shots = task.config.num_fewshot or 0
            documents[part] = {
                "shots": shots,
                "documents": len(task.eval_docs),
                "sha256": _checksum(task.eval_docs),
                "examples": _checksum(task.fewshot_docs()) if shots else None,
            }
    return {"harness": lm_eval.__version__, "tasks": documents}


def _checksum(documents: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def harness_summary(results: Mapping[str, Result]) -> dict[str, Any]:
    """Metrics by task. In a group all questions weigh the same, as in the harness's MMLU; its parts are there too."""
    by_task: dict[str, list[Result]] = {}
    by_part: dict[str, dict[str, list[Result]]] = {}
    for result in results.values():
        by_task.setdefault(result["task"], []).append(result)
        by_part.setdefault(result["task"], {}).setdefault(result["part"], []).append(result)
    tasks = {}
    for task, questions in by_task.items():
        parts = by_part[task]
        tasks[task] = {"questions": len(questions), "metrics": _metrics(questions)}
        if list(parts) != [task]:
            tasks[task]["parts"] = {
                part: {"questions": len(some), "metrics": _metrics(some)} for part, some in parts.items()
            }
    return {"tasks": tasks, "average": _average(tasks)}


def _metrics(results: Sequence[Result]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    how: dict[str, str] = {}
    for result in results:
        how |= result["aggregation"]
        for metric, value in result["metrics"].items():
            values.setdefault(metric, []).append(value)
    metrics = {}
    for metric, entries in values.items():
        if metric in how:
            metrics[metric] = {"value": _put_together(how[metric], entries), "low": None, "high": None}
        else:
            mean = weighted_mean(entries)
            # Student's interval of few zeros and ones would leave what is possible, or be a point.
            shares = all(0 <= value <= 1 for value in entries)
            low, high = wilson(mean.value, mean.count) if shares else (mean.low, mean.high)
            metrics[metric] = {"value": mean.value, "low": low, "high": high}
    return metrics


def _put_together(name: str, values: list[Any]) -> float:
    from lm_eval.api.registry import get_aggregation

    return float(get_aggregation(name)([tuple(value) if isinstance(value, list) else value for value in values]))


def main_metric(task: str, metrics: Mapping[str, Any]) -> str:
    """What stands for a task: of the paper's the one of `PAPER`, else the first accuracy, else the first."""
    if task in PAPER and PAPER[task].metric in metrics:
        return PAPER[task].metric
    likely = [metric for metric in metrics if metric.startswith(("acc", "exact_match", "pass"))]
    return likely[0] if likely else next(iter(metrics))


def _average(tasks: Mapping[str, Any]) -> float | None:
    """Of the paper's tasks, if all of them are there."""
    if not PAPER.keys() <= tasks.keys():
        return None
    return sum(tasks[task]["metrics"][main_metric(task, tasks[task]["metrics"])]["value"] for task in PAPER) / len(
        PAPER
    )


def harness_report(summaries: Mapping[str, dict[str, Any]]) -> Report:
    """A row per task and metric, a column per model; the metric that stands for the task comes first."""
    tasks = list(dict.fromkeys(task for summary in summaries.values() for task in summary["tasks"]))
    rows = []
    for task in tasks:
        by_model = {name: summary["tasks"].get(task) for name, summary in summaries.items()}
        metrics: dict[str, None] = {}
        for measured in by_model.values():
            metrics |= dict.fromkeys(measured["metrics"] if measured else ())
        main = main_metric(task, metrics)
        for metric in sorted(metrics, key=lambda name: name != main):
            cells = [_cell(measured["metrics"].get(metric)) if measured else "" for measured in by_model.values()]
            title = PAPER[task].title if task in PAPER else task
            rows.append(
                (title if metric == main else "", metric, *cells, _questions(by_model) if metric == main else "")
            )
    averages = [summary["average"] for summary in summaries.values()]
    if any(value is not None for value in averages):
        rows.append(("Average accuracy", "", *("" if x is None else f"{100 * x:.2f}" for x in averages), ""))
    columns = ("task", "metric", *summaries, "questions")
    caption = "In percent, perplexities aside. ±: 95% interval of the mean over questions."
    return Report([Table("Short-context tasks", columns, rows, caption)])


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return ""
    if metric["low"] is None:
        return f"{100 * metric['value']:.2f}" if 0 <= metric["value"] <= 1 else f"{metric['value']:.4g}"
    return f"{100 * metric['value']:.2f} ±{100 * (metric['high'] - metric['low']) / 2:.2f}"


def _questions(by_model: Mapping[str, Any]) -> str:
    counts = dict.fromkeys(f"{measured['questions']:,}" for measured in by_model.values() if measured)
    return " / ".join(counts)
