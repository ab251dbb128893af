"""The errors that end a training run with one clear message."""

from __future__ import annotations


class TrainingError(ValueError):
    """Something about a run cannot work; the message says what, and what to do."""


class TrainingStopped(RuntimeError):
    """A run was stopped before its end; the message says why and where it continues from."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
