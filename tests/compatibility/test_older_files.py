"""Files that older versions wrote are read, and what they hold goes on as it would have.

Each folder of `data` was written by one version: two runs with a checkpoint at step 3 of 6 and the weights that they
end with, models, and states of streams with the logits that follow them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sdm.cli import main
from sdm.models import MemoryState, SDMForCausalLM
from sdm.native import core

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(path.name for path in DATA.iterdir())
RUNS = [(one, name) for one in VERSIONS for name in ("stream", "recall", "fuzzy") if (DATA / one / name).is_dir()]


@pytest.fixture(params=VERSIONS)
def older(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of one version's files, to work in: the runs name their texts relative to it. They used one thread."""
    folder = tmp_path / "older"
    shutil.copytree(DATA / request.param, folder)
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


def assert_as_recorded(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit on the kind of machine that wrote them, another one rounds differently; and only as long as nothing
    is recorded there that has been rounded in another way since."""
    machine = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    machine["isa"] = None if core is None else core.isa_name()
    exact = machine == json.loads(Path("machine.json").read_text())
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        if exact:
            assert torch.equal(actual[name], x), name
        else:
            torch.testing.assert_close(actual[name], x, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("older", "name"), RUNS, indirect=["older"])
def test_run_goes_on_from_its_checkpoint(older: Path, name: str) -> None:
    main(["train", f"./{name}"])  # a plain name may be that of a recipe
    steps = [json.loads(line)["step"] for line in (older / name / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert_as_recorded(load_file(f"{name}/export/model.safetensors"), load_file(f"{name}-weights.safetensors"))


def test_a_recipe_whose_name_has_another_task_now_does_not_take_over(older: Path) -> None:
    with pytest.raises(SystemExit, match=r"another configuration: .* `sdm train /.*/recall` continues it as it was"):
        main(["train", "mqar", "--run-dir", "recall"])


@pytest.mark.parametrize("name", ["hybrid", "shifted"])
def test_stream_goes_on_from_its_state(older: Path, name: str) -> None:
    model = SDMForCausalLM.from_pretrained(f"model-{name}").eval()
    expected = load_file(f"model-{name}-expected.safetensors")
    state = MemoryState.load(f"model-{name}.sdm", model)
    assert len(state) == 9
    assert state.pending == (3,)
    with torch.no_grad():
        logits = model(expected["tokens"][:, 9:], past_key_values=state.cache(model), use_cache=True).logits
    assert_as_recorded({"logits": logits}, {"logits": expected["logits"]})


def test_model_and_tokenizer_load(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "stream", "--prompt", "a mem", "--max-new-tokens", "4"])
    assert capsys.readouterr().out.strip()
