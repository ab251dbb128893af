"""Sessions of grafted models: the same tokens as generate(), forks, marks, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import sdm

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": None,
}
NEW = 12


def llama(**options: Any) -> Any:
    return grafted(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), **options)


def mistral() -> Any:
    return grafted(transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6)))


def windowed() -> Any:
    return llama(attention_window=8, attention_sinks=2)


def lfm2() -> Any:
    """A base with convolutions, whose states change in place."""
    kinds = ["conv", "full_attention", "conv"]
    return grafted(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SIZES, layer_types=kinds, conv_L_cache=3)))


def grafted(base: Any, **options: Any) -> Any:
    """Graft memories that read something, as if they had been trained."""
    model: Any = sdm.graft(base.eval(), layers=[0, 1], **options)
    for memory in model.memories().values():
        nn.init.normal_(memory.layer.out_proj.weight, std=0.5)
    return model


every_base = pytest.mark.parametrize("build", [llama, mistral, windowed, lfm2], ids=lambda build: build.__name__)


def prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(3, 64, (length,)).tolist() for length in lengths]  # without padding


def generated(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def session_of(model: Any, prompt: list[int]) -> sdm.Session:
    session = sdm.Session(model)
    session.add(prompt)
    return session


def run(session: sdm.Session, new: int = NEW) -> list[int]:
    return [piece.token for piece in session.generate(new)]


@every_base
def test_tokens_forks_marks_and_batches(build: Any) -> None:
    model = build()
    streams = prompts(1, 17, 30)
    expected = [generated(model, prompt) for prompt in streams]
    sessions = [session_of(model, prompt) for prompt in streams]
    forks = [session.fork() for session in sessions]
    marks = [session.mark() for session in sessions]
    assert [run(session) for session in sessions] == expected
    for session, mark in zip(sessions, marks, strict=True):
        session.rewind(mark)
    assert [run(session) for session in sessions] == expected, "the mark is where it was"
    answers: dict[sdm.Session, list[int]] = {fork: [] for fork in forks}
    for session, piece in sdm.Session.batch(forks, max_new_tokens=NEW):
        answers[session].append(piece.token)
    assert list(answers.values()) == expected, "forks are not disturbed by what went before"
    session, answer = sessions[1], expected[1]
    for back in (1, 5):
        session.rewind(back)
        answer = answer[: len(answer) - back]
        answer += run(session, 3)
        assert answer == generated(model, streams[1], len(answer))


def test_rows_are_shared_and_given_back() -> None:
    model = llama(num_slots=4096)
    session = session_of(model, prompts(20)[0])
    next(session.generate(1))
    written, slots = session.slots
    assert 0 < written < slots / 4
    assert session.nbytes < 0.5 * sum(memory.start_state(1).nbytes for memory in model.memories().values())
    fork = session.fork()
    assert fork.shared_nbytes == session.shared_nbytes > 0
    fork.close()
    assert session.shared_nbytes == 0


@pytest.mark.parametrize("build", [llama, mistral, windowed], ids=lambda build: build.__name__)
def test_saving_and_loading(build: Any, tmp_path: Path) -> None:
    model = build()
    prompt = prompts(15)[0]
    session = session_of(model, prompt)
    session.save(tmp_path / "fresh.sdm")  # nothing was generated
    answer = run(session, 5)
    session.save(tmp_path / "a.sdm")
    loaded = sdm.Session.load(tmp_path / "a.sdm", model)
    assert loaded.length == session.length
    assert loaded.slots == session.slots, "the tables are in the pool again"
    assert answer + run(loaded, 7) == generated(model, prompt)
    assert run(sdm.Session.load(tmp_path / "fresh.sdm", model)) == generated(model, prompt)
    with pytest.raises(ValueError, match="another model"):
        sdm.Session.load(tmp_path / "a.sdm", build())


def test_refusals(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match="a state behind its first token"):
        session_of(model, [1]).save(tmp_path / "a.sdm")
    with pytest.raises(ValueError, match="history is not available for grafted models"):
        sdm.Session(model, history=4)
    with pytest.raises(ValueError, match="vocab_size - 1 = 63, got 64"):
        session_of(model, [64])
    with pytest.raises(TypeError, match="or a grafted model"):
        sdm.Session(sdm.ungraft(model))
