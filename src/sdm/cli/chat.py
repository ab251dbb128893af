"""`sdm chat MODEL`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sdm.cli.command import Command
from sdm.cli.generate import load_for_decoding, load_tokenizer
from sdm.errors import UserError
from sdm.files import explained
from sdm.signals import PostponedSignals

if TYPE_CHECKING:
    from sdm.models.decoding import DecodingOptions
    from sdm.session import Session, SessionMark

HELP = """\
/undo        take back the last exchange, exactly
/fork        remember this point
/back        return to the last /fork
/save FILE   write the session; /load FILE continues one
/state       tokens, bytes and slots of the session
/help        this list
/quit        end (so does the end of the input)"""


@dataclass(frozen=True)
class Chat(Command):
    """Talk with a model. Ctrl-C stops an answer and keeps the session; `/help` lists the commands."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run's folder or a model's folder, with a tokenizer."""
    load: Path | None = None
    """Continue a session that was saved with /save."""
    system: str | None = None
    """Text of the system message, for a model with a chat template."""
    plain: bool = False
    """Continue the text as it is, without the tokenizer's chat template."""
    max_new_tokens: int = 256
    """Length of an answer at most."""
    temperature: float = 0.7
    """0 takes the likeliest token; otherwise tokens are sampled."""
    top_k: int = 0
    """Sample among so many tokens only; 0: among all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that make up this probability."""
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    """How to hold the weights of linear layers: as they are, or rounded, so that a token has less to read."""
    seed: int = 0
    """Seed of the sampling."""

    def run(self) -> None:
        """Read lines until the input ends."""
        from sdm.models.decoding import DecodingOptions
        from sdm.run.model import SavedModel
        from sdm.session import Session

        try:
            options = DecodingOptions(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.seed)
        except ValueError as error:
            raise UserError(f"--{str(error).replace('_', '-', 2)}") from error
        saved = SavedModel(self.model)
        tokenizer = load_tokenizer(saved.folder)
        if tokenizer is None:
            raise UserError(f"{str(self.model)!r} has no tokenizer, which a chat needs; see `sdm generate --tokens`")
        model = load_for_decoding(saved, self.weights)
        session = Session(model, tokenizer)
        if self.load is not None:
            with explained("cannot continue --load"):
                session = Session.load(self.load, model, tokenizer)
        Conversation(self, session, options).run()


