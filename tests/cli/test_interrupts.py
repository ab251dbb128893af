"""Ctrl-C ends a command with one line, exit code 130, and what can be kept."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import sdm
from processes import stop
from sdm.cli import main
from sdm.evaluation.recall import Recall
from sdm.evaluation.results import read_results
from sdm.reproduce.jobs import Job, _describe
from tiny_models import tiny_model
from training.runs import recall_run

SLEEPING = """
import time
from pathlib import Path
def sleep(*arguments, **options):
    Path({mark!r}).touch()
    time.sleep(60)
"""


@pytest.mark.parametrize("module", ["tyro", "torch", "transformers"])
def test_amid_imports(tmp_path: Path, module: str) -> None:
    """Whatever of it is being imported: what the command needs first, what a layer needs, what a model needs."""
    mark = tmp_path / "begun"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{module}.py").write_text(SLEEPING.format(mark=str(mark)) + "sleep()")
    (tmp_path / "config.json").write_text("{}")
    for command in (["-m", "sdm"], ["-c", "from sdm.__main__ import main; main()"]):
        mark.unlink(missing_ok=True)
        printed, said = stop([*command, "info", str(tmp_path)], signal.SIGINT, mark.exists, path=tmp_path / "modules")
        assert (printed, said) == ("", "stopped: SIGINT\n")


TURNING = """
try:
    sleep()
except BaseException as error:
    raise ModuleNotFoundError("Could not import module 'AutoModel'", name="transformers") from error
"""


@pytest.mark.parametrize("module", ["tyro", "torch", "transformers"])
def test_imports_that_turn_the_interrupt_into_an_error(tmp_path: Path, module: str) -> None:
    """As the lazy imports of transformers do."""
    mark = tmp_path / "begun"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{module}.py").write_text(SLEEPING.format(mark=str(mark)) + TURNING)
    (tmp_path / "config.json").write_text("{}")
    printed, said = stop(["-m", "sdm", "info", str(tmp_path)], signal.SIGINT, mark.exists, path=tmp_path / "modules")
    assert (printed, said) == ("", "stopped: SIGINT\n")


GENERATING = """
import sys
from pathlib import Path
from sdm.signals import PostponedSignals
from sdm.cli import main
enter = PostponedSignals.__enter__
def enter_and_say(self):
    entered = enter(self)
    Path(sys.argv[1]).touch()
    return entered
PostponedSignals.__enter__ = enter_and_say
main(sys.argv[2:])
"""


def test_generating_saves_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("sdm").save_pretrained(tmp_path / "model")
    mark, state = tmp_path / "begun", tmp_path / "s.sdm"
    generate = ["generate", str(tmp_path / "model"), "--tokens", "5", "6", "--max-new-tokens"]
    arguments = ["-c", GENERATING, str(mark), *generate, "1000000", "--state", str(state)]
    printed, said = stop(arguments, signal.SIGINT, mark.exists)
    tokens = printed.split()
    assert said == f"stopped: SIGINT after {len(tokens)} tokens; {state} is saved\n"
    assert (
        len(sdm.MemoryState.load(state, sdm.SDMForCausalLM.from_pretrained(tmp_path / "model"))) == 2 + len(tokens) - 1
    )
    # The stream goes on as if it had not been interrupted.
    main([*generate[:2], "--max-new-tokens", "4", "--state", str(state)])
    resumed = capsys.readouterr().out.split()
    main([*generate, str(len(tokens) + 4)])
    assert tokens + resumed == capsys.readouterr().out.split()


def test_generating_without_a_state(tmp_path: Path) -> None:
    tiny_model("sdm").save_pretrained(tmp_path / "model")
    mark = tmp_path / "begun"
    code = SLEEPING.format(mark=str(mark)) + (
        "import sys\nfrom sdm.cli import main\nfrom sdm.models import SDMForCausalLM\n"
        "SDMForCausalLM.forward = sleep\nmain(sys.argv[1:])"
    )
    _, said = stop(["-c", code, "generate", str(tmp_path / "model"), "--tokens", "5"], signal.SIGINT, mark.exists)
    assert said == "stopped: SIGINT\n"


def test_training_a_tokenizer(tmp_path: Path) -> None:
    """Amid the reading of texts, which the trainer of tokens asks for from outside of Python."""
    mark = tmp_path / "begun"
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("a memory of many slots. " * 100)
    code = SLEEPING.format(mark=str(mark)) + (
        "import sys\nimport sdm.data.sources as sources\nfrom sdm.cli import main\n"
        "sources.Document = sleep\nmain(sys.argv[1:])"
    )
    output = tmp_path / "bpe"
    arguments = ["-c", code, "tokenizer", "train", str(tmp_path / "texts"), str(output)]
    _, said = stop(arguments, signal.SIGINT, mark.exists)
    assert said == "stopped: SIGINT\n"
    assert not output.exists()


def test_evaluating(tmp_path: Path) -> None:
    mark, run = tmp_path / "begun", tmp_path / "run"
    _describe(Job("run", recall_run(), {"recall": Recall()}), run)
    code = SLEEPING.format(mark=str(mark)) + (
        "import sys\nimport sdm.evaluation.recall as recall\n"
        "from sdm.signals import CONTINUES, ending_with_one_message\n"
        "from sdm.reproduce.jobs import run_job\nrecall.ask = sleep\n"
        "with ending_with_one_message(CONTINUES):\n    run_job(Path(sys.argv[1]))"
    )
    _, said = stop(["-c", code, str(run)], signal.SIGINT, mark.exists)
    assert said.splitlines()[-1] == "stopped: SIGINT; the same command continues"
    assert "Traceback" not in said
    assert not read_results(run / "evaluations" / "recall").complete
