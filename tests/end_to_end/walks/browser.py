"""The same user in a real Chromium, on the pages whose URL `tsck ui` prints in the terminal."""

import re
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Self

from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.walks.walk import Said, Walk

_URL: Final = re.compile(r"^(http://127\.0\.0\.1:\S+)  \(Ctrl-C ends it\)$", re.MULTILINE)


class Browser:
    """A window at the URL that a `tsck ui` prints. A context manager: leaving it ends the command with Ctrl-C.

    Fails if a page logs an error, or if the command prints anything but its URL and `warnings`.
    """

    def __init__(self, walk: Walk, chromium: Any, line: str) -> None:
        self.page: Any = None
        self._walk, self._chromium, self._line = walk, chromium, f"{line} --no-browser"
        self._problems: list[str] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        terminal = self._walk.terminal
        terminal.begin(self._line)
        terminal.until(lambda: _URL.search(terminal.screen()))
        with ExitStack() as opening:
            context = self._chromium.new_context()
            opening.callback(context.close)
            self.page = context.new_page()
            self.page.set_default_timeout(PATIENCE_SECONDS * 1000)
            self.page.on("console", lambda message: self._problems.append(message.text) if message.type == "error" else None)
            self.page.on("pageerror", lambda error: self._problems.append(str(error)))
            self.page.goto(_URL.findall(terminal.screen())[0])
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()
        self._walk.terminal.press("C-c")
        ended = self._walk.read_on(self._line)
        assert self._problems == []
        assert _URL.sub("", ended.text).strip() in ("", "^C"), ended

    def follow(self, name: str) -> None:
        """Clicks on a link."""
        self._click(self.page.get_by_role("link", name=name, exact=True))

    def press(self, name: str) -> None:
        """Clicks on a button."""
        self._click(self.page.get_by_role("button", name=name, exact=True))

    def choose(self, name: str) -> None:
        """Clicks on a box or a circle of a table."""
        self._click(self.page.get_by_label(name, exact=True))

    def write(self, label: str, text: str) -> None:
        """Types into a field, and Enter."""
        self.page.get_by_label(label).fill(text)
        self.page.keyboard.press("Enter")

    def see(self, selector: str) -> str:
        """Waits until it is to be seen; its text."""
        self.page.locator(selector).first.wait_for()
        return str(self.page.locator(selector).first.inner_text())

    def commands(self, title: str) -> Said:
        """What is in the block of code with this title: to follow as what a terminal prints."""
        block = self.see(f"figure.code:has(figcaption:has-text({title!r})) pre")
        return self._walk.read(f"`{block}`", self.page.url)

    def _click(self, found: Any) -> None:
        self._walk.clicks += 1
        found.first.click()
