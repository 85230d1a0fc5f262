"""Prints what commands return: aligned tables for people, one JSON document for programs.

Text from a store is untrusted: control characters are escaped before they reach a terminal. click removes the colours if stdout is no
terminal.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import click

from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.errors import StoreError
from tensorstore_ck.redaction import one_line, redacted

if TYPE_CHECKING:
    from tensorstore_ck.catalog import FoundSnapshot
    from tensorstore_ck.log.snapshot import Snapshot
    from tensorstore_ck.maintenance.forget import Forgotten

_COLOURS: Final = re.compile("(" + "|".join(re.escape(code) for code in ("\x1b[0m", "\x1b[1m", "\x1b[31m", "\x1b[32m")) + ")")
"""The codes of `bold`, `red`, `green`, and of their end."""
_NOT_ASCII: Final = re.compile(r"[^\n\x20-\x7e]")
MAX_SHOWN: Final = 40
"""Rows of a long table that are printed."""
_MOST_METRICS: Final = 2000
"""Characters for the metrics of a snapshot where no terminal limits them."""
_LEAST_METRICS: Final = 4
"""Characters for the metrics of a snapshot, even on a narrow terminal."""


def emit(document: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Prints a command's result, as text or as JSON."""
    if as_json:
        for piece in _json_pieces(document):
            click.echo(_escaped(piece), nl=False)
        click.echo()
    else:
        for line in lines:
            say(line)


def _json_pieces(document: object) -> Iterator[str]:
    """The JSON of a document, an item of it at a time: thousands of names may lead to one snapshot."""
    if not isinstance(document, Mapping) or not document:
        yield json.dumps(_plain(document), indent=2, ensure_ascii=False)
        return
    before = "{\n  "
    for key, item in document.items():
        text = json.dumps(_plain(item), indent=2, ensure_ascii=False).replace("\n", "\n  ")
        yield f"{before}{json.dumps(str(key), ensure_ascii=False)}: {text}"
        before = ",\n  "
    yield "\n}"


def say(line: str, *, err: bool = False) -> None:
    """Prints one line of text: see `shown`."""
    click.echo(shown(line), err=err)


def shown(line: str) -> str:
    """A line as it is printed: without secrets of URLs, and only our own colours act on a terminal."""
    parts = _COLOURS.split(redacted(line))
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def emit_line(document: object) -> None:
    """Prints a document on one line, for a command that prints one after another."""
    click.echo(_escaped(json.dumps(_plain(document), ensure_ascii=False)))


def emit_words(text: str) -> None:
    """Prints what a shell completes words with, in the form that the shell reads."""
    click.echo(text, nl=False)


