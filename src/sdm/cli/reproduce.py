"""`sdm reproduce quick`, `mini`, `crossover`, `graft`, `ruler`, `facts`, `heads`, `rivals` and
`paper`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sdm.cli.command import Command
from sdm.cli.display import tables_json
from sdm.errors import UserError
from sdm.signals import CONTINUES

if TYPE_CHECKING:
    from rich.console import Console

    from sdm.analysis.pages import Finding, Page
    from sdm.reproduce.study import Study


@dataclass(frozen=True)
class StudyCommand:
    """Options of every study."""

    output: Path
    """Folder of the runs, the figures and report.html."""
    processes: int = 2
    """Runs at a time, one thread each."""
    report_only: bool = False
    """Run nothing, and write the page from the runs that are there."""
    json: bool = False
    """Print the findings as JSON instead of tables."""
    only: tuple[str, ...] = ()
    """Experiments to run, of those that report.html lists; all if none is named."""

    def study(self) -> Study:
        """The study of these options."""
        raise NotImplementedError

    def hint(self) -> str:
        """A command to try next."""
        return ""

    def run(self) -> None:
        """Run the study, print its findings, and raise if a run failed."""
        from sdm.cli.display import console, show_json
        from sdm.cli.progress import study_progress
        from sdm.reproduce.run_study import run_study

        at_least_one(processes=self.processes)
        screen = console()
        report = run_study(
            self.study(),
            self.output,
            self.processes,
            lambda jobs: study_progress(jobs, self.processes, screen),
            self.report_only,
            self.only,
        )
        if self.json:
            show_json({"page": report.path, "findings": [_finding_json(finding) for finding in report.page.findings]})
            return report.check()
        print_page(report.page, screen)
        for line in (f"{report.path} has all of this with its figures.", self.hint()):
            if line:
                screen.print(line, markup=False, highlight=False, soft_wrap=True)
        return report.check()


def at_least_one(**options: int) -> None:
    """Raise a UserError that names the first option below one."""
    for name, value in options.items():
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


@dataclass(frozen=True)
class Quick(StudyCommand):
    """Recall, small language models of code, cost and use of the memory, within ten minutes on two cores."""

    output: Path = Path("runs/quick")

    def study(self) -> Study:
        """The paper's claims in miniature."""
        from sdm.reproduce.quick import quick_study

        return quick_study()

    def hint(self) -> str:
        """Text from the model of code."""
        return f"Try:  sdm generate {self.output / 'code-sdm'} --prompt 'def '"


@dataclass(frozen=True)
class Mini(StudyCommand):
    """Every experiment of the paper at small scale with three seeds, in an hour to an hour and a half on two cores."""

    output: Path = Path("runs/mini")

    def study(self) -> Study:
        """Every experiment of the paper."""
        from sdm.reproduce.mini import mini_study

        return mini_study()


