# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its own driver through the WebDriver protocol.

Both are packages of the operating system (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

MISSING = "needs Chromium and its driver (Debian: chromium, chromium-driver)"
_START_S = 60


def find_chromium() -> tuple[str, str] | None:
    """Paths of the browser and of its driver; None if one of them is missing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    browser = browser or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


class Browser:
    """A browser with one window; a context manager.

    Args:
        width, height: of the window, in pixels.
    """

    def __init__(self, width: int = 1180, height: int = 1500) -> None:
        found = find_chromium()
        if found is None:
            raise RuntimeError(MISSING)
        self._size = width, height
        self._binary, driver = found
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._session = ""

    def __enter__(self) -> Self:
        options = {
            "binary": self._binary,
            "args": ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--hide-scrollbars", "--window-size={},{}".format(*self._size)],
        }  # fmt: skip
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        deadline = time.monotonic() + _START_S
        while not self._session:
            try:
                body = {"capabilities": {"alwaysMatch": wanted}}
                self._session = self._post("/session", body)["sessionId"]
            except (URLError, ConnectionError) as error:
                if isinstance(error, HTTPError) or time.monotonic() > deadline:
                    self._driver.kill()
                    raise
                time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            request = Request(f"{self._url}/session/{self._session}", method="DELETE")
            urlopen(request, timeout=30).read()
        finally:
            self._driver.terminate()
            self._driver.wait(30)

    def open(self, url: str) -> None:
        """Load a page."""
        self._post(f"/session/{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a script in the page, and return what it returns."""
        body = {"script": script, "args": []}
        return self._post(f"/session/{self._session}/execute/sync", body)

    def errors(self) -> list[str]:
        """What the page has logged as an error, refused scripts included."""
        log = self._post(f"/session/{self._session}/se/log", {"type": "browser"})
        severe = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
        return [message for message in severe if "favicon" not in message]

    def screenshot(self, path: Path) -> None:
        """Write the window as a PNG."""
        with urlopen(f"{self._url}/session/{self._session}/screenshot", timeout=60) as answer:
            path.write_bytes(base64.b64decode(json.loads(answer.read())["value"]))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
