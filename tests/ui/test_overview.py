"""The page of all stores, and who may see it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorstore_ck.common.extras import EXTRAS
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Access
from tests.catalog.made import publish
from tests.effort import PATIENCE_SECONDS
from tests.ui.conftest import Client, enter


def test_the_token_becomes_a_cookie_and_leaves_the_url(client: Client) -> None:
    browser = client()
    assert browser.get("/").status_code == 403
    assert browser.get("/open/another").status_code == 403
    answer = browser.get("/open/the-token", follow_redirects=False)
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/").status_code == 200
    assert browser.get("/static/style.css").status_code == 200


def test_other_hosts_are_refused(client: Client) -> None:
    browser = enter(client())
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        assert browser.get("/", headers={"host": host}).status_code == 421, host
    assert browser.get("/", headers={"host": "localhost:9000"}).status_code == 200


def test_pages_only_answer_reads_and_forbid_scripts_of_others(client: Client) -> None:
    browser = enter(client())
    assert (browser.post("/").status_code, browser.post("/static/style.css").text) == (405, "These pages change nothing.\n")
    for path in ("/", "/static/style.css", "/nothing", "/open/wrong"):
        headers = browser.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
    assert browser.get("/nothing").status_code == 404


def test_behind_a_proxy(client: Client) -> None:
    access = Access.of("https://hub.example/user/me/8080", 8080)
    browser = client(access=access, base_url="https://hub.example")
    assert access.entrance == f"/user/me/8080/{access.folder}/open/{access.token}"
    for entrance in (access.entrance, access.entrance.removeprefix("/user/me/8080")):  # a proxy may remove its part
        answer = browser.get(entrance, follow_redirects=False)
        assert answer.headers["location"] == f"/user/me/8080/{access.folder}/"
        assert f"path=/user/me/8080/{access.folder}/" in answer.headers["set-cookie"].lower()
        assert "secure" in answer.headers["set-cookie"].lower()
    page = browser.get(f"{access.prefix}/")
    assert f'href="{access.prefix}/static/style.css"' in page.text
    assert browser.get(f"{access.prefix}/static/style.css").status_code == 200
    assert browser.get(f"{access.prefix}/find/").status_code == 404  # not a redirect to a path without what is in front
    assert Access.of("", 8080).folder != Access.of("", 8080).folder  # of another port, whose pages get no cookie of this one
    assert Access.of("https://hub.example:443/user/me/", 8080).url(8080).startswith("https://hub.example/user/me/")
    assert Access.of("/user/me", 8080).url(8080).startswith("http://127.0.0.1:8080/user/me/")
    for wrong in ("javascript:alert(1)", "https://me:password@hub.example/", "https://hub.example:port/"):
        with pytest.raises(InvalidOptionError):
            Access.of(wrong, 8080)


def test_an_error_that_nobody_expects_has_the_headers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a defect")

    browser = enter(client())
    browser._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    monkeypatch.setattr("tensorstore_ck.ui.find.search", broken)
    answer = browser.get("/find")
    assert answer.status_code == 500
    assert "a defect" not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_a_late_branch_and_a_page_after_a_save(client: Client, store: Store) -> None:
    now = store.engine.clock()
    for ref, times in {"runs/late": (0, 10, 20), "runs/fine": (0, 1800, 3599), "runs/new": (0,)}.items():
        for step, at in enumerate(times):
            store.engine.log._clock = lambda at=at: now - (3600 - at) * 10**9  # type: ignore[misc]
            publish(store, ref, step)
    browser = enter(client())
    text = browser.get("/").text
    assert text.count(", late") == 1
    assert "late" in text.split("runs/late")[1].split("</tr>")[0]
    assert "runs/after" not in text
    publish(store, "runs/after", 1)
    assert "runs/after" in browser.get("/").text


def test_a_finished_run_is_not_late_until_it_goes_on(client: Client, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = store.engine.clock()

    def publish_at(seconds_ago: int, step: int) -> None:
        monkeypatch.setattr(store.engine.log, "_clock", lambda: now - seconds_ago * 10**9)
        publish(store, "runs/done", step)

    for step in range(3):
        publish_at(3600 - 10 * step, step)
    browser = enter(client())
    assert ", late" in browser.get("/").text
    store.finish("runs/done")
    assert ", finished" in browser.get("/").text
    assert ", late" not in browser.get("/").text
    publish_at(3000, 3)
    assert ", late" in browser.get("/").text


def test_a_dead_store_does_not_hide_the_others_and_names_are_escaped(client: Client, store: Store, tmp_path: Path) -> None:
    publish(store, "runs/gpt", 1)
    dead = str(tmp_path / "<script>alert(1)<")
    text = enter(client(store.url, dead)).get("/").text
    assert "cannot be read now" in text
    assert "runs/gpt" in text
    assert "<script>" not in text
    assert "cannot be read now" in enter(client(dead)).get("/").text
    many = enter(client(store.url, dead, f"{dead}2")).get("/").text
    assert "2 stores are not shown as they are now" in many
    assert many.count("cannot be read now") == 2


WITHOUT = """
import os, sys
from tensorstore_ck.cli import main
for package in ("sqlalchemy", "starlette", "uvicorn", "jinja2"):
    if os.fork() == 0:
        sys.modules[package] = None
        main(["ui", "--no-browser"])
    os.wait()
"""


def test_one_command_installs_all_that_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    assert done.stderr.count("run `pip install " + " ".join(f"'{each}'" for each in EXTRAS["ui"]) + "`") == 4


def test_hundreds_of_branches_are_filtered_ordered_and_paged(client: Client, store: Store) -> None:
    for number in range(120):
        publish(store, f"sweep/{number:03}", 1, new_bytes=number)
    publish(store, "runs/gpt", 1)
    browser = enter(client())

    def names(**query: str | int) -> list[str]:
        return re.findall(r'<th scope="row"><a [^>]*>([^<]*)</a>', browser.get("/", params=query).raise_for_status().text)

    assert names() == ["runs/gpt", *(f"sweep/{number:03}" for number in range(119, 70, -1))]
    assert names(order="name", page=3) == [f"sweep/{number:03}" for number in range(99, 120)]
    assert names(order="most put", q="sweep/0") == [f"sweep/{number:03}" for number in range(99, 49, -1)]
    assert names(q="gpt") == ["runs/gpt"]
    assert names(order="longest ago")[0] == "sweep/000"
    text = browser.get("/?q=<b>none").text
    assert "has “&lt;b&gt;none” in its name" in text
    assert "121" in text.split("<dt>Branches</dt>")[1].split("</dd>")[0]


def test_bytes_by_day_and_the_last_runs(client: Client, store: Store) -> None:
    day = 86_400 * 10**9
    for at, size in ((20_000 * day, 3 << 20), (20_000 * day + 1, 1 << 20), (20_002 * day, 2 << 20)):
        store.engine.log._clock = lambda at=at: at  # type: ignore[misc]
        publish(store, "runs/gpt", 1, new_bytes=size)
    browser = enter(client())
    text = browser.get("/").text
    titles = re.findall(r"<rect [^>]*height=\"([\d.]+)\"><title>([^<]*)</title>", text)
    assert titles == [("100.0", "2024-10-04: 4.0 MiB"), ("50.0", "2024-10-06: 2.0 MiB")]
    assert "never" in text.split("<dt>Last fsck (UTC)</dt>")[1].split("</dd>")[0]
    store.fsck()
    last = browser.get("/").text.split("<dt>Last fsck (UTC)</dt>")[1].split("</dd>")[0]
    assert 'class="bad"' in last  # the snapshots have no objects
    assert "findings" in last
