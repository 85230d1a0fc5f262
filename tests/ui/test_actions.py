"""What pages may change with ``--allow``, and what keeps other sites from it."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tensorstore_ck.cli import main
from tensorstore_ck.errors import InvalidOptionError, UndecidedError
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Access, Sources, make_app, parse_allow
from tensorstore_ck.ui.actions import ACTIONS
from tests.catalog.made import publish
from tests.ui.conftest import BASE, Client, Open, enter
from tests.ui.test_space import page_of, put

ALL = ",".join(ACTIONS)
FORM_HEADERS = {"origin": BASE, "sec-fetch-site": "same-origin"}
Writer = Callable[..., TestClient]


def access_of(allow: str) -> Access:
    return Access("", "", False, "tsck_ui_8080", "the-token", parse_allow(allow))


@pytest.fixture
def writer(sources: Callable[..., Sources]) -> Writer:
    """Makes browsers for a server with ``--allow``."""

    def make(allow: str = ALL, access: Access | None = None, base_url: str = BASE) -> TestClient:
        opened = sources(allow=allow)
        opened.refresh()
        return TestClient(make_app(opened, access or access_of(allow)), base_url=base_url)

    return make


def send(browser: TestClient, store: Store, verb: str, headers: dict[str, str] | None = None, **form: str) -> Any:
    """A form of our own, if nothing else is said."""
    form = {"csrf": access_of("").csrf, **form}
    url = f"/stores/{store.engine.config.uuid}/do/{verb}"
    return browser.post(url, data=form, headers=FORM_HEADERS if headers is None else headers, follow_redirects=False)


def notice_of(browser: TestClient, answer: Any) -> str:
    """What the page says that an action redirects to."""
    assert answer.status_code == 303
    found = re.search(r'<p class="notice (?:bad|done)" role="(?:alert|status)">(.*?)</p>', browser.get(answer.headers["location"]).text)
    assert found is not None
    return unescape(re.sub("</?code>", "`", found[1]))


def test_each_action_changes_the_store_and_says_so(writer: Writer, store: Store, tmp_path: Path) -> None:
    root = publish(store, "runs/a", 1)
    publish(store, "runs/a", 2)
    browser = enter(writer())
    browser.get("/")
    assert not (tmp_path / "writer").exists(), "the store is opened for writing by the first action"
    answer = send(browser, store, "tag", at=root, name="release/1")
    where = urlsplit(answer.headers["location"])
    assert where.path == f"/stores/{store.engine.config.uuid}/snapshot"
    assert parse_qs(where.query)["at"] == [root]
    assert notice_of(browser, answer) == "The tag release/1 names this snapshot now."
    assert store.tags()["release/1"].root == root
    assert notice_of(browser, send(browser, store, "annotate", at=root, name="acc", value=" 0.5 ")) == "The metric acc is 0.5 now."
    assert store.resolve(root).metrics["acc"] == 0.5
    assert "marked bad" in notice_of(browser, send(browser, store, "mark", at=root, mark="bad", reason="NaN"))
    assert (store.resolve(root).mark, store.resolve(root).reason) == ("bad", "NaN")
    assert "no mark" in notice_of(browser, send(browser, store, "mark", at=root, mark="", reason="left over"))
    assert (store.resolve(root).mark, store.resolve(root).reason) == ("", "")
    assert "pinned for 30d" in notice_of(browser, send(browser, store, "pin", at=root, reason="paper", expires="30d"))
    (pin,) = store.pins()
    assert (pin.reason, pin.expires_ns is not None) == ("paper", True)
    store.forget("runs/a@1")
    (window,) = store.forgotten()
    assert notice_of(browser, send(browser, store, "undo", name="runs/a", entry=str(window.entry))) == "1 snapshot of runs/a is back."
    assert len(store.log("runs/a")) == 2


def test_errors_of_the_store_are_shown_where_the_form_was(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    browser = enter(writer())
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("tag", {"at": root, "name": "no spaces"}, "cannot be the name of a branch or tag"),
        ("tag", {"at": root, "name": "runs/a"}, "runs/a"),
        ("tag", {"at": "0" * 64, "name": "x"}, "0000"),
        ("annotate", {"at": root, "name": "acc", "value": "<b>"}, "the value of a metric is a number, not '<b>'"),
        ("pin", {"at": root, "expires": "soon"}, "expires must be a duration"),
        ("mark", {"at": root, "mark": "good"}, "mark must be"),
        ("undo", {"name": "runs/a", "entry": "1"}, "cannot be undone"),
        ("undo", {"name": "runs/a", "entry": "x"}, "whole number"),
    ]
    for verb, form, error in wrong:
        text = notice_of(browser, send(browser, store, verb, **form))
        assert text.startswith("Nothing was changed: ")
        assert error in text
    assert (store.tags(), store.pins(), store.resolve(root).metrics) == ({}, (), {})


def test_what_is_undecided_is_not_called_unchanged(writer: Writer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    root = publish(store, "runs/a", 1)

    def fail(*_: object) -> None:
        raise UndecidedError("no answer came")

    monkeypatch.setattr(Store, "tag", fail)
    browser = enter(writer())
    assert notice_of(browser, send(browser, store, "tag", at=root, name="x")).startswith("It is not known whether this was done: no answer")


def test_undo_of_what_changed_meanwhile_is_a_conflict(writer: Writer, store: Store) -> None:
    for step in range(4):
        publish(store, "runs/a", step)
    store.forget("runs/a@0")
    browser = enter(writer())
    (window,) = store.forgotten()
    store.forget("runs/a@1")
    text = notice_of(browser, send(browser, store, "undo", name="runs/a", entry=str(window.entry)))
    assert "'runs/a' changed meanwhile" in text
    assert len(store.log("runs/a")) == 2


def test_a_notice_is_shown_once_and_cannot_be_made_up(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    browser = enter(writer())
    assert 'class="notice' not in browser.get("/?notice=Please+send+me+your+token").text
    location = send(browser, store, "tag", at=root, name="<script>").headers["location"]
    text = browser.get(location).text
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    assert "cannot be the name" not in browser.get(location).text


def test_forms_of_others_are_refused(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    browser = enter(writer())
    others: list[dict[str, str]] = [
        {},
        {"origin": "null", "sec-fetch-site": "same-origin"},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://localhost:8080.evil.example"},
        {"origin": BASE, "sec-fetch-site": "same-site"},
        {"origin": BASE, "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "none"},
    ]
    for headers in others:
        assert send(browser, store, "tag", headers, at=root, name="x").status_code == 403, headers
    assert store.tags() == {}


def test_forms_without_our_secret_are_refused(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    browser = enter(writer())
    for csrf in ("", "0" * 64, "the-token", "\N{SNOWMAN}"):
        assert send(browser, store, "tag", at=root, name="x", csrf=csrf).status_code == 403, csrf
    assert store.tags() == {}
    assert access_of(ALL).csrf != Access("", "", False, "tsck_ui_8080", "another").csrf


def test_forms_need_the_cookie_the_host_and_the_type(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    browser = writer()
    assert send(browser, store, "tag", at=root, name="x").status_code == 403
    enter(browser)
    assert send(browser, store, "tag", {**FORM_HEADERS, "host": "evil.example"}, at=root, name="x").status_code == 421
    url, body = f"/stores/{store.engine.config.uuid}/do/tag", {"csrf": access_of("").csrf, "at": root, "name": "x"}
    assert browser.post(url, json=body, headers=FORM_HEADERS).status_code == 415
    too_long = {**body, "name": "x" * 70_000}
    assert browser.post(url, data=too_long, headers=FORM_HEADERS).status_code == 413
    many = {**body, **{f"f{number}": "x" for number in range(100)}}
    assert browser.post(url, data=many, headers=FORM_HEADERS).status_code == 400
    assert browser.post(f"/stores/{'0' * 32}/do/tag", data=body, headers=FORM_HEADERS).status_code == 404
    assert store.tags() == {}


def test_only_what_is_allowed_has_a_route(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    browser = enter(writer("pin"))
    assert send(browser, store, "pin", at=root).status_code == 303
    for verb in ("tag", "annotate", "mark", "undo", "unpin", "gc", "forget", "repair", "fsck"):
        assert send(browser, store, verb, at=root, name="x", entry="1").status_code == 404
    assert browser.get(f"/stores/{store.engine.config.uuid}/do/pin").status_code == 405
    for url in ("/", f"/stores/{store.engine.config.uuid}/space", "/static/style.css"):
        assert browser.post(url, headers=FORM_HEADERS, data={"csrf": access_of("").csrf}).status_code == 405
    assert browser.put("/", headers=FORM_HEADERS).status_code == 405


def test_behind_a_proxy_the_origin_is_that_of_the_proxy(writer: Writer, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    access = Access.of("https://hub.example/user/me", 8080, parse_allow("tag"))
    browser = writer(access=access, base_url="https://hub.example")
    assert browser.get(access.entrance, follow_redirects=False).status_code == 303
    url, form = f"{access.prefix}/stores/{store.engine.config.uuid}/do/tag", {"csrf": access.csrf, "at": root}
    for number, (origin, host, status) in enumerate(
        [
            ("https://hub.example", "hub.example", 303),
            ("https://hub.example", "127.0.0.1:8080", 303),  # a proxy may pass its own name on, or ours
            ("http://hub.example", "hub.example", 403),
            ("https://other.example", "hub.example", 403),
            ("http://127.0.0.1:8080", "127.0.0.1:8080", 403),
        ]
    ):
        sent = browser.post(
            url, data={**form, "name": f"t{number}"}, headers={"origin": origin, "host": host, "cookie": f"{access.cookie}={access.token}"},
            follow_redirects=False,
        )  # fmt: skip
        assert sent.status_code == status, (origin, host)
    assert store.tags().keys() == {"t0", "t1"}


def test_what_can_be_undone(writer: Writer, store: Store) -> None:
    for step in range(8):
        publish(store, "runs/a", step)
    publish(store, "runs/b", 1)
    url = f"/stores/{store.engine.config.uuid}/forgotten"
    browser = enter(writer("undo"))
    assert "Nothing was forgotten" in browser.get(url).text
    store.forget("runs/a@0")
    store.forget(*(f"runs/a@{step}" for step in range(1, 7)))
    store.forget("runs/b")
    text = browser.get(url).text
    assert text.count("<button aria-label") == 2
    assert "after the newer one" in text
    assert "the branch" in text
    assert "and 1 more" in text
    text = browser.get(url, params={"name": "runs/b", "back": "ref"}).text
    assert "runs/a" not in text
    form = dict(re.findall(r'name="(\w+)" value="([^"]*)"', text))
    answer = send(browser, store, "undo", **form)
    assert urlsplit(answer.headers["location"]).path.endswith("/ref")
    assert "runs/b" in store.branches()
    text = enter(writer("tag")).get(url).text
    assert "<button" not in text
    assert f"<code>tsck undo runs/a -s {store.url}</code>" in text


def test_allow_names_what_there_is() -> None:
    assert parse_allow("") == frozenset()
    assert parse_allow(" tag, pin ,") == {"tag", "pin"}
    with pytest.raises(InvalidOptionError, match=r"'gc'.*tag, annotate, mark, pin, undo"):
        parse_allow("tag,gc")
    done = CliRunner().invoke(main, ["ui", "--allow", "repair", "-s", "nowhere", "--no-browser"])
    assert done.exit_code == InvalidOptionError.exit_code
    assert "allowed are tag, annotate, mark, pin, undo" in done.output


@pytest.mark.slow
def test_actions_in_a_browser(open_page: Open, store: Store) -> None:
    root = put(store, "runs/a", 1, 10_000)
    put(store, "runs/a", 2, 10_000)
    page = open_page(page_of(store, "snapshot", f"?at={root}"), allow=ALL)
    page.get_by_label("Name, which never moves").fill("not a name")
    page.get_by_role("button", name="Tag it").click()
    page.get_by_role("alert").wait_for()
    assert page.get_by_label("Name, which never moves").input_value() == "not a name"
    page.get_by_label("Name, which never moves").fill("release/1")
    page.get_by_role("button", name="Tag it").click()
    page.get_by_text("The tag release/1 names this snapshot now.").wait_for()
    page.get_by_role("button", name="Mark it bad").click()
    page.get_by_role("button", name="Remove the mark").click()
    page.get_by_text("This snapshot has no mark any more.").wait_for()
    assert page.url.partition("?")[0].endswith("/snapshot")
    store.untag("release/1")
    store.forget("runs/a@1")
    page.goto(page.url.partition("/stores/")[0] + page_of(store, "ref", "?name=runs/a"))
    page.get_by_role("button", name="Undo").first.click()
    page.get_by_text("1 snapshot of runs/a is back.").wait_for()
    assert page.url.partition("?")[0].endswith("/ref")
    assert [each.step for each in store.log("runs/a")] == [2, 1]


def test_without_allow_there_are_commands(client: Client, store: Store) -> None:
    root = publish(store, "runs/a", 1)
    text = enter(client()).get(page_of(store, "snapshot", f"?at={root}")).text
    assert f"tsck pin {root[:16]} --reason WHY -s {store.url}" in text
    assert 'method="post"' not in text
