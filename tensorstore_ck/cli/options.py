"""The options that commands share: which store, how to open it, how to print.

A command that works on a store takes a `StoreChoice`, made from the command line, the environment variables named here and the file of
allowed locations; it opens the store when the command asks for it.
"""

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, get_args

import click

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.cold.allowed_locations import is_in_same_bucket, parse_allowed
from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.cold.locations import LocationOpener
from tensorstore_ck.backend.picklable import PicklableBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.backend.staging import Staging
from tensorstore_ck.backend.store_backend import StoreBackend
from tensorstore_ck.cli.allowed_locations import read_places
from tensorstore_ck.cli.complete_names import complete_ref, note_store
from tensorstore_ck.cli.hints import complete, show_completed, store_arguments
from tensorstore_ck.cli.output import printable, say
from tensorstore_ck.cli.progress import Bar, CountingBackend
from tensorstore_ck.common.executor import DaskCluster
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.signing_keys import PASSPHRASE_VARIABLE, SigningKey, is_encrypted
from tensorstore_ck.common.units import parse_bytes, parse_seconds
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.errors import InvalidOptionError, NotAStoreError, StoreError
from tensorstore_ck.format.codec import CodecName
from tensorstore_ck.format.store_config import CONFIG_NAME, StoreConfig
from tensorstore_ck.log import ROLLBACK, Rollback
from tensorstore_ck.redaction import display_url, hidden_options

if TYPE_CHECKING:
    from tensorstore_ck.store import OpenOptions, ReadOnlyStore, Store

