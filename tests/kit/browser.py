"""A headless Chromium, driven over a pipe by its DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_S = 240.0


class NavigatedError(Exception):
    """The page was left while an expression was evaluated in it."""


class Browser:
    """One page of a browser. `console` has what it has logged, and every error of a script or a policy."""

    def __init__(self, send, receive):
        self._send, self._receive, self._rest, self._number = send, receive, b"", 0
        self.console = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url, headers=None):
        self._call("Network.setExtraHTTPHeaders", headers=headers or {})
        self._call("Page.navigate", url=str(url))
        # For a moment after the navigation the document of the new address is an empty one.
        self.until(
            f"location.href === {json.dumps(str(url))} && document.readyState === 'complete'"
            " && (location.href === 'about:blank' || document.body?.childElementCount > 0)"
        )

    def look(self, width, height=900, *, dark=False):
        """Set the size of the window, and light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        value = "dark" if dark else "light"
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def scripts(self, *, on):
        self._call("Emulation.setScriptExecutionDisabled", value=not on)

    def value(self, expression):
        """Return the JSON value of an expression of JavaScript."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression):
        """Wait until an expression is true and has no error; return its value."""
        deadline, tried = (
            time.monotonic() + LIMIT_S,
            f"(() => {{ try {{ return {expression}; }} catch {{}} }})()",
        )
        value = None
        while not value:
            assert time.monotonic() < deadline, f"never true: {expression}; {self.console}"
            with suppress(NavigatedError):  # a page loads itself anew when it gets another part
                value = self.value(tried)
            if not value:
                time.sleep(0.1)
        return value

    def picture(self, path, selector=None, *, quality=80):
        """Write a picture in WebP of the whole page, or of one element."""
        options = {"format": "webp", "quality": quality, "captureBeyondViewport": True}
        if selector is not None:
            place = self.value(
                f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                " return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}; })()"
            )
            options["clip"] = {**place, "scale": 1}
        Path(path).write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **options)["data"]))

    def _call(self, method, **values):
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self._next(deadline - time.monotonic())
            if found.get("id") == self._number:
                if "navigated" in found.get("error", {}).get("message", ""):
                    raise NavigatedError(method)
                assert "error" not in found, (method, found["error"])
                return found["result"]

    def _next(self, limit_s):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, limit_s))
            assert ready, "the browser does not answer"
            data = os.read(self._receive, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(text)
        values = found.get("params", {})
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(str(values["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(str(values["args"]))
            case "Log.entryAdded":
                self.console.append(values["entry"]["text"])
        return found


@contextmanager
def browser(folder):
    """Start a browser whose files are in `folder`; it ends with the block."""
    to_browser, ours = os.pipe()
    mine, from_browser = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    options += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}"]
    # The browser reads at descriptor 3 and writes to 4.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', PATH, *options]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(to_browser, from_browser),
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(ours, mine)
    finally:
        os.close(ours)
        os.close(mine)
        try:
            process.wait(20)  # it ends when its pipe is closed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(20)
