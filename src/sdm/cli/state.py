"""`sdm state show FILE --model RUN` and `sdm state diff A B --model RUN`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained


@dataclass(frozen=True)
class State(Command):
    """Show what a state file holds, layer by layer, or where two of them differ."""

    action: Annotated[Literal["show", "diff"], tyro.conf.Positional]
    """show: one file. diff: two files of one model."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """State files, as `sdm generate --state` and `MemoryState.save` write them."""
    model: Path
    """The run's folder or the model's folder that wrote them."""
    prompt: str | None = None
    """show: the text that the state has read, to tell when each slot was last written."""
    tokens: tuple[int, ...] = ()
    """The same text as token ids, for a model without a tokenizer."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        """Load the files, which must be of this model, and print a table."""
        from sdm.analysis.tables import rich_table
        from sdm.cli.display import show, show_json
        from sdm.models import MemoryState
        from sdm.run.model import SavedModel

        self.check_options()
        saved = SavedModel(self.model)
        model: Any = saved.load()
        states = []
        for file in self.files:
            with explained(f"cannot read {file}"):
                states.append(MemoryState.load(file, model))
        if self.json:
            return show_json(self._layers(model, states[0]) if self.action == "show" else _differences(*states))
        table = self._shown(model, saved.folder, states[0]) if self.action == "show" else self._compared(*states)
        show(rich_table(table))
        return None

    def check_options(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        expected = 1 if self.action == "show" else 2
        if len(self.files) != expected:
            raise UserError(
                f"sdm state {self.action} takes {expected} state file{'s' * (expected > 1)}, got {len(self.files)}"
            )
        for file in self.files:
            if not file.is_file():
                raise UserError(f"there is no state file {str(file)!r}")
        if self.prompt is not None and self.tokens:
            raise UserError("give either --prompt or --tokens")
        if self.action == "diff" and (self.prompt is not None or self.tokens):
            raise UserError("--prompt and --tokens belong to `sdm state show`")

    def _layers(self, model: Any, state: Any) -> dict[str, object]:
        from sdm.models.state_summary import summarize_state

        layers = [dataclasses.asdict(layer) for layer in summarize_state(state, model)]
        return {"tokens": len(state), "pending": list(state.pending), "layers": layers}

    def _shown(self, model: Any, folder: Path, state: Any) -> Any:
        import torch

        from sdm.evaluation.report import Table
        from sdm.models.state_summary import last_written, summarize_state

        ids = self._text(folder, model.config.vocab_size)
        written = {}
        if ids is not None:
            if len(ids) != len(state):
                raise UserError(f"the text has {len(ids)} tokens, but the state has read {len(state)}: give all of it")
            written = last_written(model, torch.tensor(ids))
        rows = []
        layers = summarize_state(state, model)
        for layer in layers:
            cells = [str(layer.index), layer.layer_type, _bytes(layer.nbytes), f"{layer.norm:.4g}"]
            if layer.slots is None or layer.changed is None:
                cells += ["", "", ""]
            else:
                cells += [f"{layer.changed:,}", f"{layer.changed / layer.slots:.1%}", f"{layer.largest:.3g}"]
            if ids is not None:
                cells.append(_age(written[layer.index], len(ids)) if layer.index in written else "")
            rows.append(tuple(cells))
        columns: tuple[str, ...] = ("layer", "type", "size", "norm", "slots\nchanged", "of all", "largest\nchange")
        if ids is not None:
            columns = (*columns, "last written\n(tokens ago)")
        caption = "norm: of an SDM layer, of the difference to its initial state M0, of others of the whole state."
        if ids is not None:
            caption += " last written: median over the written slots, and the oldest."
        pending = f", {len(state.pending)} pending" if state.pending else ""
        title = f"{self.files[0].name}: {len(state):,} tokens{pending}, {_bytes(sum(layer.nbytes for layer in layers))}"
        return Table(title, columns, tuple(rows), caption)

    def _compared(self, first: Any, second: Any) -> Any:
        from sdm.evaluation.report import Table

        rows = []
        for index, changes in first.diff(second).items():
            largest = int(changes.change.argmax()) if len(changes) else 0
            where = f"head {int(changes.head[largest])}, slot {int(changes.slot[largest])}" if len(changes) else ""
            size = float(changes.change.max()) if len(changes) else 0.0
            rows.append((str(index), f"{len(changes):,}", f"{float(changes.change.norm()):.4g}", f"{size:.3g}", where))
        if not rows:
            raise UserError(f"{self.model} has no SDM layer, so its states have no slots to compare")
        pairs = zip(self.files, (first, second), strict=True)
        names = " and ".join(f"{file.name} ({len(state):,} tokens)" for file, state in pairs)
        columns = ("layer", "slots that differ", "norm", "largest", "where")
        return Table(f"Difference of {names}", columns, tuple(rows), "norm: length of the difference of all rows.")

    def _text(self, folder: Path, vocab_size: int) -> list[int] | None:
        from sdm.cli.generate import load_tokenizer

        ids = list(self.tokens)
        if self.prompt is not None:
            tokenizer = load_tokenizer(folder)
            if tokenizer is None:
                raise UserError(f"{str(self.model)!r} has no tokenizer; give the text as token ids with --tokens")
            with explained("cannot tokenize --prompt"):
                ids = tokenizer(self.prompt)["input_ids"]
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"tokens must lie within 0 ... {vocab_size - 1}, got {token}")
        return ids or None


def _differences(first: Any, second: Any) -> dict[str, object]:
    layers = [
        {
            "layer": index,
            "slots": len(changes),
            "norm": float(changes.change.norm()),
            "largest": float(changes.change.max()) if len(changes) else 0.0,
        }
        for index, changes in first.diff(second).items()
    ]
    return {"tokens": [len(first), len(second)], "layers": layers}


def _age(last_HN: Any, tokens: int) -> str:
    age = tokens - 1 - last_HN[last_HN >= 0]
    return f"{int(age.median())}, {int(age.max())}" if len(age) else "never"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
