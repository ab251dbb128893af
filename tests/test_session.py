"""Sessions: the same tokens as generate(), alone and as a batch; forks, marks, files; what a session owns."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import sdm
from sdm.layers.row_pool import LEAST_GROWTH, pool_of
from sdm.models.cost import session_bytes
from sdm.models.decoding import TextStream
from tiny_models import STACKS, tiny_model, tokens
from tiny_tokenizer import tiny_tokenizer

NEW = 32


def generated(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def session_of(model: Any, prompt: list[int], **options: Any) -> sdm.Session:
    session = sdm.Session(model, **options)
    session.add(prompt)
    return session


def run(session: sdm.Session, new: int = NEW) -> list[int]:
    return [piece.token for piece in session.generate(new)]


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(length).tolist() for length in lengths]


@pytest.mark.parametrize("history", [0, 100])
@pytest.mark.parametrize("stack", STACKS)
def test_a_session_gives_the_tokens_of_generate(stack: str, history: int) -> None:
    model = tiny_model(stack)
    for prompt in prompts(1, 17, 60):
        assert run(session_of(model, prompt, history=history)) == generated(model, prompt)


@pytest.mark.parametrize("stack", STACKS)
def test_adding_in_pieces_and_between_answers(stack: str) -> None:
    model = tiny_model(stack)
    first, second = prompts(9, 5)
    session = session_of(model, first)
    answer = run(session, 10)
    session.add(second)
    assert run(session, 10) == generated(model, first + answer + second, 10)
    assert session.length == session._cache.get_seq_length() + 1 == 9 + 10 + 5 + 10


@pytest.mark.parametrize("history", [0, 100])
@pytest.mark.parametrize("stack", STACKS)
def test_a_batch_of_unequal_pasts(stack: str, history: int) -> None:
    """Sessions of different lengths, which join late, leave early and come back, give what they give alone."""
    model = tiny_model(stack)
    streams = prompts(1, 30, 4, 11, 7, 70)
    expected = [generated(model, prompt) for prompt in streams]
    sessions = [session_of(model, prompt, history=history) for prompt in streams]
    answers: dict[sdm.Session, list[int]] = {session: [] for session in sessions}
    batch = sdm.Session.batch(sessions[:3], max_new_tokens=NEW)
    for step in range(2 * NEW):
        if step == 5:
            batch.join(sessions[3], max_new_tokens=NEW)
        if step == 9:
            batch.leave(sessions[1])
            batch.join(sessions[4], max_new_tokens=NEW)
        if step == 12:
            assert sessions[0].nbytes > 0, "looking at a session does not disturb the batch"
            batch.join(sessions[5], max_new_tokens=NEW)
            batch.join(sessions[1], max_new_tokens=NEW - 9)
        for session, piece in batch.step():
            answers[session].append(piece.token)
    assert not len(batch)
    assert [answers[session] for session in sessions] == expected
    assert all(session.finish_reason == "length" for session in sessions)


@pytest.mark.parametrize("stack", STACKS)
def test_forks_go_their_own_way(stack: str) -> None:
    model = tiny_model(stack)
    prompt, *others = prompts(25, 3, 4)
    session = session_of(model, prompt)
    forks = [session.fork() for _ in others]
    for fork, more in zip(forks, others, strict=True):
        fork.add(more)
    answers = [run(fork) for fork in forks]
    assert answers == [generated(model, prompt + more) for more in others]
    assert run(session) == generated(model, prompt)


def test_a_session_owns_the_rows_that_it_has_written() -> None:
    model = tiny_model(num_slots=4096)
    layer = next(block.mixer for block in model.model.layers if hasattr(block.mixer, "sparse_tables"))
    pool = pool_of(layer)
    session = session_of(model, tokens(20).tolist())
    session.fork()  # reads all but the last token
    gc.collect()
    written, slots = session.slots
    assert slots == 2 * 4096
    assert 2 * 4 <= written <= 2 * 4 * 19
    pool.collect()
    assert pool.used_rows == written
    assert session.nbytes < 0.2 * sdm.cost(model.config).state_bytes()

    alone = session.nbytes
    forks = [session.fork() for _ in range(5)]
    assert pool.used_rows == written, "forks share"
    assert session.shared_nbytes == written * pool.row_nbytes
    assert all(fork.slots[0] == written for fork in forks)
    run(forks[0], 3)  # reads three tokens
    added = pool.used_rows - written
    assert 0 < added <= 2 * 4 * 3
    for fork in forks:
        fork.close()
    assert pool.used_rows == written
    assert session.nbytes == alone
    session.close()
    assert pool.used_rows == 0
    assert len(pool.rows) <= slots * (1 + 1 / LEAST_GROWTH), "the memory of closed sessions is given back"


@pytest.mark.parametrize("stack", ["sdm", "gdn", "shifted", "convolved"])
def test_the_formula_of_a_sessions_bytes(stack: str) -> None:
    model = tiny_model(stack, num_slots=4096)
    config = model.config
    for length in (1, 10, 60):
        session = session_of(model, tokens(length).tolist())
        next(session.generate(1))
        written, slots = session.slots
        heads = 2 * bool(slots)
        most = heads * min(4096, 4 * length)
        assert written <= most
        assert session.nbytes == session_bytes(config, length) - (most - written) * 16 * 4
    assert length == 1 or written < most or not slots, "some rows were written twice"


def test_the_bytes_of_users_in_the_docs() -> None:
    """docs/serving.md: level, whole tables, then what a session owns behind 100, 1,000 and 10,000 tokens, in GB."""
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    for level in (1, 8, 13):
        config = sdm.ladder(level, global_layer="sdm")
        sizes = [sdm.cost(config).state_bytes(), *(session_bytes(config, length) for length in (100, 1_000, 10_000))]
        assert f"| {level} | " + " | ".join(f"{size / 1e9:.3f}" for size in sizes) + " |" in text


def test_a_hundred_sessions_leave_nothing() -> None:
    model = tiny_model("shifted")
    layer = model.model.layers[1].mixer.layer
    for _ in range(100):
        run(session_of(model, tokens(5).tolist()), 3)
    pool = pool_of(layer)
    gc.collect()
    pool.collect()
    assert pool.used_rows == 0
    assert len(pool._maps) <= 8


def test_a_pool_shrinks_around_the_streams_that_stay() -> None:
    """Rows of a stream move when others are gone, and stay as they are bit for bit."""
    model = tiny_model(num_slots=4096)
    layer = next(block.mixer for block in model.model.layers if hasattr(block.mixer, "sparse_tables"))
    pool = pool_of(layer)
    early, *others = [session_of(model, tokens(length).tolist()) for length in (30, 200, 300, 250)]
    late = session_of(model, tokens(40).tolist())
    kept = (early, late)
    for session in (early, *others, late):
        next(session.generate(1))
    fork = early.fork()
    before, states = len(pool.rows), [session.state() for session in kept]
    expected = [generated(model, session.tokens, 10) for session in (*kept, fork)]
    for session in others:
        session.close()
    assert len(pool.rows) < before
    assert len(pool.rows) - 2 * 4096 <= 1.5 * pool.used_rows + 2 * 4096 / LEAST_GROWTH
    for session, state in zip(kept, states, strict=True):
        assert not sum(len(changes) for changes in session.state().diff(state).values())
    assert [run(session, 10) for session in (*kept, fork)] == expected
    for session in (*kept, fork):
        session.close()
    assert pool.used_rows == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_sessions_that_come_and_go_leave_no_memory() -> None:
    """benchmarks/sessions.py does this with a thousand sessions at the width of level 1."""
    model = tiny_model(num_slots=16384)

    def use(count: int) -> int:
        for _ in range(count):
            session = session_of(model, tokens(5).tolist())
            run(session, 2)
            session.fork()
            session.close()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = use(50)
    assert use(200) <= 1.01 * before


def test_closing_gives_back_what_the_history_keeps() -> None:
    model = tiny_model(num_slots=4096)
    layer = next(block.mixer for block in model.model.layers if hasattr(block.mixer, "sparse_tables"))
    session = session_of(model, tokens(5).tolist(), history=20)
    run(session, 10)
    session.close()
    assert pool_of(layer).used_rows == 0
    assert session.nbytes == session.length == 0


def test_sessions_that_come_and_go_do_not_copy_the_table() -> None:
    """A pool that has room for a session keeps it: the initial table is copied once, when the pool first grows."""
    model = tiny_model(num_slots=4096)
    layer = next(block.mixer for block in model.model.layers if hasattr(block.mixer, "sparse_tables"))
    run(session_of(model, tokens(5).tolist()), 3)
    rows = pool_of(layer).rows
    for _ in range(50):
        session = session_of(model, tokens(5).tolist())
        run(session, 3)
        assert pool_of(layer).rows is rows
        session.close()
        assert pool_of(layer).rows is rows


@pytest.mark.parametrize("stack", STACKS)
def test_rewinding_to_a_mark_is_exact(stack: str) -> None:
    model = tiny_model(stack)
    session = session_of(model, tokens(12).tolist())
    before = run(session, 5)
    mark = session.mark()
    state, length = session.state(), session.length
    answers = []
    for _ in range(2):
        session.add([1, 2, 3])
        answers.append(run(session, 10))
        session.rewind(mark)
        assert session.length == length
        assert session.tokens[-5:] == before
        for mine, other in zip(session.state()._contents, state._contents, strict=True):
            for name, x in mine.items():
                if isinstance(x, torch.Tensor):
                    assert torch.equal(x, other[name])  # type: ignore[arg-type]
                else:
                    assert torch.equal(x.table(), other[name].table())  # type: ignore[union-attr]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("history", [0, 64])
@pytest.mark.parametrize("stack", STACKS)
def test_rewinding_by_tokens(stack: str, history: int) -> None:
    model = tiny_model(stack)
    prompt = tokens(12).tolist()
    session = session_of(model, prompt, history=history)
    answer = run(session, 20)
    for back in (1, 7, 3):
        session.rewind(back)
        del answer[len(answer) - back :]
        assert session.length == len(prompt) + len(answer)
        assert session.tokens == prompt + answer
        answer += run(session, 2)
        assert answer == generated(model, prompt, len(answer))
    session.rewind(session.length)
    assert session.length == 0
    session.add(prompt)
    assert run(session) == generated(model, prompt)


def test_taking_back_the_last_token_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits behind the tokens that were read are known; a file has the last token as one to read again."""
    model = tiny_model()
    prompt = tokens(12).tolist()
    session = session_of(model, prompt)
    expected = run(session, 20)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", None)
        session.rewind(1)
        fork, mark = session.fork(), session.mark()
        assert run(session, 1) == expected[-1:]
        session.rewind(1)
        assert [piece.token for _, piece in sdm.Session.batch([session], max_new_tokens=1)] == expected[-1:]
        session.rewind(mark)
        assert run(fork, 1) == run(session, 1) == expected[-1:]
    assert prompt + expected + run(session, 5) == session.tokens == prompt + generated(model, prompt, 25)
    fork.rewind(1)
    fork.save(tmp_path / "a.sdm")
    assert run(sdm.Session.load(tmp_path / "a.sdm", model), 3) == run(fork, 3) == generated(model, prompt, 22)[-3:]


