"""The notebook runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"
SECONDS = 180  # on two cores that nobody else uses


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_stored_without_outputs() -> None:
    for cell in cells():
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert NOTEBOOK.stat().st_size < 20_000


def test_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process and without Jupyter; what it prints is what its text promises."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    threads, names, printed = torch.get_num_threads(), dict[str, Any](), io.StringIO()
    begin = time.process_time()
    try:
        with redirect_stdout(printed):
            for number, cell in enumerate(cells()):
                if cell["cell_type"] == "code":
                    exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - begin < 2 * SECONDS  # of both cores together
    said = printed.getvalue()
    right = {int(line.split()[0]): line.split()[2] for line in said.splitlines() if line.endswith("% right")}
    assert int(right[8].rstrip("%")) >= 80, "it has learned to recall"
    assert names["session"].length > 0