def clear_line() -> None:
    """Removes the progress bar that may be on the terminal's last line; the next report draws it again."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        click.echo("\r\x1b[K", nl=False, err=True)


def _escaped(document: str) -> str:
    """JSON without control characters."""
    return _NOT_ASCII.sub(lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], document).replace(
        "\x7f", "\\u007f"
    )


def short_root(root: str | None) -> str:
    """The first digits of a root."""
    return root[:SHOWN_ROOT_DIGITS] if root else "-"


def step_text(step: int | None) -> str:
    """A step in a table."""
    return "-" if step is None else str(step)


def short_number(value: float | str, digits: int = 6) -> str:
    """A metric, in at most `digits` digits; or an attribute, which may be a text."""
    return printable(value) if isinstance(value, str) else f"{value:.{digits}g}"


def counted(count: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``, ``2 entries``, ``2 branches``."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("ry") else noun + ("es" if noun.endswith("ch") else "s")
    return f"{count:,} {noun}"


def none_text(what: str, made_by: str, forgotten: "Sequence[Forgotten]", kind: str) -> str:
    """The line for an empty list: which command makes a first item, or restores removed refs of that kind."""
    removed = len({removal.ref for removal in forgotten if removal.kind == kind})
    if not removed:
        return f"no {what} yet: {made_by} makes one"
    return f"no {what}: {counted(removed, kind)} forgotten; `tsck forget` lists what can be brought back, `tsck undo REF` does it"


def first_names(names: Sequence[str]) -> str:
    """The first five of them."""
    return ", ".join(map(printable, names[:5])) + (", ..." if len(names) > 5 else "")


def printable(text: object) -> str:
    """`text` with control characters escaped, on one line."""
    return one_line(str(text))


def metrics_text(metrics: Mapping[str, float | str], width: int | None = None) -> str:
    """``name=number``, sorted by name. If they do not fit into `width`, numbers get fewer digits, losses come first, and the rest is
    counted.
    """
    texts = (" ".join(_metric_words(metrics, digits).values()) for digits in (6, 3, 2))
    if width is None:
        return next(texts)
    fitting = next((text for text in texts if len(text) <= width), None)
    if fitting is not None:
        return fitting
    text, words = "", _metric_words(metrics, 3)
    for shown, name in enumerate(sorted(words, key=lambda name: ("loss" not in name, name))):
        rest = f"+{len(words) - shown}"
        if len(text) + len(words[name]) + 1 + len(rest) > width:
            return text + rest
        text += f"{words[name]} "
    return text


def _metric_words(metrics: Mapping[str, float | str], digits: int) -> dict[str, str]:
    return {name: f"{printable(name)}={short_number(value, digits)}" for name, value in sorted(metrics.items())}


def mark_text(snapshot: "Snapshot | FoundSnapshot") -> str:
    """``bad: reason``, or nothing."""
    return ": ".join(printable(text) for text in (snapshot.mark, snapshot.reason) if text) if snapshot.mark else ""


def red(text: str) -> str:
    """For errors."""
    return click.style(text, fg="red")


def green(text: str) -> str:
    """For success."""
    return click.style(text, fg="green")


def bold(text: str) -> str:
    """For headings."""
    return click.style(text, bold=True)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Set[str] = frozenset(), styles: Sequence[Callable[[str], str]] = ()
) -> list[str]:
    """Aligned columns under a heading, without empty columns; those in `right` are right-aligned.

    `styles` colours whole rows.
    """
    kept = [at for at, title in enumerate(header) if not rows or any(row[at] for row in rows) or at == 0]
    widths = {at: max(len(header[at]), *(len(row[at]) for row in rows), 0) for at in kept}

    def line(cells: Sequence[str]) -> str:
        padded = (cells[at].rjust(widths[at]) if header[at] in right else cells[at].ljust(widths[at]) for at in kept)
        return "  ".join(padded).rstrip()

    body = [line(row) for row in rows]
    return [bold(line(header)), *(style(text) for style, text in zip(styles, body, strict=True))] if styles else [bold(line(header)), *body]


def shortened_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Set[str] = frozenset(), limit: int = MAX_SHOWN, rest: str = "more"
) -> list[str]:
    """The first rows of a table, indented, and how many more there are."""
    more = [f"... and {len(rows) - limit:,} {rest}"] if len(rows) > limit else []
    return indented([*table(header, rows[:limit], right=right), *more])


def facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """``name  value`` lines with aligned values, without empty ones."""
    kept = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    return [f"{bold(name.ljust(width))}  {value}" for name, value in kept]


def indented(lines: Iterable[str]) -> list[str]:
    """Two spaces deeper."""
    return [f"  {line}" for line in lines]


def snapshot_table(
    snapshots: "Sequence[Snapshot]",
    names: Sequence[str] | None = None,
    title: str = "REF",
    kept_by: Mapping[str, Sequence[str]] | None = None,
    asked: Sequence[str] = (),
) -> list[str]:
    """A row for each snapshot, after a column of `names` if given; `kept_by`: id -> what keeps the snapshot; `asked`: attributes to show.

    Metrics that would make a row wider than the terminal, or elsewhere than `_MOST_METRICS`, are counted instead.
    """
    header = ["ROOT", "STEP", "TIME (UTC)", "SIZE", "NEW", "STATE", "METRICS", "MARK"]
    states = _states(snapshots)
    rows = [
        [
            short_root(snapshot.root),
            step_text(snapshot.step),
            iso_time(snapshot.time_ns),
            human_bytes(snapshot.logical_bytes),
            human_bytes(snapshot.new_bytes),
            states.get(snapshot.id, ""),
            "",
            mark_text(snapshot),
        ]
        for snapshot in snapshots
    ]
    if kept_by:
        header.append("KEPT BY")
        rows = [[*row, printable(", ".join(kept_by.get(snapshot.id, ())))] for row, snapshot in zip(rows, snapshots, strict=True)]
    if names is not None:
        header, rows = [title, *header], [[printable(name), *row] for name, row in zip(names, rows, strict=True)]
    room = _MOST_METRICS
    if stdout_is_terminal():
        others = max((len(click.unstyle(line)) for line in table(header, rows)), default=0)
        room = max(shutil.get_terminal_size().columns - others - 2, _LEAST_METRICS)
    texts = {
        snapshot.id: metrics_text(_with_attributes(snapshot, asked), room) for snapshot in {each.id: each for each in snapshots}.values()
    }
    for row, snapshot in zip(rows, snapshots, strict=True):
        row[header.index("METRICS")] = texts[snapshot.id]
    return table(header, rows, right={"STEP", "SIZE", "NEW"}, styles=[red if snapshot.mark else str for snapshot in snapshots])


def _with_attributes(snapshot: "Snapshot", asked: Sequence[str]) -> Mapping[str, float | str]:
    """The metrics of a snapshot, and the attributes that were asked for."""
    if not asked:
        return snapshot.metrics
    from tensorstore_ck.log.snapshot import searchable  # noqa: PLC0415 - as below

    return {**{name: value for name, value in searchable(snapshot).items() if name in asked}, **snapshot.metrics}


def stdout_is_terminal() -> bool:
    """Whether somebody looks at the output: lines then fit the terminal."""
    return sys.stdout.isatty()


def _states(snapshots: "Sequence[Snapshot]") -> dict[str, str]:
    """Id -> the role of a snapshot for branches, in a history. A snapshot that heads only the branch that it was saved to is ``head``."""
    from tensorstore_ck.log.snapshot_log import SnapshotLog  # noqa: PLC0415 - as above

    if not isinstance(snapshots, SnapshotLog):
        return {}
    saved_to = {snapshot.id: snapshot.ref for snapshot in snapshots}
    heads = {name: "head" if [saved_to.get(name)] == refs else f"head of {first_names(refs)}" for name, refs in snapshots.heads.items()}
    return {**dict.fromkeys(snapshots.abandoned, "abandoned"), **heads}


def snapshot_line(what: str, snapshot: "Snapshot") -> str:
    """The snapshot that a command made or moved, on one line."""
    step = "" if snapshot.step is None else f", step {snapshot.step}"
    mark = f", {red(mark_text(snapshot))}" if snapshot.mark else ""
    return f"{what} {short_root(snapshot.root)}{step}{mark}"


def put_sizes(snapshot: "Snapshot") -> str:
    """The bytes that a save added. A small state can add more than its own size: packs and parts have an index."""
    return f"  ({human_bytes(snapshot.logical_bytes)}; the store grew by {human_bytes(snapshot.new_bytes)})"


def error_document(error: StoreError) -> dict[str, str]:
    """An error in a JSON document."""
    return {"kind": error.kind, "message": str(error), "object": error.object_id}


def fields_of(report: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name."""
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}


def _plain(value: Any) -> Any:
    """A value for JSON: dataclasses and named tuples as objects, numbers that are not finite as text, bytes as hex."""
    from tensorstore_ck.log.snapshot import Snapshot  # noqa: PLC0415 - loads numpy, and errors are printed without it

    if isinstance(value, Snapshot):
        return {**_plain(fields_of(value)), "time": iso_time(value.time_ns)}
    if isinstance(value, StoreError):
        return error_document(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(fields_of(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return str(value) if isinstance(value, PurePath) else repr(value)
