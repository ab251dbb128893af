"""TRL trains the model: every trainer, with the model as an object and as a path, and its command.

Runs where TRL is installed; the extra `dev` brings it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tiny_models import tiny_config, tiny_model
from tiny_tokenizer import tiny_tokenizer

trl = pytest.importorskip("trl", reason="TRL is not installed; `pip install -e .[dev]` brings it")
datasets = pytest.importorskip("datasets")

pytestmark = [
    # What the other libraries deprecate in each other, or say of tiny runs on a CPU, is not ours.
    pytest.mark.filterwarnings("ignore"),
]

slow = pytest.mark.slow
PAD, EOS = 95, 96
TEXT = [{"text": "the memory holds what was written"}, {"text": "and reads it again"}] * 2
PAIRS = [{"prompt": "two and two", "chosen": " make four", "rejected": " make five"}] * 4
RANKED = [{"chosen": "two and two make four", "rejected": "two and two make five"}] * 4
PROMPTS = [{"prompt": "count to "}, {"prompt": "remember "}] * 2


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def arguments(kind: Any, folder: Path, **options: Any) -> Any:
    common = {
        "output_dir": str(folder / "trained"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return kind(**(common | options))


def sft(model: Any, folder: Path) -> Any:
    args = arguments(trl.SFTConfig, folder, max_length=16)
    return trl.SFTTrainer(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(TEXT), processing_class=tiny_tokenizer()
    )


def packed_sft(model: Any, folder: Path) -> Any:
    args = arguments(trl.SFTConfig, folder, max_length=16, packing=True, padding_free=True)
    return trl.SFTTrainer(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(TEXT), processing_class=tiny_tokenizer()
    )


def dpo(model: Any, folder: Path) -> Any:
    return trl.DPOTrainer(
        model=model,
        args=arguments(trl.DPOConfig, folder),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=tiny_tokenizer(),
    )


def grpo(model: Any, folder: Path) -> Any:
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=arguments(trl.GRPOConfig, folder, num_generations=2, max_completion_length=4, beta=0.1),
        train_dataset=datasets.Dataset.from_list(PROMPTS),
        processing_class=tiny_tokenizer(),
    )


def rloo(model: Any, folder: Path) -> Any:
    return trl.RLOOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=arguments(trl.RLOOConfig, folder, num_generations=2, max_completion_length=4, beta=0.1),
        train_dataset=datasets.Dataset.from_list(PROMPTS),
        processing_class=tiny_tokenizer(),
    )


def reward(model: Any, folder: Path) -> Any:
    return trl.RewardTrainer(
        model=model,
        args=arguments(trl.RewardConfig, folder, max_length=32),
        train_dataset=datasets.Dataset.from_list(RANKED),
        processing_class=tiny_tokenizer(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "model"
    tiny_model("sdm", pad_token_id=PAD, eos_token_id=EOS).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def cases() -> list[Any]:
    """Every trainer with both kinds of model; the quick tests run each trainer's more demanding case once."""
    quick = {(sft, "path"), (dpo, "object"), (grpo, "path"), (reward, "path")}
    return [
        pytest.param(trainer, given, id=f"{trainer.__name__}-{given}", marks=() if (trainer, given) in quick else slow)
        for trainer in (sft, packed_sft, dpo, grpo, rloo, reward)
        for given in ("object", "path")
    ]


@pytest.mark.parametrize(("trainer", "given"), cases())
def test_trainers(trainer: Callable[[Any, Path], Any], given: str, folder: Path, tmp_path: Path) -> None:
    by_path = given == "path"
    model: Any = str(folder)
    if not by_path and trainer is reward:
        model = AutoModelForSequenceClassification.from_config(
            tiny_config("sdm", num_labels=1, pad_token_id=PAD, eos_token_id=EOS)
        )
    elif not by_path:
        model = AutoModelForCausalLM.from_pretrained(folder)
    made = trainer(model, tmp_path)
    before = {name: x.detach().clone() for name, x in made.model.named_parameters()}
    made.train()
    assert made.state.global_step == 2
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert torch.tensor(losses).isfinite().all()
    assert any(not torch.equal(x, before[name]) for name, x in made.model.named_parameters())


@slow
def test_the_command(folder: Path, tmp_path: Path) -> None:
    """`trl sft` with the folder alone: nothing imports `sdm` but the code in the folder."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXT))
    command = [
        *(sys.executable, "-m", "trl.scripts.sft"),
        *("--model_name_or_path", str(folder), "--trust_remote_code", "true", "--dataset_name", str(data)),
        *("--output_dir", str(tmp_path / "trained"), "--max_steps", "1", "--max_length", "16", "--use_cpu", "true"),
        *("--bf16", "false", "--report_to", "none", "--per_device_train_batch_size", "2"),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.model_type == "sdm"
