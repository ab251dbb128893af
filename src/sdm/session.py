"""One user's stream of tokens: add text, generate, fork, save, rewind; and many of them as one batch.

    session = sdm.Session(model, tokenizer)
    session.add("Once upon a time")
    for piece in session.generate(max_new_tokens=50):
        print(piece.text, end="", flush=True)

Sessions of a model share the rows of its sparse memories: a session owns the rows that it has written, and a fork those
that it has written since. See `sdm.layers.row_pool`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from sdm.files import file_identity, locked
from sdm.layers.row_pool import PooledTable, pooled_tables
from sdm.models.cache import LayerCache, SDMCache
from sdm.models.decoding import Decoding, DecodingOptions, Piece, eos_tokens
from sdm.models.journal import SplitJournal
from sdm.models.session_cache import (
    dense_cache,
    empty_cache,
    fork_layer,
    is_servable,
    layer_nbytes,
    memory_layers,
    pool_tables,
)
from sdm.models.state import MemoryState

LOCK_SECONDS = 10.0
Tokenizer: TypeAlias = PreTrainedTokenizerBase | None

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _plain_tensors(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run without gradients, and make ordinary tensors even within `torch.inference_mode`: they live on behind it."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class SessionMark:
    """A point of a session's stream that `Session.rewind` returns to. It shares rows with the session."""

    length: int
    pending: tuple[int, ...]
    layers: tuple[Any, ...]
    logits: Tensor | None


