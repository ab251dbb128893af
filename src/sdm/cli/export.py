"""Commands that write files for other programs: `sdm export`, `sdm tokenizer` and `sdm ruler`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sdm.cli.command import Command


@dataclass(frozen=True)
class Export(Command):
    """Write the model of a run's newest checkpoint as a folder that transformers loads."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    output: Path | None = None
    """The folder to write. By default `export` within the run's."""

    chat_template: bool = False
    """Add a simple chat template ("role: content" lines) if the tokenizer has none, for `transformers serve`."""

    def run(self) -> None:
        """Export the model and print the folder."""
        from sdm.run.model import export_run

        print(export_run(self.run_dir, self.output, self.chat_template))


@dataclass(frozen=True)
class Tokenizer(Command):
    """Train a byte-level BPE tokenizer."""

    command: Annotated[Literal["train"], tyro.conf.Positional]
    """What to do."""
    source: Annotated[str, tyro.conf.Positional]
    """"code", "text", a file, a folder, pypi:NAME==VERSION or hf:NAME."""
    output: Annotated[Path, tyro.conf.Positional]
    """The folder to write."""
    vocab_size: int = 4096
    """Ids, the 256 bytes and the token between documents included."""

    def run(self) -> None:
        """Train the tokenizer, save it and print its folder."""
        from sdm.data import open_source, train_bpe

        texts = (document.text for document in open_source(self.source).documents())
        train_bpe(texts, self.vocab_size).save(self.output)
        print(self.output)


@dataclass(frozen=True)
class Ruler(Command):
    """Write samples of RULER's tasks as lines of JSON, for other programs; `sdm eval ruler` measures models on them."""

    tokenizer: Annotated[str, tyro.conf.Positional]
    """"byte", or the folder of a tokenizer or of a model, by which lengths are counted."""
    output: Annotated[Path, tyro.conf.Positional]
    """The file to write. Its lines have the names that RULER's own files have."""
    tasks: tuple[str, ...] = ()
    """Which of the 13 tasks; none: all."""
    lengths: tuple[int, ...] = (4096,)
    """Tokens of prompt and answer together."""
    samples: int = 500
    """Of each task at each length."""
    seed: int = 42
    """Of the samples."""
    essays: str = "text"
    """The text that needles are hidden in: files of the user's, or a built-in corpus (text, code)."""
    squad: Path | None = None
    """SQuAD 2.0's development set for qa_1; None: made from templates."""
    hotpot: Path | None = None
    """HotpotQA's development set, distractor setting, for qa_2; None: made from templates."""
    skip_short: bool = False
    """Leave out lengths that a task does not fit into, instead of refusing."""

    def run(self) -> None:
        """Write the samples, with progress on standard error."""
        from sdm.cli.progress import eval_progress
        from sdm.data.tokenization import ByteTokenizer
        from sdm.evaluation.eval_model import open_tokenizer
        from sdm.evaluation.measurement import Advance
        from sdm.evaluation.ruler.measurement import Ruler as Measurement
        from sdm.evaluation.ruler.tasks import TASKS
        from sdm.files import new_file

        settings = Measurement(
            tasks=self.tasks or tuple(TASKS),
            lengths=self.lengths,
            samples=self.samples,
            seed=self.seed,
            essays=self.essays,
            squad=self.squad,
            hotpot=self.hotpot,
            skip_short=self.skip_short,
        )
        tokenizer = ByteTokenizer() if self.tokenizer == "byte" else open_tokenizer(Path(self.tokenizer))
        generator = settings.generator(tokenizer)
        held = settings.held(generator)
        total = self.samples * sum(length for _, length in held)
        done = 0
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with new_file(self.output) as temporary, temporary.open("w") as file, eval_progress() as listener:
            for task, length in held:
                for sample in generator.samples(task, length, self.samples):
                    record = sample.record() | {"comparable": settings.comparable(task)}
                    file.write(json.dumps(record) + "\n")
                    done += length
                    listener(Advance(str(self.output), done, total, done))
        print(self.output)
