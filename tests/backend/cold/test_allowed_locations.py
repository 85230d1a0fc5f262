"""Which locations a host uses: by kinds of URLs, and by prefixes that it allows."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.backend.cold import locations
from tensorstore_ck.backend.cold.allowed_locations import is_allowed, is_inside, parse_allowed, places_file
from tensorstore_ck.backend.cold.locations import LocationOpener
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import InvalidOptionError, PlaceUnavailableError
from tensorstore_ck.redaction import display_url

SECRET = {"key": "id", "secret": "s3cret", "endpoint_url": "http://minio:9000"}
OWN_ENDPOINT = [
    ("s3://bucket/ckpt", "s3://bucket/cold"),
    ("s3://bucket/ckpt", "s3://cold"),
    ("s3://bucket/ckpt", "s3a://cold/ckpt?storage_class=STANDARD_IA"),
    ("s3://fast--use1-az4--x-s3/ckpt", "s3://fast--use1-az4--x-s3/cold"),
    ("gs://bucket/ckpt", "gcs://cold.example.org/ckpt"),
    ("az://bucket/ckpt", "abfs://cold/ckpt"),
    ("memory://bucket", "memory://cold"),
]
ELSEWHERE = [
    ("s3://bucket/ckpt", "gs://cold/ckpt"),
    ("s3://bucket/ckpt", "http://169.254.169.254/latest/meta-data"),
    ("s3://bucket/ckpt", "https://evil.example.org/x"),
    ("s3://bucket/ckpt", "s3://user:secret@cold/x"),
    ("s3://bucket/ckpt", "s3://cold@evil.example.org/x"),
    ("s3://bucket/ckpt", "s3://evil.example.org:9000/x"),
    ("s3://bucket/ckpt", "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/evil/x"),
    ("s3://bucket/ckpt", "s3://arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/evil/x"),
    ("s3://bucket/ckpt", "s3://evil--op-s3/x"),
    ("s3://bucket/ckpt", "s3:///x"),
    ("s3://bucket/ckpt", "s3://cold/../x"),
    ("s3://bucket/ckpt", "s3://cold#evil/x"),
    ("s3://bucket/ckpt", "/etc"),
    ("s3://bucket/ckpt", "file:///etc"),
    ("s3://bucket/ckpt", "memory://cold"),
    ("s3://bucket/ckpt", "simplecache::s3://cold/x"),
    ("s3://bucket/ckpt", "filecache::s3://cold/x"),
    ("s3://bucket/ckpt", "zip://x::s3://cold/x"),
    ("s3://bucket/ckpt", "s3://cold/x::http://evil.example.org/x"),
    ("gs://bucket/ckpt", "gs://cold@evil/x"),
    ("az://bucket/ckpt", "abfs://cold@evil.dfs.core.windows.net/x"),
    ("az://bucket/ckpt", "az://evil.blob.core.windows.net/cold/x"),
    ("sftp://host/ckpt", "sftp://host/cold"),
    ("sftp://host/ckpt", "sftp://evil/cold"),
    ("/data/ckpt", "s3://cold/x"),
    ("/data/ckpt", "memory://cold"),
    ("memory://bucket", "memory:/cold"),
    ("memory://bucket", "cold"),
]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What was opened, with which options."""
    found: list[tuple[str, dict[str, Any]]] = []

    def open_backend(url: str, options: Mapping[str, Any], **_: Any) -> MemoryBackend:
        found.append((url, dict(options)))
        return MemoryBackend()

    monkeypatch.setattr(locations, "open_backend", open_backend)
    return found


@pytest.mark.parametrize(("store", "place"), OWN_ENDPOINT)
def test_credentials_go_to_other_buckets_of_the_same_endpoint(opened: list[Any], store: str, place: str) -> None:
    LocationOpener(store, SECRET)(place)
    [(_, options)] = opened
    assert SECRET.items() <= options.items()


@pytest.mark.parametrize(("store", "place"), ELSEWHERE)
def test_nothing_else_is_opened_unless_allowed_and_then_without_the_credentials(opened: list[Any], store: str, place: str) -> None:
    with pytest.raises(PlaceUnavailableError) as refused:
        pickle.loads(pickle.dumps(LocationOpener(store, SECRET)))(place)
    assert all(word in str(refused.value) for word in (store, display_url(place), "places=", "--allow-place", str(places_file())))
    assert opened == []
    try:
        allowed = parse_allowed([place])
    except InvalidOptionError:
        with pytest.raises(PlaceUnavailableError):
            LocationOpener(store, SECRET, allowed=(place,))(place)
        assert opened == []
    else:
        pickle.loads(pickle.dumps(LocationOpener(store, SECRET, allowed=allowed)))(place)
        assert opened == [(place, {})]


@pytest.mark.parametrize("query", ["endpoint_url=http://evil", "storage_class=STANDARD&endpoint_url=http://evil", "key=x", ""])
def test_a_url_brings_no_options(opened: list[Any], query: str) -> None:
    with pytest.raises(InvalidOptionError, match="storage_class"):
        LocationOpener("s3://bucket/ckpt", SECRET)(f"s3://cold/x?{query}")
    assert opened == []


