"""A real Prometheus scrapes an exporter over real stores, and answers the queries of the dashboard; promtool tries the alerts."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tensorstore_ck.gc import GcOptions
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.integrations.prometheus.conftest import Served, get
from tests.integrations.prometheus.queries import RULES, panel_queries, rules, variable_queries
from tests.servers import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"),
]


@contextmanager
def prometheus(folder: Path, scraped: str) -> Iterator[Callable[..., Any]]:
    """A server that scrapes `scraped` every two seconds; a function that asks its HTTP API."""
    folder.mkdir()
    target = urllib.parse.urlsplit(scraped)
    job = {"job_name": "tsck", "metrics_path": target.path, "static_configs": [{"targets": [target.netloc]}]}
    times = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": times, "rule_files": [str(RULES)], "scrape_configs": [job]}))
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=error"]
    with (folder / "log").open("w") as log, subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log) as process:

        def ask(path: str, **parameters: str) -> Any:
            answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
            assert answer["status"] == "success"
            return answer["data"]

        try:
            yield ask
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except urllib.error.URLError:
            pass  # it is not ready yet
        time.sleep(0.1)
    raise AssertionError("it did not come about in time")


@pytest.fixture
def scraped(serve: Callable[..., Served], make_store: Callable[..., Store], tmp_path: Path) -> Served:
    """A store with all that can be measured, one with an odd name, and one that is dead."""
    stores = [make_store("ck"), make_store('odd "name"\nof\\two lines')]
    for store in stores:
        for step in (1, 2, 3, 4):
            store.put_snapshot({"weights": torch.rand(1000)}, ref="runs/gpt", step=step)
        store.put_snapshot({"weights": torch.rand(1000)}, ref="runs/old", step=1)
        store.forget("runs/old")
        store.gc(GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1))
        store.fsck()
        store.set_quota("runs/*", refuse="1GB")
    served = serve(*(store.url for store in stores), str(tmp_path / "dead"))
    served.exporter.refresh(measure=True)
    return served


def test_every_query_of_the_dashboard_has_an_answer(scraped: Served, tmp_path: Path) -> None:
    urls = {watched.url for watched in scraped.exporter.watched}
    with prometheus(tmp_path / "prometheus", scraped.url) as ask:
        until(lambda: len(ask("query", query="count_over_time(tsck_up[1m]) > 1")["result"]) == len(urls))
        assert {each["metric"]["store"] for each in ask("query", query="tsck_up")["result"]} == urls
        empty = {title for title, query in panel_queries("1m").items() if not ask("query", query=query)["result"]}
        assert empty == set()
        for selector, label in variable_queries().values():
            assert ask(f"label/{label}/values", **{"match[]": selector})
        (down,) = ask("query", query=panel_queries()["Stores that cannot be read A"])["result"]
        assert down["value"][1] == "1"

        def evaluated() -> bool:
            found = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
            assert all(rule["health"] in ("ok", "unknown") for rule in found)
            return all(rule["health"] == "ok" for rule in found)

        until(evaluated)
        until(lambda: {alert["labels"]["alertname"] for alert in ask("alerts")["alerts"]} >= {"TsckStoreUnreadable"})


def promtool(*arguments: str, **options: Any) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("rules_test.yml")
    tested = {test["alertname"] for each in yaml.safe_load(cases.read_text())["tests"] for test in each["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in rules()}
    for path in (cases, RULES):
        shutil.copy(path, tmp_path)
    promtool("test", "rules", cases.name, cwd=tmp_path)


def test_the_format_is_without_findings(scraped: Served) -> None:
    promtool("check", "metrics", input=get(scraped.url))
