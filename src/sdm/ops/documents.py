"""Documents packed into one row, described by the offset of every document's start and, last, the row's length."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def check_documents(cu_seqlens: Tensor, batch: int) -> int:
    """Raise for what shape and dtype can tell. Returns the number of documents."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor or None, got {type(cu_seqlens).__name__}")
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens must be an integer tensor, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be [documents + 1] offsets, the first 0 and the last T, "
            f"got shape {list(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: the batch must be 1, got {batch}")
    return cu_seqlens.numel() - 1


def document_bounds(cu_seqlens: Tensor, time: int) -> list[int]:
    """The offsets as numbers, checked."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != time:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at T = {time}, got {bounds[0]} and {bounds[-1]}; "
            "it holds the offset of every document's start and, last, the length of the row"
        )
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(
                f"cu_seqlens must not decrease, got {start} then {end}: document {document} would overlap the next"
            )
    return bounds


def chunk_documents(bounds: list[int], chunk: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Cut documents into chunks of which none holds two documents.

    Returns the token at each place of each chunk (T, one behind the last token, where a document's last chunk is not
    full) and the number of chunks of each document.
    """
    places, chunks = [], []
    for start, end in itertools.pairwise(bounds):
        chunks.append(-(-(end - start) // chunk))
        place = torch.arange(start, start + chunks[-1] * chunk)
        places.append(place.masked_fill(place >= end, bounds[-1]))
    return torch.cat(places).to(device), chunks
