"""`sdm reproduce crossover`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdm.errors import UserError


@dataclass(frozen=True)
class Crossover:
    """Where the plain recipe turns the order of SDM and GDN: longer and wider runs, and variants at equal FLOPs. Hours;
    a part of it is named by the options."""

    output: Path = Path("runs/crossover")
    """The folder for the runs, the figure and the numbers."""
    processes: int = 2
    """Runs at a time, one thread each."""
    widths: tuple[int, ...] = (64, 128)
    """Widths d of the models, multiples of 32."""
    steps: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Lengths of the runs, in steps of 2,048 tokens."""
    seeds: int = 3
    """At the smallest width; the others have one."""
    ablations: bool = True
    """Also train every variant, to 512 steps at the smallest width."""
    report_only: bool = False
    """Run nothing, and report on what there is."""

    def run(self) -> None:
        from sdm.cli.display import console
        from sdm.reproduce.studies.crossover import reproduce_crossover

        for name, values in (("widths", self.widths), ("steps", self.steps)):
            if not values or min(values) < 1:
                raise UserError(f"--{name} must be one or more positive numbers, got {values}")
        for width in self.widths:
            if width % 32:
                raise UserError(f"--widths must be multiples of 32, the size of a head, got {width}")
        for name, count in (("processes", self.processes), ("seeds", self.seeds)):
            if count < 1:
                raise UserError(f"--{name} must be at least 1, got {count}")
        reproduce_crossover(
            self.output,
            self.processes,
            console(),
            self.widths,
            self.steps,
            self.seeds,
            self.ablations,
            self.report_only,
        )
