"""Answers from the text of a prompt alone: what a model that reads everything would say.

A prompt that the oracle cannot answer has no answer, or more than one. Questions of files are in free language; the
oracle answers those that are made from templates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

_TRACK, _LIST = "Memorize and track the chain(s)", "Below is a numbered list of words."
_DOTS = re.compile(r"\.+")


def answer(prompt: str) -> str:
    """In the form in which the task's worked example, if it has one, is answered."""
    for begins, oracle in _ORACLES.items():
        if prompt.startswith(begins):
            return oracle(prompt)
    raise ValueError(f"this is no prompt of a RULER task: {prompt[:60]!r} ...")


def _needles(prompt: str) -> str:
    question = prompt[prompt.rindex("\nWhat ") :]
    kind, query = _match(r"the special magic (\w+?)s? for (.+) mentioned in the provided text\?", question)
    keys = re.split(r", and |, ", query)
    hidden = re.findall(rf"One of the special magic {kind}s for (\S+) is: (\S+)\.(?=\s)", prompt)
    return ", ".join(value for key in keys for name, value in hidden if name == key)


def _variables(prompt: str) -> str:
    prompt = prompt[prompt.rindex(_TRACK) :]  # what stands before is the worked example
    (wanted,) = _match(r"assigned the value (\d+) in the text above", prompt)
    values: dict[str, str] = {}
    for name, assigned in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)", prompt, re.MULTILINE):
        values[name] = values.get(assigned, assigned)
    return " ".join(name for name, value in values.items() if value == wanted)


def _common(prompt: str) -> str:
    listed = prompt[prompt.rindex(_LIST) :].split("\n")[1]
    words = Counter(re.findall(r"\d+\. (\S+)", listed)).most_common(10)
    return " ".join(f"{number}. {word}" for number, (word, _) in enumerate(words, 1))


def _frequent(prompt: str) -> str:
    coded = prompt.split("\n")[0].split("coded words. ", 1)[1]
    words = Counter(word for word in coded.split() if not _DOTS.fullmatch(word)).most_common(3)
    return " ".join(word for word, _ in words)


def _documents(prompt: str) -> str:
    question = prompt[prompt.rindex("\nQuestion: ") :]
    if " born?" in question:
        (building,) = _match(r"the founder of (.+) born\?", question)
        (founder,) = _match(rf"(?i:{re.escape(building)}) was founded by (.+?) in \d+\.", prompt)
        return _match(rf"{re.escape(founder)} was a \w+ who was born in (\w+) in", prompt)[0]
    (building,) = _match(r"Who founded (.+)\?", question)
    return _match(rf"(?i:{re.escape(building)}) was founded by (.+?) in \d+\.", prompt)[0]


def _match(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the text says nothing of {pattern!r}")
    return found.groups()


# By how a prompt begins.
_ORACLES: dict[str, Callable[[str], str]] = {
    "A special magic": _needles,
    "Some special magic": _needles,
    _TRACK: _variables,
    _LIST: _common,
    "Read the following coded text": _frequent,
    "Answer the question based on the given documents.": _documents,
}
