"""The tasks of the paper's table as the harness has them, and how they are loaded with local data.

The paper names the tasks and says neither how many examples stand before a question (shots) nor which accuracy is meant
nor how questions are put. Here questions are the harness's, shots are its defaults but for open questions and MMLU,
which are asked behind five examples as is usual, and the metric is the usual one of each task.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdm.errors import UserError, nearest
from sdm.evaluation.harness.local_data import Absent, load_local

if TYPE_CHECKING:
    from datasets import Dataset
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

_log = logging.getLogger(__name__)
HERE = Path(__file__).parent
SEED = 1234  # of the choice of examples, the harness's own


@dataclass(frozen=True)
class Benchmark:
    """A task of the paper's table."""

    title: str
    """Its name there."""
    task: str
    """Its name in the harness."""
    folder: str
    """Where the harness keeps it; empty: with us."""
    metric: str
    """What is taken for the table: metric and filter."""
    shots: int
    columns: tuple[str, ...]
    """That the rows of its dataset must have."""


PAPER: dict[str, Benchmark] = {
    benchmark.task: benchmark
    for benchmark in (
        Benchmark(
            "HellaSWAG",
            "hellaswag",
            "hellaswag",
            "acc_norm",
            0,
            ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        ),
        Benchmark("WinoGrande", "winogrande", "winogrande", "acc", 0, ("sentence", "option1", "option2", "answer")),
        Benchmark("ARC easy", "arc_easy", "arc", "acc", 0, ("question", "choices", "answerKey")),
        Benchmark("ARC challenge", "arc_challenge", "arc", "acc_norm", 0, ("question", "choices", "answerKey")),
        Benchmark("PIQA", "piqa", "piqa", "acc", 0, ("goal", "sol1", "sol2", "label")),
        Benchmark("OpenBookQA", "openbookqa", "openbookqa", "acc_norm", 0, ("question_stem", "choices", "answerKey")),
        Benchmark("RACE.mid", "race_middle", "", "acc", 0, ("article", "problems")),
        Benchmark("RACE.high", "race", "race", "acc", 0, ("article", "problems")),
        Benchmark("CommonsenseQA", "commonsense_qa", "commonsense_qa", "acc", 0, ("question", "choices", "answerKey")),
        Benchmark("BoolQ", "boolq", "super_glue/boolq", "acc", 0, ("question", "passage", "label")),
        Benchmark("TQA", "triviaqa", "triviaqa", "exact_match,remove_whitespace", 5, ("question", "answer")),
        Benchmark("HumanEval+/pass@1", "humaneval_plus", "", "pass_at_1", 0, ("prompt", "test", "entry_point")),
        Benchmark("NaturalQuestions", "nq_open", "nq_open", "exact_match,remove_whitespace", 5, ("question", "answer")),
        Benchmark("MMLU", "mmlu", "mmlu/default", "acc", 5, ("question", "choices", "answer")),
        Benchmark("GSM8K", "gsm8k", "gsm8k", "exact_match,strict-match", 5, ("question", "answer")),
    )
}


@dataclass(frozen=True)
class Loaded:
    """A task that was asked for, with its data."""

    name: str
    """As it was asked for: a task, or a group of tasks."""
    parts: dict[str, Any]
    """The harness's task objects by their names; one, unless it is a group."""


