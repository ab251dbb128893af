"""What a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """The message names what is wrong, what was expected and what to do; a command shows nothing else."""


class RankError(UserError):
    """Another process of the job has failed; the message names its rank."""
