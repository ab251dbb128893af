"""The `sdm` command: a table of subcommands. Each imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sdm import __version__
from sdm.ending import PostponedSignals, ending_with_one_message
from sdm.files import explained

DESCRIPTION = "Language models with a sparse delta memory. `sdm --version` prints the version."
# Where a run keeps its model for transformers.
EXPORT = "export"


@dataclass(frozen=True)
class Ladder:
    """Print the paper's scaling ladder beside ours."""

    def run(self) -> None:
        from rich.console import Console

        from sdm.analysis.tables import ladder_tables

        # Where there is less room wrapped lines keep the numbers that would be cut off.
        console = Console()
        console.width = max(console.width, 80)
        console.print(*ladder_tables())


@dataclass(frozen=True)
class DrawFigure:
    """Draw a figure of the paper from our formulas."""

    name: Annotated[Literal["state-vs-flops"], tyro.conf.Positional]
    """Which figure."""
    output: Path | None = None
    """File to write; its suffix says the format. By default the figure's name with .png."""

    def run(self) -> None:
        from sdm.analysis.figures import draw

        path = self.output or Path(f"{self.name}.png")
        with explained(f"cannot write --output {path}"):
            draw(self.name, path)
        print(path)


@dataclass(frozen=True)
class Info:
    """Print the sizes, layers, state and backend of a model."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder or a model's folder."""
    context: int = 8192
    """Tokens of context at which costs per token are given."""

    def run(self) -> None:
        from rich.console import Console

        from sdm import ops
        from sdm.analysis.tables import model_table
        from sdm.models.saved_folder import load_config

        if self.context < 0:
            raise ValueError(f"--context must not be negative, got {self.context}")
        run = unfinished_run(self.model)
        config = load_config(model_folder(self.model)) if run is None else restored_model(run).config
        Console().print(model_table(config, self.context))
        print(f"backend: {config.backend}; available here: {', '.join(ops.available_backends())}")
        if "native" not in ops.available_backends():
            print("the compiled core is not installed: CPUs run the slower backend chunked")


@dataclass(frozen=True)
class Generate:
    """Continue a prompt, printing tokens as they come."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder or a model's folder."""
    prompt: str | None = None
    """Text to continue. May be left out when a state file is resumed."""
    tokens: tuple[int, ...] = ()
    """The prompt as token ids, for a model without a tokenizer; ids are printed then."""
    state: Path | None = None
    """State file: resumed from if it exists, and written at the end."""
    max_new_tokens: int = 64
    """How many tokens to generate at most."""
    temperature: float = 0.0
    """0 takes the likeliest token; otherwise tokens are sampled."""
    top_k: int = 0
    """Sample among so many tokens only; 0: among all."""
    seed: int = 0
    """Of the sampling."""

    def run(self) -> None:
        import torch
        from transformers import TextStreamer

        from sdm.models import MemoryState, SDMCache
        from sdm.models.saved_folder import load_model

        self.check_options()
        run = unfinished_run(self.model)
        folder = model_folder(self.model) if run is None else run / "tokenizer"
        model: Any = load_model(folder) if run is None else restored_model(run)
        tokenizer = None if self.tokens else load_tokenizer(folder)
        resumed = None
        if self.state is not None and self.state.exists():
            resumed = MemoryState.load(self.state, model)
        prompt = list(self.tokens)
        if self.prompt is not None:
            if tokenizer is None:
                raise ValueError(f"{self.model!r} has no tokenizer; give the prompt as token ids with --tokens")
            with explained("cannot tokenize --prompt"):
                prompt = tokenizer(self.prompt, add_special_tokens=resumed is None)["input_ids"]
        ids = ([] if resumed is None else list(resumed.pending)) + prompt
        if not ids:
            raise ValueError("nothing to continue: give --prompt or --tokens, or resume a --state")
        cache = SDMCache(model.config) if resumed is None else resumed.cache(model)
        self.check_stream(model.config, prompt, cache.get_seq_length() + len(ids))
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k}
        torch.manual_seed(self.seed)
        # Without a state there is nothing to save: a signal need not wait for the token that is being computed.
        signals = PostponedSignals()
        with torch.inference_mode(), contextlib.nullcontext() if self.state is None else signals:
            output = model.generate(
                torch.tensor([ids]),
                # A mask as long as the whole stream tells generate() that the ids are only its end.
                attention_mask=torch.ones(1, cache.get_seq_length() + len(ids), dtype=torch.int64),
                past_key_values=cache,
                max_new_tokens=self.max_new_tokens,
                streamer=None if tokenizer is None else TextStreamer(tokenizer, skip_prompt=True),
                stopping_criteria=[lambda ids, scores: torch.full(ids.shape[:1], signals.received is not None)],
                **sampling,
            )
            new = output[0, len(ids) :].tolist()
            if tokenizer is None:
                print(*new)
            if self.state is not None:
                # The model has not seen the last token yet: it comes first when the stream is resumed.
                MemoryState.from_cache(model, cache, pending=new[-1:]).save(self.state)
        if signals.received is not None:
            print(f"stopped: {signals.received} after {len(new)} tokens; {self.state} is saved", file=sys.stderr)
            raise SystemExit(signals.received.exit_code)

    def check_options(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        if self.tokens and self.prompt is not None:
            raise ValueError("give either --prompt or --tokens")
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}")
        # Below that, scores divided by the temperature overflow.
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise ValueError(f"--temperature must be 0 or a number from 1e-6 on, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be at least 1, or 0 for all tokens, got {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be within 0 ... 2^63 - 1, got {self.seed}")
        if self.state is not None:
            # A state that turns out not to be writable in the end would be lost.
            if self.state.exists() and not self.state.is_file():
                raise ValueError(f"--state must be a file, got {str(self.state)!r}")
            if not (self.state.parent.is_dir() and os.access(self.state.parent, os.W_OK)):
                raise ValueError(
                    f"--state must be in an existing folder that can be written to, got {str(self.state)!r}"
                )

    def check_stream(self, config: Any, prompt: list[int], length: int) -> None:
        """Refuse tokens that the model does not know, and more of them than it takes."""
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                option = "--tokens" if self.tokens else "--prompt"
                raise ValueError(f"{option} must be of tokens within 0 ... {config.vocab_size - 1}, got {token}")
        # The model does not see the last new token.
        length, limit = length + self.max_new_tokens - 1, config.max_position_embeddings
        if limit is not None and length > limit:
            raise ValueError(
                f"prompt and new tokens make a stream of {length}, but the model's max_position_embeddings is {limit}; "
                "shorten the prompt or lower --max-new-tokens"
            )


