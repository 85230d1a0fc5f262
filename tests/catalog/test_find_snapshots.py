"""What `find` answers, against a filter in plain Python; and what it refuses."""

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.catalog import Catalog, FoundSnapshot
from tensorstore_ck.catalog.find_snapshots import metric_names
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tests.catalog.made import publish
from tests.gc.stores import Clock, open_store

NOW = 2_000_000_000_000_000_000
DAY = 86_400 * 10**9
REFS = ("runs/gpt-7b", "runs/gpt-13b", "exp/lr/2", "main")
VALUES = (0.5, 1.0, 2.0, float("nan"), float("inf"), -1e300)
Holds = Callable[[FoundSnapshot], bool]


class Said(NamedTuple):
    """A condition, and the same in Python."""

    text: str
    holds: Holds


def fill(catalog: Catalog, url: str, seed: int) -> None:
    """Thirty snapshots that differ in everything that can be asked for."""
    clock = Clock(NOW - 30 * DAY)
    backend = MemoryBackend(clock=clock)
    backend.url = url
    store = open_store(backend, clock=clock)
    roots = []
    for number in range(seed, seed + 30):
        clock.advance(86_000)
        metrics = {
            name: VALUES[(number * place) % len(VALUES)]
            for place, name in enumerate(("loss", "val/acc", "step"), start=1)
            if number % (place + 1)
        }
        sizes = {"logical_bytes": 10**number if number < 13 else number, "new_bytes": number}
        roots.append(publish(store, REFS[number % 4], None if number % 5 == 0 else number * 10, metrics, **sizes))
    for number, root in enumerate(roots):
        if number % 4 == 0:
            store.tag(f"v{number}", root)
        if number % 8 == 0:
            store.tag(f"best-{number}", root)
        if number % 6 == 0:
            store.pin(root, owner="ada")
        if number % 7 == 0:
            store.mark(root, reason="?")
    store.forget("exp/lr/2")
    store.reset("main", roots[0])
    catalog.sync(store)


@pytest.fixture(scope="module")
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Catalog, ...]]:
    from tests.catalog import server

    urls = [str(tmp_path_factory.mktemp("find") / "catalog.sqlite")]
    if server.program("initdb") is not None:
        urls.append(request.getfixturevalue("postgres") + "&application_name=find")
    opened = [Catalog(url, clock=lambda: NOW) for url in urls]
    for catalog in opened:
        fill(catalog, "s3://bucket/ckpt", 0)
        fill(catalog, "/data/it's", 7)
    yield tuple(opened)
    for catalog in opened:
        catalog.close()


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ops = st.sampled_from(sorted(OPS))
STEPS = (0, 40, 100, 110.5, 300, 1e30)


def _known(value: Callable[[FoundSnapshot], Any], test: Callable[[Any], Any]) -> Holds:
    """What is missing or NaN satisfies nothing."""
    return lambda found: (had := value(found)) is not None and not math.isnan(had) and bool(test(had))


def _number(name: str, value: Callable[[FoundSnapshot], Any], numbers: tuple[float, ...]) -> st.SearchStrategy[Said]:
    some = st.sampled_from(numbers)
    return st.one_of(
        st.builds(lambda op, number: Said(f"{name} {op} {number!r}", _known(value, lambda had: OPS[op](had, number))), ops, some),
        st.builds(lambda op, number: Said(f"{number!r}{op}{name}", _known(value, lambda had: OPS[op](number, had))), ops, some),
        st.builds(
            lambda low, high: Said(f"{name} BETWEEN {low!r} AND {high!r}", _known(value, lambda had: low <= had <= high)), some, some
        ),
        st.builds(
            lambda low, high: Said(f"{name} not between {low!r} and {high!r}", _known(value, lambda had: not low <= had <= high)),
            some,
            some,
        ),
        st.lists(some, min_size=1, max_size=3).map(
            lambda them: Said(f"{name} in ({', '.join(map(repr, them))})", _known(value, lambda had: had in them))
        ),
        st.lists(some, min_size=1, max_size=3).map(
            lambda them: Said(f"{name} not in ({', '.join(map(repr, them))})", _known(value, lambda had: had not in them))
        ),
    )


