"""Every token once per epoch, no document beside another, targets that are the next tokens."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sdm.data import IGNORED, ByteTokenizer, TokenStore
from sdm.data.packing import ConcatenatedRows, DocumentStreams, Row
from sdm.data.shards import TokenWriter

EOS = 256
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def store_of(sizes: list[int]) -> TokenStore:
    """Document d holds the tokens d 0, d 1, d 2, ... as letters, so that every token tells where it is from."""
    with tempfile.TemporaryDirectory() as folder:
        writer = TokenWriter(Path(folder), ByteTokenizer(), {"name": "test", "split": "train"}, shard_tokens=50)
        for document, size in enumerate(sizes):
            writer.write([chr(0x20 + document) + "".join(chr(0x40 + i) for i in range(size - 1))])
        writer.finish()
        return TokenStore(Path(folder))


def pieces(row: Row) -> list[tuple[list[int], list[int]]]:
    """The tokens and targets of each piece, without padding."""
    result, start = [], 0
    for length in row.lengths:
        tokens, targets = row.input_ids[start : start + length].tolist(), row.targets[start : start + length].tolist()
        start += length
        if targets[0] == IGNORED:
            assert set(targets) == {IGNORED}
            assert set(tokens) == {EOS}
        else:
            assert IGNORED not in targets
            result.append((tokens, targets))
    assert start == len(row.input_ids)
    return result


def check_piece(documents: list[list[int]], tokens: list[int], targets: list[int]) -> None:
    """It is a stretch of one document, and its targets are the tokens after it."""
    padded = [[*document, EOS] for document in documents]
    assert any(
        document[i : i + len(tokens)] == tokens and document[i + 1 : i + 1 + len(tokens)] == targets
        for document in padded
        for i in range(len(document) - len(tokens))
    )


def transitions(documents: list[list[int]]) -> Counter[tuple[int, int]]:
    return Counter(pair for document in documents for pair in zip(document, [*document[1:], EOS], strict=True))


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_concatenated_rows(sizes: list[int], length: int, seed: int, shuffle: bool) -> None:
    store = store_of(sizes)
    documents = [store.document(i).tolist() for i in range(store.num_documents)]
    rows = ConcatenatedRows(store, length, seed, shuffle)
    for epoch in (0, 3):
        seen: Counter[tuple[int, int]] = Counter()
        for index in range(rows.num_rows):
            row = rows.row(epoch * rows.num_rows + index)
            assert len(row.input_ids) == length
            for tokens, targets in pieces(row):
                check_piece(documents, tokens, targets)
                seen.update(zip(tokens, targets, strict=True))
        assert seen == transitions(documents)


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 12), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_document_streams(sizes: list[int], length: int, num_rows: int, seed: int, shuffle: bool) -> None:
    store = store_of(sizes)
    documents = [store.document(i).tolist() for i in range(store.num_documents)]
    streams = DocumentStreams(store, length, num_rows, seed, shuffle)
    for epoch in (0, 2):
        seen: Counter[tuple[int, int]] = Counter()
        for r in range(num_rows):
            before: int | None = None  # what the row before expects next
            for step in range(streams.steps_per_epoch):
                row = streams.row(epoch * streams.steps_per_epoch + step, r)
                found = pieces(row)
                assert len(found) <= 1
                if not found:
                    assert row.reset
                    continue
                tokens, targets = found[0]
                check_piece(documents, tokens, targets)
                seen.update(zip(tokens, targets, strict=True))
                if not row.reset:
                    assert tokens[0] == before
                    assert tokens[0] != EOS
                else:
                    assert step == 0 or tokens[0] == EOS
                before = targets[-1]
        assert seen == transitions(documents)


def test_a_long_document_is_carried_through() -> None:
    streams = DocumentStreams(store_of([30]), 8, 1, 0)
    rows = [streams.row(step, 0) for step in range(streams.steps_per_epoch)]
    assert [row.reset for row in rows] == [True, False, False, False]
    joined = [token for row in rows for tokens, _ in pieces(row) for token in tokens]
    assert joined == streams.store.document(0).tolist()


def test_epochs_and_seeds_differ_and_repeat() -> None:
    store = store_of([10] * 12)

    def order(seed: int, epoch: int, shuffle: bool = True) -> list[list[int]]:
        rows = ConcatenatedRows(store, 11, seed, shuffle)
        return [rows.row(epoch * rows.num_rows + i).input_ids.tolist() for i in range(rows.num_rows)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0, shuffle=False) == order(5, 7, shuffle=False)
