"""Tokenizers to measure lengths with."""

from __future__ import annotations

from itertools import islice

import pytest

from sdm.data.sources import open_source
from sdm.data.tokenization import ByteTokenizer, HFTokenizer, Tokenizer, train_bpe
from sdm.evaluation.ruler.sample import Generator, counter


@pytest.fixture(scope="session")
def trained_bpe() -> HFTokenizer:
    return train_bpe((document.text for document in islice(open_source("code").documents(), 40)), 2048)


@pytest.fixture(scope="session")
def tokenizers(trained_bpe: HFTokenizer) -> dict[str, Tokenizer]:
    return {"byte": ByteTokenizer(), "bpe": trained_bpe}


@pytest.fixture(scope="session")
def generators(tokenizers: dict[str, Tokenizer]) -> dict[str, Generator]:
    return {name: Generator(counter(tokenizer)) for name, tokenizer in tokenizers.items()}
