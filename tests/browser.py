"""A real browser for tests: headless Chromium, driven by its own chromedriver over plain HTTP.

The WebDriver protocol is JSON over HTTP, which Python's library speaks: selenium would add a dozen packages for what is
below. Debian and Ubuntu have both programs (`apt-get install chromium chromium-driver`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-default-apps", "--disable-extensions", "--force-color-profile=srgb"),
)
SECONDS = 240  # a machine may be busy
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # what is here is not behind a proxy


def missing() -> str:
    """Which of the programs is not there; empty if both are."""
    needed = {"Chromium": any(map(shutil.which, PROGRAMS)), "chromedriver": shutil.which("chromedriver")}
    absent = [name for name, found in needed.items() if not found]
    return f"{' and '.join(absent)} not installed (apt-get install chromium chromium-driver)" if absent else ""


class Browser:
    """One tab."""

    def __init__(self, address: str, profile: Path) -> None:
        self._address = address
        options = {
            "binary": next(filter(None, map(shutil.which, PROGRAMS))),
            "args": [*FLAGS, f"--user-data-dir={profile}"],
        }
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        made = self._call("", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/{made['sessionId']}"
        self.command("Emulation.setFocusEmulationEnabled", enabled=True)  # a window without a screen has no focus

    def _call(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}/session{path}", data, method=method)
        try:
            with _opener.open(request, timeout=SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path or 'session'}: {json.load(error)['value']['message']}") from None

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._call(f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def show_as(self, width: int, dark: bool = False, media: str = "") -> None:
        """As a screen of so many pixels, or with `media` as paper."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, path: Path) -> None:
        self.log("browser"), self.log("performance")
        self._call(f"{self._session}/url", {"url": path.absolute().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns."""
        return self._call(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since the last call."""
        return self._call(f"{self._session}/se/log", {"type": kind})

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for, without those that hold their data themselves."""
        found = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        sent = [one["params"]["request"]["url"] for one in found if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """The whole page, however long."""
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def print(self, path: Path) -> int:
        """A PDF. Returns how many pages it has."""
        data = base64.b64decode(self._call(f"{self._session}/print", {"page": {"width": 21.0, "height": 29.7}}))
        path.write_bytes(data)
        return len(re.findall(rb"/Type\s*/Page\b", data))

    def close(self) -> None:
        self._call(self._session, None, "DELETE")


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its profile and its log in a folder."""
    log = folder / "chromedriver.log"
    with subprocess.Popen(
        ["chromedriver", "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            port = next(
                (found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line))), None
            )
            assert port, f"chromedriver did not start; see {log}"
            tab = Browser(f"http://127.0.0.1:{port}", folder / "profile")
            try:
                yield tab
            finally:
                tab.close()
        finally:
            driver.terminate()
