"""The commands ui and exporter: pages in a browser, and metrics for Prometheus. They load their servers when they run."""

import os
import signal
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import click

from tensorstore_ck.cli.options import StoreChoice, command, default_option, price_option, store_options
from tensorstore_ck.cli.output import emit_line, printable, say
from tensorstore_ck.common.prices import Prices
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.store_config import CONFIG_NAME

if TYPE_CHECKING:
    from tensorstore_ck.store import ReadOnlyStore, Store

_LOOPBACK: Final = "127.0.0.1"


@command(
    "Look at stores in a browser.",
    "tsck ui -s ./ckpt",
    "tsck ui ./ckpt s3://bucket/ckpt --no-browser",
    "tsck ui --db catalog.sqlite",
    "tsck ui --allow tag,pin,undo",
)
@click.argument("urls", nargs=-1, metavar="[STORE]...")
@click.option("--db", metavar="URL", help="Show this catalog (see `tsck catalog`); without STORE and -s as it was synced last.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Listen on port N of 127.0.0.1; default: a free one.")
@click.option("--no-browser", is_flag=True, help="Only print the URL.")
@click.option("--base-url", default="", metavar="PATH", help="Where a proxy offers the pages: a path, or a URL if its host is another one.")
@click.option("--allow", default="", metavar="LIST", help="What pages may change: tag,annotate,mark,pin,undo; default: nothing.")
@price_option
@store_options()
def ui(
    urls: tuple[str, ...],
    choice: StoreChoice,
    *,
    db: str | None,
    port: int,
    no_browser: bool,
    base_url: str,
    allow: str,
    price: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show stores in a browser, until interrupted. The server listens on 127.0.0.1, and changes nothing in a store without --allow.

    The printed URL has a token in it: anyone who has it can look at the stores, and change what --allow names. With --json it is one line.
    """
    from tensorstore_ck.ui import Access, Sources, make_app, parse_allow, private_catalog, serve  # noqa: PLC0415 - may not be installed

    allowed, prices = parse_allow(allow), Prices.parse(price)

    wanted = list(dict.fromkeys(_wanted(urls, choice, db)))

    def open_store(url: str) -> "ReadOnlyStore":
        return choice.at(url, wanted).look()

    def open_writable(url: str) -> "Store":
        return choice.at(url, wanted).open()

    with ExitStack() as stack:
        catalog = stack.enter_context(private_catalog(choice.cache_dir, wanted)) if db is None else db
        sources = stack.enter_context(
            closing(Sources(catalog, wanted, open_store, is_private=db is None, open_writable=open_writable if allowed else None))
        )
        listening = stack.enter_context(closing(_listen(port)))
        port = listening.getsockname()[1]
        access = Access.of(base_url, port, allowed)
        sources.start()
        for missing in (each for each in wanted if "://" not in each and not os.path.isfile(os.path.join(each, CONFIG_NAME))):
            say(f"tsck: warning: there is no store at {printable(missing)}: its page says so until there is one", err=True)
        url = access.url(port)
        with suppress(KeyboardInterrupt):
            emit_line({"url": url}) if as_json else say(printable(f"{url}  (Ctrl-C ends it)"))
            if not no_browser:
                webbrowser.open(url)
            serve(make_app(sources, access, choice.complete, choice.open_options(), prices=prices), listening)


def _wanted(urls: Sequence[str], choice: StoreChoice, db: str | None) -> list[str]:
    wanted = [*urls, *([choice.url] if choice.url else [])]
    return wanted if wanted or db is not None else [choice.require_url()]


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_LOOPBACK, port))
    except OSError as exc:
        raise InvalidOptionError(f"cannot listen on port {port} of {_LOOPBACK}: {exc.strerror}", object_id="port") from exc


def _address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[HOST]:PORT``."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in bare and bare == host) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not an address: write 127.0.0.1:9464, or [::1]:9464.")
    return bare, int(port)


@command(
    "Serve metrics of stores to Prometheus.",
    "tsck exporter -s ./ckpt",
    "tsck exporter s3://bucket/a s3://bucket/b --db /var/lib/tsck/catalog.sqlite",
    "tsck exporter --db postgresql://tsck@db/tsck --listen 0.0.0.0:9464",
)
@click.argument("urls", nargs=-1, metavar="[STORE]...")
@click.option("--db", metavar="URL", help="Read through this catalog (see `tsck catalog`); without STORE and -s as it was synced last.")
@click.option(
    "--listen", type=_address, default="127.0.0.1:9464", show_default=True, metavar="HOST:PORT", help="Where to answer; port 0: a free one."
)
@default_option("--interval", "interval", "30s", "How often to read the logs.")
@default_option(
    "--usage-interval",
    "usage_interval",
    "1h",
    "How often to measure the bytes by state, which lists the store and reads its parts; 0s: never.",
)
@store_options()
def exporter(
    urls: tuple[str, ...],
    choice: StoreChoice,
    *,
    db: str | None,
    listen: tuple[str, int],
    interval: float,
    usage_interval: float,
    as_json: bool,
) -> None:
    """Answer Prometheus at /metrics, until interrupted. It changes nothing in a store; a scrape reads no store.

    The stores are read in the background: one that does not answer has tsck_up 0, and hides no other. Anyone who can reach the address can
    read the metrics. With --json the URL is one line.
    """
    from tensorstore_ck.integrations.prometheus import Endpoint, Exporter, private_catalog  # noqa: PLC0415 - may not be installed

    wanted = _wanted(urls, choice, db)

    def open_store(url: str) -> "ReadOnlyStore":
        return replace(choice, url=url).look()

    with ExitStack() as stack:
        shown = [_url(choice, url) for url in wanted]
        catalog = stack.enter_context(private_catalog(choice.cache_dir, shown)) if db is None else db
        stores = Exporter(catalog, shown, open_store, interval_seconds=interval, measure_seconds=usage_interval)
        stack.enter_context(closing(stores))
        if not wanted:
            stores.refresh()  # a catalog that does not exist is an error now
        try:
            endpoint = stack.enter_context(closing(Endpoint(stores.registry, *listen, on_error=stores.note_scrape_error)))
        except OSError as exc:
            raise InvalidOptionError(f"cannot listen on {listen[0]} port {listen[1]}: {exc.strerror}", object_id="listen") from exc
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            stores.start()
            emit_line({"url": endpoint.url}) if as_json else say(printable(f"{endpoint.url}  (Ctrl-C ends it)"))
            endpoint.serve()


def _url(choice: StoreChoice, url: str) -> str:
    """The URL that the open store would report, so that a store that cannot be opened has the same label. Sends no request."""
    with closing(replace(choice, url=url).open_backend()) as backend:
        return backend.url
