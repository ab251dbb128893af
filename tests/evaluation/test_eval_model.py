"""Any causal model: the same numbers whole and in pieces, alone and side by side, and clear words where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from evaluation.conftest import OTHERS, other_model, save_model
from sdm.data import ByteTokenizer
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.inference import Generator, Scorer
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.nll import Likelihood
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.models.causal_lm import is_length_dependent
from tiny_models import STACKS, tiny_model, tokens
from training.runs import recall_run, text_run, train


def any_model(kind: str) -> Any:
    return other_model(kind) if kind in OTHERS else tiny_model(kind)


@pytest.mark.parametrize("kind", [*OTHERS, "sdm", "full_attention", "mixed"])
def test_likelihood_in_pieces(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is carried on makes pieces of time the same as the whole, and the whole is what the logits say."""
    model = any_model(kind)
    ids = tokens(2, 41)
    expected = F.cross_entropy(model(ids[:, :-1]).logits.transpose(1, 2), ids[:, 1:], reduction="none")
    scorer = Scorer(model)
    whole, past = scorer.nll(ids[:, :-1], ids[:, 1:])
    assert past is None
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=1e-4)
    found, past = [], None
    for start, stop in ((0, 7), (7, 8), (8, 30), (30, 40)):
        piece, past = scorer.nll(ids[:, start:stop], ids[:, start + 1 : stop + 1], past, carry=True)
        found.append(piece)
        assert past is not None
        assert past.tokens == stop
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=2e-5, rtol=1e-4)
    # Of the caches of others, only those that do not go on exactly are done without, and it is said.
    assert ("computed again" in caplog.text) == (kind == "mamba")


def test_targets_that_do_not_count() -> None:
    ids = tokens(2, 9)
    targets = ids.masked_fill(torch.rand(2, 9) < 0.5, -100)
    for model in (tiny_model(), other_model("llama")):
        found, _ = Scorer(model).nll(ids, targets)
        assert torch.equal(found == 0, targets == -100)


@pytest.mark.parametrize("kind", [*OTHERS, *STACKS])
def test_generation_side_by_side(kind: str) -> None:
    """Prompts of different lengths get the answers that each gets by itself; also such as end early."""
    model = any_model(kind)
    prompts = [tokens(length).tolist() for length in (3, 17, 9, 17, 1, 30, 12, 5)]
    generate = Generator(model, [96])
    alone = [generate([prompt], 12)[0] for prompt in prompts]
    assert generate(prompts, 12) == alone
    assert all(len(answer) <= 12 and 96 not in answer for answer in alone)
    longest = max(range(8), key=lambda place: len(alone[place]))
    end = alone[longest][-1]
    ended = Generator(model, [96, end])(prompts, 12)
    assert ended[longest] == alone[longest][: alone[longest].index(end)]


def test_generation_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are read in pieces of time, which changes nothing."""
    prompts = [tokens(length).tolist() for length in (33, 50)]
    for model in (tiny_model("mixed"), other_model("llama")):
        whole = Generator(model, [])(prompts, 8)
        monkeypatch.setattr("sdm.evaluation.inference.PREFILL", 16)
        assert Generator(model, [])(prompts, 8) == whole
        monkeypatch.undo()


def test_answers(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        lm = open_model(folder)
        texts = lm.answer(["One", "Two and three"], 10)
        ids = lm.generate([lm.encode_prompt("One"), lm.encode_prompt("Two and three")], 10)
        assert [lm.decode(one) for one in ids] == texts
        stop = texts[0][4]
        assert lm.answer(["One", "Two and three"], 10, [stop])[0] == texts[0][: texts[0].index(stop)]
        assert lm.encode_prompt("ab") == [96, ord("a") - 32, ord("b") - 32]
        with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
            lm.generate([[1], []], 4)


def test_what_a_folder_asks_for_does_not_change_greedy_answers(tmp_path: Path) -> None:
    folder = save_model(other_model("llama"), tmp_path / "model")
    plain = open_model(folder).generate([[1, 2, 3]], 20)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"repetition_penalty": 5.0, "top_k": 3}))
    assert open_model(folder).generate([[1, 2, 3]], 20) == plain


def test_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run, its export, and a run that is not finished."""
    caplog.set_level("INFO", logger="sdm")
    config = text_run(tmp_path)
    train(config, tmp_path / "run")
    run, export = open_model(tmp_path / "run"), open_model(tmp_path / "run" / "export")
    assert run.fingerprint == export.fingerprint
    assert run.run is not None
    assert export.run is not None
    assert export.run.folder == run.run.folder == tmp_path / "run"
    assert run.tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert run.start_id == 256
    assert run.context_limit == 2**20
    (tmp_path / "run" / "export" / "config.json").unlink()
    unfinished = open_model(tmp_path / "run")
    assert "is not finished: the model is that of the checkpoint after step 8" in caplog.text
    assert unfinished.fingerprint == run.fingerprint
    task = open_model(tmp_path / "task") if train(recall_run(), tmp_path / "task") else None
    assert task is not None
    assert task.fingerprint["tokenizer"] is None
    with pytest.raises(UserError, match=r"task has no tokenizer in .* take a measurement of token ids, such as recall"):
        task.encode("text")


def test_fingerprints(folders: dict[str, Path], tmp_path: Path) -> None:
    """Every weight counts, the head's too."""
    model = other_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    other = open_model(save_model(model, tmp_path / "other"))
    same, half = open_model(folders["llama"]), open_model(folders["llama"], precision="bfloat16")
    assert same.fingerprint == open_model(folders["llama"]).fingerprint
    assert other.fingerprint["weights"] != same.fingerprint["weights"]
    assert half.fingerprint != same.fingerprint
    assert half.model.dtype == torch.bfloat16


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a run's folder nor a model's: it has no config\.json"):
        open_model(tmp_path / "nothing")
    folder = save_model(other_model("llama"), tmp_path / "model", tokenizer=False)
    with pytest.raises(UserError, match="model has no tokenizer in"):
        open_model(folder).encode("text")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot load the model in"):
        open_model(folder)
    folder = save_model(other_model("llama", num_hidden_layers=1), tmp_path / "less")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"missing weights: model\.layers\.1\."):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "of my own"}))
    with pytest.raises(UserError, match="cannot load the model in"):
        open_model(folder)
    with pytest.raises(UserError, match=r"cannot move .* to --device abacus"):
        open_model(save_model(other_model("gpt2"), tmp_path / "gpt2"), "abacus")


def test_a_context_beyond_the_limit(tmp_path: Path) -> None:
    lm = open_model(save_model(other_model("gpt2"), tmp_path / "gpt2"))
    assert lm.context_limit == 128
    assert len(lm.generate([[1] * 120], 9)[0]) <= 9
    with pytest.raises(UserError, match="gpt2 takes at most 128 tokens, got 129"):
        lm.generate([[1] * 120], 10)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = save_model(
        other_model("llama", vocab_size=50, bos_token_id=1, eos_token_id=1, pad_token_id=1), tmp_path / "m"
    )
    with pytest.raises(UserError, match="has 97 ids, but m takes 50: it is another model's"):
        open_model(folder).encode("text")


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