class Session:
    """One stream of tokens through a model.

    Tokens that are added are read by the model when the next one is generated. Sessions of a model are for one thread.

    Args:
        model: an `sdm.SDMForCausalLM`, or a grafted model (`sdm.graft`).
        tokenizer: of transformers; None takes and gives token ids only.
        state: continue this `sdm.MemoryState` instead of starting anew.
        history: how many of the last tokens `rewind` takes back bit for bit without a mark. It takes memory; see
            docs/serving.md. Sessions of grafted models have marks only.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer = None, *, state: MemoryState | None = None, history: int = 0
    ) -> None:
        if not is_servable(model):
            raise TypeError(f"model must be an sdm.SDMForCausalLM or a grafted model, got {type(model).__name__}")
        if not isinstance(history, int) or history < 0:
            raise ValueError(f"history must be a number of tokens, got {history!r}")
        self.model, self.tokenizer, self.history = model, tokenizer, history
        self.finish_reason: str | None = None
        """Why the last generation ended: "eos", "stop" or "length"; None if it did not end by itself."""
        self._ids: list[int] = []  # the last tokens of the stream, all of them unless it was loaded
        self._pending: list[int] = []  # those that the model has not read
        self._logits: Tensor | None = None  # [V] behind those that it has read
        self._file: tuple[Path, tuple[int, int, int]] | None = None
        self._batch: SessionBatch | None = None
        self._broken = False
        self._marks: list[weakref.ref[SessionMark]] = []
        self._cache = self._start(state)
        self._seen = self._cache.get_seq_length()  # a call that failed on its way does not count
        if state is not None:
            self._ids = list(state.pending)
            self._pending = list(state.pending)

    @_plain_tensors
    def _start(self, state: MemoryState | None) -> Any:
        cache = empty_cache(self.model) if state is None else state.cache(self.model)
        pool_tables(self.model, cache)
        if isinstance(cache, SDMCache):
            cache.origin = None
            if cache.journal is not None:  # its records are of whole tables
                cache.use_journal(None)
            if self.history:
                cache.record(self.history)
        elif self.history:
            raise ValueError("history is not available for grafted models: take marks, which rewind returns to")
        return cache

    # What it holds

    @property
    def length(self) -> int:
        """Tokens of the stream, those included that the model has not read yet."""
        return self._seen + len(self._pending)

    def __len__(self) -> int:
        """Tokens of the stream."""
        return self.length

    @property
    def context_limit(self) -> int | None:
        """The longest stream that the model takes; None: there is no limit."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def nbytes(self) -> int:
        """Bytes of the state that belong to this session alone: rows shared with forks or marks are not counted."""
        return sum(layer_nbytes(layer) for layer in self._cache_now().layers)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of rows that this session has written and shares with its forks or marks."""
        total = 0
        for table in self._tables():
            written, own = table.pool.counts(table.tables[0].number)
            total += (written - own) * table.pool.row_nbytes
        return total

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of sparse memories that the stream has written, and all of them."""
        tables = self._tables()
        written = sum(table.pool.counts(table.tables[0].number)[0] for table in tables)
        return written, sum(table.pool.shape[0] * table.pool.shape[1] for table in tables)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the stream; of a session that was loaded, those since."""
        return list(self._ids)

    def _tables(self) -> list[PooledTable]:
        states = (layer.state for layer in self._cache_now().layers if isinstance(layer, LayerCache))
        return [table for state in states if state is not None for table in pooled_tables(state)]

    def _cache_now(self) -> Any:
        """The session's own cache, taken out of the batch that it may be part of."""
        if self._batch is not None:
            self._batch._unstack()
        return self._cache

    # Adding and generating

    def add(self, text: str | Sequence[int]) -> int:
        """Add text, or token ids, to the stream, and return how many tokens it is.

        Special tokens that begin a text are added at the start of the stream only.

        Raises:
            ValueError: a token is not in the vocabulary, or the stream exceeds the context limit. Nothing is added.
        """
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("text needs a tokenizer, and this session has none: add token ids")
            ids = self.tokenizer(text, add_special_tokens=self.length == 0)["input_ids"]
        else:
            ids = [int(token) for token in text]
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        for token in ids:
            if not 0 <= token < vocabulary:
                raise ValueError(f"tokens must be within 0 ... vocab_size - 1 = {vocabulary - 1}, got {token}")
        self._check_length(len(ids))
        self._ids += ids
        self._pending += ids
        return len(ids)

    def _check_length(self, more: int) -> None:
        limit = self.context_limit
        if limit is not None and self.length + more > limit:
            raise ValueError(
                f"the stream would have {self.length + more} tokens, but the model's context limit "
                f"(max_position_embeddings) is {limit}; it has {self.length} now: add less, or rewind"
            )

    def generate(
        self,
        max_new_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Generate tokens, one at a time. Whoever stops iterating keeps what was generated until then.

        Args:
            max_new_tokens: how many at most. `finish_reason` says afterwards why it ended.
            temperature: 0 takes the likeliest token; otherwise tokens are sampled.
            top_k: sample among so many tokens; 0: among all.
            top_p: sample among the likeliest tokens that make up this probability.
            seed: of the sampling; None draws one.
            stop: strings that end the generation. Their tokens are part of the stream, not of the text.

        Returns:
            An iterator of `Piece(token, text)`.

        Raises:
            ValueError: an option is wrong, the stream is empty, or it would exceed the context limit.
        """
        given = (stop,) if isinstance(stop, str) else tuple(stop)
        decoding = self._decoding(DecodingOptions(max_new_tokens, temperature, top_k, top_p, seed, given))
        return self._generate(decoding)

    def _decoding(self, options: DecodingOptions) -> Decoding:
        if not self._pending and self._logits is None:
            raise ValueError("nothing to continue: add text or tokens first")
        self._check_length(options.max_new_tokens - 1)  # the model does not read the last new token
        self.finish_reason = None
        return Decoding(options, self.tokenizer, eos_tokens(self.model))

    def _generate(self, decoding: Decoding) -> Iterator[Piece]:
        while decoding.reason is None:
            yield self._accept(decoding, self._next_logits())

    def _next_logits(self) -> Tensor:
        """Read what is pending: the logits [V] behind the last token."""
        self._cache_now()
        if self._pending or self._logits is None:
            return self._read(len(self._pending))
        return self._logits

    def _joins_batches(self) -> bool:
        """Whether the next token is one that a batch can read. A grafted model's attention is not batched."""
        return isinstance(self._cache, SDMCache) and len(self._pending) == 1

    def _accept(self, decoding: Decoding, logits: Tensor) -> Piece:
        piece = decoding.accept(logits)
        self._ids.append(piece.token)
        self._pending.append(piece.token)
        self.finish_reason = decoding.reason
        return piece

    @_plain_tensors
    def _read(self, count: int) -> Tensor:
        """Let the model read the first `count` pending tokens: the logits [V] behind them."""
        self._check_whole()
        ids = torch.tensor([self._pending[:count]], device=self.model.device)
        self._broken = True
        output = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._broken = False
        self._seen += count
        del self._pending[:count]
        self._logits = output.logits[0, -1]
        return self._logits

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError("a call of the model failed on its way: rewind this session to a mark, or load it")

    # Forks, marks, files

    @_plain_tensors
    def fork(self) -> Session:
        """Return another session that goes its own way from here. It shares every row until one of them writes it."""
        self._read_all_but_last()
        other = Session(self.model, self.tokenizer, history=self.history)
        other._set(self._fork_layers(), self._seen, self._logits)
        other._ids, other._pending = list(self._ids), list(self._pending)
        return other

    def _read_all_but_last(self) -> None:
        """Read what is pending, so that it is read once for all forks."""
        self._cache_now()
        if len(self._pending) > 1:
            self._read(len(self._pending) - 1)

    def _fork_layers(self) -> tuple[Any, ...]:
        self._check_whole()
        return tuple(fork_layer(layer) for layer in self._cache_now().layers)

    def _set(self, layers: Sequence[Any], length: int, logits: Tensor | None) -> None:
        journal = self._cache.journal if isinstance(self._cache, SDMCache) else None
        self._cache.layers = list(layers)
        if isinstance(self._cache, SDMCache):
            self._cache.use_journal(journal)
        if journal is not None:
            journal.clear()
        self._seen, self._broken, self._logits = length, False, logits

    @_plain_tensors
    def mark(self) -> SessionMark:
        """Name the point of the stream where it is now, for `rewind`.

        A mark is a fork: while it is referred to, rows that the session rewrites are kept for it.
        """
        mark = SessionMark(self.length, tuple(self._pending), self._fork_layers(), self._logits)
        self._marks = [known for known in self._marks if known() is not None] + [weakref.ref(mark)]
        return mark

    @_plain_tensors
    def rewind(self, to: int | SessionMark) -> None:
        """Take tokens back: the last `to` tokens, or those since a mark.

        Going back to a mark restores the state bit for bit. So does a number of tokens that `history` covers. Otherwise
        the tokens from the last mark before, or from the start of the stream, are read again.

        Raises:
            ValueError: the mark is not of this session, or its tokens were taken back; or the stream was loaded and
                does not reach back so far. The session stays as it is.
        """
        if isinstance(to, SessionMark):
            if not any(known() is to for known in self._marks):
                raise ValueError("this mark is of another session, or of tokens that were taken back since")
            self._return_to(to)
            return
        length = self.length
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to <= length:
            raise ValueError(f"rewind takes back 0 ... {length} tokens of this stream, or to a mark; got {to!r}")
        if to == 0:
            return
        self._cache_now()
        target, seen = length - to, self._seen
        kept = len(self._ids) - to  # of the tokens that are known
        if target > seen:
            self._truncate(kept, self._pending[: target - seen])
            return
        # The model reads the last token again for its logits, unless they are known.
        back = seen - max(target - 1, 0)
        if not self._broken and kept > 0 and isinstance(self._cache, SDMCache) and back <= self._cache.rewindable:
            self._cache.crop(-back)
            self._seen, self._logits = self._seen - back, None
            self._truncate(kept, self._ids[kept - 1 : kept])
            return
        nearest = self._mark_before(target, to)
        if not self._broken and target == seen and self._logits is not None:
            self._truncate(kept, [])
            return
        self._read_again_from(nearest, max(kept, 0))

    def _mark_before(self, target: int, back: int) -> SessionMark | None:
        """Return the last mark of the first `target` tokens; None: all tokens are known, and can be read again."""
        marks = [mark for mark in (known() for known in self._marks) if mark is not None and mark.length <= target]
        nearest = max(marks, key=lambda mark: mark.length, default=None)
        if nearest is None and len(self._ids) < self.length:
            raise ValueError(
                f"cannot take back {back} tokens: the stream was loaded, and there is no mark at its first {target} "
                "tokens or before"
            )
        return nearest

    def _read_again_from(self, mark: SessionMark | None, kept: int) -> None:
        """Return to a mark, or to the start, and let the first `kept` known tokens be read from there."""
        again = self._ids[len(self._ids) - self.length + (0 if mark is None else mark.length) : kept]
        if mark is None:
            self._cache = self._start(None)
            self._seen, self._broken, self._logits, self._pending, self._ids = 0, False, None, [], []
        else:
            self._return_to(mark)
        self._ids += again
        self._pending += again
        self._truncate(len(self._ids), self._pending)

    def _return_to(self, mark: SessionMark) -> None:
        length = self.length
        layers = [fork_layer(layer) for layer in mark.layers]
        self._set(layers, mark.length - len(mark.pending), mark.logits)
        self._truncate(len(self._ids) - (length - mark.length), list(mark.pending))

    def _truncate(self, kept: int, pending: list[int]) -> None:
        """Keep so many of the known tokens; marks behind them are void."""
        self._ids, self._pending = self._ids[: max(kept, 0)], list(pending)
        length = self.length
        self._marks = [known for known in self._marks if (mark := known()) is not None and mark.length <= length]

    @_plain_tensors
    def state(self) -> MemoryState:
        """Return the state as an immutable `sdm.MemoryState`, with the tokens that are not read yet."""
        self._check_whole()
        if not self._pending and self.length:  # logits are not part of a state
            self._read_again_from(self._mark_before(self.length - 1, 1), len(self._ids))
            self._read_all_but_last()
        if not isinstance(self._cache_now(), SDMCache):
            self._read_all_but_last()
            if self._seen == 0:
                raise ValueError("a grafted model's session has a state behind its first token: add more, or generate")
        return MemoryState.from_cache(self.model, dense_cache(self.model, self._cache_now()), pending=self._pending)

    def save(self, path: str | PathLike[str], overwrite: bool = False) -> None:
        """Write a state file, which `Session.load` and `sdm generate --state` continue. It is complete or not there.

        Args:
            path: where. A file that this session was loaded from or saved to is replaced.
            overwrite: replace any other file too.

        Raises:
            FileExistsError: the file is not this session's, or another process has saved it since.
        """
        path = Path(path)
        state = self.state()
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            with locked(path.parent) as free:
                if free or time.monotonic() > deadline or not path.parent.is_dir():
                    self._check_file(path, overwrite)
                    state.save(path)
                    self._file = (path.resolve(), file_identity(path))
                    return
            time.sleep(0.05)

    def _check_file(self, path: Path, overwrite: bool) -> None:
        if overwrite or not path.exists():
            return
        if self._file is None or self._file[0] != path.resolve():
            raise FileExistsError(f"{path} exists already: save under another name, or with overwrite=True")
        if self._file[1] != file_identity(path):
            raise FileExistsError(
                f"{path} was saved by another process since this session was loaded or saved: save under another name, "
                "or with overwrite=True"
            )

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: PreTrainedModel, tokenizer: Tokenizer = None, *, history: int = 0
    ) -> Session:
        """Read a session that was saved with this model. Anything else is refused."""
        before = file_identity(Path(path)) if Path(path).is_file() else None
        session = cls(model, tokenizer, state=MemoryState.load(path, model), history=history)
        if before is not None:
            session._file = (Path(path).resolve(), before)
        return session

    @_plain_tensors
    def close(self) -> None:
        """Give back the session's memory now instead of when nobody refers to it."""
        if self._batch is not None:
            self._batch.leave(self)
        pools = [table.pool for table in self._tables()]
        self._cache, self._marks, self._ids, self._pending = DynamicCache(), [], [], []
        self._logits, self._seen = None, 0
        self._broken = True
        for pool in pools:
            pool.collect()

    @staticmethod
    def batch(sessions: Sequence[Session] = (), **options: Any) -> SessionBatch:
        """Return a batch that decodes these sessions together. The options are those of `generate`, for all of them."""
        made = SessionBatch()
        for session in sessions:
            made.join(session, **options)
        return made

    def __repr__(self) -> str:
        return f"Session(tokens={self.length}, nbytes={self.nbytes})"


