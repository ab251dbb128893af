"""Tables in narrow terminals."""

from __future__ import annotations

import logging

import pytest

from sdm.analysis.tables import rich_table
from sdm.cli.display import WIDTH, logging_to_terminal, show
from sdm.evaluation.report import Table


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.usefixtures("narrow")
def test_a_wide_table_is_printed_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a model", *(f"100.{digit} ±0.0" for digit in range(8)), "131,328"], ["other", *"abcdefgh", "7"]]
    show(rich_table(Table("Accuracy", ["model", *"12345678", "state"], rows, "how it was made")), "and a line")
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in rows[0])
    assert max(map(len, printed.splitlines())) <= WIDTH
    lines = [line.split() for line in printed.splitlines()]
    assert sum(words[:2] == ["a", "model"] for words in lines) == 3  # every part names its rows
    assert sum(words[:1] == ["other"] for words in lines) == 3
    assert [printed.count(text) for text in ("Accuracy", "how it was made", "and a line")] == [1, 1, 1]


@pytest.mark.usefixtures("narrow")
def test_long_names_of_rows_are_folded_before_columns_go(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a model whose name is far longer than any terminal of eighty columns can show in a line of its table"
    show(rich_table(Table("", ["model", "nats"], [[name, "3.25"]], "")))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert sum("nats" in line for line in lines) == 1
    assert " ".join(" ".join(lines).replace("3.25", "").split()).endswith(name)


@pytest.mark.usefixtures("narrow")
def test_a_single_column_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    show(rich_table(Table("", ["words"], [["word " * 40]], "")))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split().count("word") for line in lines) == 40
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.usefixtures("narrow")
def test_a_table_that_fits_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(rich_table(Table("", ["a model of forty characters, no less than", "nats"], [["x", "3.25"]], "")))
    assert "a model of forty characters, no less than" in capsys.readouterr().out


def test_what_the_library_logs_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("sdm.data.corpus")
    with logging_to_terminal():
        logger.info("tokenizing %s", "code")
        logger.debug("details")
        logger.warning("slow")
    logger.info("nobody shows this")
    assert capsys.readouterr() == ("", "tokenizing code\nwarning: slow\n")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("SDM_LOG", "debug", "d\ni\nwarning: w\n"), ("SDM_LOG", "error", ""), ("RANK", "1", "warning: w\n")],
)
def test_the_level_of_what_is_shown(
    name: str, value: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with logging_to_terminal():
        logger = logging.getLogger("sdm")
        logger.debug("d")
        logger.info("i")
        logger.warning("w")
    assert capsys.readouterr().err == shown