def _metric(written: str, name: str) -> st.SearchStrategy[Said]:
    def value(found: FoundSnapshot) -> float | None:
        return found.metrics.get(name)

    return st.one_of(
        _number(written, value, (0.5, 1.0, 2, -3, 1e308)),
        st.just(Said(f"{written} is null", lambda found: name not in found.metrics)),
        st.just(Said(f"{written} is not null", lambda found: name in found.metrics)),
        st.just(Said(f"{written} is nan", lambda found: name in found.metrics and math.isnan(found.metrics[name]))),
        st.just(Said(f"{written} is not nan", lambda found: not (name in found.metrics and math.isnan(found.metrics[name])))),
    )


def _like(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"%": ".*", "_": "."}.get(char, re.escape(char)) for char in pattern), re.DOTALL)


def _text(name: str, value: Callable[[FoundSnapshot], str], texts: tuple[str, ...]) -> st.SearchStrategy[Said]:
    def quoted(text: str) -> str:
        return "'" + text.replace("'", "''") + "'"

    some, patterns = st.sampled_from(texts), st.sampled_from([*texts, "%", "gpt%", "%it's%", "GPT%", "_ain", "%-7_", "%/%"])
    return st.one_of(
        st.builds(lambda text: Said(f"{name} = {quoted(text)}", lambda found: value(found) == text), some),
        st.builds(lambda text: Said(f"{name}!={quoted(text)}", lambda found: value(found) != text), some),
        st.builds(
            lambda text: Said(f"{name} in ({quoted(text)}, {quoted(texts[0])})", lambda found: value(found) in (text, texts[0])), some
        ),
        st.builds(lambda text: Said(f"{name} like {quoted(text)}", lambda found: bool(_like(text).fullmatch(value(found)))), patterns),
        st.builds(lambda text: Said(f"{name} not like {quoted(text)}", lambda found: not _like(text).fullmatch(value(found))), patterns),
    )


TESTS = st.one_of(
    _metric("loss", "loss"),
    _metric('"val/acc"', "val/acc"),
    _metric("val/acc", "val/acc"),
    _metric("metric('step')", "step"),
    _number("step", lambda found: found.step, STEPS),
    st.just(Said("step is null", lambda found: found.step is None)),
    st.just(Said("step is not null", lambda found: found.step is not None)),
    _number("size", lambda found: found.logical_bytes, (3, 1000, 10**9)),
    st.just(Said("size >= 1MB and new_bytes < 10kB", lambda found: found.logical_bytes >= 10**6 and found.new_bytes < 10**4)),
    _number("new_bytes", lambda found: found.new_bytes, (3, 10, 1e300)),
    _text("job", lambda found: found.job, ("gpt-7b", "lr/2", "main", "7b")),
    _text("ref", lambda found: found.ref, REFS),
    _text("store", lambda found: found.store, ("s3://bucket/ckpt", "/data/it's", "x")),
    _text("actor", lambda found: found.actor, ("nobody",)),
    _text("mark", lambda found: found.mark, ("bad", "")),
    st.just(Said("mark is null", lambda found: not found.mark)),
    st.just(Said("state = 'forgotten'", lambda found: found.state == "forgotten")),
    st.just(Said("tag is null", lambda found: not found.tags)),
    st.just(Said("tag like 'best%'", lambda found: any(tag.startswith("best") for tag in found.tags))),
    st.just(Said("tag != 'v8'", lambda found: "v8" not in found.tags)),
    st.just(Said("tag not in ('v8', 'v4')", lambda found: not {"v8", "v4"} & set(found.tags))),
    st.just(Said("pinned", lambda found: found.pinned)),
    st.just(Said("pinned != true", lambda found: not found.pinned)),
    st.just(Said("age < 7d", lambda found: NOW - found.time_ns < 7 * DAY)),
    st.just(Said("age between 48h and '10d'", lambda found: 2 * DAY <= NOW - found.time_ns <= 10 * DAY)),
    st.just(Said("time >= '2033-05-10'", lambda found: found.time_ns >= 1_999_296_000 * 10**9)),
    st.just(Said("time < '2033-05-10T12:00:00+02:00'", lambda found: found.time_ns < (1_999_296_000 + 36_000) * 10**9)),
)


