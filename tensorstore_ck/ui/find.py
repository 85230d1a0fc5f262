"""The page that searches the snapshots of all stores by a condition."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog import Catalog, FoundSnapshot
from tensorstore_ck.catalog.condition_to_sql import FIELDS
from tensorstore_ck.catalog.current_refs import LIVE, STATES
from tensorstore_ck.catalog.find_snapshots import metric_names
from tensorstore_ck.catalog.schema import stores
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.ui.pages import Pages, page_number

PAGE_ROWS: Final = 50
MAX_NAMES: Final = 1000
"""The most metric names that the inputs offer."""
MAX_COLUMNS: Final = 6
"""Columns of metrics: those of the condition and the order."""
ALL: Final = "all"
_AT: Final = re.compile(r"at character (\d{1,9})\b")
_PLAIN: Final = re.compile(r"[^\W\d][\w./]*")


@dataclass(slots=True)
class Asked:
    """The contents of the form, and their errors."""

    condition: str
    order: str
    descending: bool
    state: str
    number: int
    errors: dict[str, str] = field(default_factory=dict)
    """``q`` or ``order`` -> message."""

    @property
    def wrong_at(self) -> int | None:
        """Where in the condition the error is, from 0 on, if the message says that."""
        message = self.errors.get("q", "")
        match = _AT.search(message)
        return int(match[1]) - 1 if match else len(self.condition) if "ends too early" in message else None

    @property
    def query(self) -> Mapping[str, object]:
        """The query of this page, without its number."""
        state = None if self.state == LIVE else self.state
        return {"q": self.condition or None, "order": self.order or None, "descending": "yes" if self.descending else None, "state": state}


def page(pages: Pages, request: Request) -> Response:
    """The page."""
    query = request.query_params
    state = query.get("state", LIVE)
    wanted = Asked(
        condition=query.get("q", "").strip(),
        order=query.get("order", "").strip(),
        descending="descending" in query,
        state=state if state in (*STATES, ALL) else LIVE,
        number=page_number(query),
    )
    pages.sources.refresh()
    catalog = pages.sources.catalog
    with catalog.reading() as connection:
        names = metric_names(connection, MAX_NAMES)
        uuids = {url: uuid for url, uuid in connection.execute(select(stores.c.url, stores.c.uuid))}  # noqa: C416 - rows are no pairs for mypy
    snapshots, columns = search(catalog, wanted)
    words = [*FIELDS, *map(_quoted, names)]
    return pages.render(
        "find.html",
        "find",
        wanted=wanted,
        found=snapshots[:PAGE_ROWS],
        has_more=len(snapshots) > PAGE_ROWS,
        columns=columns[:MAX_COLUMNS],
        states=(*STATES, ALL),
        words=words,
        orders=[word for word in words if word not in ("tag", "pinned")],
        examples=examples(names),
        uuids=uuids,
    )


def search(catalog: Catalog, wanted: Asked) -> tuple[tuple[FoundSnapshot, ...], tuple[str, ...]]:
    """A page of snapshots and the first of the next one, and the metrics that were asked about. Adds errors to `wanted`."""
    columns: tuple[str, ...] = ()
    for name, arguments in (("q", (wanted.condition, None)), ("order", ("", wanted.order or None))):
        try:
            columns += catalog.metrics_in(*arguments)
        except InvalidOptionError as exc:
            wanted.errors[name] = str(exc)
    if wanted.errors:
        return (), ()
    try:
        snapshots = catalog.find(
            wanted.condition,
            order_by=wanted.order or None,
            descending=wanted.descending,
            limit=PAGE_ROWS + 1,
            offset=(wanted.number - 1) * PAGE_ROWS,
            state=None if wanted.state == ALL else wanted.state,
        )
    except NotFoundError as exc:  # no snapshot has one of the metrics
        is_order = exc.object_id not in catalog.metrics_in(wanted.condition)
        wanted.errors["order" if is_order else "q"] = str(exc)
        return (), ()
    except StoreError as exc:
        wanted.errors["q"] = str(exc)
        return (), ()
    return snapshots, tuple(dict.fromkeys(columns))


def examples(names: list[str]) -> list[str]:
    """Conditions that find something in a usual catalog."""
    losses = [name for name in names if "loss" in name] or names
    of_metric = [f"{_quoted(losses[0])} < 2.1 and step > 5000", f"{_quoted(losses[0])} is nan"] if losses else []
    return [*of_metric, "job like 'gpt%' and age < 7d", "mark = 'bad'", "not tag is null or pinned", "size > 10GB and not pinned"]


def _quoted(name: str) -> str:
    """A metric as a condition names it."""
    return name if _PLAIN.fullmatch(name) and name not in FIELDS else '"' + name.replace('"', '""') + '"'
