"""On an S3 server a version costs a follower few requests, however many blocks changed, and no writes."""

import itertools
import uuid
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.backend.chaos import Fault, Request, chaos_proxy
from tests.feed.versions import REF, copy_of, equal, save, train, update
from tests.servers import S3Server

LAYERS = 8


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.mark.slow
def test_requests_of_a_version(server: S3Server, tmp_path: Path) -> None:
    url = f"{server.url}/{uuid.uuid4()}"
    state = {"model": {f"layers.{number}": torch.randn(64, 512).bfloat16() for number in range(LAYERS)}}
    mine = copy_of(state)
    with chaos_proxy(server.port) as proxy:
        options = {**server.storage_options, "endpoint_url": proxy.url}
        with (
            tsck.open(url, create=True, storage_options=server.storage_options, cache_dir=tmp_path / "trainer") as trainer,
            tsck.open(url, read_only=True, storage_options=options, cache_dir=tmp_path / "follower") as store,
        ):
            steps = itertools.count()
            save(trainer, state, next(steps))
            feed = store.follow(REF, into=mine)
            update(feed)
            for step in (1, 2):
                for _ in range(step):  # it skips versions
                    train(state, step, 0.005)
                    save(trainer, state, next(steps))
                proxy.seen.clear()
                update(feed)
                assert equal(mine, state)
                packs = [request for request in proxy.seen if "/packs/" in request.path]
                assert len(packs) <= 1 + step, "one for the layout, and one for each version's differences"
                assert len(proxy.seen) <= 6 + step, [request.path for request in proxy.seen]
                assert not [request for request in proxy.seen if request.method not in ("GET", "HEAD")]
            proxy.plan = forbidden
            before = copy_of(mine)
            train(state, 9, 0.005)
            save(trainer, state, 100)
            with pytest.raises(tsck.errors.PermissionDeniedError):
                feed.poll()
            assert equal(mine, before)
            proxy.plan = lambda _: Fault.NONE
            update(feed)
            assert equal(mine, state)


def forbidden(request: Request) -> Fault:
    """No pack may be read."""
    return Fault.STATUS_403 if "/packs/" in request.path else Fault.NONE
