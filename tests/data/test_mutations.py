"""Whatever happens to the bytes of the cache: it is refused, or it is what it was."""

from __future__ import annotations

import random

import pytest

from sdm.data import Corpus, CorpusConfig, DataError, open_corpus

TEXT = "a memory of many slots holds what the window has forgotten; number {}. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusConfig:
    folder = tmp_path_factory.mktemp("mutations")
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / "texts" / f"{number}.txt").write_text(TEXT.format(number) * 6)
    return CorpusConfig(
        sources=(str(folder / "texts"),),
        tokenizer="bpe:280",
        sequence_length=16,
        batch_size=2,
        valid_fraction=0.2,
        cache_dir=folder / "cache",
    )


def seen(config: CorpusConfig) -> list[object]:
    """Everything that a run takes from the cache."""
    found: list[object] = []
    for split in ("train", "valid"):
        corpus = open_corpus(config, split)
        assert isinstance(corpus, Corpus)
        found += [corpus.fingerprint, corpus.vocab_size, corpus.tokenizer.fingerprint, corpus.tokenizer.eos_id]
        found += [corpus.batch(step, [0, 1]).input_ids.tolist() for step in range(3)]
        found += [(store.num_bytes, store.eos_id, store.manifest) for store in corpus.stores]
    return found


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed, place = bytearray(data), rng.randrange(max(len(data), 1))
    kind = rng.choice(["bit", "byte", "digit", "cut", "insert", "delete", "copy"])
    if kind == "bit" and data:
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == "byte" and data:
        changed[place] = rng.randrange(256)
    elif kind == "digit" and data:  # what is still JSON afterwards is the hardest to notice
        digits = [i for i, byte in enumerate(data) if chr(byte) in "0123456789abcdef"] or [place]
        changed[rng.choice(digits)] = ord(rng.choice("0123456789abcdef"))
    elif kind == "cut":
        del changed[place:]
    elif kind == "insert":
        changed[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    elif kind == "delete":
        del changed[place : place + rng.randrange(1, 9)]
    else:
        source = rng.randrange(max(len(data), 1))
        changed[place : place + 16] = data[source : source + 16]
    return bytes(changed)


def silently_wrong(config: CorpusConfig, count: int, seed: int) -> list[str]:
    """The mutations after which the cache loads as something else, or is refused without its name in one line."""
    rng, expected, wrong = random.Random(seed), seen(config), []
    assert config.cache_dir is not None
    files = sorted(path for path in config.cache_dir.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"tokenizer.json", "manifest.json", "documents.bin", "tokens-00000.bin"}
    for number in range(count):
        path = rng.choice(files)
        data = path.read_bytes()
        path.write_bytes(mutated(data, rng))
        try:
            if seen(config) != expected:
                wrong.append(f"{number}: {path}")
        except DataError as error:
            if "\n" in str(error) or str(config.cache_dir) not in str(error):
                wrong.append(f"{number}: {path}: {error}")
        finally:
            path.write_bytes(data)
    return wrong


def test_mutations_of_the_cache(corpus: CorpusConfig) -> None:
    assert silently_wrong(corpus, 120, seed=0) == []


@pytest.mark.slow
def test_a_thousand_mutations_of_the_cache(corpus: CorpusConfig) -> None:
    assert silently_wrong(corpus, 1000, seed=1) == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "checksums.json"])
def test_a_cached_tokenizer_that_lost_a_file(corpus: CorpusConfig, name: str) -> None:
    seen(corpus)
    assert corpus.cache_dir is not None
    (file,) = (corpus.cache_dir / "tokenizers").rglob(name)
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(DataError, match=r"delete .* to train it again"):
        open_corpus(corpus)
    file.write_bytes(data)
