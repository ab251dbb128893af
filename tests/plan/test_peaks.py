"""Planned memory against what the system counts for steps on 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_planned_peaks_are_measured_ones(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth: steps of mostly activations, with and without checkpointing, and of mostly weights and M0, kept
    from forward to backward or not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import ranks as benchmark

    found = benchmark.measured(ranks)
    assert len(found) == 4 * len(benchmark.MESHES[ranks])
    for case, said in found:
        peak = max(one["peak"] for one in said)
        assert benchmark.planned(case) == pytest.approx(peak, rel=0.1), case
