"""The `sdm` command: a table of subcommands. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

# Where a run keeps its model for transformers.
EXPORT = "export"


@dataclass(frozen=True)
class Ladder:
    """Print the paper's scaling ladder beside ours."""

    def run(self) -> None:
        from rich.console import Console

        from sdm.analysis.tables import ladder_table

        # A terminal of 80 columns would cut the numbers off; wrapped lines keep them.
        console = Console()
        console.width = max(console.width, 120)
        console.print(ladder_table())


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
        from sdm.models import SDMConfig

        config = SDMConfig.from_pretrained(model_folder(self.model))
        Console().print(model_table(config, self.context))
        print(f"backend: {config.backend}; available here: {', '.join(ops.available_backends())}")


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

        model = load_model(self.model)
        tokenizer = None if self.tokens else load_tokenizer(self.model)
        resumed = None
        if self.state is not None and self.state.exists():
            try:
                resumed = MemoryState.load(self.state, model)
            except ValueError as error:
                raise SystemExit(str(error)) from error
        prompt = list(self.tokens)
        if self.prompt is not None:
            if tokenizer is None:
                raise SystemExit("give either --prompt or --tokens")
            prompt = tokenizer(self.prompt, add_special_tokens=resumed is None)["input_ids"]
        ids = ([] if resumed is None else list(resumed.pending)) + prompt
        if not ids:
            raise SystemExit("nothing to continue: give --prompt or --tokens, or resume a --state")
        cache = SDMCache(model.config) if resumed is None else resumed.cache(model)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k}
        torch.manual_seed(self.seed)
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]),
                # A mask as long as the whole stream tells generate() that the ids are only its end.
                attention_mask=torch.ones(1, cache.get_seq_length() + len(ids), dtype=torch.int64),
                past_key_values=cache,
                max_new_tokens=self.max_new_tokens,
                streamer=None if tokenizer is None else TextStreamer(tokenizer, skip_prompt=True),
                **sampling,
            )
        new = output[0, len(ids) :].tolist()
        if tokenizer is None:
            print(*new)
        if self.state is not None:
            # The model has not seen the last token yet: it comes first when the stream is resumed.
            MemoryState.from_cache(model, cache, pending=new[-1:]).save(self.state)


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
        from sdm.training.errors import TrainingError
        from sdm.training.export import export_run

        try:
            print(export_run(self.run_dir, self.output))
        except TrainingError as error:
            raise SystemExit(f"error: {error}") from error


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
        from sdm.data import DataError, open_source, train_bpe

        try:
            texts = (document.text for document in open_source(self.source).documents())
            train_bpe(texts, self.vocab_size).save(self.output)
        except DataError as error:
            raise SystemExit(f"error: {error}") from error
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
    if arguments[:1] == ["train"]:
        # Which fields there are depends on the recipe: it has a parser of its own.
        from sdm.recipes.command import train

        train(arguments[1:])
        return
    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="sdm", description=__doc__, args=arguments).run()


def model_folder(name: str) -> Path:
    """The folder with config.json: the one named, or the export within a run's."""
    for folder in (Path(name), Path(name) / EXPORT):
        if (folder / "config.json").is_file():
            return folder
    raise SystemExit(f"{name!r} is neither a model's folder (no config.json) nor a run's (no {EXPORT}/config.json)")


def load_model(name: str) -> Any:
    from transformers.utils import logging

    from sdm.models import SDMForCausalLM

    logging.disable_progress_bar()
    return SDMForCausalLM.from_pretrained(model_folder(name)).eval()


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    folder = model_folder(name)
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise SystemExit(f"{str(folder)!r} has no tokenizer; give the prompt as token ids with --tokens")
    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    main()