STORE_VARIABLE: Final = "TSCK_STORE"
CACHE_VARIABLE: Final = "TSCK_CACHE_DIR"
STATE_VARIABLE: Final = "TSCK_STATE_DIR"
ROLLBACK_VARIABLE: Final = "TSCK_ROLLBACK"
TRUST_VARIABLE: Final = "TSCK_TRUST"
SIGN_VARIABLE: Final = "TSCK_SIGN"

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """Which store to open, and how."""

    url: str | None
    """None: the current folder, if it is a store."""
    storage_options: dict[str, Any] = field(repr=False)
    cache_dir: str | None = None
    single_writer_unsafe: bool = False
    no_sync: bool = False
    places: tuple[str, ...] = ()
    """Locations that the command line allows; the user's file allows others."""
    complete: Callable[[str], str] = str
    """Completes the commands in a message, so that they work on this store as they are printed."""
    state_dir: str | None = None
    rollback: Rollback = "warn"
    trust: str | None = None
    """The trust file; None: the user's own."""
    sign: str | None = None
    """The file of the key that signs what the command moves."""

    def require_url(self) -> str:
        """Where the store is.

        Raises:
            NotAStoreError: no store was given, and the current folder is none.
        """
        if self.url:
            return self.url
        if not self.is_here():
            raise NotAStoreError(
                f"which store? Give --store URL, set {STORE_VARIABLE}, or change into the store's folder (this one holds no {CONFIG_NAME})",
                object_id=os.getcwd(),
            )
        return "."

    @staticmethod
    def is_here() -> bool:
        """Whether the current folder is a store."""
        return os.path.isfile(CONFIG_NAME)

    def look(self, bar: Bar | None = None) -> "ReadOnlyStore":
        """The store, for a command that only reads."""
        return self.open(bar, read_only=True)

    def open(self, bar: Bar | None = None, codec: CodecName = "auto", *, read_only: bool = False) -> "Store":
        """The store; close it, or use it as a context manager. `bar` counts the raw bytes of blocks that are read, and the stored bytes of
        those that are written.
        """
        from tensorstore_ck.store import Store  # noqa: PLC0415 - neither help nor a completion needs it

        engine = self.open_engine(codec, read_only=read_only)
        if bar is not None:
            engine = replace(engine, backend=CountingBackend(engine.backend, bar), on_read=bar.add)
        return Store(engine)

    def open_engine(
        self, codec: CodecName = "auto", *, read_only: bool = False, staging: Staging | None = None, config: StoreConfig | None = None
    ) -> Engine:
        """The engine of the store, for operations that `Store` does not offer; see `engine.opening`."""
        url = self.require_url()
        engine = open_engine(
            url,
            storage_options=self.storage_options,
            single_writer_unsafe=self.single_writer_unsafe,
            no_sync=self.no_sync,
            cache_dir=self.cache_dir,
            codec=codec,
            read_only=read_only,
            places=self.allowed_places(),
            rollback=self.rollback,
            state_dir=self.state_dir,
            staging=staging,
            sign=None if self.sign is None else _signing_key(self.sign),
            trust=self.trust,
            config=config,
        )
        note_store(url, self.storage_options, self.cache_dir, f"{engine.config.uuid}-{engine.config.log}")
        return engine

    def at(self, url: str, named: Collection[str]) -> "StoreChoice":
        """This choice for the store at `url`, which a catalog may name that others can write.

        The storage options, which may be secrets, go only to the buckets and hosts of the URLs that the user `named`.
        """
        is_named = url in named or any(is_in_same_bucket(url, each) for each in named)
        if self.storage_options and not is_named:
            say(
                f"tsck: {printable(display_url(url))} is opened without the storage options: they are for stores that the command names; "
                "name it, or another store in its bucket, if they are for it too",
                err=True,
            )
        return replace(self, url=url, storage_options=self.storage_options if is_named else {})

    def open_options(self) -> "OpenOptions":
        """The arguments of `tensorstore_ck.open` that reach the store from a program, without secrets."""
        options = {
            "storage_options": hidden_options(self.storage_options),
            "cache_dir": self.cache_dir,
            "state_dir": self.state_dir,
            "trust": self.trust,
            "places": list(self.allowed_places()),
        }
        return cast("OpenOptions", {name: value for name, value in options.items() if value})

    def portable(self, engine: Engine) -> Engine:
        """The engine with a backend that can be pickled, for workers on other hosts."""
        own: Backend = PicklableBackend(self.require_url(), self.storage_options, self.no_sync)
        if engine.read_only:
            own = ReadOnlyBackend(own)
        with suppress(StoreError):  # the command reports a log that cannot be read
            engine.log.sync()
        placed = ColdLocations(own, self.place_opener(own.url, read_only=engine.read_only), engine.log.view, store=engine.config.uuid)
        return replace(engine, placed=placed, backend=StoreBackend(own, cold=placed))

    def place_opener(self, url: str, *, read_only: bool = False) -> LocationOpener:
        """Opens the locations to which packs of the store at `url` were moved."""
        return LocationOpener(url, self.storage_options, self.no_sync, read_only, allowed=parse_allowed(self.allowed_places()))

    def allowed_places(self) -> tuple[str, ...]:
        """The locations where packs may lie, besides those that need no permission."""
        return (*self.places, *read_places())

    def advice_lines(self, advice: Iterable[str]) -> list[str]:
        """Lines with commands in them, without this command's storage options, which may be secrets."""
        lines = [printable(line) for line in advice]
        return [*lines, "(add the --storage-option of this command to each of these)"] if lines and self.storage_options else lines

    def open_backend(self) -> Backend:
        """The backend alone, for commands that work where there is no store."""
        return open_backend(self.require_url(), self.storage_options, no_sync=self.no_sync)


def command(short_help: str, *examples: str) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command, whose help is the function's docstring, the options and the examples."""
    lines = "\n".join(f"  {example}" for example in examples)
    return click.command(short_help=short_help, epilog=f"\b\nExample{'s' if len(examples) > 1 else ''}:\n{lines}")


