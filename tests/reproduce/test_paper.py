"""The paper's experiments at their own size: configurations that load, commands that parse, sizes of the ladder."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import sdm
from sdm.cli import COMMANDS, _parse
from sdm.cli.command import Command
from sdm.data.config import CorpusConfig
from sdm.errors import UserError
from sdm.models.cost import LEVELS
from sdm.reproduce.paper import PaperRun, paper_runs, shell, write_paper
from sdm.run import Run
from sdm.run.mesh import resolve

GPUS = {1: 8, 6: 32, 8: 64, 13: 256}
LAYERS = {"sdm": "sdm", "gdn": "gdn", "attention": "full_attention", "mixed": ["full_attention", "sdm"]}


def by_name(level: int, folder: Path = Path("runs")) -> dict[str, PaperRun]:
    runs = paper_runs(level, folder, ("data/text",), "data/tokenizer")
    return {run.name.removeprefix(f"level-{level}-"): run for run in runs}


@pytest.mark.parametrize(
    "level", [1, pytest.param(8, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)]
)
def test_everything_that_is_written_can_be_read(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations load as they were, meshes are valid, and the command line takes every line of the scripts."""
    monkeypatch.chdir(tmp_path)
    Path("data/tasks").mkdir(parents=True)
    runs, train, measure = write_paper(level, tmp_path, GPUS[level], "h100")
    for run in runs:
        assert Run(tmp_path / run.name).written_config() == run.config
        assert resolve(run.config, run.gpus).size == run.gpus
    commands = [
        shlex.split(line)
        for script in (train, measure)
        for line in script.read_text().splitlines()
        if line.startswith(("torchrun ", "sdm "))
    ]
    parsed = [_parsed(words, tmp_path) for words in commands]
    assert len(parsed) > 2 * len(runs)
    trained = [words[-1] for words in commands if words[0] == "torchrun"]
    assert trained == [str(tmp_path / run.name) for run in runs]


def _parsed(words: list[str], folder: Path) -> Command:
    """What a line of a script does, as the command line understands it."""
    if words[0] == "torchrun":
        assert words[5:].count("-m") == 1 or "--rdzv-id" in words
        words = words[words.index("-m") + 1 :]
    assert words[0] == "sdm"
    found: list[str] = []
    for word in words[1:]:
        found += sorted(map(str, folder.glob(Path(word).name))) if "*" in word else [word]
    return _parse(COMMANDS[found[0]], found)


@pytest.mark.parametrize("level", LEVELS)
def test_sizes_are_those_of_the_ladder(level: int) -> None:
    runs = by_name(level)
    for name, layer in LAYERS.items():
        if name == "mixed" and level == 13:
            assert name not in runs, "the paper's mixed hybrids are of levels 1 to 8"
            continue
        config = runs[name].config
        found, wanted = sdm.cost(config.model.build(128_256)), sdm.cost(sdm.ladder(level, layer))
        assert found == wanted, name
        assert isinstance(config.data, CorpusConfig)
        tokens = config.schedule.steps * config.data.batch_size * config.data.sequence_length
        assert 0 <= tokens - LEVELS[level].tokens < 2**21
        assert config.optim.lr == LEVELS[level].learning_rate


def test_ablations() -> None:
    """Each at the level where the paper has it, with the paper's sizes."""
    plain = {*LAYERS}
    assert {*by_name(1)} == {*by_name(5)} == plain
    sizes = {
        name: sdm.cost(run.config.model.build(128_256)).layers[3].state * 2 / 2**20  # in bfloat16, one layer
        for name, run in by_name(6).items()
        if name.startswith("sdm")
    }
    assert sizes == {"sdm": 432.0, "sdm-slots-36864": 108.0, "sdm-slots-9216": 27.0}
    level_8 = by_name(8)
    grid = {name for name in level_8 if "-w" in name}
    assert grid == {f"sdm-w{w}-r{r}" for w in (32, 64) for r in (32, 64, 128)} - {"sdm-w64-r64"}
    assert level_8["sdm-w32-r128"].config.model.num_reads == 128
    assert not level_8["sdm-null"].config.model.learned_initial_state
    assert level_8["gdn-learned"].config.model.gdn_learned_initial_state
    assert "mamba2" in level_8


@pytest.mark.parametrize(("level", "tokens"), [(8, 4e9), (13, 16e9)])
def test_long_context(level: int, tokens: float) -> None:
    runs = by_name(level, Path("runs"))
    long = {name: run for name, run in runs.items() if run.is_long}
    assert {"sdm-long", "gdn-long", "attention-long"} <= {*long}
    for name, run in long.items():
        data = run.config.data
        assert isinstance(data, CorpusConfig)
        assert data.sequence_length == 131_072
        assert 0 <= run.config.schedule.steps * data.batch_size * data.sequence_length - tokens < 2**21
        assert run.config.init_from == Path("runs") / f"level-{level}-{name.removesuffix('-long')}"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="level must be one of 1, 2, 3, 4, 5, 6, 8, 13, got 7"):
        write_paper(7, tmp_path, 8, "h100")
    with pytest.raises(UserError, match="multiple of 8"):
        write_paper(1, tmp_path, 12, "h100")
    with pytest.raises(UserError, match="level-13-sdm does not fit on 1 x H100"):
        write_paper(13, tmp_path, 1, "h100")
    assert not list(tmp_path.iterdir())


def test_shell() -> None:
    assert shell(("a b", "x/y z/level-*-sdm", "$HEAD:29500")) == "'a b' 'x/y z'/level-*-sdm $HEAD:29500"
