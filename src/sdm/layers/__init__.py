"""Sequence-mixing layers. All take x [B,T,hidden_size] and hand their state in and out: see `interface.py`."""

from sdm.layers.attention import KeyValueState
from sdm.layers.decode_linear import optimize_for_decoding
from sdm.layers.determinism import deterministic
from sdm.layers.fast_weight_memory import FastWeightMemory, FastWeightState
from sdm.layers.full_attention import FullAttention
from sdm.layers.gated_delta_net import GatedDeltaNet
from sdm.layers.interface import SequenceLayer
from sdm.layers.kimi_delta_attention import KimiDeltaAttention
from sdm.layers.mamba2 import Mamba2
from sdm.layers.modules import GatedMLP
from sdm.layers.product_key_memory import NoState, ProductKeyMemory
from sdm.layers.raven import Raven
from sdm.layers.shifted_keys import ShiftedKeys, ShiftedState
from sdm.layers.sliding_window_attention import SlidingWindowAttention
from sdm.layers.sparse_delta_memory import MemoryTable, SparseDeltaMemory
from sdm.layers.state import LayerState, RecurrentState
from sdm.layers.token_shift import PreviousToken, TokenShift

__all__ = [
    "FastWeightMemory",
    "FastWeightState",
    "FullAttention",
    "GatedDeltaNet",
    "GatedMLP",
    "KeyValueState",
    "KimiDeltaAttention",
    "LayerState",
    "Mamba2",
    "MemoryTable",
    "NoState",
    "PreviousToken",
    "ProductKeyMemory",
    "Raven",
    "RecurrentState",
    "SequenceLayer",
    "ShiftedKeys",
    "ShiftedState",
    "SlidingWindowAttention",
    "SparseDeltaMemory",
    "TokenShift",
    "deterministic",
    "optimize_for_decoding",
]