def named_value(text: str) -> tuple[str, object]:
    """``NAME=VALUE``: ``3e-4`` is a number, ``true`` a bool, ``[1, 2]`` a list; what is not JSON is text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter("one of its values is not NAME=VALUE.")  # the value may be a secret
    try:
        return name, parse_json(value)
    except ValueError:
        return name, value


def named_number(text: str) -> tuple[str, float]:
    """``NAME=NUMBER``."""
    _, _, value = text.partition("=")
    try:
        return named_value(text)[0], float(value)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not NAME=NUMBER: {value!r} is not a number.") from None


def seconds(text: str) -> float:
    """``90s``, ``10m``, ``1h``, ``30d``."""
    try:
        return parse_seconds(text, "time")
    except InvalidOptionError:
        raise click.BadParameter(f"{text!r} is not a duration: write 90s, 10m, 1h or 30d.") from None


def fraction(text: str) -> float:
    """``20%`` or ``0.2``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise click.BadParameter(f"{text!r} is not between 0% and 100%.")
    return value


def byte_count(text: str) -> int:
    """``500MB``, ``10GB``, ``1.5GiB``."""
    try:
        return parse_bytes(text, "size")
    except InvalidOptionError:
        raise click.BadParameter(f"{text!r} is not a size: write 500MB, 10GB or 1.5GiB.") from None


def byte_rate(text: str) -> int:
    """``100MB``, ``1.5GiB/s``: bytes per second."""
    try:
        rate = parse_bytes(text.strip().removesuffix("/s"), "rate")
    except InvalidOptionError:
        rate = 0
    if rate <= 0:
        raise click.BadParameter(f"{text!r} is not a rate: write 500kB, 100MB or 1GiB, per second.")
    return rate


def default_option(option: str, name: str, default: str, help_text: str) -> Callable[[Command], Command]:
    """An option for a time or, if the default is a percentage, for a part; the help shows the default."""
    metavar, kind = ("PART", fraction) if default.endswith("%") else ("TIME", seconds)
    return click.option(option, name, type=kind, default=default, show_default=True, metavar=metavar, help=help_text)


def _signing_key(path: str) -> SigningKey:
    """The key in a file; asks for its passphrase if it needs one."""
    is_asked = is_encrypted(path) and not os.environ.get(PASSPHRASE_VARIABLE)
    return SigningKey.load(path, click.prompt(f"Passphrase of {path}", hide_input=True, err=True) if is_asked else None)


