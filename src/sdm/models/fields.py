"""Fields of a model with their documentation, read off the classes that declare them.

The configuration for transformers and the command line are both made of this list.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A field as a class declares it."""

    name: str
    type: object
    default: object
    doc: str


@functools.cache
def documented_fields(kind: type, inherited: bool = True) -> tuple[Field, ...]:
    """The fields of a dataclass, those of its bases first. Each must have a default and a line of documentation."""
    bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)] if inherited else [kind]
    documented: dict[str, Field] = {}
    for base in bases:
        hints, docs = inspect.get_annotations(base, eval_str=True), _docs(base)
        for field in dataclasses.fields(base):
            if field.name not in hints:
                continue
            if field.default is dataclasses.MISSING or not docs.get(field.name):
                raise TypeError(f"{base.__name__}.{field.name} must have a default and, below it, a line that says it")
            documented[field.name] = Field(field.name, hints[field.name], field.default, docs[field.name])
    return tuple(documented.values())


def _docs(kind: type) -> dict[str, str]:
    """The string below each field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = typing.cast(ast.ClassDef, tree).body
    docs = {}
    for statement, below in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(below.value.value).split())
    return docs