def test_what_cannot_be_rewound(tmp_path: Path) -> None:
    model = tiny_model()
    session = session_of(model, [1, 2, 3])
    mark = session.mark()
    run(session, 4)
    late = session.mark()
    session.rewind(mark)
    with pytest.raises(ValueError, match="taken back since"):
        session.rewind(late)
    with pytest.raises(ValueError, match="of another session"):
        session.fork().rewind(mark)
    with pytest.raises(ValueError, match=r"takes back 0 \.\.\. 3 tokens"):
        session.rewind(4)
    run(session, 4)
    session.save(tmp_path / "a.sdm")
    loaded = sdm.Session.load(tmp_path / "a.sdm", model)
    assert loaded.length == 7
    with pytest.raises(ValueError, match="the stream was loaded"):
        loaded.rewind(5)


@pytest.mark.parametrize("stack", STACKS)
def test_saving_and_loading(stack: str, tmp_path: Path) -> None:
    model = tiny_model(stack)
    prompt = tokens(15).tolist()
    session = session_of(model, prompt)
    answer = run(session, 10)
    session.save(tmp_path / "a.sdm")
    loaded = sdm.Session.load(tmp_path / "a.sdm", model)
    assert loaded.length == session.length
    assert answer + run(loaded, 10) == generated(model, prompt, 20)
    fresh = session_of(model, prompt)  # nothing of it is read yet
    fresh.save(tmp_path / "b.sdm")
    assert run(sdm.Session.load(tmp_path / "b.sdm", model)) == generated(model, prompt)


