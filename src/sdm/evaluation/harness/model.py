"""A model as lm-evaluation-harness asks for it.

Everything is the harness's own (`HFLM`: how text becomes tokens, what is cut off, how answers are generated) but the
scoring of continuations by our models, where what several requests have in common is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lm_eval.models.huggingface import HFLM

from sdm.evaluation.inference import Scored, score_continuations
from sdm.models import SDMForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Request = tuple[Any, list[int], list[int]]
"""What the harness knows it by, the tokens of its context and those of its continuation."""


class HarnessModel(HFLM):
    """A causal language model of ours or of transformers, with its tokenizer."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, max_length: int | None = None
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype="float32",
        )

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Scored]:
        if not isinstance(self.model, SDMForCausalLM):
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        kept = []
        by_context: dict[tuple[int, ...], list[int]] = {}
        for place, (_, context, continuation) in enumerate(requests):
            whole = (context + continuation)[-(self.max_length + 1) :]  # the model does not see the last token
            kept.append(continuation)
            by_context.setdefault(tuple(whole[: -len(continuation)]), []).append(place)
        scores: list[Scored] = [(0.0, False)] * len(requests)
        for batch in _batches(by_context, self.batch_size):
            contexts = [list(context) for context in batch]
            owners = [(group, place) for group, context in enumerate(batch) for place in by_context[context]]
            scored = score_continuations(
                self.model, contexts, [group for group, _ in owners], [kept[place] for _, place in owners]
            )
            for (_, place), score in zip(owners, scored, strict=True):
                scores[place] = score
        return scores


def _batches(by_context: dict[tuple[int, ...], list[int]], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Contexts of about the same length, with at most `size` continuations, or one context with more."""
    batch: list[tuple[int, ...]] = []
    rows = 0
    for context in sorted(by_context, key=len, reverse=True):
        if batch and rows + len(by_context[context]) > size:
            yield batch
            batch, rows = [], 0
        batch.append(context)
        rows += len(by_context[context])
    if batch:
        yield batch
