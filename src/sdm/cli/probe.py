"""`sdm probe RUN ...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained


@dataclass(frozen=True)
class Probe(Command):
    """Look at how a model uses the keys and slots of its memories: the paper's appendix on memory access."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, finished or not, or of models with SDM layers; several are drawn side by side."""
    data: tuple[str, ...] = ()
    """"code", "text", files or folders; none: what the run held out."""
    split: Literal["auto", "train", "valid", "test", "all"] = "auto"
    """Which documents of a source; auto: as `sdm eval` takes them."""
    documents: int = 8
    """The first so many documents of 8,192 tokens or more, as in the paper; shorter ones if there are not so many."""
    length: int = 2048
    """Tokens of each document, from its beginning."""
    output: Path | None = None
    """The folder for probe.json and figures, by default probe in the run's; several models get a folder each in it."""
    device: str = "auto"
    """"cpu", "cuda", ...; "auto" takes a GPU if there is one."""

    def run(self) -> None:
        from sdm.analysis.probe_report import check_memory, probe, probe_figures, probe_table
        from sdm.analysis.probe_texts import probe_texts
        from sdm.cli.display import show
        from sdm.cli.eval_options import distinct_names
        from sdm.evaluation.eval_model import open_model
        from sdm.files import write_json

        if not self.models:
            raise UserError("name a run: sdm probe RUN")
        if self.documents < 1:
            raise UserError(f"--documents must be at least 1, got {self.documents}")
        if self.length < 2:
            raise UserError(f"--length must be at least 2, got {self.length}")
        names, probes, written = distinct_names(self.models), {}, []
        for name, path in zip(names, self.models, strict=True):
            folder = self._folder(name, path)
            lm = open_model(path, self.device, name=name)
            check_memory(lm)
            result = probe(lm, probe_texts(lm, self.data, self.split, self.documents, self.length))
            show(probe_table(name, result))
            with explained(f"cannot write into {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / "probe.json", result.describe(lm))
            probes[name] = result.access
            written += [folder / "probe.json", *probe_figures({name: result.access}, folder)]
        if len(probes) > 1 and self.output is not None:
            written += probe_figures(probes, self.output)
        for file in written:
            print(file)

    def _folder(self, name: str, path: Path) -> Path:
        from sdm.run import Run

        if self.output is not None:
            return self.output if len(self.models) == 1 else self.output / name
        run = Run.around(path)
        if run is None:
            raise UserError(f"--output: {str(path)!r} is no run's folder; say where probe.json is to go")
        return run.folder / "probe"
