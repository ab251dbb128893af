"""`sdm tokenizer train SOURCE OUTPUT`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sdm.cli.command import Command


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
