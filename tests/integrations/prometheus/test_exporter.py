"""What Prometheus reads from `tsck exporter`, over HTTP."""

import os
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.integrations.prometheus import collector, endpoint
from tensorstore_ck.integrations.prometheus import exporter as exporter_module
from tensorstore_ck.integrations.prometheus.collector import KINDS
from tensorstore_ck.integrations.prometheus.watched_store import WatchedStore
from tensorstore_ck.log import Op
from tensorstore_ck.store import ReadOnlyStore, Store
from tests.catalog.made import publish
from tests.documents import DOCS, text
from tests.effort import PATIENCE_SECONDS
from tests.integrations.prometheus.conftest import Samples, Served, get, samples

Serve = Callable[..., Served]
MakeStore = Callable[..., Store]
Open = Callable[[str], ReadOnlyStore]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def put(store: Store, ref: str, step: int) -> str:
    state = {"weights": torch.full((20_000,), float(step)).bernoulli(0.5) + step}
    return store.put_snapshot(state, ref=ref, step=step).root


def test_stores_and_branches(serve: Serve, make_store: MakeStore) -> None:
    store = make_store()
    begun = store.engine.clock() // 10**9
    for step, age in enumerate((100, 90, 80, 50)):
        store.engine.log._clock = lambda age=age: (begun - age) * 10**9  # type: ignore[misc]
        root = publish(store, "runs/gpt", step, logical_bytes=1000 + step)
    publish(store, "runs/once", None)
    publish(store, "runs/forgotten", 1)
    store.forget("runs/forgotten")
    store.tag("paper", root)
    store.pin(root, owner="me", reason="a test")
    found = serve(store.url).refreshed()
    at = store.url
    assert found["tsck_up", at] == 1
    assert found["tsck_last_save_timestamp_seconds", at, "runs/gpt"] == begun - 50
    assert found["tsck_save_interval_seconds", at, "runs/gpt"] == 10
    assert found["tsck_head_step", at, "runs/gpt"] == 3
    assert found["tsck_saves_total", at, "runs/gpt"] == 4
    assert found["tsck_logical_bytes", at, "runs/gpt"] == 1003
    assert found["tsck_new_bytes_total", at, "runs/gpt"] == 400
    assert ("tsck_save_interval_seconds", at, "runs/once") not in found
    assert ("tsck_head_step", at, "runs/once") not in found
    assert found["tsck_saves_total", at, "runs/once"] == 1
    assert [found[f"tsck_{what}", at] for what in ("branches", "tags", "pins")] == [2, 1, 1]
    assert [found["tsck_snapshots", at, state] for state in ("live", "forgotten")] == [5, 1]
    assert found["tsck_log_entries_total", at] == 9
    assert abs(found["tsck_catalog_sync_timestamp_seconds", at] - begun) < PATIENCE_SECONDS
    assert not any("runs/forgotten" in key for key in found)


def test_how_long_the_last_save_took(serve: Serve, make_store: MakeStore) -> None:
    store = make_store()
    publish(store, "runs/copied", 1)
    begun = time.monotonic()
    store.put_snapshot({"w": torch.ones(4)}, ref="runs/saved", step=1)
    longest = time.monotonic() - begun
    found = serve(store.url).refreshed()
    assert 0 < found["tsck_last_save_duration_seconds", store.url, "runs/saved"] <= longest
    assert ("tsck_last_save_duration_seconds", store.url, "runs/copied") not in found


def test_what_changes_between_two_refreshes(serve: Serve, make_store: MakeStore) -> None:
    store, now = make_store(), 100
    publish(store, "runs/b", 1)
    served = serve(store.url, clock=lambda: now * 10**9)
    assert ("tsck_saves_total", store.url, "runs/b") in served.refreshed()
    store.forget("runs/b")
    for times, interval in (((0, 10, 20), 10), ((60, 100), 25)):
        for seconds in times:
            store.engine.log._clock = lambda seconds=seconds: seconds * 10**9  # type: ignore[misc]
            publish(store, "runs/a", seconds)
        found = served.refreshed()
        assert found["tsck_save_interval_seconds", store.url, "runs/a"] == interval
        assert found["tsck_saves_total", store.url, "runs/a"] == (3 if interval == 10 else 5)
        assert found["tsck_catalog_sync_timestamp_seconds", store.url] == now
        assert not any("runs/b" in key for key in found)
    store.finish("runs/a")
    assert ("tsck_save_interval_seconds", store.url, "runs/a") not in served.refreshed(), "no save is expected"
    now = 200
    assert served.refreshed()["tsck_catalog_sync_timestamp_seconds", store.url] == 200


