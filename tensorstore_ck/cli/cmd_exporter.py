"""The command exporter: metrics of stores for Prometheus. It loads its server when it runs."""

import signal
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

import click

from tensorstore_ck.cli.options import StoreChoice, command, seconds, store_options
from tensorstore_ck.cli.output import emit_line, printable, say
from tensorstore_ck.errors import InvalidOptionError

if TYPE_CHECKING:
    from tensorstore_ck.store import ReadOnlyStore

_DEFAULT: Final = "127.0.0.1:9464"


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
    "--listen", type=_address, default=_DEFAULT, show_default=True, metavar="HOST:PORT", help="Where to answer; port 0: a free one."
)
@click.option("--interval", type=seconds, default="30s", show_default=True, metavar="TIME", help="How often to read the logs.")
@click.option(
    "--usage-interval",
    type=seconds,
    default="1h",
    show_default=True,
    metavar="TIME",
    help="How often to measure the bytes by state, which lists the store and reads its parts; 0s: never.",
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

    wanted = [*urls, *([choice.url] if choice.url else [])]
    if not wanted and db is None:
        wanted = [choice.require_url()]

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
            signal.signal(signal.SIGTERM, _interrupt)
            stores.start()
            emit_line({"url": endpoint.url}) if as_json else say(printable(f"{endpoint.url}  (Ctrl-C ends it)"))
            endpoint.serve()


def _url(choice: StoreChoice, url: str) -> str:
    """The store's URL as the store itself says it, so that a store that cannot be opened has the same label. Sends no request."""
    with closing(replace(choice, url=url).open_backend()) as backend:
        return backend.url


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