def test_files_that_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    session = session_of(model, [1, 2, 3])
    run(session, 4)
    path = tmp_path / "a.sdm"
    session.save(path)
    session.save(path)  # its own
    with pytest.raises(ValueError, match="another model"):
        sdm.Session.load(path, tiny_model())
    with pytest.raises(FileNotFoundError):
        sdm.Session.load(tmp_path / "none", model)
    other = session_of(model, [4])
    with pytest.raises(FileExistsError, match="exists already"):
        other.save(path)
    loaded = sdm.Session.load(path, model)
    run(loaded, 2)
    loaded.save(path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="by another process since"):
        session.save(path)
    assert path.read_bytes() == before
    session.save(path, overwrite=True)


def save_again(folder: str, path: str, results: Any) -> None:
    model = sdm.SDMForCausalLM.from_pretrained(folder).eval()
    session = sdm.Session.load(path, model)
    results.put("loaded")
    run(session, 3)
    try:
        session.save(path)
        results.put("saved")
    except FileExistsError:
        results.put("refused")


def test_two_processes_save_one_session(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    session = session_of(model, [1, 2, 3])
    run(session, 2)
    path = tmp_path / "a.sdm"
    session.save(path)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=save_again, args=(str(tmp_path / "model"), str(path), results))
    process.start()
    assert results.get(timeout=120) == "loaded"
    outcomes = [results.get(timeout=120)]
    process.join()
    try:
        session.save(path)
        outcomes.append("saved")
    except FileExistsError:
        outcomes.append("refused")
    assert outcomes == ["saved", "refused"]
    assert sdm.Session.load(path, model).length == 3 + 2 + 3