def _joined(inner: st.SearchStrategy[Said]) -> st.SearchStrategy[Said]:
    return st.one_of(
        st.builds(lambda a, b: Said(f"({a.text}) and {b.text}", lambda found: a.holds(found) and b.holds(found)), inner, TESTS),
        st.builds(lambda a, b: Said(f"({a.text} OR {b.text})", lambda found: a.holds(found) or b.holds(found)), TESTS, inner),
        st.builds(lambda a: Said(f"not ({a.text})", lambda found: not a.holds(found)), inner),
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.recursive(TESTS, _joined, max_leaves=6))
@example(Said("not (step < 100)", lambda found: found.step is None or found.step >= 100))
@example(Said("not (loss < 1 or loss >= 1)", lambda found: math.isnan(found.metrics.get("loss", math.nan))))
@example(Said("job like 'GPT%'", lambda found: False))
@example(Said("not (age between 48h and '10d')", lambda found: not 2 * DAY <= NOW - found.time_ns <= 10 * DAY))
@example(Said("age >= 2w or age < 1d", lambda found: not DAY <= NOW - found.time_ns < 14 * DAY))
@example(Said("tag is null or not pinned and mark is not null", lambda found: not found.tags or (not found.pinned and found.mark != "")))
def test_it_finds_what_a_filter_finds(filled: tuple[Catalog, ...], said: Said) -> None:
    for catalog in filled:
        everything = catalog.find(state=None)
        assert len(everything) == 60
        assert catalog.find(said.text, state=None) == tuple(filter(said.holds, everything))


@pytest.mark.parametrize("text", ["loss < 2", "not (loss < 2)", "loss is null or val/acc > 0", "loss is not nan and not loss in (1, 2)"])
def test_what_is_common_is_found_like_what_is_rare(filled: tuple[Catalog, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for catalog in filled:
        found = catalog.find(text, state=None)
        monkeypatch.setattr("tensorstore_ck.catalog.find_snapshots.MAX_RARE", 0)
        assert catalog.find(text, state=None) == found
        monkeypatch.undo()
        assert 0 < len(found) < 60


def test_order_and_limit(filled: tuple[Catalog, ...]) -> None:
    for catalog in filled:
        found = catalog.find(state=None)
        assert [each.time_ns for each in found] == sorted((each.time_ns for each in found), reverse=True)
        for name in ("loss", '"val/acc"', '"step"'):
            for turned in (False, True):
                ordered = catalog.find(state=None, order_by=name, descending=turned)
                values = [each.metrics.get(name.strip('"'), float("nan")) for each in ordered]
                finite = [value for value in values if not math.isnan(value)]
                assert finite == sorted(finite, reverse=turned)
                assert values[: len(finite)] == finite, "what has none comes last"
                assert catalog.find(state=None, order_by=name, descending=turned, limit=5) == ordered[:5]
                assert catalog.find(state=None, order_by=name, descending=turned, limit=5, offset=7) == ordered[7:12]
        for name in ("step", "job", "ref", "store", "time", "size", "new_bytes", "mark", "state", "actor", "root"):
            assert len(catalog.find(order_by=name, descending=True, state=None)) == 60
        assert [each.ref for each in catalog.find(order_by="ref", state=None)] == sorted(each.ref for each in found)
        assert catalog.find(state=None, order_by="age") == found
        assert catalog.find(state=None, offset=55) == found[55:]
        with catalog.reading() as connection:
            assert metric_names(connection, 10) == ["loss", "step", "val/acc"]
            assert metric_names(connection, 2) == ["loss", "step"]


def test_only_what_is_live_unless_asked_for(filled: tuple[Catalog, ...]) -> None:
    for catalog in filled:
        live = catalog.find()
        assert {each.state for each in live} == {"live"}
        assert 0 < len(live) < 60
        assert {each.state for each in catalog.find("state != 'live'")} == {"forgotten"}


def test_a_root_by_its_first_digits(filled: tuple[Catalog, ...]) -> None:
    for catalog in filled:
        one = catalog.find()[3]
        for digits in (one.root, one.root[:12], one.root[:12].upper()):
            assert catalog.find(f"root = '{digits}'") == (one,)
        assert len(catalog.find(f"root != '{one.root[:12]}'", state=None)) == 59
        assert len(catalog.find(f"root not in ('{one.root[:12]}')", state=None)) == 59


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss <", "ends too early"),
        ("(loss < 1", "ends too early"),
        ("loss < 1)", r"syntax error at character 9 near '\)'"),
        ("loss < 1 and and step > 2", "syntax error at character 14 near 'and step"),
        ("loss ~ 1", "character 6"),
        ("loss < 1; drop table snapshots", "character 9"),
        ("loss < step", "character 8"),
        ("loss + 1 < 2", "character 6"),
        ("__import__('os')", r"character 11"),
        ("loss in ()", "character 10"),
        ('job like "gpt"', "texts stand in single quotes"),
        ("job = 'gpt", "character 7"),
        ("\0", "must be a text"),
        (" ", "is empty"),
        ("job = '\udcff'", "must be a text"),
        ("metric('a\0') < 1", "must be a text"),
        (f"size < {'9' * 400}GB", "a size like"),
        (f"size < {'9' * 400}", None),
        (f"step < {'9' * 30} and loss < 1e999", None),
        (f"age < {'9' * 400}d", "a duration"),
        ("time > '0001-01-01' and age < 90000w", None),
        ("1 < 2", "character 5"),
        ("loss = 'abc'", "loss must be compared with a number, not with 'abc'"),
        ("loss < true", "compared with a number"),
        ("loss < 10GB", "compared with a number"),
        ("loss like '2%'", "loss must be compared with a number, not with '2%'"),
        ("loss", "not with nothing"),
        ("step like 'x'", "step is a number"),
        ("step is nan", "not with 'is nan'"),
        ("step = '7'", "step must be compared with a number"),
        ("job < 'x'", "job is a text"),
        ("job = 7", "a text in single quotes"),
        ("job like 'a\\'", "ends with a backslash"),
        ("state = 'dead'", "there is no state 'dead': use one of 'live'"),
        ("mark = 'worse'", "there is no mark 'worse'"),
        ("root = 'xyz'", "the first digits"),
        ("root = ''", "the first digits"),
        ("root like 'a%'", "root is a root"),
        ("time > '31.1.2026'", "a date like"),
        ("time = '2026-01-31'", "time is a time"),
        ("time > 7", "a date like"),
        ("time > '9999-12-31T23:59:59-23:00'", None),
        ("age < 7", "a duration"),
        ("age < 7y", "a duration"),
        ("size > 10XB", "a size like"),
        ("size > 'much'", "a size like"),
        ("pinned = 'yes'", "pinned is true or false"),
        ("pinned > 1", "true or false"),
        ("tag > 'v1'", "the name of a tag"),
        ("tag = 1", "a text in single quotes"),
        ("not " * 2000 + "pinned", "too deep"),
        ("(" * 4000 + "pinned" + ")" * 4000, None),
        ("(not " * 60 + "pinned" + ")" * 60, "too deep"),
        ("step = 1 or " * 300 + "pinned", "too long"),
        ("pinned and " * 1000 + "pinned", "10,000 characters"),
    ],
)
def test_what_makes_no_sense(filled: tuple[Catalog, ...], text: str, message: str | None) -> None:
    for catalog in filled:
        if message is None:
            catalog.find(text)
            continue
        with pytest.raises(InvalidOptionError, match=message) as caught:
            catalog.find(text)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("los < 1", "did you mean loss"),
        ("Step < 1", "did you mean step"),
        ("val_acc < 1", "did you mean val/acc"),
        ("qqq < 1", "there are loss, step, val/acc"),
        ('"\'; drop table snapshots; --" < 1', "a metric or an attribute"),
    ],
)
def test_a_metric_that_nobody_has(filled: tuple[Catalog, ...], text: str, message: str) -> None:
    for catalog in filled:
        with pytest.raises(NotFoundError, match=message):
            catalog.find(text)
        with pytest.raises(NotFoundError, match="has a metric or an attribute 'nope'"):
            catalog.find(order_by="nope")


