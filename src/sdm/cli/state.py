"""`sdm state show FILE --model RUN` and `sdm state diff A B --model RUN`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from sdm.evaluation.report import Table
    from sdm.models import MemoryState
    from sdm.models.state_summary import LayerWrites


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
    """show: the text that the state has read, or the name of a file that holds it, to tell when each slot was last
    written and how much is left of each token's write."""
    tokens: tuple[int, ...] = ()
    """The same text as token ids, for a model without a tokenizer."""
    json: bool = False
    """Print JSON instead of a table."""
    since: Path | None = None
    """show: an earlier state of the same stream, if the text is what was read after it."""
    output: Path | None = None
    """show: a new folder for writes.csv, slots.csv and survival.png, with every write and every slot."""

    def run(self) -> None:
        """Load the files, which must be of this model, and print a table."""
        from sdm.cli.display import show, show_json
        from sdm.models import MemoryState
        from sdm.run.model import SavedModel

        self.check_options()
        saved = SavedModel(self.model)
        model = saved.load()
        states = []
        for file in self.files:
            with explained(f"cannot read {file}"):
                states.append(MemoryState.load(file, model))
        if self.json and self.action == "show":
            return show_json(self._layers(model, saved.folder, states[0]))
        if self.json:
            return show_json(_differences(*states))
        if self.action == "show":
            show(*self._shown(model, saved.folder, states[0]))
            if self.output is not None:
                print(f"{self.output} has every write and every slot")
        else:
            show(self._compared(*states))
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
        has_text = self.prompt is not None or bool(self.tokens)
        if self.action == "diff" and (has_text or self.since is not None or self.output is not None):
            raise UserError("--prompt, --tokens, --since and --output belong to `sdm state show`")
        for name, value in (("--since", self.since), ("--output", self.output)):
            if value is not None and not has_text:
                raise UserError(f"{name} needs the text that the state has read: give --prompt or --tokens")
        if self.since is not None and not self.since.is_file():
            raise UserError(f"--since must be a state file, and there is none at {str(self.since)!r}")
        if self.output is not None and self.output.exists():
            raise UserError(f"--output must be a new folder, and {str(self.output)!r} exists")

    def _layers(self, model: PreTrainedModel, folder: Path, state: MemoryState) -> dict[str, object]:
        from sdm.models.state_summary import summarize_state

        layers = [dataclasses.asdict(layer) for layer in summarize_state(state, model)]
        writes = [
            {
                "layer": index,
                "left": layer.left.kept.nanmean(dim=0).tolist(),
                "decay_alone": layer.left.decayed.nanmean(dim=0).tolist(),
                "slots_not_rewritten": layer.left.slots.double().mean(dim=0).tolist(),
            }
            for index, layer in self._writes(model, folder, state)[1].items()
        ]
        facts: dict[str, object] = {"tokens": len(state), "pending": list(state.pending), "layers": layers}
        return facts | ({"writes": writes} if writes else {})

    def _shown(self, model: PreTrainedModel, folder: Path, state: MemoryState) -> list[Table]:
        from sdm.evaluation.report import Table
        from sdm.models.state_summary import summarize_state

        ids, writes, more = self._writes(model, folder, state)
        rows = []
        layers = summarize_state(state, model)
        for layer in layers:
            cells = [str(layer.index), layer.layer_type, _bytes(layer.nbytes), f"{layer.norm:.4g}"]
            if layer.slots is None or layer.changed is None:
                cells += ["", "", ""]
            else:
                cells += [f"{layer.changed:,}", f"{layer.changed / layer.slots:.1%}", f"{layer.largest:.3g}"]
            if ids:
                cells.append(_age(writes[layer.index].last, len(ids)) if layer.index in writes else "")
            rows.append(tuple(cells))
        columns: tuple[str, ...] = ("layer", "type", "size", "norm", "slots\nchanged", "of all", "largest\nchange")
        caption = "norm: of an SDM layer, of the difference to its initial state M0, of others of the whole state."
        if ids:
            columns = (*columns, "last written\n(tokens ago)")
            caption += " last written: median over the slots that the text wrote, and the oldest."
        pending = f", {len(state.pending)} pending" if state.pending else ""
        title = f"{self.files[0].name}: {len(state):,} tokens{pending}, {_bytes(sum(layer.nbytes for layer in layers))}"
        return [Table(title, columns, tuple(rows), caption), *more]

    def _writes(
        self, model: PreTrainedModel, folder: Path, state: MemoryState
    ) -> tuple[list[int], dict[int, LayerWrites], list[Table]]:
        """Run the text that the state has read again: its tokens, what became of its writes, and a table of it."""
        if self.prompt is None and not self.tokens:
            return [], {}, []
        import torch

        from sdm.cli.generate import load_tokenizer
        from sdm.cli.trace import text_ids
        from sdm.models import MemoryState
        from sdm.models.state_summary import stream_writes

        tokenizer = load_tokenizer(folder)
        ids = text_ids(self.model, self.prompt, self.tokens, tokenizer, model.config.vocab_size)
        since, past = None, 0
        if self.since is not None:
            with explained(f"cannot read {self.since}"):
                since = MemoryState.load(self.since, model)
            ids, past = [*since.pending, *ids], len(since)
        # `sdm generate` has not shown its last token to the model.
        if ids[-len(state.pending) :] == list(state.pending) and past + len(ids) == len(state) + len(state.pending):
            ids = ids[: len(state) - past]
        if past + len(ids) != len(state):
            beyond = f" after the {past} of --since" if since is not None else ""
            raise UserError(
                f"the text has {len(ids)} tokens{beyond}, but the state has read {len(state)}: give all of it"
            )
        if not ids:
            return [], {}, []
        with explained("cannot tell when slots were written"):
            writes = stream_writes(model, torch.tensor(ids), since, expected=state)
        if not writes:
            return ids, {}, []
        from sdm.analysis.state_writes import save_writes, writes_table

        if self.output is not None:
            texts = None if tokenizer is None else [str(tokenizer.decode([token])) for token in ids]
            with explained(f"cannot write --output {self.output}"):
                save_writes(self.output, writes, ids, texts)
        return ids, writes, [writes_table(writes)]

    def _compared(self, first: MemoryState, second: MemoryState) -> Table:
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


def _differences(first: MemoryState, second: MemoryState) -> dict[str, object]:
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


def _age(last_HN: Tensor, tokens: int) -> str:
    age = tokens - 1 - last_HN[last_HN >= 0]
    return f"{int(age.median())}, {int(age.max())}" if len(age) else "never"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
