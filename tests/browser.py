"""Open a page in headless Chromium, and look at its requests, errors and appearance.

This speaks the DevTools protocol over the browser's pipe, so that only Chromium is needed.
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
    """One tab. `events` holds what the page has reported since it was opened."""

    def __init__(self, write_pipe, read_pipe):
        self._write_pipe, self._read_pipe, self._buffer = write_pipe, read_pipe, b""
        self._last_id, self.events, self._session = 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._read_pipe, 65536)
            assert chunk, "the browser has exited"
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_pipe, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._message()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, reply
                return reply["result"]
            self.events.append((reply["method"], reply.get("params", {})))

    def open(self, path, width, height=844, scheme="light"):
        """Load a file in a window of this width, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            event = self._message()
            self.events.append((event["method"], event.get("params", {})))

    def evaluate(self, script):
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def requests(self):
        return [p["request"]["url"] for m, p in self.events if m == "Network.requestWillBeSent"]

    def errors(self):
        """Exceptions, console output and log entries."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [p for m, p in self.events if m in methods]

    def screenshot(self, path):
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        Path(path).write_bytes(base64.b64decode(reply["data"]))


@contextmanager
def browser():
    """A browser with a temporary profile."""
    read_end, write_pipe = os.pipe()
    read_pipe, write_end = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--remote-debugging-pipe --disable-extensions --disable-background-networking"
        )
        # Chromium reads the protocol from descriptor 3 and writes to descriptor 4.
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
            yield Browser(write_pipe, read_pipe)
        finally:
            os.close(write_pipe)
            os.close(read_pipe)
            process.terminate()
            process.wait(timeout=20)