@pytest.mark.parametrize("text", ["'; DROP TABLE snapshots; --", "' OR '1'='1", "\\' OR 1=1 --", "%' ESCAPE '", "{0}", ":param %(x)s %s ?"])
def test_values_stay_values(filled: tuple[Catalog, ...], text: str) -> None:
    for catalog in filled:
        written = text.replace("'", "''")
        for field in ("job", "ref", "store", "tag", "actor"):
            assert catalog.find(f"{field} = '{written}'") == ()
            assert catalog.find(f"{field} in ('{written}', 'x')") == ()
            assert catalog.find(f"{field} like '{written}'") == ()
        assert len(catalog.find(state=None)) == 60


def test_options_that_make_no_sense(filled: tuple[Catalog, ...]) -> None:
    for catalog in filled:
        for options in (
            {"limit": 0},
            {"limit": 1.5},
            {"offset": -1},
            {"offset": True},
            {"state": "dead"},
            {"order_by": "tag"},
            {"order_by": "pinned"},
            {"order_by": "a\udcff"},
            {"order_by": 7},
        ):
            with pytest.raises(InvalidOptionError):
                catalog.find(**options)
        assert len(catalog.find(limit=10**40, state=None)) == 60
        with pytest.raises(InvalidOptionError):
            catalog.find(7)  # type: ignore[arg-type]
