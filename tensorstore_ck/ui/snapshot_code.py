"""Code to copy that opens a snapshot. It works as printed, except that it lacks secrets."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tensorstore_ck.ui.catalog_snapshots import CatalogFacts
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey

_PLAIN_URL: Final = re.compile(r"(/|[a-z0-9]+://)[A-Za-z0-9._/+=-]+")
"""Matches a store URL that can follow ``::`` in an fsspec URL: one without special characters."""


class Code(NamedTuple):
    """Some lines to copy."""

    title: str
    text: str


def code_of(pages: Pages, store: StoreKey, facts: CatalogFacts) -> list[Code]:
    """Code for Python, the command line and fsspec."""
    root, marked = facts.short_root, bool(facts.snapshot.mark)
    allow = ", allow_marked=True" if marked else ""
    blocks = [Code("Python", "\n".join([*_opened(pages, store), f"    state = store.checkout({root!r}{allow})"]))]
    blocks.append(Code("Command line", pages.command(store, "show", root)))
    blocks.append(Code("Command line: into a file", pages.command(store, "get", root, "state.pt", *(["--allow-marked"] if marked else []))))
    if facts.parent is not None and facts.parent.state != "gone":
        blocks.append(Code("Command line: changes since the parent", pages.command(store, "diff", f"{root}~1", root)))
    options = {key: value for key, value in pages.open_options.items() if key in ("cache_dir", "places")}
    if "storage_options" in pages.open_options:
        options["target_options"] = pages.open_options["storage_options"]
    files = f"files = fsspec.filesystem('tsck', store={store.url!r}{_arguments(options)})"
    text = ["import fsspec", "", files, f"print(files.ls({root!r}, detail=False))", f"about = files.cat_file('{root}/snapshot.json')"]
    blocks.append(Code("fsspec", "\n".join(text)))
    if _PLAIN_URL.fullmatch(store.url) and not pages.open_options:
        blocks.append(Code("A path for programs that use fsspec", f"tsck://{root}/snapshot.json::{store.url}"))
    return blocks


def code_of_tensor(pages: Pages, store: StoreKey, root: str, tensor: str) -> str:
    """Code that reads one tensor."""
    lines = [f"    with store.open_snapshot({root!r}) as snapshot:", f"        tensor = snapshot[{tensor!r}][...]"]
    return "\n".join([*_opened(pages, store), *lines])


def _opened(pages: Pages, store: StoreKey) -> list[str]:
    options = _arguments({"read_only": True, **pages.open_options})
    return ["import tensorstore_ck as tsck", "", f"with tsck.open({store.url!r}{options}) as store:"]


def _arguments(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())