class SessionBatch:
    """Sessions with different pasts that decode as one batch. They join and leave between tokens.

        batch = sdm.Session.batch([a, b], max_new_tokens=50)
        for session, piece in batch:
            ...                     # batch.join(c) and batch.leave(a) may be called here

    A session that has finished leaves by itself. Tables are not copied when the batch changes, only the small states of
    the other layers.
    """

    def __init__(self) -> None:
        self._decodings: dict[Session, Decoding] = {}
        self._stacked: tuple[Session, ...] = ()
        self._cache: SDMCache | None = None

    def join(self, session: Session, **options: Any) -> None:
        """Let a session take part from the next token on.

        Args:
            session: of the same model as the others.
            options: those of `Session.generate`.
        """
        if session in self._decodings:
            raise ValueError("this session is in the batch already")
        if any(other.model is not session.model for other in self._decodings):
            raise ValueError("the sessions of a batch must have the same model object")
        self._decodings[session] = session._decoding(DecodingOptions(**options))

    def leave(self, session: Session) -> None:
        """Take a session out. It keeps what it has generated."""
        if self._decodings.pop(session, None) is None:
            raise ValueError("this session is not in the batch")
        if session._batch is self:
            self._unstack()
            # Not to keep the tensors of the whole batch alive.
            for layer in session._cache.layers:
                if layer.state is not None:
                    layer.state = layer.state.trimmed().map(torch.clone)

    def __len__(self) -> int:
        return len(self._decodings)

    def __contains__(self, session: Session) -> bool:
        return session in self._decodings

    def __iter__(self) -> Iterator[tuple[Session, Piece]]:
        """Generate until every session has finished."""
        while self._decodings:
            yield from self.step()

    @_plain_tensors
    def step(self) -> list[tuple[Session, Piece]]:
        """Generate one token for every session.

        Sessions that have more than one token to read, and those of grafted models, do so by themselves.
        """
        alone = [session for session in self._decodings if not session._joins_batches()]
        logits = {session: session._next_logits() for session in alone}
        together = tuple(session for session in self._decodings if session not in logits)
        if together:
            logits.update(zip(together, self._read(together), strict=True))
        pieces = []
        for session, decoding in list(self._decodings.items()):
            pieces.append((session, session._accept(decoding, logits[session])))
            if decoding.reason is not None:
                self.leave(session)
        return pieces

    def _read(self, sessions: tuple[Session, ...]) -> Tensor:
        """Read one pending token of each session: logits [S,V]."""
        if sessions != self._stacked:
            self._unstack()
            self._stack(sessions)
        cache, model = self._cache, sessions[0].model
        assert cache is not None
        ids = torch.tensor([session._pending for session in sessions], device=model.device)
        for session in sessions:
            session._check_whole()
            session._broken = True
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        for row, session in enumerate(sessions):
            session._broken = False
            session._seen += 1
            session._pending.clear()
            session._logits = logits[row]
            for layer in session._cache.layers:
                layer.length += 1
        return logits

    def _stack(self, sessions: tuple[Session, ...]) -> None:
        """Make one cache of the caches of sessions that have no batch."""
        for session in sessions:
            session._cache_now()
        model = sessions[0].model
        cache = empty_cache(model)
        assert isinstance(cache, SDMCache)
        mixers = [mixer for _, mixer in memory_layers(model, cache)]
        for place, layer in enumerate(cache.layers):
            mixer = mixers[place]
            states = [session._cache.layers[place].state or mixer.start_state(1) for session in sessions]
            layer.state = states[0].stacked(states[1:])
            layer.length = max(session._seen for session in sessions)
        journals = [session._cache.journal for session in sessions]
        if any(journal is not None for journal in journals):
            cache.use_journal(SplitJournal(len(cache.layers), journals))
        self._cache, self._stacked = cache, sessions
        for session in sessions:
            session._batch = self

    def _unstack(self) -> None:
        """Give every session its state back: views of the batch's tensors."""
        cache, sessions = self._cache, self._stacked
        self._cache, self._stacked = None, ()
        for row, session in enumerate(sessions):
            session._batch = None
            assert cache is not None
            for own, layer in zip(session._cache.layers, cache.layers, strict=True):
                assert layer.state is not None
                own.state = layer.state.map(lambda x, row=row: x[row : row + 1])  # type: ignore[misc]
