"""Recurrent language-model layers whose state is a huge sparse memory."""

from sdm import ops
from sdm.layers import SparseDeltaMemory

__version__ = "0.1.0"

__all__ = ["SparseDeltaMemory", "__version__", "ops"]
