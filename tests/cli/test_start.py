"""How the command starts: quickly, with bounded spinning, and with a message where a package is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdm.__main__ import WAIT_SETTINGS, bound_spinning
from sdm.cli import main
from sdm.cli.command import NAMES, make_listing, stored_listing

HEAVY = {"torch", "transformers", "matplotlib", "numpy"}
WITHOUT = """
import sys
hidden = sys.argv.pop(1).split(",")
class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from sdm.__main__ import main
main()
"""


def run_without(packages: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, packages, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", ["torch", "transformers", "torch,transformers"])
def test_help_needs_neither_torch_nor_transformers(missing: str) -> None:
    for arguments in (["--help"], ["train"], ["eval"], ["ladder"], ["--version"]):
        done = run_without(missing, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("missing", ["torch", "transformers", "tyro"])
def test_a_missing_package_is_one_line(missing: str, tmp_path: Path) -> None:
    done = run_without(missing, "info", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: this command needs the package {missing}, which is not installed here")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["train"], ["train", "--help"], ["eval"], ["ladder"]], ids=" ".join)
def test_lists_are_shown_without_heavy_imports(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom sdm.__main__ import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout
    assert not HEAVY & set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["train", "tiny-code"], ["eval", "nll"]], ids=" ".join)
def test_options_are_shown_without_what_runs_them(arguments: list[str]) -> None:
    """Defaults need recipes and configurations of models, and with them torch and transformers, and nothing else."""
    code = (
        "import sys\nfrom sdm.__main__ import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments, "--help"]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())
    # transformers imports datasets, and with it pandas, where they are installed.
    heavy = {"sdm.training", "sdm.analysis.draw", "matplotlib", "scipy", "lm_eval", "trl", "onnx"}
    assert not heavy & loaded


def test_our_modules_do_not_import_what_compiles() -> None:
    """torch._dynamo takes longer to import than torch. transformers' models import it, the ops and layers do not."""
    code = "import sys, sdm.ops, sdm.layers, sdm.data\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch._dynamo", "torch._inductor", "transformers", "sympy"} & set(done.stdout.split())


@pytest.mark.parametrize("name", NAMES)
def test_stored_lists_are_up_to_date(name: str) -> None:
    assert stored_listing([name]) == make_listing(name), (
        "run: python -c 'from sdm.cli.command import write_listings; write_listings()'"
    )
    assert stored_listing([name, "tiny-code"]) is None


def test_idle_threads_do_not_spin_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAIT_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    bound_spinning()
    assert int(os.environ["GOMP_SPINCOUNT"]) <= 10_000
    assert int(os.environ["KMP_BLOCKTIME"]) <= 1


def test_a_wait_policy_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAIT_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    bound_spinning()
    assert [name for name in WAIT_SETTINGS if name in os.environ] == ["OMP_WAIT_POLICY"]


def test_info_without_a_model_prints_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info"])
    printed = capsys.readouterr().out
    for word in ("sdm ", "python", "torch", "transformers", "threads", "backends", "compiled core", "GPU kernels"):
        assert f"\n{word}" in f"\n{printed}"


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--optim.learning-rate", "--optim.lr"),
        ("--optim.learning_rate=1", "--optim.lr"),
        ("--steps", "--schedule.steps"),
    ],
)
def test_options_of_other_trainers_are_suggested(option: str, meant: str) -> None:
    with pytest.raises(SystemExit, match=rf"there is no option .*; did you mean {meant}\?"):
        main(["train", "tiny-code", option, "1"])
