"""Greedy generation for prompts of different lengths, with the answers that each prompt gets by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sdm.models import SDMForCausalLM

PREFILL = 4096  # tokens of a prompt at a time
AGREEMENT = 1e-3  # of logits, relative to the largest: padded and not


class Generator:
    """Generates with one model. Prompts are padded on the left, if the model's answers do not depend on it."""

    def __init__(self, model: Any, end_ids: Sequence[int]) -> None:
        """end_ids: tokens that end an answer."""
        from transformers import GenerationConfig

        self._model = model
        self._end_ids = list(end_ids)
        # What a folder's generation_config.json asks for, such as a penalty of repetition, is not greedy.
        pad = self._end_ids[0] if self._end_ids else 0
        self._pad = pad
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self._end_ids or None, pad_token_id=pad, use_cache=True
        )
        self._pads: bool | None = True if isinstance(model, SDMForCausalLM) else None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stopped: Callable[[list[int]], bool] | None = None,
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt, token by token, without the token that ends it.

        stopped: is asked after every token whether an answer, so far, is complete.
        """
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) > 1 and not self._pads_exactly():
            answers: list[list[int]] = [[] for _ in prompts]
            for length in sorted(lengths):
                places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
                found = self([prompts[place] for place in places], max_new_tokens, stopped)
                for place, answer in zip(places, found, strict=True):
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
        if width > PREFILL:
            options["prefill_chunk_size"] = PREFILL

        def done(ids: Tensor, scores: Any) -> Tensor:
            assert stopped is not None
            return torch.tensor([stopped(row) for row in ids[:, width:].tolist()], device=ids.device)

        device = self._model.device
        criteria = [] if stopped is None else [done]
        return self._model.generate(
            ids.to(device), attention_mask=mask.to(device), stopping_criteria=criteria, **options
        )

    def _pads_exactly(self) -> bool:
        """Whether padding changes nothing; tried out once. Recurrent layers of others often let it into their state."""
        if self._pads is None:
            vocabulary = self._model.get_input_embeddings().weight.shape[0]
            prompts = [[(7919 * i + 1) % vocabulary for i in range(length)] for length in (17, 8)]
            options: dict[str, Any] = {"min_new_tokens": 2, "max_new_tokens": 2, "return_dict_in_generate": True}
            alone, padded = (
                torch.stack(self._generate(rows, output_logits=True, **options).logits)[:, -1]
                for rows in (prompts[1:], prompts)
            )
            self._pads = bool((alone - padded).abs().max() <= AGREEMENT * alone.abs().max())
            if not self._pads:
                print(
                    f"{type(self._model).__name__} lets padding change its answers: prompts are batched by length",
                    file=sys.stderr,
                )
        return self._pads