ref_option: Final = click.option(
    "--ref", required=True, metavar="NAME", shell_complete=complete_ref, help="The branch to put it on; made if it does not exist."
)
metadata_option: Final = click.option(
    "--metadata", metavar="NAME=VALUE", type=named_value, multiple=True, help="Metadata, as JSON or text (repeatable)."
)
allow_marked_option: Final = click.option("--allow-marked", is_flag=True, help="Also a snapshot that is marked bad or damaged.")
rate_option: Final = click.option(
    "--rate-limit", metavar="RATE", type=byte_rate, help="Read and write no more than this per second, e.g. 100MB."
)
codec_option: Final = click.option(
    "--codec",
    type=click.Choice(get_args(CodecName)),
    default="auto",
    show_default=True,
    help="How to encode blocks, always without loss; auto: not at all, unless saves have shown that the store is slow.",
)
allow_place_option: Final = click.option(
    "--allow-place",
    metavar="URL",
    multiple=True,
    help="Allow packs that `tsck tier` moved there (repeatable). Not needed for buckets at the store's own endpoint.",
)
price_option: Final = click.option(
    "--price",
    multiple=True,
    metavar="NAME=USD",
    help="What a gigabyte costs a month where NAME begins the URL, or is its scheme (s3, file); or a file of such lines (repeatable).",
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def host_options(command: Command) -> Command:
    """Adds the arguments `cache_dir`, `state_dir`, `rollback` and `trust`: what this host keeps for a store, and believes of it."""
    cache_help = f"Where this host keeps its cache (or ${CACHE_VARIABLE})."
    state_help = f"Where this user keeps the last seen entry of each log (or ${STATE_VARIABLE})."
    rollback_help = f"What to do about a log that went back or forked, until `tsck accept-log` (or ${ROLLBACK_VARIABLE}; default: warn)."
    trust_help = f"Which keys must have signed which refs (or ${TRUST_VARIABLE}; default: trust.toml in your configuration folder)."
    command = click.option("--trust", metavar="FILE", envvar=TRUST_VARIABLE, help=trust_help)(command)
    command = click.option("--rollback", type=click.Choice(ROLLBACK), default="warn", envvar=ROLLBACK_VARIABLE, help=rollback_help)(command)
    command = click.option("--state-dir", type=os.path.expanduser, metavar="FOLDER", envvar=STATE_VARIABLE, help=state_help)(command)
    return click.option("--cache-dir", type=os.path.expanduser, metavar="FOLDER", envvar=CACHE_VARIABLE, help=cache_help)(command)


def write_options(command: Command) -> Command:
    """Adds the arguments `sign`, and `single_writer_unsafe` and `no_sync`, which weaken safety."""
    sign_help = f"Sign each ref that the command moves with this key (or ${SIGN_VARIABLE}), as `tsck keygen` makes it."
    command = click.option("--sign", metavar="FILE", envvar=SIGN_VARIABLE, help=sign_help)(command)
    unsafe_help = "Write to a backend without exclusive creation: a second writer would lose commits."
    command = click.option("--no-sync", is_flag=True, help="Skip fsync: a power failure may lose acknowledged snapshots.")(command)
    return click.option("--single-writer-unsafe", is_flag=True, help=unsafe_help)(command)


def store_options(*, writes: bool = False, url_argument: bool = False) -> Callable[[Command], Callable[..., None]]:
    """Adds the options that choose a store, as the argument `choice`, and ``--json``.

    Args:
        writes: Whether the command can write: adds `write_options`.
        url_argument: Whether the first argument can be the store.
    """

    def decorate(command: Command) -> Callable[..., None]:
        def run(
            *args: Any,
            store: str | None,
            storage_option: tuple[tuple[str, object], ...],
            cache_dir: str | None,
            allow_place: tuple[str, ...],
            state_dir: str | None,
            rollback: Rollback,
            trust: str | None,
            sign: str | None = None,
            single_writer_unsafe: bool = False,
            no_sync: bool = False,
            url: str | None = None,
            **kwargs: Any,
        ) -> None:
            context, chosen, given = click.get_current_context(), url or store, dict(storage_option)
            files = {"cache_dir": cache_dir, "state_dir": state_dir, "trust": trust}
            arguments = store_arguments(context, url=chosen, storage_options=given, files=files, places=allow_place)
            choice = StoreChoice(
                url=chosen,
                storage_options=given,
                cache_dir=cache_dir,
                single_writer_unsafe=single_writer_unsafe,
                no_sync=no_sync,
                places=allow_place,
                complete=lambda text: complete(context, text, arguments),
                state_dir=state_dir,
                rollback=rollback,
                trust=trust,
                sign=sign,
            )
            show_completed(choice.complete)
            try:
                command(*args, choice=choice, **kwargs)
            except StoreError as exc:
                exc.args = (choice.complete(str(exc)),)
                raise

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        store_help = f"Where the store is (or ${STORE_VARIABLE}). Default: the current folder."
        storage_help = "For the storage service, e.g. endpoint_url=... (repeatable)."
        options = [
            click.option("-s", "--store", metavar="URL", envvar=STORE_VARIABLE, help=store_help),
            click.option("--storage-option", metavar="KEY=VALUE", type=named_value, multiple=True, help=storage_help),
            host_options,
            allow_place_option,
        ]
        if writes:
            options.append(write_options)
        if url_argument:
            options.insert(0, click.argument("url", required=False))
        decorated: Callable[..., None] = json_option(run)
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def for_workers(stack: ExitStack, address: str | None, choice: StoreChoice, engine: Engine) -> tuple[Engine, DaskCluster | None]:
    """The engine with a backend for workers on other hosts, and their cluster; without an address the engine as it is.

    `stack` closes both.
    """
    if address is None:
        return engine, None
    engine = choice.portable(engine)
    stack.enter_context(closing(engine.backend))
    return engine, stack.enter_context(DaskCluster(address))
