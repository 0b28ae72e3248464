"""Debian's Chromium without a window, as a person's eyes and fingers."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

from tests.multiprocess.processes import wait_until
from tests.ports import free_port

_CHROMIUM = shutil.which("chromium")
_DRIVER = shutil.which("chromedriver")
#: Nothing that a browser would tell its makers, and no more processes than it takes.
_QUIET = (
    "--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-default-apps", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


@dataclass
class Browser:
    """A page in Chromium.

    Attributes:
        driver: selenium's.
    """

    driver: webdriver.Chrome

    def open(
        self, address: str, *, width: int = 1280, dark: bool = False, still: bool = True
    ) -> None:
        """Load a page anew, and wait until it shows a job."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        wanted = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        media = [{"name": name, "value": value} for name, value in wanted.items()]
        self.tell("Emulation.setEmulatedMedia", features=media)
        self.driver.get("about:blank")  # else another #fragment is the same page
        self.driver.get(address)
        self.wait("return document.querySelector('main .tiles, main .note')", "a job")

    def tell(self, command: str, **arguments: Any) -> Any:
        """A command of Chromium's own."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, what: str) -> Any:
        """Wait until a script returns something true."""
        return wait_until(lambda: self.run(script), what)

    def text(self, selector: str = "body") -> str:
        """What is read there; nothing where that is not there."""
        script = "const one = document.querySelector(arguments[0]);"
        return str(self.run(f"{script} return one?.innerText ?? one?.textContent ?? ''", selector))

    def sees(self, words: str, selector: str = "body") -> None:
        """Wait until words are there."""
        wait_until(lambda: words in self.text(selector), f"{words!r} in {selector}")

    def press(self, *keys: str) -> None:
        """Type, to what has the focus."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        found = [
            json.loads(one["message"])["message"] for one in self.driver.get_log("performance")
        ]
        sent = [one["params"] for one in found if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def complaints(self) -> list[str]:
        """What the console has said since the last call."""
        return [one["message"] for one in self.driver.get_log("browser")]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with nothing in it; a test is skipped where there is none that works."""
    if _CHROMIUM is None or _DRIVER is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = _CHROMIUM
    for one in (*_QUIET, f"--user-data-dir={profile}"):
        options.add_argument(one)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which does not work for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(_DRIVER, port=free_port()))
    except WebDriverException as error:  # it has no sandbox here, or is not the driver's
        pytest.skip(f"Chromium does not start here: {error.msg}")
    try:
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()


TAB = Keys.TAB
ENTER = Keys.ENTER
SPACE = Keys.SPACE
RIGHT = Keys.ARROW_RIGHT
