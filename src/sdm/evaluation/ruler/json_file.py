"""Reading a JSON file of somebody else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sdm.data.errors import DataError
from sdm.files import open_regular

LARGEST = 2**30  # bytes; HotpotQA's file of the development set is a twentieth of that


def read_json_file(path: Path) -> Any:
    """Whatever value the file holds; what is wrong with it names the file and the line."""
    try:
        with open_regular(path) as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(data) > LARGEST:
        raise DataError(f"{path} is larger than {LARGEST} bytes")
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: it is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: it is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply") from error


def plain_text(text: str, where: str) -> str:
    """The text, if it is one: JSON can escape halves of characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds what is not text: {error}") from error
    return text
