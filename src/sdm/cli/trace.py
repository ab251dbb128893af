"""`sdm trace MODEL --prompt TEXT`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Trace(Command):
    """Show which earlier tokens each token reads, as a page to look at."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run's folder or a model's folder."""
    prompt: str | None = None
    """The text to trace, or the name of a file that holds it."""
    tokens: tuple[int, ...] = ()
    """The text as token ids, for a model without a tokenizer."""
    generate: int = 0
    """Continue the text by so many tokens (the likeliest ones), and trace them too."""
    state: Path | None = None
    """A state file to go on from; what it has seen is one source, "before the text"."""
    output: Path = Path("trace.html")
    """The page. An existing file is not overwritten unless --overwrite is given."""
    overwrite: bool = False
    """Replace an existing page."""
    max_tokens: int = 4096
    """Trace so many tokens at most; a longer text is refused."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        """Trace the text, write the page and print what each layer reads most."""
        import torch

        from sdm.analysis.tables import rich_table
        from sdm.analysis.trace_page import write_trace_page
        from sdm.analysis.tracing import trace
        from sdm.cli.display import show, show_json
        from sdm.cli.generate import load_tokenizer
        from sdm.evaluation.report import Table
        from sdm.models import MemoryState, SDMCache
        from sdm.run.model import SavedModel

        self.check_options()
        saved = SavedModel(self.model)
        model = saved.load()
        tokenizer = load_tokenizer(saved.folder)
        ids = text_ids(self.model, self.prompt, self.tokens, tokenizer, model.config.vocab_size)
        state = None
        if self.state is not None:
            with explained("cannot go on from --state"):
                state = MemoryState.load(self.state, model)
            ids = [*state.pending, *ids]
        if self.generate:
            cache = SDMCache(model.config) if state is None else state.cache(model)
            past = cache.get_seq_length()
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, past + len(ids), dtype=torch.int64),
                    past_key_values=cache,
                    max_new_tokens=self.generate,
                    do_sample=False,
                )
            ids = output[0].tolist()
        if len(ids) > self.max_tokens:
            raise UserError(
                f"the text has {len(ids)} tokens, and --max-tokens is {self.max_tokens}; shorten it or raise the limit"
            )
        with explained("cannot trace the text"):
            result = trace(model, torch.tensor(ids), state=state)
        with explained(f"cannot write {self.output}"):
            write_trace_page(result, self.output, tokenizer, f"{self.model.name}: which tokens are read")
        layers = []
        for layer in result.layers:
            distances, shares = layer.distances()
            total = shares.sum().clamp(min=1e-12)
            layers.append(
                {
                    "layer": layer.index,
                    "type": layer.layer_type,
                    "mean_distance": float((distances * shares).sum() / total),
                    "share_from_64_on": float(shares[distances >= 64].sum() / total),
                    "share_before_the_text": float(layer.before_share().mean()),
                    "error": layer.error,
                }
            )
        if self.json:
            return show_json({"tokens": len(result), "layers": layers, "page": self.output})
        rows = [
            (
                str(layer["layer"]),
                str(layer["type"]),
                f"{layer['mean_distance']:.1f}",
                f"{layer['share_from_64_on']:.0%}",
                f"{layer['share_before_the_text']:.0%}",
                f"{layer['error']:.0e}",
            )
            for layer in layers
        ]
        columns = ("layer", "type", "mean distance", "64 or more back", "before", "error")
        show(rich_table(Table(f"{self.model}, {len(result)} tokens", columns, tuple(rows))))
        print(f"{self.output} shows which tokens each token reads")
        return None

    def check_options(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        if (self.prompt is None) == (not self.tokens):
            raise UserError("give the text to trace with --prompt (a text or a file) or with --tokens")
        if self.generate < 0:
            raise UserError(f"--generate must be at least 0, got {self.generate}")
        if self.output.exists() and not (self.overwrite and self.output.is_file()):
            raise UserError(f"--output {str(self.output)!r} exists already; give another name, or --overwrite")
        if not self.output.parent.is_dir():
            raise UserError(f"--output must be in an existing folder, got {str(self.output)!r}")


def text_ids(
    model: Path, prompt: str | None, tokens: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[int]:
    """Return the token ids of a text that a user gives with --prompt, as a text or a file, or with --tokens.

    Raises:
        UserError: if the text cannot be read or tokenized, or has tokens that the model does not know.
    """
    if prompt is None:
        ids = list(tokens)
    elif tokenizer is None:
        raise UserError(f"{str(model)!r} has no tokenizer; give the text as token ids with --tokens")
    else:
        text = prompt
        try:
            is_file = Path(prompt).is_file()
        except (OSError, ValueError):  # a text that cannot be the name of a file
            is_file = False
        if is_file:
            with explained(f"cannot read --prompt {prompt!r}"):
                text = Path(prompt).read_text(encoding="utf-8")
        with explained("cannot tokenize --prompt"):
            ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError("the text is empty: --prompt must have at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"tokens must lie within 0 ... {vocab_size - 1}, got {token}")
    return ids
