"""Likelihoods and greedy generation for any causal model of transformers, and the tensors of its cache.

- `Scorer` computes likelihoods of tokens behind a state that is carried on. Models of this library expose their states
  (`sdm.models.likelihood`). Other models keep a cache, which most of them can continue with several tokens at a time;
  whether a model does is tried out, and where it does not, the context is computed again.
- `Stream` reads tokens as generation does; `likeliest` predicts tokens at chosen places.
- `Generator` generates for prompts of different lengths, with the answers that each prompt gets by itself.
- `score_continuations` scores continuations of contexts (multiple-choice questions) by our models: the tokens with
  which all contexts of a batch begin are computed once, and a context once for all of its continuations.

Shapes: B rows, T time, V vocabulary, G contexts, R continuations.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.models import SDMCache, SDMForCausalLM
from sdm.models.likelihood import IGNORED, nll

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

PIECE = 4096  # tokens of a stream at a time, over all rows
LOGITS = 2**26  # numbers that are computed at a time, at most
AGREEMENT = 1e-3  # of logits, relative to the largest: whole or in parts, padded or not


@dataclass
class Past:
    """The state after a row of tokens. It is used once: the model changes it."""

    content: Any
    """States of our layers, a cache, or the tokens themselves where the model does not continue from its cache."""
    tokens: int
    """Tokens that were read."""


class Scorer:
    """Likelihoods of rows of tokens for one model.

    Args:
        model: a causal language model.
        limit: tokens of the longest stream that it takes; None: any.
        whole: whether it must read every stream at once, so that what went before is computed again.
    """

    def __init__(self, model: PreTrainedModel, limit: int | None = None, whole: bool = False) -> None:
        self._model = model
        self._ours = isinstance(model, SDMForCausalLM)
        self._cache: str | None = None if self._ours or whole else _continued_cache(model, limit)

    @property
    def continues(self) -> bool:
        """Whether the model continues from its cache with several tokens at a time."""
        return self._ours or self._cache is not None

    @torch.inference_mode()
    def nll(
        self, input_ids: Tensor, targets: Tensor, past: Past | None = None, carry: bool = False
    ) -> tuple[Tensor, Past | None]:
        """Return [B,T] float32 nats of each target, zero where it is -100; and with `carry` the state after them."""
        seen = (0 if past is None else past.tokens) + input_ids.shape[1]
        if isinstance(self._model, SDMForCausalLM):
            states = None if past is None else past.content
            nats, after = nll(self._model, input_ids, targets, states=states, carry=carry, reduction="none")
            return nats, Past(after, seen) if carry else None
        if self._cache is None:
            before = 0 if past is None else past.tokens
            ids = input_ids if past is None else torch.cat([past.content, input_ids], 1)
            logits = self._model(ids, use_cache=False).logits[:, before:]
            return _cross_entropy(logits, targets), Past(ids, seen) if carry else None
        content, losses = None if past is None else past.content, []
        size = max(16, LOGITS // (len(input_ids) * _vocabulary(self._model)))
        pieces = list(zip(input_ids.split(size, 1), targets.split(size, 1), strict=True))
        for number, (ids, wanted) in enumerate(pieces):
            keep = carry or number + 1 < len(pieces)
            output = self._model(ids, **_given(self._cache, content), use_cache=keep or content is not None)
            content = output[self._cache] if keep else None
            losses.append(_cross_entropy(output.logits, wanted))
        return torch.cat(losses, 1), Past(content, seen) if carry else None


class Stream:
    """Rows of tokens that are read as generation reads them: logits of the last token only, and a cache.

    Args:
        model: a causal language model.
        in_pieces: whether the model continues from its cache with more than one token.
    """

    def __init__(self, model: PreTrainedModel, in_pieces: bool) -> None:
        self._model, self._in_pieces = model, in_pieces
        self._name, self._content = CACHES[0], None
        few = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": True, **({"logits_to_keep": 1} if few else {})}

    @torch.inference_mode()
    def read(self, input_ids: Tensor) -> Tensor:
        """Read tokens [B,T] and return the logits [B,V] after the last of them."""
        size = max(1, PIECE // len(input_ids)) if self._in_pieces else input_ids.shape[1]
        for ids in input_ids.split(size, 1):
            output = self._model(ids, **_given(self._name, self._content), **self._options)
            if self._content is None:
                self._name = next((name for name in CACHES if output.get(name) is not None), self._name)
            self._content = output.get(self._name)
        return output.logits[:, -1]

    def nbytes(self) -> int:
        """Size of the cache."""
        return sum(tensor.nbytes for tensor in cache_tensors(self._content))


@torch.inference_mode()
def likeliest(model: PreTrainedModel, input_ids: Tensor, wanted: Tensor) -> Tensor:
    """Return the likeliest next token [n] at the places of input_ids [B,T] where `wanted` [B,T] is True, on the CPU."""
    input_ids, wanted = input_ids.to(model.device), wanted.to(model.device)
    if isinstance(model, SDMForCausalLM):  # logits where they are wanted only
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return model.lm_head(hidden[wanted]).argmax(-1).cpu()
    return model(input_ids, use_cache=False).logits[wanted].argmax(-1).cpu()


def _given(name: str, content: object) -> dict[str, object]:
    return {} if content is None else {name: content}


def _vocabulary(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return len(weight)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="none").view(targets.shape)


@torch.inference_mode()
def _continued_cache(model: PreTrainedModel, limit: int | None) -> str | None:
    """The name of the cache that the model takes and returns, if it continues from it exactly."""
    taken = inspect.signature(model.forward).parameters
    vocabulary, device = _vocabulary(model), model.device
    length = min(24, limit or 24)
    cut = 2 * length // 3
    if cut == 0:
        return None
    ids = (torch.arange(length, device=device) * 7919 % vocabulary).view(1, -1)
    whole = model(ids, use_cache=False).logits[:, cut:].float()
    for name in CACHES:
        if name not in taken:
            continue
        try:
            first = model(ids[:, :cut], use_cache=True)
            second = model(ids[:, cut:], **{name: first[name]}, use_cache=True).logits.float()
        except Exception:  # each architecture fails in its own way over what it cannot do
            continue
        if (second - whole).abs().max() <= AGREEMENT * whole.abs().max():
            return name
    _log.warning(
        "%s does not continue from its cache exactly: what went before is computed again, which takes time and memory "
        "for long documents",
        type(model).__name__,
    )
    return None


PREFILL = 4096  # tokens of a prompt at a time


class Generator:
    """Greedy generation with one model. Prompts are padded on the left if that does not change the answers.

    Args:
        model: a causal language model.
        end_ids: tokens that end an answer.
        limit: tokens of the longest stream that the model takes; None: any.
        whole: whether it must read a prompt at once, and beside prompts of the same length only.
    """

    def __init__(
        self, model: PreTrainedModel, end_ids: Sequence[int], limit: int | None = None, whole: bool = False
    ) -> None:
        from transformers import GenerationConfig

        self._model = model
        self._end_ids = list(end_ids)
        # What a folder's generation_config.json asks for, such as a penalty of repetition, is not greedy.
        pad = self._end_ids[0] if self._end_ids else 0
        self._pad = pad
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self._end_ids or None, pad_token_id=pad, use_cache=True
        )
        self._limit, self._whole = limit, whole
        self._pads: bool | None = True if isinstance(model, SDMForCausalLM) else False if whole else None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stopped: Callable[[list[int]], bool] | None = None,
    ) -> list[list[int]]:
        """Generate the likeliest continuation of each prompt, token by token, without the token that ends it.

        Args:
            prompts: token ids, of different lengths.
            max_new_tokens: most tokens of an answer.
            stopped: is called after every token, and returns whether the answer so far is complete.
        """
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) > 1 and not self._pads_exactly():
            answers: list[list[int]] = [[] for _ in prompts]
            for length in sorted(lengths):
                places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
                group = self([prompts[place] for place in places], max_new_tokens, stopped)
                for place, answer in zip(places, group, strict=True):
                    answers[place] = answer
            return answers
        rows = self._generate(prompts, max_new_tokens=max_new_tokens, stopped=stopped)[:, max(lengths) :].tolist()
        return [self._cut(row, stopped) for row in rows]

    def _cut(self, ids: list[int], stopped: Callable[[list[int]], bool] | None) -> list[int]:
        """Rows that were done wait for the others with padding."""
        for place, token in enumerate(ids):
            if token in self._end_ids:
                return ids[:place]
            if stopped is not None and stopped(ids[: place + 1]):
                return ids[: place + 1]
        return ids

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], stopped: Callable[[list[int]], bool] | None = None, **options: Any
    ) -> Any:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        if width > PREFILL and not self._whole:
            options["prefill_chunk_size"] = PREFILL

        def done(ids: Tensor, scores: object) -> Tensor:
            assert stopped is not None
            return torch.tensor([stopped(row) for row in ids[:, width:].tolist()], device=ids.device)

        device = self._model.device
        criteria = [] if stopped is None else [done]
        return cast(Any, self._model).generate(  # transformers types it for its own classes
            ids.to(device), attention_mask=mask.to(device), stopping_criteria=criteria, **options
        )

    def _pads_exactly(self) -> bool:
        """Whether padding changes nothing; tried out once. Recurrent layers of others often let it into their state."""
        if self._pads is None:
            vocabulary = _vocabulary(self._model)
            longest = min(17, (self._limit or 18) - 1)  # and two new tokens, of which the model sees one
            if longest < 2:
                return False
            prompts = [[(7919 * i + 1) % vocabulary for i in range(length)] for length in (longest, longest // 2)]
            options: dict[str, Any] = {"min_new_tokens": 2, "max_new_tokens": 2, "return_dict_in_generate": True}
            alone, padded = (
                torch.stack(self._generate(rows, output_logits=True, **options).logits)[:, -1]
                for rows in (prompts[1:], prompts)
            )
            self._pads = bool((alone - padded).abs().max() <= AGREEMENT * alone.abs().max())
            if not self._pads:
                _log.warning(
                    "%s lets padding change its answers: prompts are batched by length", type(self._model).__name__
                )
        return self._pads


Scored = tuple[float, bool]
"""Log-likelihood of a continuation, and whether it is the likeliest one token by token."""


@torch.inference_mode()
def score_continuations(
    model: SDMForCausalLM, contexts: Sequence[list[int]], owner: Sequence[int], continuations: Sequence[list[int]]
) -> list[Scored]:
    """Score each continuation behind its context.

    Args:
        model: a model of this library.
        contexts: token ids, none of them empty.
        owner: for each continuation the number of its context.
        continuations: token ids, none of them empty.
    """
    device = model.device
    cache = SDMCache(model.config)
    shared = _in_common(contexts)
    if shared:
        model.model(
            input_ids=torch.tensor([contexts[0][:shared]], device=device), past_key_values=cache, use_cache=True
        )
        cache.batch_repeat_interleave(len(contexts))
    ids, mask = _padded([context[shared:] for context in contexts], device, left=True)
    hidden = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).last_hidden_state
    # The last token of a context predicts the first of every continuation.
    first = torch.tensor([continuation[0] for continuation in continuations], device=device)
    owner_R = torch.tensor(owner, device=device)
    logits_GV = model.lm_head(hidden[:, -1]).float()
    total_R = logits_GV.log_softmax(-1)[owner_R, first]
    greedy_R = logits_GV.argmax(-1)[owner_R] == first

    longer = [place for place, continuation in enumerate(continuations) if len(continuation) > 1]
    if longer:
        cache.batch_select_indices(owner_R[longer])
        ids, mask = _padded([continuations[place][:-1] for place in longer], device)
        wanted, _ = _padded([continuations[place][1:] for place in longer], device)
        hidden = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits, targets = model.lm_head(hidden.last_hidden_state[mask]).float(), wanted[mask]
        scored = torch.zeros(mask.shape, device=device)
        scored[mask] = logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        likeliest = mask.logical_not()
        likeliest[mask] = logits.argmax(-1) == targets
        total_R[longer] += scored.sum(1)
        greedy_R[longer] &= likeliest.all(1)
    return list(zip(total_R.tolist(), greedy_R.tolist(), strict=True))


def _in_common(contexts: Sequence[list[int]]) -> int:
    """How many tokens all contexts begin with, a last token of its own left to each; none if there is one context."""
    if len(contexts) == 1:
        return 0
    least, most = min(contexts), max(contexts)  # in alphabetical order: all others lie between them
    longest = min(map(len, contexts)) - 1
    return next((place for place in range(longest) if least[place] != most[place]), longest)


def _padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows as one tensor, and where they are in it."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place] = torch.tensor(tokens)
        mask[row, place] = True
    return ids.to(device), mask.to(device)


CACHES = ("past_key_values", "cache_params", "state")  # what models call it


def cache_tensors(content: object) -> Iterator[Tensor]:
    """Yield all tensors that a cache of any kind refers to, each once."""
    yield from _tensors(content, set())


def _tensors(content: object, seen: set[int]) -> Iterator[Tensor]:
    if id(content) in seen or isinstance(content, (str, type)):
        return
    seen.add(id(content))
    if isinstance(content, Tensor):
        yield content
        return
    if isinstance(content, dict):
        parts: Iterable[object] = content.values()
    elif isinstance(content, (list, tuple)):
        parts = content
    else:
        parts = getattr(content, "__dict__", {}).values()
    for part in parts:
        yield from _tensors(part, seen)
