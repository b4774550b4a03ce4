"""A page in headless Chromium: what it asks for, what it complains of, and how it looks.

Speaks the DevTools protocol over the browser's own pipe, so that nothing but Chromium is needed.
"""

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)  # fmt: skip  # noqa: E501


class Browser:
    """One tab. `events` are all that the page has reported so far."""

    def __init__(self, to, back):
        self._to, self._back, self._rest = to, back, b""
        self._number, self.events, self._session = 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self):
        while b"\0" not in self._rest:
            chunk = os.read(self._back, 65536)
            assert chunk, "the browser has gone"
            self._rest += chunk
        text, self._rest = self._rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self.events.append((found["method"], found.get("params", {})))

    def open(self, path, width, height=844, scheme="light"):
        """Load a file at some width, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            found = self._message()
            self.events.append((found["method"], found.get("params", {})))

    def evaluate(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def requests(self):
        return [p["request"]["url"] for m, p in self.events if m == "Network.requestWillBeSent"]

    def complaints(self):
        wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [p for m, p in self.events if m in wrong]

    def screenshot(self, path):
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        Path(path).write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser():
    """A browser that has no network and leaves nothing behind."""
    read_end, to = os.pipe()
    back, write_end = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--remote-debugging-pipe --disable-extensions --disable-background-networking"
        )
        # The protocol is spoken over descriptors 3 and 4.
        command = f"exec {CHROMIUM} {options} --user-data-dir={profile} 3<&{read_end} 4>&{write_end}"  # fmt: skip  # noqa: E501
        process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        try:
            yield Browser(to, back)
        finally:
            os.close(to)
            os.close(back)
            process.terminate()
            process.wait(timeout=20)
