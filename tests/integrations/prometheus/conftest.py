"""Stores, and exporters that answer over HTTP on loopback."""

import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tensorstore_ck as tsck
from tensorstore_ck.integrations.prometheus import Endpoint, Exporter
from tensorstore_ck.store import ReadOnlyStore, Store
from tests.effort import PATIENCE_SECONDS

Samples = Mapping[tuple[str, ...], float]
"""(name, value of each label by name) -> value."""


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def samples(text: str) -> Samples:
    """Fails if one of them is there twice."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *(sample.labels[name] for name in sorted(sample.labels, reverse=True)))  # store before ref and state
            assert key not in found
            found[key] = sample.value
    return found


class Served:
    """An exporter behind its endpoint. `exporter.refresh()` reads the stores; nothing does so in the background."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter
        self.endpoint = Endpoint(exporter.registry, "127.0.0.1", 0, on_error=exporter.note_scrape_error)
        serve = self.endpoint._server.serve_forever  # `Endpoint.serve` looks for its end every half second
        self._thread = threading.Thread(target=serve, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self.endpoint.url

    def scrape(self) -> Samples:
        return samples(get(self.url))

    def refreshed(self, *, measure: bool = False) -> Samples:
        self.exporter.refresh(measure=measure)
        return self.scrape()

    def close(self) -> None:
        self.endpoint.stop()
        self._thread.join()
        self.endpoint.close()
        self.exporter.close()


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[[str], ReadOnlyStore]:
    return lambda url: tsck.open(url, read_only=True, cache_dir=tmp_path / "readers-cache")


@pytest.fixture
def serve(tmp_path: Path, open_store: Callable[[str], ReadOnlyStore]) -> Iterator[Callable[..., Served]]:
    """Serves stores, by default through a catalog of its own."""
    made: list[Served] = []

    def serve(*urls: str, db: str = "", **options: Any) -> Served:
        options.setdefault("open_store", open_store)
        made.append(Served(Exporter(db or str(tmp_path / f"catalog{len(made)}.sqlite"), urls, **options)))
        return made[-1]

    yield serve
    for each in made:
        each.close()


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    """Makes a store in a folder of that name."""
    made: list[Store] = []

    def make(name: str = "ck") -> Store:
        made.append(tsck.open(tmp_path / name, create=True, no_sync=True, cache_dir=tmp_path / "writers-cache"))
        return made[-1]

    yield make
    for each in made:
        each.close()
