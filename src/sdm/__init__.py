"""Recurrent language-model layers whose state is a huge sparse memory."""

from sdm import ops

__version__ = "0.1.0"

__all__ = ["__version__", "ops"]
