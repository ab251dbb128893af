"""A run on several ranks is the run on one: same data, same losses, same gradients, the same checkpoints.

All jobs of a number of ranks share one launch: starting processes costs far more than the jobs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sdm.models.saved_folder import load_model
from sdm.run import Run
from sdm.run.config import ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig
from sdm.run.config_file import to_json
from sdm.run.mesh import MeshConfig
from sdm.run.model import restore
from sdm.training import Trainer
from training.rank_worker import main as perform_jobs
from training.runs import recall_run, text_run

WORKER = Path(__file__).with_name("rank_worker.py")
TESTS = Path(__file__).parents[1]
TOLERANCE = 1e-5
QUIET = MonitorConfig(log_every=1, memory_every=2, validate_every=2, validation_batches=1, display="none")


def launch(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def small(folder: Path, layout: str, rows: int = 4, steps: int = 4, **compute: Any) -> TrainConfig:
    """A run of a few steps over all that ranks might disagree on."""
    sections: dict[str, Any] = {
        "schedule": ScheduleConfig(steps=steps, warmup=1),
        "monitor": QUIET,
    }
    config = recall_run(**sections) if layout == "recall" else text_run(folder, layout, **sections)
    how = ComputeConfig(threads=1, device="cpu", **compute)
    return replace(config, data=replace(config.data, batch_size=rows), compute=how)


def with_mesh(config: TrainConfig, mesh: MeshConfig = MeshConfig()) -> TrainConfig:  # noqa: B008
    return replace(config, compute=replace(config.compute, mesh=mesh))


def job(name: str, config: TrainConfig, folder: Path, action: str = "train", **more: Any) -> dict[str, Any]:
    return {"name": name, "config": to_json(config), "folder": str(folder), "action": action, **more}


class Outcome:
    """What the same jobs left on one rank and on several."""

    def __init__(self, folder: Path, ranks: int, configs: dict[str, TrainConfig], others: list[dict[str, Any]]) -> None:
        self.folder, self.ranks, self.configs = folder, ranks, configs
        for place in ("one", "many"):
            (folder / place).mkdir()
        alone = {n: with_mesh(c) for n, c in configs.items()}
        jobs = {
            place: [job(n, c, folder / place / "runs" / n) for n, c in named.items()]
            for place, named in (("one", alone), ("many", configs))
        }
        perform_jobs(jobs["one"], folder / "one")
        (folder / "jobs.json").write_text(json.dumps(jobs["many"] + others))
        result = launch(ranks, str(WORKER), str(folder / "jobs.json"), str(folder / "many"))
        assert result.returncode == 0, result.stdout + result.stderr

    def run(self, place: str, name: str) -> Run:
        return Run(self.folder / place / "runs" / name)

    def said(self, name: str, rank: int) -> dict[str, Any]:
        return json.loads((self.folder / "many" / f"{name}-{rank}.json").read_text())  # type: ignore[no-any-return]

    def tensors(self, place: str, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / place / f"{name}.safetensors")

    def compare(self, name: str, tolerance: float) -> None:
        """Gradients of the first step, losses and lengths of gradients of all, weights of the end."""
        assert_near(self.tensors("many", name), self.tensors("one", name), tolerance)
        many, one = self.run("many", name).metrics(), self.run("one", name).metrics()
        assert [line["step"] for line in many] == [line["step"] for line in one]
        for ours, theirs in zip(many, one, strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - {"seconds", "seconds_left", "tokens_per_second"}:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance), key
        ours, theirs = (load_model(self.run(place, name).export).state_dict() for place in ("many", "one"))
        assert_near(ours, theirs, tolerance)


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        error, scale = (actual[name] - x).abs().max(), x.abs().max().clamp(min=1e-2)
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


def continued(folder: Path, config: TrainConfig) -> Path:
    """A run that one process has begun."""
    trainer = Trainer(config, folder)
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    trainer.close()
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("two")
    stream = small(folder, "stream", accumulation=4, checkpointing="segment", segment_length=8)
    tied = small(folder, "recall")
    configs = {
        "stream": stream,
        "packed": small(folder, "packed", rows=5),  # not the same number of rows on each rank
        "tied": replace(tied, model=replace(tied.model, tie_word_embeddings=True)),
        "context": small(folder, "packed", mesh=MeshConfig(context=2)),
        "channel": small(folder, "recall", mesh=MeshConfig(channel=2)),
        "kept": small(folder, "packed", accumulation=2, mesh=MeshConfig(keep_weights=True)),
    }
    begun = continued(folder / "begun", stream)
    faster = to_json(replace(tied, optim=OptimConfig(lr=0.5)))
    # The same names of files, and on another machine something else in one of them.
    text = small(folder, "packed")
    text = replace(text, data=replace(text.data, sources=("texts",)))
    shutil.copytree(folder / "texts", folder / "machine" / "texts")
    (folder / "machine" / "texts" / "3.txt").write_text("something else entirely. " * 20)
    own_cache = to_json(replace(text, data=replace(text.data, cache_dir=folder / "machine" / "cache")))
    others = [
        job("load", stream, begun, "load"),
        job("load-channel", configs["channel"], continued(folder / "begun-channel", tied), "load"),
        job("config", tied, folder / "refused", other=faster),
        job("version", tied, folder / "refused", version="0.0.0"),
        job("data", text, folder / "refused", other=own_cache, places=[str(folder), str(folder / "machine")]),
    ]
    return Outcome(folder, 2, configs, others)


@pytest.mark.parametrize("name", ["stream", "packed", "tied", "context", "channel", "kept"])
def test_two_ranks_are_one(two: Outcome, name: str) -> None:
    two.compare(name, TOLERANCE)


def test_initial_states_are_shared(two: Outcome) -> None:
    for rank in range(2):
        assert two.said("stream", rank)["share"] == [0.5]


@pytest.mark.parametrize(("name", "load"), [("stream", "load"), ("channel", "load-channel")])
def test_checkpoints_change_their_number_of_ranks(two: Outcome, name: str, load: str) -> None:
    """Bit for bit: written by two and read by one, written by one and read by two."""
    model, _, step = restore(two.run("many", name))
    assert step == 4
    exported = load_model(two.run("many", name).export).state_dict()
    for tensor, x in model.state_dict().items():
        assert torch.equal(exported[tensor], x), tensor
    files = list(two.run("many", name).checkpoints().path(4).glob("*.safetensors"))
    assert len(files) == 2
    begun = two.folder / load.replace("load", "begun") / "checkpoints" / "step-00000002"
    stored = load_file(next(begun.glob("*.safetensors")))
    loaded = two.tensors("many", load)
    assert any(part.startswith("stream_state.") for part in stored) == (name == "stream")
    assert loaded.keys() == stored.keys()
    for name, x in stored.items():
        assert torch.equal(loaded[name].reshape(x.shape), x), name


@pytest.mark.slow
def test_checkpoints_of_two_ranks_are_read_by_four_and_by_one(two: Outcome) -> None:
    """Bit for bit, weights and moments, with channels split or not before and after."""
    meshes = {"rows": MeshConfig(), "both": MeshConfig(channel=2), "channels": MeshConfig(channel=4)}
    jobs = {
        (name, mesh): job(f"{name}-{mesh}", with_mesh(two.configs[name], degrees), two.run("many", name).folder, "load")
        for name in ("channel", "tied")
        for mesh, degrees in meshes.items()
    }
    for place in ("one-again", "four"):
        (two.folder / place).mkdir()
    whole = [
        job(name, with_mesh(two.configs[name]), two.run("many", name).folder, "load") for name in ("channel", "tied")
    ]
    perform_jobs(whole, two.folder / "one-again")
    (two.folder / "four.json").write_text(json.dumps(list(jobs.values())))
    result = launch(4, str(WORKER), str(two.folder / "four.json"), str(two.folder / "four"))
    assert result.returncode == 0, result.stdout + result.stderr
    for name, mesh in jobs:
        expected, found = two.tensors("one-again", name), two.tensors("four", f"{name}-{mesh}")
        assert found.keys() == expected.keys()
        assert any(key.endswith("exp_avg_sq") for key in found)
        for key, x in expected.items():
            assert torch.equal(found[key], x), (name, mesh, key)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config", "config.optim.lr is 0.5 here and 0.001 on rank 0"),
        ("version", "version.sdm is '0.0.0' here"),
        ("data", "data is ["),
    ],
)
def test_a_rank_of_another_run_is_refused_by_name(two: Outcome, name: str, reason: str) -> None:
    own, first = two.said(name, 1), two.said(name, 0)
    assert reason in own["error"]
    assert first["kind"] == "RankError"
    assert first["error"].startswith("rank 1: ")
    assert reason in first["error"]
    assert not (two.folder / "refused" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ways_to_compute_a_step(tmp_path: Path, ranks: int) -> None:
    configs = {
        "long": small(tmp_path, "recall", steps=50),
        "block": small(tmp_path, "rows", checkpointing="block"),
        "segment": small(tmp_path, "rows", checkpointing="segment", segment_length=8),
        "accumulated": small(tmp_path, "packed", rows=8, accumulation=8),
        "uneven": small(tmp_path, "stream", rows=5),  # the last of four ranks has no row
        "odd": small(tmp_path, "stream", rows=7, accumulation=7, steps=6),
    }
    if ranks == 4:
        meshes = {"both": (2, 1, 2), "sliced": (1, 2, 2), "channels": (1, 1, 4), "slices": (1, 4, 1)}
        for name, degrees in meshes.items():
            configs[name] = small(tmp_path, "packed", checkpointing="block", mesh=MeshConfig(*degrees))
    outcome = Outcome(tmp_path, ranks, configs, [])
    for name in configs:
        outcome.compare(name, TOLERANCE)
    assert outcome.run("many", "long").metrics()[-1]["step"] == 50


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path) -> None:
    """Weights are gathered and gradients added up in float32: only the rounding of bfloat16 products differs."""
    outcome = Outcome(tmp_path, 2, {"half": small(tmp_path, "rows", precision="bfloat16")}, [])
    outcome.compare("half", 1e-2)