def test_a_dead_store_hides_no_other_and_comes_back(
    serve: Serve, make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alive, late = make_store("alive"), str(tmp_path / "late")
    publish(alive, "runs/a", 1)
    served = serve(late, alive.url)
    for failures in (1, 2):
        found = served.refreshed()
        assert (found["tsck_up", late], found["tsck_up", alive.url]) == (0, 1)
        assert found["tsck_refresh_errors_total", late] == failures
        assert found["tsck_refresh_errors_total", alive.url] == 0
        assert found["tsck_saves_total", alive.url, "runs/a"] == 1
    assert caplog.text.count(f"{late} cannot be read now") == 1
    publish(make_store("late"), "runs/b", 1)
    found = served.refreshed()
    assert found["tsck_up", late] == 1
    assert found["tsck_saves_total", late, "runs/b"] == 1


def test_a_store_that_vanished_is_down_and_what_was_known_stays_until_another_takes_its_place(
    serve: Serve, make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    publish(store, "runs/a", 1)
    served = serve(store.url)
    before = served.refreshed()
    shutil.move(tmp_path / "ck", tmp_path / "away")
    found = served.refreshed()
    assert found["tsck_up", store.url] == 0
    for name in ("tsck_last_save_timestamp_seconds", "tsck_saves_total"):
        assert found[name, store.url, "runs/a"] == before[name, store.url, "runs/a"]
    shutil.move(tmp_path / "away", tmp_path / "ck")
    assert served.refreshed()["tsck_up", store.url] == 1
    shutil.rmtree(tmp_path / "ck")
    publish(make_store(), "runs/second", 1)
    found = served.refreshed()
    assert found["tsck_up", store.url] == 1
    assert {key[2] for key in found if key[0] == "tsck_saves_total"} == {"runs/second"}


def test_a_store_that_hangs_holds_up_nothing(
    serve: Serve, make_store: MakeStore, open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "CLOSE_SECONDS", 0.1)
    alive, dead = make_store("alive"), str(tmp_path / "dead")
    publish(alive, "runs/a", 1)
    let_go = threading.Event()

    def opened(url: str) -> ReadOnlyStore:
        if url == dead:
            let_go.wait(PATIENCE_SECONDS)
        return open_store(url)

    served = serve(dead, alive.url, open_store=opened, interval_seconds=0.01, measure_seconds=0)
    served.exporter.start()
    for saves in (1, 2, 3):
        while served.scrape().get(("tsck_saves_total", alive.url, "runs/a")) != saves:
            pass
        publish(alive, "runs/a", saves)
    assert served.scrape()["tsck_up", dead] == 0
    served.exporter.close()
    let_go.set()


def test_a_store_that_hangs_after_it_was_read_is_down(serve: Serve, make_store: MakeStore) -> None:
    store, now = make_store(), 0.0
    publish(store, "runs/a", 1)
    served = serve(store.url, interval_seconds=10, monotonic=lambda: now)
    assert served.refreshed()["tsck_up", store.url] == 1
    during: list[float] = []

    def hang() -> None:
        nonlocal now
        for later in (29.0, 31.0):
            now = later
            during.append(served.scrape()["tsck_up", store.url])

    watched = served.exporter.watched[0]
    watched.synced.refresh = hang  # type: ignore[method-assign,assignment]
    watched.refresh()
    assert during == [1, 0]
    assert served.scrape()["tsck_up", store.url] == 1


def test_any_name_of_a_folder(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    names = ['say "hi"', "two\nlines", "back\\slash", "a{b}=c,d", "Gewichte \N{GREEK SMALL LETTER LAMDA}", "carriage\rreturn"]
    stores = [make_store(name) for name in names]
    for store in stores:
        publish(store, "runs/a", 1)
    no_text = str(tmp_path / os.fsdecode(b"not \xff text"))
    served = serve(*(store.url for store in stores), no_text)
    found = served.refreshed()
    for store in stores:
        assert found["tsck_saves_total", store.url, "runs/a"] == 1
    assert found["tsck_up", no_text.encode("utf-8", "backslashreplace").decode()] == 0
    families = text_string_to_metric_families(get(served.url, Accept=OPENMETRICS))  # type: ignore[no-untyped-call]
    values = {sample.labels["store"] for family in families if family.name == "tsck_saves" for sample in family.samples}
    assert values == {store.url for store in stores}


def test_bytes_by_state_are_all_bytes_of_the_store(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    put(store, "runs/kept", 1)
    pinned = put(store, "runs/pinned", 2)
    put(store, "runs/undone", 3)
    put(store, "runs/garbage", 4)
    store.forget("runs/garbage")
    store.gc(GcOptions(undo_window_seconds=0, max_delete=1))  # the snapshot is too young to be freed, but its undo window is over
    store.pin(pinned, owner="me", reason="a test")
    store.forget("runs/pinned")
    store.forget("runs/undone")
    served = serve(store.url)
    assert not any(key[0] == "tsck_stored_bytes" for key in served.refreshed())
    found = served.refreshed(measure=True)
    states = {key[2]: value for key, value in found.items() if key[0] == "tsck_stored_bytes"}
    usage = store.usage()
    assert sum(states.values()) == usage.objects_bytes
    assert states["pinned"] == usage.pinned_bytes > 80_000
    assert states["undo_window"] == usage.undo_bytes > 80_000
    assert states["live"] == usage.stored_bytes - usage.pinned_bytes - usage.undo_bytes > 80_000
    assert found["tsck_unreferenced_bytes", store.url] == states["young"] + states["garbage"] == usage.unreferenced_bytes
    assert found["tsck_freeable_bytes", store.url] == usage.freeable.now_bytes
    assert 0 < found["tsck_free_bytes", store.url] < (usage.space.total_bytes or 0)
    assert found.get(("tsck_growth_bytes_per_day", store.url)) == usage.space.growth_bytes_per_day
    assert found["tsck_usage_timestamp_seconds", store.url] <= store.engine.clock() / 1e9
    leftover = tmp_path / "ck" / "packs" / "AA" / "01AAAAAAAAAAAAAAAAAAAAAAAA"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(bytes(1_000_000))
    young = states["young"]
    found = served.refreshed(measure=True)
    assert found["tsck_stored_bytes", store.url, "young"] == young + 1_000_000
    os.utime(leftover, (0, 0))
    found = served.refreshed(measure=True)
    assert found["tsck_stored_bytes", store.url, "young"] == young
    assert found["tsck_stored_bytes", store.url, "garbage"] == states["garbage"] + 1_000_000
    assert found["tsck_freeable_bytes", store.url] == 1_000_000


def test_a_measurement_that_fails_is_counted_and_the_last_one_stays(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    put(store, "runs/a", 1)
    served = serve(store.url)
    before = served.refreshed(measure=True)
    put(store, "runs/a", 2)
    shutil.rmtree(tmp_path / "ck" / "parts")
    found = served.refreshed(measure=True)
    assert found["tsck_up", store.url] == 1
    assert found["tsck_usage_errors_total", store.url] == 1
    assert found["tsck_usage_timestamp_seconds", store.url] == before["tsck_usage_timestamp_seconds", store.url]


@pytest.mark.parametrize("measure_seconds", [0, 1000])
def test_space_is_measured_in_the_background_unless_it_is_off(serve: Serve, make_store: MakeStore, measure_seconds: float) -> None:
    store = make_store()
    put(store, "runs/a", 1)
    refreshes = 0

    def monotonic() -> float:
        nonlocal refreshes
        refreshes += 1
        return float(refreshes)

    served = serve(store.url, interval_seconds=0.01, measure_seconds=measure_seconds, monotonic=monotonic)
    served.exporter.start()
    if measure_seconds:
        while ("tsck_unreferenced_bytes", store.url) not in served.scrape():
            pass
    while refreshes < 100:
        pass
    assert (("tsck_unreferenced_bytes", store.url) in served.scrape()) == bool(measure_seconds)


def test_a_scrape_reads_nothing_and_a_refresh_writes_nothing(
    serve: Serve, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    put(store, "runs/a", 1)
    calls: list[str] = []
    for name in (
        "get",
        "get_if_there",
        "read_into",
        "size",
        "list",
        "put",
        "replace",
        "create",
        "delete",
        "open_writer",
        "open_whole_writer",
    ):
        method = getattr(LocalBackend, name)

        def counted(self: Any, *args: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            calls.append(_name)
            return _method(self, *args, **options)

        monkeypatch.setattr(LocalBackend, name, counted)
    served = serve(store.url)
    served.refreshed(measure=True)
    assert {"get", "list"} <= set(calls) <= {"get", "get_if_there", "read_into", "size", "list"}
    calls.clear()
    assert served.scrape()["tsck_up", store.url] == 1
    assert calls == []
    served.refreshed()
    assert "list" not in calls


def test_a_catalog_that_others_sync(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    store, db = make_store(), str(tmp_path / "shared.sqlite")
    publish(store, "runs/a", 1)
    served = serve(db=db)
    with pytest.raises(NotFoundError):
        served.exporter.refresh()
    with Catalog(db, clock=lambda: 5 * 10**9) as catalog:
        catalog.sync(store)
        found = served.refreshed()
        assert found["tsck_saves_total", store.url, "runs/a"] == 1
        assert found["tsck_catalog_sync_timestamp_seconds", store.url] == 5
        assert ("tsck_up", store.url) not in found
        publish(store, "runs/a", 2)
        catalog.sync(store)
    assert served.refreshed()["tsck_saves_total", store.url, "runs/a"] == 2


def test_a_store_has_one_name_whoever_synced_it_last(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    store, db, link = make_store(), str(tmp_path / "shared.sqlite"), str(tmp_path / "link")
    publish(store, "runs/a", 1)
    os.symlink(store.url, link)
    served = serve(link, db=db)
    served.refreshed()
    with Catalog(db) as catalog:
        publish(store, "runs/a", 2)
        catalog.sync(store)  # by its other name
    assert {key[1] for key in served.refreshed() if key[0] in ("tsck_up", "tsck_saves_total")} == {link}


def test_a_catalog_that_does_not_answer(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    store, db = make_store(), tmp_path / "shared.sqlite"
    publish(store, "runs/a", 1)
    served = serve(store.url, db=str(db), interval_seconds=0.01)
    served.refreshed()
    db.write_bytes(b"no database at all" * 1000)
    served.exporter.start()
    while not served.scrape()["tsck_catalog_errors_total",]:
        pass
    assert served.scrape()["tsck_saves_total", store.url, "runs/a"] == 1


def test_what_http_answers(serve: Serve, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(make_store().url)
    served.exporter.refresh()
    home = served.url.removesuffix("/metrics")
    assert home.startswith("http://127.0.0.1:")
    assert "/metrics" in get(home)

    def refused(url: str, method: str = "GET") -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE_SECONDS)
        with caught.value as error:
            return error.code, error.read().decode()

    assert refused(f"{home}/other")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert refused(served.url, method)[0] in (405, 501)
    monkeypatch.setattr(WatchedStore, "is_up", property(lambda self: 1 / 0))
    code, said = refused(served.url)
    assert (code, "ZeroDivision" in said, "ZeroDivision" in caplog.text) == (500, False, True)
    monkeypatch.undo()
    assert served.scrape()["tsck_exporter_scrape_errors_total",] == 1


def test_requests_for_another_host_are_refused(serve: Serve, make_store: MakeStore) -> None:
    """A site that the user visits can let its name lead to 127.0.0.1."""
    served = serve(make_store().url)
    for host in ("evil.com", "evil.com:9464", "127.0.0.1.evil.com", "localhost.evil.com:1", "[::2]:9464", ""):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(served.url, Host=host)
    for host in ("localhost", "LOCALHOST:9464", "127.0.0.1", "127.0.0.1:1", "[::1]:9464"):
        assert "tsck_exporter_info" in get(served.url, Host=host)


def test_idle_connections_hold_up_no_scrape(serve: Serve, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", None)  # nothing but other connections ends an idle one
    served = serve(make_store().url)
    port = int(served.url.split(":")[2].split("/")[0])
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)) for _ in range(100)]
        assert "tsck_exporter_info" in get(served.url)
        assert idle[0].recv(1) == b""


def test_series_are_bounded_whatever_names_there_are(serve: Serve, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MAX_SERIES", 2)
    store = make_store()
    for name in ("a", "b", "c"):
        put(store, f"runs/{name}", 1)
    store.engine.log.append(lambda view: [Op.report("gc", "\x1b[2Jmade up", 1, {})])
    found = serve(store.url).refreshed()
    assert {key[2] for key in found if key[0] == "tsck_saves_total"} == {"runs/b", "runs/c"}
    assert {key[3]: value for key, value in found.items() if key[0] == "tsck_last_run_outcome"} == {
        "ok": 0,
        "findings": 0,
        "refused": 0,
        "failed": 0,
        "other": 1,
    }


def test_names_are_as_prometheus_wants_them(serve: Serve, make_store: MakeStore) -> None:
    """https://prometheus.io/docs/practices/naming: base units, `_total` for counters alone, and in both formats the same."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", get(serve(make_store().url).url), re.MULTILINE))
    assert {kind.name for kind in KINDS} == {name for name in kinds if name.startswith("tsck_")}
    for kind in KINDS:
        assert kinds[kind.name] == ("counter" if kind.name.endswith("_total") else "gauge")
        assert re.fullmatch(r"tsck_[a-z]+(_[a-z]+)*", kind.name)
        assert not re.search(r"_(age|ms|milliseconds|minutes|hours|kb|mb|count)(_|$)", kind.name)
        assert kind.help
    for each in ("time", "duration", "interval"):
        assert all(re.search(r"_seconds(_total)?$", kind.name) for kind in KINDS if each in kind.name)


def test_the_documentation_has_every_metric() -> None:
    rows = re.findall(r"^\| `(tsck_\w+)` \| (.*?) \| (.*) \|$", text(DOCS / "guides" / "monitoring.md"), re.MULTILINE)
    assert rows == [(kind.name, ", ".join(kind.labels), kind.help) for kind in KINDS]


@pytest.mark.parametrize("options", [{"interval_seconds": 0}, {"interval_seconds": float("nan")}, {"measure_seconds": -1}])
def test_intervals(serve: Serve, options: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError):
        serve("/nowhere", **options)


def test_secrets_are_in_no_label(serve: Serve) -> None:
    served = serve("s3://key:sekret123@bucket/ck", "/data/https://me:sekret123@host/x")
    served.exporter.refresh()
    answer = get(served.url)
    assert "sekret123" not in answer
    assert samples(answer)["tsck_up", "s3://***@bucket/ck"] == 0


def test_the_last_runs_of_gc_and_fsck(serve: Serve, make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    put(store, "runs/a", 1)
    put(store, "runs/b", 1)
    served = serve(store.url)
    at, before = store.url, served.refreshed()
    assert not any("last_run" in key[0] or "findings" in key[0] for key in before)

    def outcomes(found: Samples, run: str) -> dict[str, float]:
        return {key[3]: value for key, value in found.items() if key[0] == "tsck_last_run_outcome" and key[2] == run}

    store.forget("runs/b")
    begun = store.engine.clock() / 1e9
    report = store.gc(GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1))
    store.fsck()
    found = served.refreshed()
    for run in ("gc", "fsck"):
        assert outcomes(found, run) == {"ok": 1, "findings": 0, "refused": 0, "failed": 0}
        assert begun <= found["tsck_last_run_timestamp_seconds", at, run] <= store.engine.clock() / 1e9
        assert found["tsck_last_run_duration_seconds", at, run] >= 0
    assert found["tsck_last_gc_freed_bytes", at] == report.freed_bytes > 80_000
    assert found["tsck_fsck_findings", at, "error"] == 0
    shutil.rmtree(tmp_path / "ck" / "parts")
    store.fsck()
    found = served.refreshed()
    assert outcomes(found, "fsck") == {"ok": 0, "findings": 1, "refused": 0, "failed": 0}
    assert found["tsck_fsck_findings", at, "error"] > 0
    with pytest.raises(StoreError):
        store.gc(GcOptions(max_delete=0))
    found = served.refreshed()
    assert outcomes(found, "gc")["ok"] == 0
    assert sum(outcomes(found, "gc").values()) == 1
    assert ("tsck_last_gc_freed_bytes", at) not in found


def test_quotas(serve: Serve, make_store: MakeStore) -> None:
    store = make_store()
    publish(store, "runs/a", 1, new_bytes=100)
    store.set_quota("runs/*", warn=1000, refuse=2000)
    store.set_quota("other/*", warn="1kB")
    served = serve(store.url)
    found = served.refreshed()
    assert [found[f"tsck_quota_{what}_bytes", store.url, "runs/*"] for what in ("used", "warn", "refuse")] == [100, 1000, 2000]
    assert found["tsck_quota_used_bytes", store.url, "other/*"] == 0
    assert ("tsck_quota_refuse_bytes", store.url, "other/*") not in found
    publish(store, "runs/a", 2, new_bytes=500)
    store.remove_quota("other/*")
    found = served.refreshed()
    assert found["tsck_quota_used_bytes", store.url, "runs/*"] == 600
    assert not any("other/*" in key for key in found)
