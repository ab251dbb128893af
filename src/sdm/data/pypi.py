"""Source distributions of the package index as text: "pypi:NAME==VERSION", "pypi:FILE.txt" or "pypi".

A distribution is fetched once through pip's index client, compared with the SHA-256 that it is pinned by, and kept as
an archive in the cache. Its .py files are the documents; exact copies of a file count once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdm.data import fetch_sdist
from sdm.data.prepare import cache_folder
from sdm.data.sdist import Sdist, SdistError, read_sdist
from sdm.data.sources import PYPI, Document
from sdm.errors import DataError
from sdm.files import DamagedFile, Json, new_folder, open_regular, printable, read_json, remove_leftovers, write_json

PACKAGES = Path(__file__).with_name("packages.txt")
LISTING = "listing.json"
FORMAT = 1  # of the listing
_NAME, _VERSION, _HASH = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", r"[A-Za-z0-9.!+_-]+", r"[0-9a-f]{64}"
_SPEC = re.compile(rf"({_NAME})==({_VERSION})(?:#sha256=({_HASH}))?")
_LINE = re.compile(rf"({_NAME})==({_VERSION})\s+--hash=sha256:({_HASH})")
EXPECTED = "NAME==VERSION#sha256=HEX"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pin:
    """A source distribution by name, version and SHA-256 of its archive."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """NAME==VERSION."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Package:
    """A source distribution that is in the cache."""

    pin: Pin
    archive: Path
    licence: str
    files: Sequence[tuple[str, int, str]]
    """Name, bytes and SHA-256 of each .py file."""

    def read(self) -> Sdist:
        """Read the archive, which must still be the one that is pinned."""
        try:
            with open_regular(self.archive) as stream:
                data = stream.read()
        except OSError as error:
            raise DataError(f"{self.archive} cannot be read: {error}; delete its folder to fetch it again") from error
        if hashlib.sha256(data).hexdigest() != self.pin.sha256:
            raise DataError(f"{self.archive} is not what was fetched; delete its folder to fetch it again")
        try:
            return read_sdist(data, self.archive.name)
        except SdistError as error:
            raise DataError(f"{self.pin.requirement}: {self.archive}: {error}") from error


class PackageSource:
    """The .py files of source distributions, each a document, in the order of the pins and of the files' names.

    Args:
        spec: "pypi" (the packages of packages.txt), "pypi:FILE.txt" (pins in pip's format, with hashes) or
            "pypi:NAME==VERSION#sha256=HEX"; the hash may be left out if packages.txt has it.
        cache_dir: As in `CorpusConfig`.
    """

    def __init__(self, spec: str, cache_dir: Path | None = None) -> None:
        self.name = spec
        self.packages = [open_package(pin, cache_dir) for pin in pins_of(spec)]

    def documents(self) -> Iterator[Document]:
        """Yield the documents, in the same order every time."""
        seen: set[str] = set()
        for package in self.packages:
            for file in package.read().files:
                if file.sha256 not in seen:
                    seen.add(file.sha256)
                    yield Document(file.name, file.text)

    def identity(self) -> Json:
        """Return JSON that changes when the documents may have changed, without reading them."""
        return [FORMAT, [[package.pin.requirement, package.pin.sha256] for package in self.packages]]

    def num_bytes(self) -> int:
        """Return how many bytes the documents have."""
        return sum(self._sizes().values())

    def has(self, count: int) -> bool:
        """Return whether there are at least `count` documents."""
        return len(self._sizes()) >= count

    def licences(self) -> dict[str, str]:
        """Return the licence of each package, as it states it."""
        return {package.pin.requirement: package.licence for package in self.packages}

    def _sizes(self) -> dict[str, int]:
        return {sha256: size for package in self.packages for _, size, sha256 in package.files}


def pins_of(spec: str) -> list[Pin]:
    """The pins that a spec names; see `PackageSource`."""
    what = spec.removeprefix(PYPI)
    if spec == PYPI.removesuffix(":"):
        return read_pins(PACKAGES)
    if what.endswith(".txt"):
        return read_pins(Path(what).expanduser())
    match = _SPEC.fullmatch(what)
    if match is None:
        raise DataError(f"source {spec!r}: expected {PYPI}{EXPECTED}, or {PYPI}FILE.txt with pins")
    name, version, sha256 = match.groups()
    if sha256 is None:
        known = {pin.requirement: pin for pin in read_pins(PACKAGES)}
        if what not in known:
            raise DataError(
                f"source {spec!r} is not pinned: expected {PYPI}{EXPECTED}; the SHA-256 of every file is on the "
                "package's page of the index, and `pip hash FILE` prints that of a file"
            )
        return [known[what]]
    return [Pin(name, version, sha256)]


