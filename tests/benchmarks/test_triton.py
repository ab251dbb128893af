"""The counts and models behind the tables on GPUs in docs/performance.md, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdm.ops.triton.backend import interpreting

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def test_a_cache_keeps_what_was_touched_last() -> None:
    from benchmarks._row_cache import forward, moved

    tokens = [[(0, True)], [(1, False)], [(0, False)]]
    # Three rows come, and the changed one goes back.
    assert moved(tokens, room=1, skip=0) == pytest.approx(4 / 3)
    assert moved(tokens, room=2, skip=0) == pytest.approx(2 / 3)
    assert moved(tokens, room=1, skip=2) == 1
    # No room: every row comes, and the written ones go back. Room for all: nothing moves once they are there.
    assert moved(forward(40, 50, 4), room=0, skip=0) == 4 + 4 + 4
    assert moved(forward(400, 50, 4), room=50, skip=200) == 0


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
def test_planned_inversion_beside_snapshots() -> None:
    from benchmarks.triton_backward import compare

    found = compare(time=40, channels=4, accesses=4)
    assert found["planned"][2] <= 1e-5
    assert found["planned"][0] < found["bf16"][0] <= 1
    errors = [error for *_, error in found.values()]
    assert errors == sorted(errors)
    assert found["planned"][1] <= 1e-6