@dataclass(frozen=True)
class Crossover(StudyCommand):
    """When SDM overtakes GDN by the plain recipe: longer and wider runs, and changes at equal FLOPs. Takes hours; the
    options select a part of it."""

    output: Path = Path("runs/crossover")
    widths: tuple[int, ...] = (64, 128)
    """Widths d of the models, multiples of 32."""
    steps: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Lengths of the runs, in steps of 2,048 tokens."""
    seeds: int = 3
    """Seeds at the smallest width; the others have one."""
    text: Literal["code", "pypi"] = "code"
    """The standard library, 4M tokens; or packages of the package index, 79M tokens."""
    changes: tuple[str, ...] = ("sdm-keys", "gdn-shift")
    """Changes of the recipe that are trained to all steps and widths, besides plain SDM and GDN."""

    def study(self) -> Study:
        """Plain SDM and GDN along tokens and width."""
        from sdm.reproduce.crossover import CHANGES, crossover_study

        for change in self.changes:
            if change not in CHANGES:
                raise UserError(f"--changes must be of {', '.join(CHANGES)}; got {change!r}")
        for name, values in (("widths", self.widths), ("steps", self.steps), ("seeds", (self.seeds,))):
            if not values or min(values) < 1:
                raise UserError(f"--{name} must be one or more positive numbers, got {values}")
        for width in self.widths:
            if width % 32:
                raise UserError(f"--widths must be multiples of 32, the size of a head, got {width}")
        return crossover_study(self.widths, self.steps, self.seeds, self.text, self.changes)


@dataclass(frozen=True)
class Graft(StudyCommand):
    """Memories grafted onto small pretrained models, against LoRA and fine-tuning, with three seeds. Takes an hour on
    two cores; the options select a part of it."""

    output: Path = Path("runs/graft")
    base_steps: int = 8192
    """Steps of the bases, of 2,048 tokens each."""
    steps: int = 256
    """Steps of every method, of 2,048 tokens each."""
    seeds: int = 3
    """Seeds of every method; a base has one."""
    bases: tuple[str, ...] = ("mistral", "qwen3")
    """Architectures of the bases. The recall task is of the first."""
    window: int = 64
    """Tokens that grafts limit full attention to."""

    def study(self) -> Study:
        """Every method on every base."""
        from sdm.reproduce.graft import graft_study

        at_least_one(base_steps=self.base_steps, steps=self.steps, seeds=self.seeds, window=self.window)
        return graft_study(self.output, self.base_steps, self.steps, self.seeds, self.bases, self.window)


@dataclass(frozen=True)
class Ruler(StudyCommand):
    """RULER's tasks at many times the trained length, by models of 0.4M parameters trained on tasks of its kind. Takes
    hours."""

    output: Path = Path("runs/ruler")
    samples: int = 100
    """Samples of each task at 512 and 2,048 tokens; half as many at 8,192, a fifth at 32,768."""

    def study(self) -> Study:
        """RULER beyond the trained length."""
        from sdm.reproduce.ruler import ruler_study

        at_least_one(samples=self.samples)
        return ruler_study(self.samples)


@dataclass(frozen=True)
class Facts(StudyCommand):
    """Facts that never change: what SDM and GDN store in a learned initial state, in about an hour on two cores."""

    output: Path = Path("runs/facts")

    def study(self) -> Study:
        """Learned and null initial states."""
        from sdm.reproduce.facts import facts_study

        return facts_study()


@dataclass(frozen=True)
class Heads(StudyCommand):
    """One memory or four at an equal state, in recall, rebinding and code, in about an hour on two cores."""

    output: Path = Path("runs/heads")

    def study(self) -> Study:
        """Heads at an equal state."""
        from sdm.reproduce.heads import heads_study

        return heads_study()


@dataclass(frozen=True)
class Rivals(StudyCommand):
    """KDA, Raven and FwPKM beside SDM and GDN, in recall and on a level of the tiny ladder, in two hours on two
    cores."""

    output: Path = Path("runs/rivals")

    def study(self) -> Study:
        """Recall, and a level of the tiny ladder."""
        from sdm.reproduce.rivals import rivals_study

        return rivals_study()


@dataclass(frozen=True)
class Paper:
    """Write the paper's experiments at a level of its ladder, for machines with GPUs: runs and commands."""

    level: int
    """Level of the ladder: 1 to 6, 8 or 13."""
    output: Path = Path("runs/paper")
    """Folder of the runs and the scripts; all machines must see it."""
    gpus: int = 64
    """Number of GPUs. Runs that cannot use all of them get fewer."""
    gpu: Literal["a100", "h100", "h200", "mi300x"] = "h100"
    """Kind of GPU."""
    sources: tuple[str, ...] = ("data/text",)
    """Text to train on, as in --data.sources of `sdm train`."""
    code: tuple[str, ...] = ("data/code",)
    """Code to measure likelihood by position on."""
    tokenizer: str = "data/tokenizer"
    """Folder of a tokenizer of at most 128,256 tokens."""

    def run(self) -> None:
        """Write the runs and print what each is."""
        from sdm.reproduce.paper import describe, write_paper

        runs, train, measure = write_paper(
            self.level, self.output, self.gpus, self.gpu, self.sources, self.code, self.tokenizer
        )
        for run in runs:
            print(f"{self.output / run.name}: {run.gpus} GPUs, {describe(run.config)}")
        print(f"{train} trains them, {measure} measures them")


VERDICTS = {
    "agrees": "same direction as the paper",
    "differs": "not the paper's direction",
    "unclear": "unclear",
    "measured": "not compared with the paper",
    "failed": "FAILED",
    "missing": "MISSING",
}


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "title": finding.title,
        "verdict": finding.verdict,
        "found": finding.found,
        "why": finding.why,
        "notes": list(finding.notes),
        "tables": tables_json(finding.tables),
    }


def print_page(page: Page, screen: Console) -> None:
    """Print the tables and notes of all findings, then one line for each."""
    from sdm.analysis.tables import print_fitting

    def say(text: str) -> None:
        screen.print(text, markup=False, highlight=False)

    shown: set[str] = set()
    for finding in page.findings:
        print_fitting(screen, *finding.tables)
        for note in finding.notes:
            say(f"  {note}")
        if finding.why:
            say(f"  {finding.title}: {finding.why}")
        deviations = [line for line in finding.deviations if line not in shown]
        if deviations:
            say("Not the paper's recipe:")
            for line in deviations:
                say(f"  - {line}")
        shown.update(deviations)
        say("")
    for finding in page.findings:
        say(f"{finding.title}: {finding.found} [{VERDICTS[finding.verdict]}]")


@dataclass(frozen=True)
class Reproduce(Command):
    """Reproduce the paper: its claims in miniature, or its experiments at their own size."""

    advice = CONTINUES

    what: tyro.conf.OmitArgPrefixes[
        Annotated[Quick, tyro.conf.subcommand("quick")]
        | Annotated[Mini, tyro.conf.subcommand("mini")]
        | Annotated[Crossover, tyro.conf.subcommand("crossover")]
        | Annotated[Graft, tyro.conf.subcommand("graft")]
        | Annotated[Ruler, tyro.conf.subcommand("ruler")]
        | Annotated[Facts, tyro.conf.subcommand("facts")]
        | Annotated[Heads, tyro.conf.subcommand("heads")]
        | Annotated[Rivals, tyro.conf.subcommand("rivals")]
        | Annotated[Paper, tyro.conf.subcommand("paper")]
    ]

    def run(self) -> None:
        """Run the chosen study."""
        self.what.run()
