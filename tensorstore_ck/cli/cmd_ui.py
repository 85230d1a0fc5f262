"""The command ui: pages in a browser. It loads its server when it runs."""

import os
import socket
import webbrowser
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

import click

from tensorstore_ck.cli.options import StoreChoice, command, price_option, store_options
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

    wanted = list(dict.fromkeys([*urls, *([choice.url] if choice.url else [])]))
    if not wanted and db is None:
        wanted = [choice.require_url()]

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
        emit_line({"url": url}) if as_json else say(printable(f"{url}  (Ctrl-C ends it)"))
        if not no_browser:
            webbrowser.open(url)
        serve(make_app(sources, access, choice.complete, choice.open_options(), prices=prices), listening)


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_LOOPBACK, port))
    except OSError as exc:
        raise InvalidOptionError(f"cannot listen on port {port} of {_LOOPBACK}: {exc.strerror}", object_id="port") from exc
