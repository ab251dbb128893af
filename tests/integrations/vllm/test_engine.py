"""vLLM's tokens are those of `generate()`: many sequences at once, in pieces, preempted, in rows that others had.

`make vllm-test` runs these in a virtual environment with vLLM.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from served_models import NEW, SIZES, expected, prompts_of, save, state_gib
from tiny_models import STACKS, tiny_model
from tiny_tokenizer import tiny_tokenizer

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that a test can look into the engine
vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm-test` runs this in an environment with it")

from sdm.integrations.vllm.model import PooledMixer  # noqa: E402
from sdm.integrations.vllm.pool import StatePool, _keep  # noqa: E402
from sdm.models import SDMForCausalLM  # noqa: E402

Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes engines, and takes them down at the end."""
    engines: list[Any] = []

    def make(folder: Path, **options: Any) -> Any:
        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 64}
        engines.append(vllm.LLM(str(folder), **(defaults | options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()


def generate(engine: Any, prompts: list[list[int]], new: int = NEW) -> list[Any]:
    greedy = vllm.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)


def served(engine: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in generate(engine, prompts, new)]


def converse(engine: Any, model: SDMForCausalLM, prompts: list[list[int]]) -> int:
    """Ask, and ask again behind the answers. Returns how many tokens came with states of prefixes."""
    hits = 0
    for _ in range(2):
        outputs = generate(engine, prompts)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        assert answers == expected(model, prompts)
        hits += sum(output.num_cached_tokens or 0 for output in outputs)
        prompts = [[*prompt, *answer, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    return hits


def pools(engine: Any) -> list[StatePool]:
    return engine.apply_model(lambda model: [m.pool for m in model.modules() if isinstance(m, PooledMixer)])[0]


@pytest.mark.parametrize("chunked", [True, False])
def test_64_prompts_at_once(tmp_path: Path, serve: Serve, chunked: bool) -> None:
    model = save(tmp_path)
    prompts = prompts_of([1 + 37 * place % 151 for place in range(64)])
    tokens = {"max_num_batched_tokens": 96} if chunked else {"max_num_batched_tokens": 512}
    engine = serve(tmp_path, enable_chunked_prefill=chunked, **tokens)
    assert served(engine, prompts) == expected(model, prompts)


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "sdm"])
def test_every_stack(tmp_path: Path, serve: Serve, stack: str) -> None:
    model = save(tmp_path, stack, tie_word_embeddings=stack == "convolved")
    prompts = prompts_of([1, 2, 7, 40, 90, 33])
    assert served(serve(tmp_path, max_num_batched_tokens=64), prompts) == expected(model, prompts)


def test_rows_are_reused_and_mutations_are_caught(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve sequences share three rows: nine of them wait. Then the faults that such a pool invites."""
    model = save(tmp_path)
    prompts = prompts_of([1, 5, 23, 60, 90, 2, 40, 3, 17, 64, 31, 8])
    want = expected(model, prompts)
    engine = serve(tmp_path, additional_config={"sdm_state_gib": state_gib(model, 3)})
    memories = pools(engine)
    assert [pool.states.streams for pool in memories] == [3]
    assert served(engine, prompts) == want
    mix, restart = StatePool.mix, StatePool._restart

    def zeros(pool: StatePool, row: int) -> None:
        _keep(pool._rows(row, row + 1), pool.start.map(torch.zeros_like))

    def lost(pool: StatePool, x: torch.Tensor, spans: Any, y: torch.Tensor) -> torch.Tensor:
        before = pool.states.map(torch.clone)
        for span in spans:
            if span.source is None:
                restart(pool, span.row)
                _keep(before.map(lambda part, row=span.row: part[row : row + 1]), pool.start)
        mix(pool, x, spans, y)
        if any(span.end - span.start > 1 for span in spans):
            _keep(pool.states, before)
        return y

    mutations = {"_restart": [zeros, lambda pool, row: None], "mix": [lost]}
    for name, faults in mutations.items():
        for fault in faults:
            with monkeypatch.context() as patched:
                patched.setattr(StatePool, name, fault)
                assert served(engine, prompts) != want, f"{name} with a fault gives the same tokens"
    assert served(engine, prompts) == want


@pytest.mark.parametrize(("stack", "states"), [("mixed", 40), ("sdm", 3), ("all_recurrent", 3)])
def test_prefix_caching(tmp_path: Path, serve: Serve, stack: str, states: int) -> None:
    """Prompts that share beginnings and conversations that go on; with few states, those of prefixes give way."""
    model = save(tmp_path, stack)
    caching = {"sdm_prefix_caching": True, "sdm_state_gib": state_gib(model, states)}
    sequences = {"max_num_seqs": 4 if states == 40 else 2, "max_num_batched_tokens": 90}
    engine = serve(tmp_path, additional_config=caching, block_size=32, **sequences)
    shared = prompts_of([140, 133])
    tails = prompts_of([20, 1] * 4)
    prompts = [shared[place % 2][: 140 - 20 * (place // 4)] + tail for place, tail in enumerate(tails)]
    hits = converse(engine, model, prompts)
    assert states < 40 or hits >= 10 * 64
    assert converse(engine, model, prompts[:1]) >= 128, "a conversation that goes on continues its state"


def test_preemption(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few pages for keys, running sequences are put back and start again from the initial state."""
    from vllm.v1.core.sched.scheduler import Scheduler

    model = save(tmp_path, "mixed")
    prompts = prompts_of([120, 110, 125, 100, 116, 124])
    preempted = []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda *given, **named: preempted.append(1) or preempt(*given, **named)
    )
    engine = serve(tmp_path, max_num_seqs=6, num_gpu_blocks_override=22)
    assert served(engine, prompts, 40) == expected(model, prompts, 40)
    assert preempted


def trained(steps: int = 150) -> tuple[SDMForCausalLM, list[int]]:
    """A model that has learned the letters of a text, and the text's tokens."""
    text = (Path(__file__).parents[3] / "LICENSE").read_text().replace("\n", " ")
    ids = torch.tensor(tiny_tokenizer()(" ".join(text.split()))["input_ids"])
    model = tiny_model("sdm", **(SIZES | {"initial_state_std": 0.02, "initializer_range": 0.05})).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 65, (8,))
        batch = torch.stack([ids[start : start + 65] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), ids.tolist()


def test_bfloat16_by_logprobs_of_a_trained_model(tmp_path: Path, serve: Serve) -> None:
    """Tokens may differ in bfloat16; vLLM's log-probabilities are as near to those of float32 as transformers' are."""
    model, ids = trained()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    prompts = [ids[start : start + 120] for start in range(0, 2000, 250)]
    only = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = serve(tmp_path, dtype="bfloat16", max_num_batched_tokens=200).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], only, use_tqdm=False
    )
    got = torch.tensor(
        [
            [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
            for output, prompt in zip(outputs, prompts, strict=True)
        ]
    )
    batch = torch.tensor(prompts)

    @torch.no_grad()
    def logprobs(model: SDMForCausalLM) -> torch.Tensor:
        scores = model(batch).logits[:, :-1].float().log_softmax(-1)
        return scores.gather(2, batch[:, 1:, None])[..., 0]

    exact = logprobs(model)
    assert exact.mean() > -2.6, "the model has learned something: chance is -4.6"
    theirs = logprobs(model.to(torch.bfloat16))
    error, usual = (got - exact).abs(), (theirs - exact).abs()
    print(f"mean and largest error: vLLM {error.mean():.4f} {error.max():.3f}, HF {usual.mean():.4f} {usual.max():.3f}")
    assert error.mean() <= 1.5 * usual.mean()
    assert error.max() <= 3 * usual.max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        ({"additional_config": {"sdm_state_gib": 1e-9}}, "holds no sequence"),
        ({"additional_config": {"sdm_state_gib": "much"}}, "must be a positive number"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "take drafted tokens back"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, serve: Serve, options: dict[str, Any], message: str) -> None:
    save(tmp_path)
    with pytest.raises(Exception, match=message):
        serve(tmp_path, **options)
