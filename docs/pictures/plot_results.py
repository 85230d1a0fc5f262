"""Draws the plots of docs/benchmarks.md from the tables of benches/RESULTS.md: `python docs/pictures/plot_results.py`."""

import re
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
RESULTS = (HERE.parent.parent / "benches" / "RESULTS.md").read_text(encoding="utf-8")
WIDTH, LEFT, ROW = 800, 370, 26
OURS, THEIRS = "#3f51b5", "#a9b4c2"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its first two lines."""
    lines = RESULTS.split(f"\n## {heading}")[1].split("\n## ")[0].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    table = lines[first + 1 : next((n for n in range(first, len(lines)) if not lines[n].startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]


def number(cell: str) -> float:
    """The first number in a cell, such as 0.670 in ``**0.670, missed**``."""
    found = re.search(r"\d+(\.\d+)?", cell)
    assert found, cell
    return float(found.group())


def bars(title: str, values: list[tuple[str, float, bool]], unit: str) -> str:
    """An SVG with a bar for each (label, value, whether it is of this project)."""
    most, height = max(value for _, value, _ in values), 60 + ROW * len(values)
    drawn = [f'<text x="12" y="26" font-size="15" font-weight="600">{escape(title)}</text>']
    for at, (label, value, own) in enumerate(values):
        y, width = 44 + ROW * at, round((WIDTH - LEFT - 110) * value / most, 1)
        drawn += [
            f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width}" height="18" fill="{OURS if own else THEIRS}"/>',
            f'<text x="{LEFT + width + 8}" y="{y + 14}">{value:g} {escape(unit)}</text>',
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
    head += f'font-family="system-ui, sans-serif" font-size="13" fill="#1b2a41">\n<title>{escape(title)}</title>\n'
    return f'{head}<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(drawn) + "\n</svg>\n"


def plots() -> dict[str, str]:
    """The text of each file."""
    speeds = [(row[0].replace("*", ""), number(row[1]), "tsck" in row[0]) for row in rows("Save and restore beside peers (2026-11-21)")]
    sizes = rows("What snapshots cost (2026-11-22)")
    training, lora = sizes[0], sizes[2]
    tools = ["tsck small", "ZipNN", "blosc2", "zstd -1", "restic", "borg"]
    stored = [(f"{tool}: {run}", number(cell), tool == "tsck small") for run, row in (("pre-training", training), ("LoRA", lora))
              for tool, cell in zip(tools, row[2:], strict=True)]  # fmt: skip
    return {
        "speed.svg": bars("Save and restore of 1 GiB on a local disk, GB/s (higher is better)", speeds, "GB/s"),
        "stored.svg": bars("Bytes stored for each later snapshot, as a share of its size (lower is better)", stored, ""),
    }


if __name__ == "__main__":
    for name, text in plots().items():
        (HERE / name).write_text(text, encoding="utf-8")