@pytest.mark.parametrize(
    "wrong", ["cold", "", "s3://", "s3:///x", "~/cold", "file://host/x", "s3://cold/../x", "/data/../etc", "a::s3://b/c", "s3://c\n/x"]
)
def test_what_cannot_be_allowed(wrong: str) -> None:
    with pytest.raises(InvalidOptionError, match="absolute path or a URL"):
        parse_allowed([wrong])


def test_one_location_or_a_path(tmp_path: Path) -> None:
    assert parse_allowed("s3://cold") == ("s3://cold",)
    assert parse_allowed(tmp_path) == parse_allowed([tmp_path]) == (str(tmp_path),)


# --- prefixes -----------------------------------------------------------------------------------------------------------

STEP = st.text("ab-.%~ ü", min_size=1, max_size=3).filter(lambda step: step not in (".", ".."))
SERVICE = st.sampled_from(["s3://", "gs://", "sftp://", "/nowhere/", "file:///nowhere/"])


def canonical(service: str, steps: list[str]) -> str:
    joined = "/".join(steps)
    return service + (joined.replace("%", "%25") if service.startswith("file") else joined)


@given(SERVICE, SERVICE, st.lists(STEP, min_size=1, max_size=4), st.lists(STEP, min_size=1, max_size=4), st.sampled_from(["", "/"]))
def test_a_prefix_ends_where_a_step_of_the_path_does(one: str, two: str, inner: list[str], outer: list[str], slash: str) -> None:
    same_service = one.replace("file://", "") == two.replace("file://", "")
    expected = same_service and inner[: len(outer)] == outer
    assert is_inside(canonical(one, inner), canonical(two, outer) + slash) is expected


@given(SERVICE, st.lists(STEP, min_size=1, max_size=3), st.lists(STEP, max_size=2), st.text("ab-.", min_size=1, max_size=3))
def test_a_longer_name_without_a_slash_is_another_location(service: str, steps: list[str], more: list[str], suffix: str) -> None:
    allowed = canonical(service, steps)
    assert is_inside(canonical(service, [*steps, *more]), allowed)
    assert not is_inside(canonical(service, [*steps[:-1], steps[-1] + suffix, *more]), allowed)


@given(
    SERVICE, st.lists(STEP, min_size=1, max_size=3), st.lists(st.sampled_from(["..", "a"]), max_size=3).filter(lambda all_: ".." in all_)
)
def test_nothing_that_goes_back_is_inside(service: str, steps: list[str], back: list[str]) -> None:
    assert not is_inside(canonical(service, [*steps, *back]), canonical(service, steps))
    if service.startswith("file"):
        assert not is_inside(canonical(service, steps) + "/" + "/".join(back).replace(".", "%2e"), canonical(service, steps))


def test_storage_classes_make_no_difference() -> None:
    assert is_inside("s3://cold/ckpt/uuid?storage_class=STANDARD_IA", "s3://cold/ckpt?storage_class=GLACIER_IR")
    assert not is_inside("s3://cold-evil/x?storage_class=STANDARD_IA", "s3://cold?storage_class=GLACIER_IR")
    assert is_inside("S3A://cold/x", "s3://cold")


# --- folders ------------------------------------------------------------------------------------------------------------


def test_folders_next_to_a_store_in_a_folder(tmp_path: Path) -> None:
    store = str(tmp_path / "jobs" / "ckpt")
    (tmp_path / "jobs" / "real").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "jobs" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "jobs" / "in").symlink_to("real")
    beside = ["ckpt-cold", "ckpt-cold/uuid", "real", "in/uuid", "./new//x"]
    assert all(is_allowed(f"{tmp_path}/jobs/{each}", store, ()) for each in beside)
    assert is_allowed(f"file://{tmp_path}/jobs/real", store, ())
    away = ["elsewhere", "jobs-evil", "jobs/../elsewhere", "jobs/out", "jobs/out/uuid", "jobs/in/../../elsewhere"]
    assert not any(is_allowed(f"{tmp_path}/{each}", store, ()) for each in away)
    assert not is_allowed(f"file://{tmp_path}/jobs/%2e%2e/elsewhere", store, ())
    assert is_allowed(f"{tmp_path}/elsewhere/x", store, [str(tmp_path / "elsewhere")])
    assert not is_allowed(f"{tmp_path}/jobs/out", store, [str(tmp_path / "jobs" / "real")])
    assert is_allowed(f"{tmp_path}/jobs/out/x", store, [str(tmp_path / "jobs" / "out")]), "who allows a link allows what it leads to"


def test_folders_where_everybody_can_write_are_not_allowed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert not is_allowed(f"{tmp_path}/cold", f"{tmp_path}/ckpt", ())
    assert is_allowed(f"{tmp_path}/cold", f"{tmp_path}/ckpt", [f"{tmp_path}/cold"])
    assert not is_allowed("/etc", "/ckpt", ()), "the root folder is around everything"


def test_no_other_path_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To look at a path may mount something, as at /net/host."""
    looked: list[str] = []
    real_lstat = os.lstat

    def lstat(path: Any, **more: Any) -> os.stat_result:
        looked.append(str(path))
        return real_lstat(path, **more)

    monkeypatch.setattr(os, "lstat", lstat)
    assert not is_allowed("/net/evil/x", f"{tmp_path}/ckpt", ["/mnt/cold"])
    assert not [path for path in looked if path.startswith("/net")]
