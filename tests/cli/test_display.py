"""Tables in narrow terminals."""

from __future__ import annotations

import pytest

from sdm.analysis.report import rich_table
from sdm.cli.display import show
from sdm.evaluation.report import Table


def test_numbers_are_not_cut_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    row = ["a model", *(f"100.{digit} ±0.0" for digit in range(8)), "131,328"]
    show(rich_table(Table("Accuracy", ["model", *"12345678", "state"], [row], "")))
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in row)
