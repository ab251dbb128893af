"""What a command is: a dataclass whose fields are its arguments."""

from __future__ import annotations

from typing import ClassVar


class Command:
    """Base of all commands. What it needs beyond the arguments is imported when it runs: `sdm --help` must be quick."""

    advice: ClassVar[str] = ""
    """Follows what is said of a signal that ended the command."""

    def run(self) -> None:
        """Run the command; a `UserError` ends it with its message alone."""
        raise NotImplementedError
