"""The errors that end a training run with one clear message."""

from __future__ import annotations

from sdm.errors import UserError
from sdm.signals import Stopped


class TrainingError(UserError):
    """Something about a run cannot work; the message says what, and what to do."""


class TrainingStopped(Stopped):
    """A run was stopped before its end; the message says why and where it continues from."""
