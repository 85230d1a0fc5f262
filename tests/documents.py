"""README.md and the pages of docs, and the Python in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parent.parent
README: Final = REPOSITORY / "README.md"
DOCS: Final = REPOSITORY / "docs"
PAGES: Final = (README, *sorted(DOCS.rglob("*.md")))


def text(page: Path) -> str:
    """Of a page."""
    return page.read_text(encoding="utf-8")


def python_blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The line on which each block of Python begins, and its text; but for those after a line ``<!-- not run: why -->``."""
    for found in re.finditer(r"(^<!-- not run: [^\n]+ -->\n+)?^```python\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL):
        if not found[1]:
            yield text(page).count("\n", 0, found.start(2)) + 1, found[2]


def script_name(block: str) -> str:
    """``train.py`` of a block that begins with ``# train.py: how to run it``: a whole program. Else empty."""
    found = re.match(r"# ([\w.]+\.py): ", block)
    return found[1] if found else ""


def script(name: str) -> str:
    """The only block of that name."""
    found = [block for page in PAGES for _, block in python_blocks(page) if script_name(block) == name]
    assert len(found) == 1, f"{len(found)} blocks begin with '# {name}: '"
    return found[0]


def commands(page: Path) -> set[str]:
    """Calls of ``tsck`` in a page, without the name of the program: lines of blocks, and what is quoted in the text."""
    lines = {re.split(r"  |#", command)[0].strip() for command in re.findall(r"^ *tsck (.+)$", text(page), re.MULTILINE)}
    quoted = {command for command in re.findall(r"`tsck ([^`]+)`", text(page)) if not re.search(r"[\[\]|]", command)}
    return lines | quoted