def read_pins(path: Path) -> list[Pin]:
    """Read a list of pins: lines `NAME==VERSION --hash=sha256:HEX`, empty lines and comments."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the list of packages {path} cannot be read: {error}") from error
    pins = []
    for number, line in enumerate(lines, 1):
        content = line.partition(" #")[0].strip()
        if not content or content.startswith("#"):
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise DataError(f"{path}, line {number}: expected NAME==VERSION --hash=sha256:HEX, got {content[:200]!r}")
        pins.append(Pin(*match.groups()))
    names = [_normalized(pin.name) for pin in pins]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path} lists {name} more than once; its files would count twice")
    if not pins:
        raise DataError(f"the list of packages {path} is empty")
    return pins


def open_package(pin: Pin, cache_dir: Path | None = None) -> Package:
    """Return a package from the cache; it is fetched if it is not there."""
    folder = cache_folder(cache_dir) / "packages" / f"{_normalized(pin.name)}-{pin.version}-{pin.sha256[:16]}"
    if not folder.is_dir():
        _fetch(pin, folder)
    try:
        listing = read_json(folder / LISTING)
        archive = folder / str(listing["archive"])
        if listing["format"] != FORMAT or listing["sha256"] != pin.sha256 or archive.parent != folder:
            raise ValueError("it describes another archive")
        files = [(str(name), int(size), str(sha256)) for name, size, sha256 in listing["files"]]
        return Package(pin, archive, str(listing["licence"]), files)
    except (OSError, DamagedFile, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / LISTING} is damaged: {error}; delete {folder} to fetch it again") from error


def _fetch(pin: Pin, folder: Path) -> None:
    """Fetch an archive into a new folder of the cache, with the listing of its files."""
    logger.info("fetching the source distribution of %s into %s", pin.requirement, printable(folder))
    try:
        remove_leftovers(folder)
        with tempfile.TemporaryDirectory() as temporary:
            archive = _download(pin, Path(temporary))
            data = archive.read_bytes()
            name = archive.name
    except OSError as error:
        raise DataError(f"{pin.requirement} cannot be fetched: {error}") from error
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != pin.sha256:
        raise DataError(
            f"{pin.requirement}: the archive {name} has another SHA-256 than it is pinned by: expected {pin.sha256}, "
            f"got {sha256}; nothing of it was kept. Check the pin, and the index that pip uses (`pip config list`)"
        )
    try:
        content = read_sdist(data, name)
    except SdistError as error:
        raise DataError(f"{pin.requirement}: {name}: {error}; nothing of it was kept") from error
    if not content.files:
        raise DataError(f"{pin.requirement}: {name} has no .py files that can be read")
    listing = {
        "format": FORMAT,
        "archive": name,
        "sha256": sha256,
        "licence": content.licence,
        "files": [[file.name, len(file.text.encode()), file.sha256] for file in content.files],
    }
    try:
        with new_folder(folder) as temporary_folder:
            (temporary_folder / name).write_bytes(data)
            write_json(temporary_folder / LISTING, listing)
    except OSError as error:
        raise DataError(
            f"{pin.requirement} cannot be kept in {folder}: {error}; make room, or set data.cache_dir or $SDM_CACHE"
        ) from error
    logger.info("%s: %d files, licence: %s", pin.requirement, len(content.files), content.licence)


def _download(pin: Pin, folder: Path) -> Path:
    command = [sys.executable, "-I", fetch_sdist.__file__, pin.name, pin.version, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    try:
        outcome = json.loads(done.stdout.splitlines()[-1])
        error = outcome.get("error")
    except (IndexError, ValueError, AttributeError):
        error = f"pip ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    if error is not None:
        hint = done.stderr.strip().splitlines()
        said = f" (pip: {hint[-1][:300]})" if hint else ""
        raise DataError(
            f"source distribution of {pin.requirement} cannot be fetched: {error}{said}. Without a network, set "
            "PIP_FIND_LINKS to a folder that holds the archive"
        )
    return folder / Path(outcome["file"]).name


def _normalized(name: str) -> str:
    """A project's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
