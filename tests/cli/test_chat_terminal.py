"""`sdm chat` as a process: in a terminal, where Ctrl-C stops an answer, and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

SECONDS = 240.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("sdm", eos_token_id=None, max_position_embeddings=None).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            environment = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
            os.execve(sys.executable, [sys.executable, "-m", "sdm", *arguments], environment)
        self.printed = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Return what is printed until `pattern`, and the match itself."""
        deadline = time.monotonic() + SECONDS
        while True:
            match = re.search(pattern, self.printed)
            if match:
                text, self.printed = self.printed[: match.end()], self.printed[match.end() :]
                return text
            assert time.monotonic() < deadline, f"{pattern!r} was not printed: {self.printed!r}"
            if select.select([self.terminal], [], [], 1.0)[0]:
                try:
                    self.printed += os.read(self.terminal, 65536).decode(errors="replace").replace("\r", "")
                except OSError as error:  # the other end is closed
                    raise AssertionError(f"the command has ended: {self.printed!r}") from error

    def end(self) -> int:
        """Wait for the end of the command and return its exit code."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """End the command if it runs."""
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.fixture
def chat(folder: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", str(folder), "--max-new-tokens", "1000000", "--temperature", "0")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_keeps_the_session(chat: Terminal) -> None:
    answers = []
    for line, tokens in (("hello", 0), ("hello", 0)):
        chat.wait_for("> ")
        chat.type(f"{line}\n")
        chat.wait_for(f"{line}\n")
        answers.append(chat.wait_for("(?s).{30}"))
        chat.type("\x03")
        chat.wait_for("stopped; the session goes on")
        chat.wait_for("> ")
        chat.type("/state\n")
        text = chat.wait_for(r"\d+ tokens, .* slots written")
        assert int(re.findall(r"(\d+) tokens", text)[-1]) >= len(line) + 30, "the session keeps what was answered"
        chat.wait_for("> ")
        chat.type("/undo\n")
        chat.wait_for(rf"\({tokens} tokens\)")
    assert answers[0] == answers[1], "the exchange was taken back exactly"
    chat.wait_for("> ")
    chat.type("\x03")  # at the prompt it only clears the line
    chat.wait_for("Ctrl-D or /quit ends")
    chat.wait_for("> ")
    chat.type("/quit\n")
    assert chat.end() == 0


def test_a_pipe(folder: Path) -> None:
    command = [sys.executable, "-m", "sdm", "chat", str(folder), "--max-new-tokens", "8", "--temperature", "0"]
    lines = "hello\nagain\n/undo\nagain\n/state\n"
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    first, again, same, state = ended.stdout.splitlines()
    assert len(first) == 8
    assert again == same
    assert state.startswith(f"{2 * 5 + 2 * 8} tokens")
    assert "(13 tokens)" in ended.stderr
