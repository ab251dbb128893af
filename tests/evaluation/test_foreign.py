"""Models of other libraries: what their folders may ask for, and positions that depend on the length at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from evaluation.conftest import other_model, save_model
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.nll import Likelihood
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.evaluation.runner import evaluate
from sdm.models.causal_lm import is_length_dependent

SHORT = 64  # tokens from which on frequencies change


def length_dependent(kind: str, folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "bos_token_id": 96,
        "eos_token_id": 96,
        "pad_token_id": 95,
    }
    torch.manual_seed(3)
    if kind == "longrope":
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
        rope |= {"original_max_position_embeddings": SHORT}
        config = Phi3Config(
            **sizes, rope_parameters=rope, max_position_embeddings=4096, original_max_position_embeddings=SHORT
        )
        return save_model(Phi3ForCausalLM(config).eval(), folder)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    return save_model(
        LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope, max_position_embeddings=SHORT)).eval(), folder
    )


def alone(folder: Path, text: str) -> float:
    """The nats of a text by one forward pass of a model that has read nothing before."""
    lm = open_model(folder)
    ids = torch.tensor([lm.encode_prompt(text)])
    with torch.no_grad():
        logits = lm.model(ids[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_documents_are_scored_whole_and_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short documents beside long ones, and a long one that another model would be given in pieces."""
    folder = length_dependent(kind, tmp_path / "model")
    # Positions beyond the first length of a dynamic model are what it is made for.
    monkeypatch.setattr(EvalModel, "context_limit", None)
    monkeypatch.setattr("sdm.evaluation.nll.TOKENS", 100)
    texts = {"long": "a memory of many slots. " * 7, "short": "a few words.", "middle": "some more words. " * 5}
    (tmp_path / "texts").mkdir()
    for name, text in texts.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    measurement = Likelihood(data=(str(tmp_path / "texts"),))
    results = evaluate("nll", measurement, [(open_model(folder), tmp_path / "out")])[0]
    assert len(results.units) == 3
    for key, unit in results.units.items():
        name = Path(key.split(":")[1]).stem
        assert unit["nll"] == pytest.approx(alone(folder, texts[name]), rel=1e-6), name


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_answers_do_not_depend_on_neighbours(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = length_dependent(kind, tmp_path / "model")
    monkeypatch.setattr(EvalModel, "context_limit", None)
    monkeypatch.setattr("sdm.evaluation.inference.PREFILL", 50)
    prompts = [[5 + (7 * place) % 80 for place in range(length)] for length in (90, 12, 150, 40)]
    together = open_model(folder).generate(prompts, 6)
    assert together == [open_model(folder).generate([prompt], 6)[0] for prompt in prompts]


def test_length_dependence_is_decided_by_configuration() -> None:
    assert not is_length_dependent(other_model("llama").config)
    assert not is_length_dependent(other_model("gpt2").config)
    assert is_length_dependent(
        other_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).config
    )


@pytest.mark.parametrize("field", ["_attn_implementation", "attn_implementation"])
def test_kernels_of_a_hub_are_refused(field: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded: no hub is asked."""
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    file = folders["llama"] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: "owner/kernel"}))
    with pytest.raises(UserError, match=rf"cannot load the model in .*{field} must be one of eager, .*'owner/kernel'"):
        open_model(folders["llama"])


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 16])
def test_models_of_a_few_positions(limit: int, texts: Path, tmp_path: Path) -> None:
    """What is tried out of a model stays within its limit."""
    folder = save_model(other_model("gpt2", n_positions=limit), tmp_path / "short")
    lm = open_model(folder)
    results = evaluate("nll", Likelihood(data=(str(texts),), context=limit), [(lm, tmp_path / "out")])[0]
    assert results.complete
    prompts = [[1] * length for length in (1, limit)]
    assert lm.generate(prompts, 1) == [open_model(folder).generate([prompt], 1)[0] for prompt in prompts]
    recall = Recall(task="recall", sizes=(4,), rows=2)
    with pytest.raises(UserError, match=f"short takes (at most {limit} tokens|97)"):
        recall.plan(lm)


def test_windows_beyond_the_limit(texts: Path, tmp_path: Path) -> None:
    """Context is withheld in windows of 1 + reach + block tokens, which may be more than the model takes."""
    lm = open_model(save_model(other_model("gpt2", n_positions=80), tmp_path / "gpt2"))
    with pytest.raises(UserError, match=r"gpt2 takes at most 80 tokens, got 105: .* lower --reach, or take --no-gain"):
        Position(data=(str(texts),), length=80, reach=40).plan(lm)
    measurement = Position(data=(str(texts),), length=80, reach=15)
    assert evaluate("position", measurement, [(lm, tmp_path / "out")])[0].complete