def resolve(names: Sequence[str]) -> TaskManager:
    """The harness's index of tasks with all of these, or an error that names those that are nearest."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = dict.fromkeys(root / benchmark.folder for benchmark in PAPER.values() if benchmark.folder)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every task that another one replaces
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[*folders, HERE / "definitions"])
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        near = {name: nearest(name, manager.all_tasks, cutoff=0.75) for name in unknown}
        if not all(near.values()):
            _log.info("looking through all tasks of the harness, which takes a minute")
            manager = lm_eval.tasks.TaskManager(include_path=[HERE / "definitions"])
            unknown = [name for name in names if name not in manager.all_tasks]
            near = {name: nearest(name, manager.all_tasks, cutoff=0.6) for name in unknown}
        if unknown:
            raise UserError("; ".join(_no_task(name, near[name]) for name in unknown))
    return manager


def _no_task(name: str, near: Sequence[str]) -> str:
    words = f"did you mean {' or '.join(near)}?" if near else f"the paper's are {', '.join(PAPER)}"
    return f"--tasks: there is no task {name!r}; {words}"


def load(
    names: Iterable[str],
    data_dir: Path | None,
    download: bool = False,
    shots: int | None = None,
) -> list[Loaded]:
    """Tasks with their datasets: from the data folder, else from what the Hugging Face Hub left in its cache.

    Raises for unknown tasks, and if a dataset is absent, says for each of them which files would be taken.
    """
    names = list(names)
    manager = resolve(names)
    tasks: list[Loaded] = []
    absent: dict[str, str] = {}
    for name in names:
        try:
            with _datasets(name, data_dir, download):
                parts = manager.load([name])["tasks"]
        except Absent as error:
            absent[name] = str(error)
            continue
        except IndexError as error:  # the harness tries every task out on its first question
            raise UserError(f"{name}: the split that its questions are from has no rows in {data_dir}") from error
        for part in parts.values():
            _set_shots(part, name, shots)
        tasks.append(Loaded(name, parts))
    if absent:
        _raise_absent(absent, [task.name for task in tasks])
    return tasks


def _raise_absent(absent: dict[str, str], present: Sequence[str]) -> None:
    lines = [f"  {name}: {message}" for name, message in absent.items()]
    advice = f"\nTo measure those that are there: --tasks {' '.join(present)}" if present else ""
    raise UserError(
        f"the datasets of {len(absent)} tasks are absent, and nothing is downloaded unless --download is given:\n"
        + "\n".join(lines)
        + advice
    )


def _set_shots(task: Task, name: str, shots: int | None) -> None:
    """As `lm_eval.simple_evaluate` does: a task that says 0 itself keeps it."""
    own = task.get_config("num_fewshot")
    if own != 0:
        if shots is None:
            shots = PAPER[name].shots if name in PAPER else own or 0
        if shots and not len(task.fewshot_docs() or ()):
            raise UserError(
                f"{name} is asked behind {shots} examples, and the split that they are from has no rows: add its file, "
                "or ask without examples with --shots 0"
            )
        task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=SEED)


class _Splits(dict[str, Any]):
    """Splits of which those that are not there are empty: without examples, nobody needs the one that they are from."""

    def __missing__(self, split: str) -> Dataset:
        return next(iter(self.values())).select([])


@contextlib.contextmanager
def _datasets(task: str, data_dir: Path | None, download: bool) -> Iterator[None]:
    """While it lasts, the harness's tasks get their datasets from here."""
    import datasets
    from huggingface_hub import constants

    load_dataset = datasets.load_dataset
    offline = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        names = dict.fromkeys([task, path, path.split("/")[-1]])
        own = HERE / "data" / path
        roots = [own] if data_dir is None or own.is_dir() else [data_dir / alias for alias in names]
        try:
            splits = load_local(roots, name)
        except Absent as error:
            try:
                return load_dataset(path=path, name=name, **options)
            except Exception:  # offline, not there, not allowed, cut off: each library has its own errors for it
                configuration = f", configuration {name}" if name else ""
                where = str(error) if data_dir is not None else "give --data-dir"
                raise Absent(f"{path}{configuration}: {where}") from None
        return _Splits({split: _adapted(rows, task, split, roots[0]) for split, rows in splits.items()})

    try:
        datasets.load_dataset = load
        if not download:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        yield
    finally:
        datasets.load_dataset = load_dataset
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline


def _adapted(rows: Dataset, task: str, split: str, folder: Path) -> Dataset:
    """Rows with the columns that the task takes; two datasets are known in a second form."""
    columns = PAPER[task].columns if task in PAPER else ()
    if "problems" in columns and "problems" not in rows.column_names and "question" in rows.column_names:
        rows = _by_article(rows)
    if task == "boolq" and "label" not in rows.column_names and "answer" in rows.column_names:
        rows = rows.add_column("label", [int(answer) for answer in rows["answer"]])
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(
            f"the split {split} of {task} in {folder} has no {', '.join(missing)}; its columns are "
            f"{', '.join(rows.column_names)}, and {task} takes {', '.join(columns)}"
        )
    return rows


def _by_article(rows: Dataset) -> Dataset:
    """RACE as it was published, a row per question, in the form of the harness, a row per article."""
    import datasets

    problems: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        problem = {key: row[key] for key in ("question", "answer", "options")}
        problems.setdefault(row["article"], []).append(problem)
    return datasets.Dataset.from_list(
        [{"article": article, "problems": repr(asked)} for article, asked in problems.items()]
    )