@dataclass(frozen=True)
class Train:
    """Train a model by a recipe; `sdm train` lists them."""

    recipe: Annotated[str, tyro.conf.Positional]
    """A recipe's name, or the folder of a run to continue. Its fields follow: `sdm train RECIPE --help`."""


@dataclass(frozen=True)
class Export:
    """Write the model of a run's newest checkpoint as a folder that transformers loads."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    output: Path | None = None
    """The folder to write. By default `export` within the run's."""

    def run(self) -> None:
        from sdm.training.export import export_run

        print(export_run(self.run_dir, self.output))


@dataclass(frozen=True)
class Tokenizer:
    """Train a byte-level BPE tokenizer."""

    command: Annotated[Literal["train"], tyro.conf.Positional]
    """What to do."""
    source: Annotated[str, tyro.conf.Positional]
    """"code", "text", a file, a folder, or hf:NAME."""
    output: Annotated[Path, tyro.conf.Positional]
    """The folder to write."""
    vocab_size: int = 4096
    """Ids, the 256 bytes and the token between documents included."""

    def run(self) -> None:
        from sdm.data import open_source, train_bpe

        texts = (document.text for document in open_source(self.source).documents())
        train_bpe(texts, self.vocab_size).save(self.output)
        print(self.output)


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's claims in miniature."""

    what: Annotated[Literal["quick"], tyro.conf.Positional]
    """quick: recall and a small pair of language models, within ten minutes on two cores."""
    output: Path = Path("runs/quick")
    """The folder for the runs, the figures and the table."""
    processes: int = 2
    """Runs at a time, one thread each."""

    def run(self) -> None:
        from sdm.recipes.reproduce import reproduce

        if self.processes < 1:
            raise ValueError(f"--processes must be at least 1, got {self.processes}")
        raise SystemExit(reproduce(self.output, self.processes))


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "export": Export,
    "tokenizer": Tokenizer,
    "reproduce": Reproduce,
    "ladder": Ladder,
    "figure": DrawFigure,
    "info": Info,
    "generate": Generate,
}


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a file may not be text; standard error takes it anyway
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments == ["--version"]:
        print(f"sdm {__version__}")
        return
    if arguments[:1] == ["train"]:
        # Which fields there are depends on the recipe: it has a parser of its own.
        from sdm.recipes.command import train

        train(arguments[1:])
        return
    command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="sdm", description=DESCRIPTION, args=arguments)
    with ending_with_one_message():
        command.run()


def model_folder(name: str) -> Path:
    """The folder with config.json: the one named, or the export within a run's."""
    for folder in (Path(name), Path(name) / EXPORT):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"{name!r} is neither a model's folder (no config.json) nor a run's (no {EXPORT}/config.json)")


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
