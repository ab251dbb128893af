"""Fetch a source distribution without building it; a child process: `python -I fetch_sdist.py NAME VERSION FOLDER`.

`pip download` runs a package's build backend to learn its metadata, which executes the package's code. This script
uses pip's own index client and settings (indexes, links, certificates, proxies, credentials), and stops after the
download. pip's classes are not a public interface, so nothing else of this package imports them.

Prints one line of JSON: {"file": NAME} or {"error": TEXT}.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path


def fetch(name: str, version: str, folder: str) -> dict[str, str]:
    """Fetch one source distribution into a folder."""
    from pip._internal.commands import create_command
    from pip._internal.network.download import Downloader
    from pip._vendor.packaging.specifiers import SpecifierSet
    from pip._vendor.packaging.version import Version

    command = create_command("download")
    wanted = f"{name}=={version}"
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "--progress-bar", "off", wanted])
    with command.main_context():
        session = command.get_default_session(options)  # type: ignore[attr-defined]
        finder = command._build_package_finder(  # type: ignore[attr-defined]
            options=options, session=session, ignore_requires_python=True
        )
        # Prereleases can be pinned like any other version.
        best = finder.find_best_candidate(name, SpecifierSet(f"=={version}", prereleases=True)).best_candidate
        if best is None:
            versions = sorted({candidate.version for candidate in finder.find_all_candidates(name)}, reverse=True)
            if Version(version) in versions or not versions:
                return {"error": "no index that pip uses has a source distribution of it, or none can be reached"}
            listed = ", ".join(str(known) for known in versions[:5])
            return {"error": f"there is no source distribution of this version; the newest are {listed}"}
        if best.link.is_file:
            return {"file": Path(shutil.copy(best.link.file_path, folder)).name}
        path, _ = Downloader(session, "off")(best.link, folder)
        return {"file": Path(path).name}


def main() -> None:
    """Print the outcome; errors of pip are part of it."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pip._internal.index.collector").setLevel(logging.DEBUG)  # where indexes that fail are named
    try:
        outcome = fetch(*sys.argv[1:])
    except ImportError as error:
        outcome = {"error": f"it needs pip, of a version whose index client can be used here: {error}"}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
