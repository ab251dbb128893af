"""Recurrent language-model layers whose state is a huge sparse memory."""

__version__ = "0.1.0"
