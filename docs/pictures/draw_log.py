"""Draws tsck-log.svg, what `tsck log` prints after the quickstart's train.py: `python docs/pictures/draw_log.py`."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart.md"
COMMAND = "tsck log runs/first -s ckpt"
COLUMN, LINE, MARGIN = 8.43, 20, 16
BOLD = ' font-weight="600"'


def printed(folder: Path) -> list[str]:
    """The lines of the command in a folder where train.py ran."""
    script = re.search(r"^```python\n(# train\.py: .*?)^```$", QUICKSTART.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert script
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "TSCK_CACHE_DIR": str(folder / "cache"), "COLUMNS": "100"}

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    run("-c", script[1])
    return run("-m", "tensorstore_ck", *COMMAND.split()[1:]).splitlines()


def terminal(command: str, lines: list[str]) -> str:
    """An SVG of a command and its output."""
    shown = [f"$ {command}", *(line.rstrip() for line in lines)]
    width, height = round(2 * MARGIN + COLUMN * max(map(len, shown))), 2 * MARGIN + LINE * len(shown)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
    head += f'font-family="ui-monospace, monospace" font-size="14" fill="#d7dce2">\n<title>{escape(command)}</title>\n'
    head += f'<rect width="{width}" height="{height}" rx="8" fill="#1b2330"/>\n'
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * at + 14}" xml:space="preserve" textLength="{COLUMN * len(line):.1f}"'
        f"{BOLD if at < 2 else ''}>{escape(line)}</text>"
        for at, line in enumerate(shown)
    ]
    return head + "\n".join(rows) + "\n</svg>\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (HERE / "tsck-log.svg").write_text(terminal(COMMAND, printed(Path(folder))), encoding="utf-8")
