"""Small stores of tokens whose every token is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sdm.data import ByteTokenizer, Document, TokenStore
from sdm.data.shards import TokenWriter


class ListSource:
    """Documents that are given."""

    def __init__(self, texts: Sequence[str], name: str = "list") -> None:
        self.texts, self.name = list(texts), name

    def documents(self) -> Iterator[Document]:
        yield from (Document(str(i), text) for i, text in enumerate(self.texts))

    def identity(self) -> Any:
        return self.texts

    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)

    def has(self, count: int) -> bool:
        return len(self.texts) >= count


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., TokenStore]:
    """A store of byte-level documents, several to a shard."""

    def make(texts: Sequence[str], shard_tokens: int = 64, name: str = "store") -> TokenStore:
        writer = TokenWriter(tmp_path / name, ByteTokenizer(), {"name": name, "split": "train"}, shard_tokens)
        for text in texts:
            writer.write([text])
        writer.finish()
        return TokenStore(tmp_path / name)

    return make


@pytest.fixture
def make_source() -> Callable[..., ListSource]:
    return ListSource
