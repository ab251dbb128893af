"""Datasets of tasks from local files.

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
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdm.data.sources import read_lines
from sdm.errors import UserError, require
from sdm.files import explained, parse_json

if TYPE_CHECKING:
    from datasets import Dataset

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
