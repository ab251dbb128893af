"""The model of a run, or of any saved folder, from the best source that there is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from sdm.data.config import CorpusConfig
from sdm.data.loader import open_data
from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.saved_folder import CONFIG, load_config, load_model
from sdm.run.errors import TrainingError
from sdm.run.export import export_model, model_tensors
from sdm.run.folder import EXPORT, Run


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


class SavedModel:
    """A model on the disk: a folder that transformers loads, which may be the export of a run, or, as long as the run
    is not finished, its newest good checkpoint. An export from before the end is older than that."""

    def __init__(self, path: Path, announce: Callable[[str], None] = _tell) -> None:
        self.path, self._announce = path, announce
        run = Run(path)
        self._run = run if run.exists() and not run.is_finished() else None
        folders = [run.tokenizer] if self._run else [one for one in (path, run.export) if (one / CONFIG).is_file()]
        if not folders:
            raise TrainingError(
                f"{str(path)!r} is neither a model's folder (no {CONFIG}) nor a run's (no {EXPORT}/{CONFIG})"
            )
        self.folder = folders[0]
        """Where the tokenizer is, if there is one; of a finished run or a model, all that transformers loads."""

    def config(self) -> SDMConfig:
        if self._run is None:
            return load_config(self.folder)
        state = self._run.checkpoints().newest_state()
        if state is None:
            return self.load().config  # or rather why it cannot be had
        self._say_step(state["step"])
        return _built(self._run)[0]

    def load(self) -> SDMForCausalLM:
        """The model in evaluation mode."""
        if self._run is None:
            return load_model(self.folder)
        model, _, step = restore(self._run, self._announce)
        self._say_step(step)
        return model.eval()

    def _say_step(self, step: int) -> None:
        self._announce(f"{self.path} is not finished: the model is that of the checkpoint after step {step}")


def export_run(folder: Path, output: Path | None = None) -> Path:
    """Export the model of the newest good checkpoint of a run, finished or not."""
    run = Run(folder)
    model, tokenizer, _ = restore(run)
    return export_model(model, tokenizer, output or run.export)


def restore(run: Run, announce: Callable[[str], None] = _tell) -> tuple[SDMForCausalLM, Tokenizer | None, int]:
    """The model of a run's newest good checkpoint, its tokenizer if it has one, and the step."""
    config, tokenizer = _built(run)
    model = SDMForCausalLM(config)
    tensors = {f"model.{name}": x for name, x in model_tensors(model).items()}
    store = run.checkpoints()
    state = store.newest(announce, lambda state: store.load(state["step"], tensors))
    assert state is not None, "it has begun"
    return model, tokenizer, state["step"]


def _built(run: Run) -> tuple[SDMConfig, Tokenizer | None]:
    """The configuration of the model of a run, and the tokenizer."""
    config = run.config()
    if not run.has_begun():
        raise TrainingError(f"the run in {run.folder} has no checkpoint yet")
    recorded = run.recorded_tokenizer() if isinstance(config.data, CorpusConfig) else None
    if recorded is not None:
        tokenizer = load_tokenizer(recorded)
        return config.model.build(tokenizer.vocab_size, tokenizer.eos_id), tokenizer
    # A task's run, or one of an older version.
    data = open_data(config.data, "train", config.schedule.steps)
    found: Tokenizer | None = getattr(data, "tokenizer", None)
    return config.model.build(data.vocab_size, None if found is None else found.eos_id), found
