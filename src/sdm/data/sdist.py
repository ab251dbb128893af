"""Read the Python files of a source distribution from its archive, without unpacking it to disk.

Nothing of the archive is executed or written: members become texts in memory. Links and special files are left out,
names that lead out of the archive are refused, and what expands out of all proportion to its size is an error.
"""

from __future__ import annotations

import email.parser
import email.policy
import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from sdm.data.sources import Expansion

LARGEST_FILE = 2**20  # bytes; longer .py files are tables that a program wrote
LARGEST_METADATA = 2**20  # bytes of PKG-INFO
SUFFIXES = (".tar.gz", ".tgz", ".zip")
METADATA = "PKG-INFO"
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError)


class SdistError(Exception):
    """An archive that cannot be used; the message says why."""


@dataclass(frozen=True)
class SdistFile:
    """A .py file of a source distribution."""

    name: str
    """Path in the archive, such as django-5.1/django/shortcuts.py."""
    text: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the text: equal files have equal ones, whatever their names."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Sdist:
    """Contents of a source distribution."""

    files: tuple[SdistFile, ...]
    """In the order of their names."""
    licence: str
    """As the package states it; "not stated" otherwise."""


def read_sdist(data: bytes, name: str) -> Sdist:
    """Read the .py files and the licence of an archive.

    Args:
        data: The archive.
        name: Its file name, which tells the format.

    Raises:
        SdistError: The archive is damaged, of another format, or made to do harm.
    """
    texts: dict[str, str] = {}
    licence = "not stated"
    try:
        for path, content in _members(data, name):
            if path.name == METADATA:
                if len(path.parts) == 2:
                    licence = _licence(content)
                continue
            try:
                texts[path.as_posix()] = content.decode("utf-8")
            except UnicodeDecodeError:  # an older encoding, or no text
                continue
    except (*_DAMAGE, RuntimeError) as error:  # RuntimeError: encrypted, or compressed in an unknown way
        raise SdistError(f"it cannot be read as an archive: {error}") from error
    return Sdist(tuple(SdistFile(path, texts[path]) for path in sorted(texts)), licence)


def _members(data: bytes, name: str) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The wanted files of an archive; what is too large is left out."""
    if name.endswith(".zip"):
        yield from _zip_members(data)
    elif name.endswith((".tar.gz", ".tgz")):
        yield from _tar_members(data)
    else:
        raise SdistError(f"{name} is of an unknown format; expected {', '.join(SUFFIXES)}")


def _tar_members(data: bytes) -> Iterator[tuple[PurePosixPath, bytes]]:
    with gzip.open(io.BytesIO(data), "rb") as expanded:
        stream = _Bounded(expanded, Expansion(len(data)))
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                path = _wanted(member.name, member.size) if member.isreg() and not member.issparse() else None
                file = None if path is None else archive.extractfile(member)
                if path is not None and file is not None:
                    yield path, file.read(member.size)


def _zip_members(data: bytes) -> Iterator[tuple[PurePosixPath, bytes]]:
    expansion = Expansion(len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            is_link = (member.external_attr >> 16) & 0o170000 == 0o120000
            path = None if member.is_dir() or is_link else _wanted(member.filename, member.file_size)
            if path is None:
                continue
            with archive.open(member) as file:
                content = file.read(member.file_size + 1)  # the header may say less than there is
            expansion.add(len(content))
            if len(content) == member.file_size:
                yield path, content


def _wanted(name: str, size: int) -> PurePosixPath | None:
    """The path of a file that is read; None for others."""
    path = PurePosixPath(name)
    limit = LARGEST_METADATA if path.name == METADATA else LARGEST_FILE
    if not (path.suffix == ".py" or path.name == METADATA) or not 0 < size <= limit:
        return None
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise SdistError(f"it has a file whose name leads elsewhere: {name[:200]!r}")
    return path


def _licence(content: bytes) -> str:
    """The licence by the metadata: the expression, a name in one line, the classifiers, or the text's first line."""
    headers = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(content, headersonly=True)
    expression, text = (str(headers.get(field) or "").strip() for field in ("License-Expression", "License"))
    classifiers = [str(entry) for entry in headers.get_all("Classifier", [])]
    named = ", ".join(entry.split("::")[-1].strip() for entry in classifiers if entry.startswith("License ::"))
    first, *others = text.splitlines() or [""]
    in_one_line = first if not others and first != "UNKNOWN" else ""
    return (expression or in_one_line or named or first or "not stated")[:100]


class _Bounded(io.RawIOBase):
    """A stream that ends with an error when it has given more than its expansion allows."""

    def __init__(self, stream: gzip.GzipFile, expansion: Expansion) -> None:
        self._stream, self._expansion = stream, expansion

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        content = self._stream.read(size)
        self._expansion.add(len(content))
        return content
