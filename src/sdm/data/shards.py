"""Tokens on disk: written once, checked, then mapped into memory.

A store is a folder:

    manifest.json      counts, checksums (its own too), the tokenizer's fingerprint, where the text came from
    tokens-00000.bin   little-endian uint16, or uint32 for vocabularies over 65536; whole documents
    documents.bin      little-endian int64 [documents + 1], where each document starts among all tokens

Every document starts with the end-of-text token of the one before.
"""

from __future__ import annotations

import bisect
import hashlib
import mmap
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdm.data.tokenization import Tokenizer
from sdm.errors import DataError
from sdm.files import DamagedFile, Json, read_checked_json, read_json, write_bytes, write_checked_json

FORMAT = 1
SHARD_TOKENS = 2**28
DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}


class TokenWriter:
    """Writes a store into a folder. `finish` makes it valid."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, description: object, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        if sys.byteorder != "little":
            raise DataError("token stores are little-endian and are only written on little-endian machines")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._tokenizer, self._description = folder, tokenizer, description
        self._dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self._start = torch.tensor([tokenizer.eos_id], dtype=torch.int32)
        self._shard_tokens = shard_tokens
        self._shards: list[_Shard] = []
        self._offsets, self._num_bytes = array("q", [0]), 0

    def write(self, texts: Sequence[str]) -> None:
        """Append documents. Empty ones are left out."""
        texts = [text for text in texts if text]
        if not texts:
            return
        if not self._shards or self._shards[-1].num_tokens >= self._shard_tokens:
            self._shards.append(_Shard(self._folder / f"tokens-{len(self._shards):05d}.bin"))
        documents: list[Tensor] = []
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            documents += (self._start, ids)
            self._offsets.append(self._offsets[-1] + 1 + len(ids))
            self._num_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
        self._shards[-1].append(torch.cat(documents).to(DTYPES[self._dtype]))

    def finish(self) -> None:
        """Write the offsets and the manifest, which makes the store valid."""
        for shard in self._shards:
            with shard.path.open("rb+") as file:
                os.fsync(file.fileno())
        offsets = self._offsets.tobytes()
        write_bytes(self._folder / "documents.bin", offsets)
        manifest = {
            "format": FORMAT,
            "dtype": self._dtype,
            "num_documents": len(self._offsets) - 1,
            "num_tokens": self._offsets[-1],
            "num_bytes": self._num_bytes,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "tokenizer": self._tokenizer.fingerprint,
            "source": self._description,
            "documents": _entry("documents.bin", len(offsets), hashlib.sha256(offsets)),
            "shards": [
                {**_entry(shard.path.name, shard.path.stat().st_size, shard.hash), "num_tokens": shard.num_tokens}
                for shard in self._shards
            ],
        }
        write_checked_json(self._folder / "manifest.json", manifest)


class _Shard:
    """A file of tokens that grows; its checksum grows with it."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_tokens, self.hash = path, 0, hashlib.sha256()

    def append(self, tokens: Tensor) -> None:
        data = tokens.numpy().data
        with self.path.open("ab") as file:
            file.write(data)
        self.hash.update(data)
        self.num_tokens += len(tokens)


def _entry(name: str, size: int, checksum: Json) -> dict[str, Any]:
    return {"file": name, "size": size, "sha256": checksum.hexdigest()}


class TokenStore:
    """A store, mapped into memory: opening it reads no tokens beyond the check."""

    def __init__(self, folder: Path, verify: bool = True) -> None:
        """verify: compare the checksums, which reads everything once. Sizes are always compared."""
        self.folder = folder
        self.manifest = self._read_manifest()
        dtype = DTYPES[self.manifest["dtype"]]
        self._offsets = self._map(self.manifest["documents"], torch.int64, verify)
        self._shards = [self._map(entry, dtype, verify) for entry in self.manifest["shards"]]
        counts = [entry["num_tokens"] for entry in self.manifest["shards"]]
        self._shard_starts = [sum(counts[:i]) for i in range(len(counts))]
        agree = int(self._offsets[-1]) == self.num_tokens == sum(counts)
        if not agree or len(self._offsets) != self.num_documents + 1:
            raise self._damaged("the counts of manifest.json do not agree")

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / "manifest.json"
        try:
            version = read_json(path).get("format")
            if version != FORMAT:
                raise DataError(f"{self.folder} has format {version!r}, expected {FORMAT}; delete it to tokenise again")
            return read_checked_json(path)
        except FileNotFoundError as error:
            raise DataError(f"{self.folder} holds no tokens: there is no manifest.json") from error
        except (OSError, DamagedFile) as error:
            raise self._damaged(str(error)) from error

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return self.manifest["num_documents"]

    @property
    def num_tokens(self) -> int:
        """With the one that starts each document."""
        return self.manifest["num_tokens"]

    @property
    def num_bytes(self) -> int:
        """Of the text, in UTF-8."""
        return self.manifest["num_bytes"]

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.manifest["vocab_size"]

    @property
    def eos_id(self) -> int:
        """Id of the token that stands before every document."""
        return self.manifest["eos_id"]

    @property
    def fingerprint(self) -> str:
        """Equal for stores of the same tokens, wherever they are kept and whatever their source is called."""
        checksums = [entry["sha256"] for entry in (self.manifest["documents"], *self.manifest["shards"])]
        return hashlib.sha256("".join(checksums).encode()).hexdigest()

    @property
    def lengths(self) -> Tensor:
        """[documents] int64, tokens of each document."""
        return self._offsets.diff()

    def document(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """int64 tokens [start, stop) of a document; its first is the end-of-text token."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} is not among the {self.num_documents} of {self.folder}")
        first, end = int(self._offsets[index]), int(self._offsets[index + 1])
        end = end if stop is None else min(end, first + stop)
        shard = bisect.bisect_right(self._shard_starts, first) - 1
        base = self._shard_starts[shard]
        return self._shards[shard][first + start - base : end - base].to(torch.int64)

    def _map(self, entry: dict[str, Any], dtype: torch.dtype, verify: bool) -> Tensor:
        path = self.folder / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise self._damaged(f"{entry['file']} is missing or is not {entry['size']} bytes long")
        if entry["size"] == 0:
            return torch.empty(0, dtype=dtype)
        with path.open("rb") as file:
            # Private to the process and copied on write: torch wants memory that it may write to, the file stays as is.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if verify and hashlib.sha256(memory).hexdigest() != entry["sha256"]:
            raise self._damaged(f"{entry['file']} does not have the checksum of manifest.json")
        return torch.frombuffer(memory, dtype=dtype)

    def _damaged(self, what: str) -> DataError:
        return DataError(f"the tokens in {self.folder} are damaged: {what}; delete the folder to tokenise again")
