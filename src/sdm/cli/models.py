"""Which model a command means, and where it comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sdm.errors import UserError
from sdm.files import explained

EXPORT = "export"  # where a run keeps its model for transformers


def model_folder(name: str) -> Path:
    """The folder with config.json: the one named, or the export within a run's."""
    for folder in (Path(name), Path(name) / EXPORT):
        if (folder / "config.json").is_file():
            return folder
    raise UserError(f"{name!r} is neither a model's folder (no config.json) nor a run's (no {EXPORT}/config.json)")


def unfinished_run(name: str) -> Path | None:
    """The folder of a run that has not come to its end, or None."""
    folder = Path(name)
    if not (folder / "run.json").is_file():
        return None
    from sdm.training.export import is_unfinished

    return folder if is_unfinished(folder) else None


def restored_model(run: Path) -> Any:
    """The model of an unfinished run, and a word about where it comes from."""
    from sdm.training.export import restore_run

    model, _, step = restore_run(run)
    print(f"{run} is not finished: the model is that of the checkpoint after step {step}", file=sys.stderr)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside the model, or None."""
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        return None
    with explained(f"cannot load the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder)