class Conversation:
    """The loop of `sdm chat`: lines in, answers out."""

    def __init__(self, settings: Chat, session: Session, options: DecodingOptions) -> None:
        assert session.tokenizer is not None
        self.session, self.options, self.tokenizer = session, options, session.tokenizer
        self.template = bool(self.tokenizer.chat_template) and not settings.plain
        if settings.system is not None and not self.template:
            raise UserError("--system needs a tokenizer with a chat template, and no --plain")
        self.messages: list[dict[str, str]] = []
        if settings.system is not None and settings.load is None:
            self.messages.append({"role": "system", "content": settings.system})
        self.before: list[tuple[SessionMark, int]] = []  # of each exchange
        self.forks: list[tuple[Session, list[dict[str, str]]]] = []
        self.turns = 0
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Answer lines until the input ends."""
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, gives input() a history
            print("/help lists the commands, Ctrl-D ends", file=sys.stderr)
        for line in self.lines():
            if line.startswith("/"):
                if line.split()[0] == "/quit":
                    return
                try:
                    self.command(*line.split(maxsplit=1))
                except (ValueError, OSError) as error:
                    print(f"error: {error}", file=sys.stderr)
            elif line.strip():
                try:
                    self.answer(line)
                except ValueError as error:  # the context limit
                    self.command("/undo")
                    print(f"error: {error}", file=sys.stderr)

    def lines(self) -> Iterator[str]:
        """Read lines. Ctrl-C at the prompt only clears the line."""
        while True:
            try:
                yield input("> ") if self.interactive else input()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\n(Ctrl-D or /quit ends)", file=sys.stderr)

    def answer(self, line: str) -> None:
        """Add a message and stream the answer. Ctrl-C ends the answer behind the token that is being computed."""
        self.before.append((self.session.mark(), len(self.messages)))
        if self.template:
            self.session.add(self.templated(line))
        else:
            self.session.add(line)
        options = self.options
        limit = self.session.context_limit
        room = options.max_new_tokens if limit is None else min(options.max_new_tokens, limit - len(self.session) + 1)
        self.turns += 1
        text = ""
        pieces = self.session.generate(
            max(room, 1),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=(options.seed or 0) + self.turns,
        )
        signals = PostponedSignals()
        with signals:
            for piece in pieces:
                text += piece.text
                print(piece.text, end="", flush=True)
                if signals.received is not None:
                    break
        print()
        self.messages.append({"role": "assistant", "content": text})
        if signals.received is not None:
            if not self.interactive or str(signals.received) != "SIGINT":
                raise SystemExit(signals.received.exit_code)
            print("(stopped; the session goes on)", file=sys.stderr)

    def templated(self, line: str) -> list[int]:
        """Return the tokens that the chat template puts between what the stream has and the answer to come."""
        tokenizer, earlier = self.tokenizer, list(self.messages)
        self.messages.append({"role": "user", "content": line})

        def render(messages: list[dict[str, str]]) -> str:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

        if self.session.length == 0:
            return tokenizer(render(self.messages), add_special_tokens=False)["input_ids"]
        ending, text = tokenizer.eos_token or "", None
        if earlier and earlier[-1]["role"] == "assistant":
            # What follows the last answer, the token that ends it included.
            answer, before, whole = earlier[-1]["content"].strip(), render(earlier[:-1]), render(self.messages)
            if whole.startswith(before) and answer in whole[len(before) :]:
                text = whole[whole.index(answer, len(before)) + len(answer) :]
        if text is None:  # a loaded session, or a template that rewrites earlier messages
            text = ending + render(self.messages[-1:])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        last = self.session.tokens[-1]
        return ids[1:] if ids[:1] == [last] == [tokenizer.eos_token_id] else ids

    def command(self, name: str, argument: str = "") -> None:
        """Carry out a line that begins with a slash."""
        session = self.session
        if name == "/help":
            print(HELP)
        elif name == "/undo":
            if not self.before:
                raise ValueError("there is no exchange to take back")
            mark, messages = self.before.pop()
            session.rewind(mark)
            del self.messages[messages:]
            print(f"({session.length} tokens)", file=sys.stderr)
        elif name == "/fork":
            self.forks.append((session.fork(), list(self.messages)))
            print(f"(fork {len(self.forks)} at {session.length} tokens)", file=sys.stderr)
        elif name == "/back":
            if not self.forks:
                raise ValueError("there is no /fork to return to")
            fork, said = self.forks[-1]
            self.session, self.messages, self.before = fork.fork(), list(said), []
            print(f"(back at {self.session.length} tokens)", file=sys.stderr)
        elif name in ("/save", "/load"):
            if not argument:
                raise ValueError(f"{name} needs the name of a file")
            if name == "/save":
                session.save(argument)
                print(f"({argument}: {session.length} tokens)", file=sys.stderr)
            else:
                self.session = type(session).load(argument, session.model, session.tokenizer)
                self.messages, self.before = [], []
                print(f"({self.session.length} tokens)", file=sys.stderr)
        elif name == "/state":
            written, slots = session.slots
            limit = "" if session.context_limit is None else f" of {session.context_limit}"
            print(
                f"{session.length} tokens{limit}, {session.nbytes:,} bytes of its own, {session.shared_nbytes:,} "
                f"shared, {written:,} of {slots:,} slots written"
            )
        else:
            raise ValueError(f"there is no command {name}; /help lists them")
