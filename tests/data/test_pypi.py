"""Source distributions as text: fetched from a local folder, pinned, cached, and never built, unpacked or trusted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sdm.data.config import CorpusConfig
from sdm.data.corpus import open_corpus
from sdm.data.pypi import PACKAGES, PackageSource, Pin, open_package, pins_of, read_pins
from sdm.data.sdist import LARGEST_FILE, SdistError, read_sdist
from sdm.data.sources import open_source
from sdm.errors import DataError

METADATA = b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nLicense-Expression: MIT\n"


def tar_gz(files: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    """An archive of files, and of members without contents."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in others:
            archive.addfile(member)
    return stream.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A member that is no regular file."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], str]:
    """Put archives where pip looks instead of the network. Returns the SHA-256."""
    links = tmp_path / "links"
    links.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(links), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("SDM_CACHE", str(tmp_path / "cache"))

    def put(name: str, data: bytes) -> str:
        (links / name).write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    return put


def test_python_files_are_documents_and_nothing_runs(publish: Callable[[str, bytes], str], tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    setup = f"open({str(marker)!r}, 'w')\nraise SystemExit(1)\n".encode()
    files = {
        "demo-1.0/setup.py": setup,
        "demo-1.0/pyproject.toml": b"[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "demo-1.0/backend.py": setup,
        "demo-1.0/PKG-INFO": METADATA,
        "demo-1.0/demo/b.py": b"x = 'b'\n",
        "demo-1.0/demo/a.py": "x = 'ä'\n".encode(),
        "demo-1.0/demo/copy.py": b"x = 'b'\n",
        "demo-1.0/demo/empty.py": b"",
        "demo-1.0/demo/latin.py": "x = 'ä'\n".encode("latin-1"),
        "demo-1.0/demo/table.py": b"#" * (LARGEST_FILE + 1),
        "demo-1.0/README.md": b"not code\n",
    }
    source = open_source(f"pypi:demo==1.0#sha256={publish('demo-1.0.tar.gz', tar_gz(files))}")
    # An exact copy counts once, under the first name; what is empty, too long or not UTF-8 is left out.
    names = ["demo-1.0/backend.py", "demo-1.0/demo/a.py", "demo-1.0/demo/b.py"]
    documents = list(source.documents())
    assert [document.name for document in documents] == names
    assert documents[1].text == "x = 'ä'\n"
    assert source.has(3)
    assert not source.has(4)
    assert source.num_bytes() == sum(len(document.text.encode()) for document in documents)
    assert isinstance(source, PackageSource)
    assert source.licences() == {"demo==1.0": "MIT"}
    assert not marker.exists()


def test_a_package_is_fetched_once(publish: Callable[[str, bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = f"pypi:demo==1.0#sha256={publish('demo-1.0.tar.gz', tar_gz({'demo-1.0/a.py': b'a'}))}"
    first = open_source(spec)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    second = open_source(spec)
    assert second.identity() == first.identity()
    assert [document.text for document in second.documents()] == ["a"]


def test_zip_archives_are_read(publish: Callable[[str, bytes], str]) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo-1.0/PKG-INFO", "Name: demo\nClassifier: License :: OSI Approved :: BSD License\n")
        archive.writestr("demo-1.0/a.py", "a = 1\n")
        link = zipfile.ZipInfo("demo-1.0/link.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    source = open_source(f"pypi:demo==1.0#sha256={publish('demo-1.0.zip', stream.getvalue())}")
    assert [document.text for document in source.documents()] == ["a = 1\n"]
    assert isinstance(source, PackageSource)
    assert source.licences() == {"demo==1.0": "BSD License"}


def test_another_hash_is_refused_and_nothing_is_kept(publish: Callable[[str, bytes], str], tmp_path: Path) -> None:
    got = publish("demo-1.0.tar.gz", tar_gz({"demo-1.0/a.py": b"a"}))
    with pytest.raises(DataError, match=f"expected {'0' * 64}, got {got}"):
        open_source(f"pypi:demo==1.0#sha256={'0' * 64}")
    assert not list((tmp_path / "cache").rglob("*.gz"))


def test_what_cannot_be_fetched_says_why(publish: Callable[[str, bytes], str]) -> None:
    publish("demo-1.0.tar.gz", tar_gz({"demo-1.0/a.py": b"a"}))
    publish("wheel_only-1.0-py3-none-any.whl", b"")
    pin = f"#sha256={'0' * 64}"
    with pytest.raises(DataError, match=r"demo==2\.0 .*no source distribution of this version; the newest are 1\.0"):
        open_source(f"pypi:demo==2.0{pin}")
    for missing in ("absent", "wheel-only"):
        with pytest.raises(DataError, match=rf"{missing}==1\.0 .*no index that pip uses .*PIP_FIND_LINKS"):
            open_source(f"pypi:{missing}==1.0{pin}")


@pytest.mark.usefixtures("publish")
def test_an_index_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(DataError, match=r"demo==1\.0 cannot be fetched: .*none can be reached.*127\.0\.0\.1"):
        open_source(f"pypi:demo==1.0#sha256={'0' * 64}")


@pytest.mark.parametrize("spec", ["demo", "demo==1.0#sha256=12", "demo>=1.0", "-r==1", "demo==1.0; extra", "../x==1"])
def test_specs_that_name_no_version_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match="expected pypi:NAME==VERSION#sha256=HEX"):
        open_source(f"pypi:{spec}")


def test_a_package_needs_a_pin() -> None:
    with pytest.raises(DataError, match="is not pinned"):
        open_source("pypi:some-package==1.0")
    known = read_pins(PACKAGES)[0]
    assert pins_of(f"pypi:{known.requirement}") == [known]


def test_lists_of_pins(publish: Callable[[str, bytes], str], tmp_path: Path) -> None:
    first = publish("demo-1.0.tar.gz", tar_gz({"demo-1.0/a.py": b"a", "demo-1.0/b.py": b"b"}))
    second = publish("other-2.0.tar.gz", tar_gz({"other-2.0/vendored.py": b"a", "other-2.0/c.py": b"c"}))
    path = tmp_path / "list.txt"
    path.write_text(f"# two\n\nother==2.0 --hash=sha256:{second}\ndemo==1.0  --hash=sha256:{first} # last\n")
    texts = [document.text for document in open_source(f"pypi:{path}").documents()]
    assert texts == ["c", "a", "b"]  # a vendored copy counts once
    for content, message in (
        ("demo==1.0\n", "line 1: expected NAME==VERSION --hash"),
        (f"a==1 --hash=sha256:{first}\nA==2 --hash=sha256:{first}\n", "lists a more than once"),
        ("# nothing\n", "is empty"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            open_source(f"pypi:{path}")
    with pytest.raises(DataError, match="cannot be read"):
        open_source(f"pypi:{tmp_path / 'absent.txt'}")


def test_the_built_in_list_is_pinned() -> None:
    assert len(pins_of("pypi")) >= 10


def test_a_corpus_of_a_package(publish: Callable[[str, bytes], str], tmp_path: Path) -> None:
    files = {f"demo-1.0/m{i:03d}.py": f"value_{i} = {i}\n".encode() * 20 for i in range(250)}
    spec = f"pypi:demo==1.0#sha256={publish('demo-1.0.tar.gz', tar_gz(files))}"
    config = CorpusConfig(sources=(spec,), sequence_length=64, batch_size=2, cache_dir=tmp_path / "own")
    splits = {split: open_corpus(config, split).stores[0] for split in ("train", "valid", "test")}
    assert sum(store.num_documents for store in splits.values()) == 250
    assert splits["train"].num_documents > 200
    assert splits["test"].num_documents > 0
    assert (tmp_path / "own" / "packages").is_dir()
    assert not (tmp_path / "cache").exists()


def test_a_changed_cache_is_found(publish: Callable[[str, bytes], str], tmp_path: Path) -> None:
    pin = Pin("demo", "1.0", publish("demo-1.0.tar.gz", tar_gz({"demo-1.0/a.py": b"a"})))
    package = open_package(pin)
    package.archive.write_bytes(tar_gz({"demo-1.0/a.py": b"other"}))
    with pytest.raises(DataError, match="is not what was fetched; delete its folder"):
        package.read()
    listing = package.archive.with_name("listing.json")
    listing.write_text(json.dumps(json.loads(listing.read_text()) | {"archive": "../../secret"}))
    with pytest.raises(DataError, match="is damaged"):
        open_package(pin)


@pytest.mark.parametrize(
    "name", ["../evil.py", "/etc/evil.py", "demo-1.0/../../evil.py", "demo-1.0\\..\\evil.py", "a\n.py"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(SdistError, match="leads elsewhere"):
        read_sdist(tar_gz({name: b"evil"}), "demo-1.0.tar.gz")


def test_links_and_devices_are_left_out() -> None:
    members = [
        special("demo-1.0/soft.py", tarfile.SYMTYPE, "/etc/passwd"),
        special("demo-1.0/hard.py", tarfile.LNKTYPE, "demo-1.0/a.py"),
        special("demo-1.0/pipe.py", tarfile.FIFOTYPE),
        special("demo-1.0/device.py", tarfile.CHRTYPE),
        special("demo-1.0/folder.py", tarfile.DIRTYPE),
    ]
    content = read_sdist(tar_gz({"demo-1.0/a.py": b"a"}, *members), "demo-1.0.tar.gz")
    assert [file.name for file in content.files] == ["demo-1.0/a.py"]
    assert content.licence == "not stated"


def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdm.data.sources.SMALL", 2**20)
    zeros = tar_gz({"demo-1.0/data.bin": bytes(2**24), "demo-1.0/a.py": b"a"})
    with pytest.raises(SdistError, match="expands to more than"):
        read_sdist(zeros, "demo-1.0.tar.gz")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(16):
            archive.writestr(f"demo-1.0/m{number}.py", bytes(2**20))
    with pytest.raises(SdistError, match="expands to more than"):
        read_sdist(stream.getvalue(), "demo-1.0.zip")


def test_a_zip_that_understates_a_size_gives_no_more_than_it_says() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo-1.0/a.py", b"a" * 1000)
    size = (1000).to_bytes(4, "little")
    data = stream.getvalue().replace(size, (10).to_bytes(4, "little"))
    try:
        files = read_sdist(data, "demo-1.0.zip").files
    except SdistError:
        return
    assert all(len(file.text) <= 10 for file in files)


@pytest.mark.parametrize("name", ["demo-1.0.tar.gz", "demo-1.0.zip"])
def test_damage_is_one_kind_of_error(name: str) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo-1.0/a.py", "a = 1\n" * 100)
    whole = stream.getvalue() if name.endswith(".zip") else tar_gz({"demo-1.0/a.py": b"a = 1\n" * 100})
    for stop in range(0, len(whole), 7):
        for data in (whole[:stop], whole[:stop] + b"\xff" + whole[stop + 1 :]):
            try:
                read_sdist(data, name)
            except SdistError:
                continue
    for data in (b"", b"nothing", gzip.compress(b"nothing" * 200)):
        with pytest.raises(SdistError):
            read_sdist(data, name)
    with pytest.raises(SdistError, match="unknown format"):
        read_sdist(whole, "demo-1.0.tar.xz")


def test_an_encrypted_zip_is_refused() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("demo-1.0/a.py", "a")
    data = bytearray(stream.getvalue())
    data[6] |= 1  # encrypted, in the file's header
    central = data.index(b"PK\x01\x02")
    data[central + 8] |= 1  # and in the directory
    with pytest.raises(SdistError, match="encrypted"):
        read_sdist(bytes(data), "demo-1.0.zip")
