"""Make the site out of pages that are written for a reader on the code host.

Pages link to files of the repository that are not in docs/. The site has a page for each of them: Markdown files as
they are, other files as a listing. So no link leaves the site, and it works without a network.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
# Pages of the repository's top folder that the navigation names.
TOP = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "readme.md"}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^```.*?^```$|^~~~.*?^~~~$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml", ".sh": "sh", ".h": "cpp", ".cpp": "cpp"}


def site_path(path: str) -> str | None:
    """Return where a file of the repository is in the site, or None for a folder and what is not there."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if not (ROOT / path).is_file():
        return None
    if path in TOP:
        return TOP[path]
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def links(path: str, text: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    for part in CODE.split(text)[::2]:
        for match in LINK.finditer(part):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))


def listing(path: str) -> str:
    """Return a page that shows a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside of docs/ that pages link to, and for what those link to."""
    waiting = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()] + list(TOP)
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        target = site_path(path)
        if path in seen or target is None:
            continue
        seen.add(path)
        if not path.startswith(f"{DOCS}/"):
            files.append(File.generated(config, target, content=listing(path)))
        if path.endswith(".md") and (ROOT / path).is_file():
            waiting += links(path, (ROOT / path).read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links point at pages of the site, those to folders at the page itself. Fences lose marks of the tests."""
    markdown = markdown.replace("```python notest\n", "```python\n")
    here = page.file.src_uri
    top = next((name for name, target in TOP.items() if target == here), None)
    path = top or (here.removeprefix("source/") if here.startswith("source/") else f"{DOCS}/{here}")
    if here.startswith("source/") and not (ROOT / path).is_file():
        return markdown  # the listing of a file that is no Markdown

    def resolved(match: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        target = site_path(wanted)
        if target is None:
            if (ROOT / wanted).is_dir():
                return match[1] + posixpath.relpath(here, posixpath.dirname(here) or ".") + match[4]
            return match[0]  # mkdocs says that it leads nowhere
        return match[1] + os.path.relpath(target, posixpath.dirname(here) or ".") + (match[3] or "") + match[4]

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(resolved, part) for part in parts[::2]]
    return "".join(parts)