def test_bad_input() -> None:
    model = tiny_model(max_position_embeddings=20)
    session = session_of(model, [1] * 10)
    assert session.context_limit == 20
    with pytest.raises(ValueError, match=r"context limit .* is 20; it has 10 now"):
        session.add([1] * 11)
    with pytest.raises(ValueError, match="vocab_size - 1 = 96, got 97"):
        session.add([1, 97])
    with pytest.raises(ValueError, match="context limit"):
        session.generate(12)
    assert session.length == 10, "what was refused left nothing"
    assert len(run(session, 11)) == 11
    with pytest.raises(ValueError, match="needs a tokenizer"):
        session.add("text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        session_of(model, [1]).generate(2, stop="x")
    with pytest.raises(ValueError, match="nothing to continue"):
        sdm.Session(model).generate(2)
    with pytest.raises(TypeError, match="SDMForCausalLM"):
        sdm.Session(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="same model"):
        sdm.Session.batch([session_of(model, [1]), session_of(tiny_model(), [1])], max_new_tokens=2)
    for option in ({"temperature": -1}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}, {"stop": [""]}):
        with pytest.raises(ValueError, match=next(iter(option))):
            session_of(model, [1]).generate(**option)


def test_a_failed_call_breaks_this_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    session, other = session_of(model, [1, 2, 3]), session_of(model, [4, 5])
    run(session, 2)
    mark = session.mark()
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(model.model.layers[3].mixer, "step_", fail, raising=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(session, 5)
    with pytest.raises(RuntimeError, match="rewind this session to a mark"):
        run(session, 5)
    assert run(other) == generated(model, [4, 5])
    session.rewind(mark)
    assert session.tokens[:3] + run(session, 5) == [1, 2, 3, *generated(model, session.tokens[:5], 5)]


def test_within_inference_mode() -> None:
    model = tiny_model()
    with torch.inference_mode():
        session = session_of(model, [1, 2, 3])
        answer = run(session, 5)
    assert answer + run(session, 5) == generated(model, [1, 2, 3], 10)


def test_eos_text_and_stop_strings() -> None:
    model, tokenizer = tiny_model("sdm", eos_token_id=96), tiny_tokenizer()
    session = sdm.Session(model, tokenizer)
    session.add("hello")
    pieces = list(session.generate(60))
    text = "".join(piece.text for piece in pieces)
    assert [piece.token for piece in pieces] == generated(model, tokenizer("hello")["input_ids"], 60)
    assert text == tokenizer.decode([piece.token for piece in pieces], skip_special_tokens=True)
    assert session.finish_reason == ("eos" if pieces[-1].token == 96 else "length")
    stop = text[4:7]
    again = sdm.Session(model, tokenizer)
    again.add("hello")
    assert "".join(piece.text for piece in again.generate(60, stop=stop)) == text[: text.index(stop)]
    assert again.finish_reason == "stop"


def test_text_of_characters_of_several_tokens() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode(errors="replace")

    for text in ("naïve 🐎 text", "ok", "日本"):
        stream = TextStream(Bytes())
        assert "".join(stream.add(byte) for byte in text.encode()) + stream.rest() == text
    stream = TextStream(Bytes(), ["END", "!"])
    assert [stream.add(byte) for byte in b"aENbEND"] == ["a", "", "", "ENb", "", "", ""]
    assert stream.stopped


def test_sampling() -> None:
    model = tiny_model()
    prompt = [1, 2, 3]

    def sampled(**options: Any) -> list[int]:
        return [piece.token for piece in session_of(model, prompt).generate(30, **options)]

    assert sampled(temperature=1.0, seed=1) == sampled(temperature=1.0, seed=1)
    assert sampled(temperature=1.0, seed=1) != sampled(temperature=1.0, seed=2)
    assert sampled(temperature=1.0, top_k=1) == generated(model, prompt, 30)
    assert sampled(temperature=1.0, top_p=1e-6) == generated(model, prompt, 30)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    best = set(logits.topk(3).indices.tolist())
    draws = {next(session_of(model, prompt).generate(1, temperature=2.0, top_k=3, seed=s)).token for s in range(40)}
    assert draws <= best
    assert len(draws) > 1
