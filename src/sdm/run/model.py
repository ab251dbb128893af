"""Loading the model of a run, finished or not, or of any saved folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sdm.data.config import TextConfig, open_data
from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.errors import TrainingError
from sdm.files import check_manifest
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.causal_lm import load_foreign_model
from sdm.models.fingerprint import architecture
from sdm.models.saved_folder import CONFIG, EXAMPLE_FOLDER, EXAMPLE_NAME, load_config, load_model
from sdm.run.adapted_model import build_adapted
from sdm.run.config import TrainConfig
from sdm.run.export import export_model, model_tensors
from sdm.run.folder import EXPORT, Run

logger = logging.getLogger(__name__)

# Fields of the architecture that only say how the weights were initialised, or repeat layer_types.
_FREE = {"local_layer", "tie_query_initialization"}


class SavedModel:
    """A model on the disk: a folder that transformers loads, or a run.

    A finished run has its export; an unfinished one its newest good checkpoint, which is newer than any export.

    Args:
        path: the folder of a model or of a run, or "example" for the model that the package holds.

    Raises:
        TrainingError: the folder is neither.
    """

    def __init__(self, path: Path) -> None:
        if path == Path(EXAMPLE_NAME) and not path.exists():
            path = EXAMPLE_FOLDER
        self.path = path
        run = Run(path)
        self._run = run if run.exists() and not run.is_finished() else None
        folders = [run.tokenizer] if self._run else [x for x in (path, run.export) if (x / CONFIG).is_file()]
        if not folders:
            raise TrainingError(
                f"{str(path)!r} is neither a model's folder (no {CONFIG}) nor a run's (no {EXPORT}/{CONFIG})"
            )
        self.folder = folders[0]
        """Where the tokenizer is, if there is one; of a finished run or a model, all that transformers loads."""

    def config(self) -> SDMConfig:
        """Return the model's configuration without loading the weights."""
        around = Run.around(self.path)
        if around is not None and around.config().adapt is not None:
            raise TrainingError(f"{self.path}: the run trains a model of transformers, which has no SDMConfig")
        if self._run is None:
            return load_config(self.folder)
        state = self._run.checkpoints().newest_state()
        if state is None:
            return self.load().config  # or the reason why it cannot be loaded
        self._log_step(state["step"])
        return _built(self._run)[0].config

    def load(self) -> Any:
        """Return the model in evaluation mode: ours, or of a run with `adapt` one of transformers."""
        if self._run is None:
            run = Run.around(self.path)
            if run is not None and run.config().adapt is not None:
                check_manifest(self.folder)
                return load_foreign_model(self.folder).eval()
            return load_model(self.folder)
        model, _, step = restore(self._run)
        self._log_step(step)
        return model.eval()

    def _log_step(self, step: int) -> None:
        logger.info("%s is not finished: the model is that of the checkpoint after step %d", self.path, step)


def export_run(folder: Path, output: Path | None = None, chat_template: bool = False) -> Path:
    """Export the model of the newest good checkpoint of a run, finished or not.

    Args:
        folder: the run's folder.
        output: where to write; None: `export` within the run's folder.
        chat_template: whether to add a simple chat template to a tokenizer without one.

    Returns:
        The folder that was written.
    """
    run = Run(folder)
    model, tokenizer, _ = restore(run)
    return export_model(model, tokenizer, output or run.export, chat_template=chat_template)


def restore(run: Run) -> tuple[Any, Tokenizer | None, int]:
    """Return the model of a run's newest good checkpoint, its tokenizer if it has one, and the step."""
    model, tokenizer = _built(run)
    tensors = {f"model.{name}": x for name, x in model_tensors(model).items()}
    store = run.checkpoints()
    state = store.newest(lambda state: store.load(state["step"], tensors))
    assert state is not None, "it has begun"
    return model, tokenizer, state["step"]


def new_model(config: TrainConfig, vocab_size: int, tokenizer: Tokenizer | None) -> Any:
    """Return the model of a run as it is before the first step."""
    if config.adapt is not None:
        return build_adapted(config.adapt, vocab_size, tokenizer)
    return SDMForCausalLM(config.model.build(vocab_size, None if tokenizer is None else tokenizer.eos_id))


def _built(run: Run) -> tuple[Any, Tokenizer | None]:
    """The model of a run with new weights, and the tokenizer."""
    config = run.config()
    if not run.has_begun():
        raise TrainingError(f"the run in {run.folder} has no checkpoint yet")
    recorded = run.recorded_tokenizer() if isinstance(config.data, TextConfig) else None
    if recorded is not None:
        tokenizer = load_tokenizer(recorded)
        return new_model(config, tokenizer.vocab_size, tokenizer), tokenizer
    data = open_data(config.data, "train", config.schedule.steps)  # a task, which has no tokenizer
    return new_model(config, data.vocab_size, None), None


def load_weights(model: SDMForCausalLM, path: Path, tokenizer: Tokenizer | None) -> None:
    """Initialise a model with the weights of a run or of a saved model.

    Args:
        model: is filled in place.
        path: the other run's or model's folder (`init_from`).
        tokenizer: of this run's data; the other model's must be the same.

    Raises:
        TrainingError: the architectures or the tokenizers differ, or the weights are damaged.
    """
    try:
        saved = SavedModel(path)
        folder = saved.folder
        check_manifest(folder)
    except ValueError as error:
        raise TrainingError(f"init_from: {error}") from error
    theirs_known = tokenizer is not None and (folder / "tokenizer.json").is_file()
    if theirs_known and load_tokenizer(folder).fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        raise TrainingError(
            f"init_from: the tokenizer in {folder} is not that of this run's data; set data.tokenizer to {folder}"
        )
    try:
        loaded = saved.load()
    except ValueError as error:
        raise TrainingError(f"init_from: the model in {folder} cannot be loaded: {error}") from error
    theirs, ours = _architecture(loaded.config), _architecture(model.config)
    for name, value in ours.items():
        if theirs[name] != value:
            raise TrainingError(
                f"init_from: the model in {folder} has {name} = {theirs[name]!r}, this run {value!r}; they must agree"
            )
    try:
        model.load_state_dict(loaded.state_dict())
    except RuntimeError as error:
        raise TrainingError(f"init_from: the weights in {folder} are not those of this run's model: {error}") from error


def _architecture(config: SDMConfig) -> dict[str, Any]:
    """The fields that give the weights their meaning."""
    named = architecture(config) | {"tie_word_embeddings": config.tie_word_embeddings}
    return {name: value for name, value in named.items() if name not in _FREE}
