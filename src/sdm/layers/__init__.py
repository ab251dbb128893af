"""Sequence-mixing layers. All take x [B,T,hidden_size] and hand their state in and out."""

from sdm.layers.sparse_delta_memory import SparseDeltaMemory

__all__ = ["SparseDeltaMemory"]
