"""The tasks of the paper's table as the harness has them, and how they are loaded with local data.

The paper names the tasks and says neither how many examples stand before a question (shots) nor which accuracy is meant
nor how questions are put. Here questions are the harness's, shots are its defaults but for open questions and MMLU,
which are asked behind five examples as is usual, and the metric is the usual one of each task.

A task's dataset is a folder: DATA_DIR/TASK, or DATA_DIR/NAME, where NAME is what the dataset is called on the Hugging
Face Hub, in whole or its last part. In it, or in a folder of the configuration's name in it, is a file per split:

    SPLIT.jsonl (also .gz, .zst)     an object in every line
    SPLIT.parquet, SPLIT-*.parquet   also in a folder data/, as downloads from the Hub have them
    SPLIT/                           saved by `Dataset.save_to_disk`
    dataset_dict.json                of the whole folder, saved by `DatasetDict.save_to_disk`

One folder may hold all configurations if its rows name theirs in a column `subject`, as those of MMLU do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdm.errors import UserError, nearest

if TYPE_CHECKING:
    from datasets import Dataset
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
import re

from sdm.data.sources import read_lines
from sdm.errors import require
from sdm.files import explained, parse_json

if TYPE_CHECKING:
    from datasets import Dataset


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


SPLITS = ("train", "validation", "test", "dev")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_PART = re.compile(r"(?P<split>\w+?)(-\d{5}-of-\d{5})?$")


class Absent(UserError):
    """There are no files of a dataset. The message says which would be taken."""


def load_local(roots: Sequence[Path], configuration: str | None) -> dict[str, Any]:
    """A dataset of the `datasets` library by the name of its split, from the first of the folders that has one.

    Raises Absent if none has.
    """
    for root in roots:
        for folder in [root / configuration, root] if configuration else [root]:
            splits = _splits(folder)
            if splits and folder == root and configuration:
                splits = {split: _of_subject(rows, configuration, folder) for split, rows in splits.items()}
            if splits:
                return splits
    places = " or ".join(str(root) for root in roots)
    raise Absent(f"no files in {places} (SPLIT.jsonl, SPLIT.parquet or a saved dataset)")


def _splits(folder: Path) -> dict[str, Any]:
    datasets = require("datasets", "eval", "reading the dataset of a task")
    if (folder / "dataset_dict.json").is_file():
        with explained(f"cannot read the dataset in {folder}"):
            return dict(datasets.load_from_disk(str(folder)))
    files: dict[str, list[Path]] = {}
    for path in _candidates(folder):
        suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), "")
        named = _PART.match(path.name.removesuffix(suffix))
        if named and named["split"] in SPLITS:
            files.setdefault(named["split"], []).append(path)
    return {split: _read(paths) for split, paths in files.items()}


def _candidates(folder: Path) -> Iterator[Path]:
    for place in (folder, folder / "data"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.name.endswith(_SUFFIXES) or (path / "dataset_info.json").is_file():
                yield path


def _read(paths: Sequence[Path]) -> Dataset:
    import datasets

    if len({path.suffix for path in paths}) > 1 or (len(paths) > 1 and paths[0].suffix != ".parquet"):
        raise UserError(f"{paths[0]} and {paths[1]} are of the same split; leave one of them")
    path = paths[0]
    if path.is_dir():
        with explained(f"cannot read the dataset in {path}"):
            return datasets.load_from_disk(str(path))
    if path.suffix == ".parquet":
        parquet = require("pyarrow.parquet", "parquet", f"reading {path}")
        tables = []
        for part in paths:
            with explained(f"cannot read {part}"):
                tables.append(datasets.Dataset(parquet.read_table(part)))
        return datasets.concatenate_datasets(tables)
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path} has no rows")
    with explained(f"the rows of {path} do not have the same fields"):
        return datasets.Dataset.from_list(rows)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    fields: set[str] | None = None
    with _explained(path):
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} must be an object, got {type(row).__name__}")
            fields = fields or set(row)
            if set(row) != fields:
                other = sorted(set(row) ^ fields)[0]
                has = "has" if other in row else "lacks"
                raise UserError(f"{path}, line {number} {has} the field {other!r}, unlike the first line")
            yield row


def _of_subject(rows: Dataset, configuration: str, folder: Path) -> Dataset:
    if "subject" not in rows.column_names:
        return rows
    chosen = [place for place, subject in enumerate(rows["subject"]) if subject == configuration]
    if not chosen:
        raise UserError(f"the rows in {folder} have no subject {configuration!r}")
    return rows.select(chosen)
