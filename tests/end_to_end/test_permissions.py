"""What each command asks of S3, under the policies of `docs/operations/policies`: enough for it, and too little to overwrite anything.

A proxy refuses what the documents do not allow, conditions included. SeaweedFS, behind it, has an identity for each role, with the same
documents; it does not know the condition keys ``s3:if-none-match`` and ``s3:ObjectCreationOperation``, so it gets them without those.
"""

import contextlib
import json
import re
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.exceptions
import botocore.session
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend import open_backend, s3_multipart_writer
from tensorstore_ck.integrations.prometheus import Exporter
from tensorstore_ck.maintenance.copy_store import copy
from tensorstore_ck.maintenance.salvage import salvage
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy
from tests.backend.s3policies import Access, accesses, allows, enforced
from tests.servers import BUCKET, ROLES, S3Server, role_options, seaweedfs

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "operations"
MIB = 1 << 20
EVERYTHING = tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=0.9)
OLD = tsck.GcOptions(undo_window_seconds=0)
"""Goes by ages, so it compares clocks."""
REPLACING = {("salvage", "store.json")}
"""The commands, and the objects, that are written over."""

Requests = dict[str, list[Access]]


def documents(role: str, prefix: str) -> list[dict[str, Any]]:
    """A role's policy, for a store under that prefix."""
    text = (DOCS / "policies" / f"{role}.json").read_text()
    found: dict[str, Any] = json.loads(
        text.replace("example-bucket/ckpt", f"{BUCKET}/{prefix}").replace("example-bucket", BUCKET).replace("ckpt/*", f"{prefix}/*")
    )
    return [found]


@dataclass
class Site:
    """A server, a proxy in front of it, and a prefix for one store."""

    server: S3Server
    proxy: ChaosProxy
    caches: Path
    has_roles: bool
    prefix: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    def options(self, role: str = "") -> dict[str, Any]:
        """As a role, behind the proxy that refuses what it may not do."""
        if not role:
            return self.server.storage_options
        self.proxy.plan = enforced(documents(role, self.prefix), BUCKET)
        return role_options(self.proxy.url, role if self.has_roles else "")

    @contextlib.contextmanager
    def open(self, role: str = "", **options: Any) -> Iterator[tsck.Store]:
        cache = self.caches / str(uuid.uuid4())
        with tsck.open(self.url, storage_options=self.options(role), cache_dir=cache, **options) as store:
            yield store


@pytest.fixture(scope="module")
def moto_site(moto_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chaos_proxy(moto_server.port) as proxy:
        yield Site(moto_server, proxy, tmp_path_factory.mktemp("caches"), has_roles=False)


@pytest.fixture(scope="module")
def seaweedfs_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    prefix = str(uuid.uuid4())
    policies = {role: _without_conditions(documents(role, prefix)[0]) for role in ROLES}
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs-roles"), policies) as server, chaos_proxy(server.port) as proxy:
        yield Site(server, proxy, tmp_path_factory.mktemp("caches"), has_roles=True, prefix=prefix)


def _without_conditions(document: dict[str, Any]) -> dict[str, Any]:
    """If a server does not distinguish the steps of an upload, they are allowed where the object is."""
    statements = []
    for statement in document["Statement"]:
        creating = statement.get("Condition", {}).get("Bool", {}).get("s3:ObjectCreationOperation")
        if creating != "false":
            statements.append({name: value for name, value in statement.items() if creating is None or name != "Condition"})
    return {**document, "Statement": statements}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """12 MB in 40 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{number}": torch.randn(1000 + number, 75, generator=generator) for number in range(40)}


def _exporter(store: tsck.Store) -> None:
    with tempfile.TemporaryDirectory() as folder:
        exporter = Exporter(f"{folder}/catalog.sqlite", [store.url], lambda _: store)
        exporter.refresh(measure=True)
        (watched,) = exporter.watched
        assert watched.is_up
        assert watched.measured


def _put(store: tsck.Store) -> None:
    first = tensors(1)
    store.put_snapshot(first, ref="run", step=1)
    store.put_snapshot({name: value if name < "layer.2" else value + 1 for name, value in first.items()}, ref="run", step=2)


def _follow(store: tsck.Store) -> None:
    mine = {name: torch.zeros_like(value) for name, value in tensors(1).items()}
    with store.follow("run", into=mine) as feed:
        feed.poll()
        feed.swap()
    assert torch.equal(mine["layer.0"], tensors(1)["layer.0"])


COMMANDS: list[tuple[str, str, Callable[[tsck.Store], object]]] = [
    ("put", "writer", _put),
    ("checkout", "reader", lambda store: store.checkout("run")),
    ("follow", "reader", _follow),
    ("show", "reader", lambda store: store.show("run@1")),
    ("log", "reader", lambda store: list(store.log("run"))),
    ("fsck", "reader", lambda store: store.fsck(read_data=True)),
    ("exporter", "reader", _exporter),
    ("tag", "writer", lambda store: store.tag("v1", at="run@2")),
    ("pin", "writer", lambda store: store.pin("run@2", reason="kept")),
    ("forget", "writer", lambda store: store.forget("run@1")),
    ("gc", "keeper", lambda store: (store.gc(OLD), store.gc(EVERYTHING))),
]


def play(site: Site, target: Site) -> Requests:
    """Each command by its role, in order; what each asked for."""
    requests: Requests = {}

    def note(command: str) -> None:
        prefixes = (f"{site.prefix}/", f"{target.prefix}/")
        found = [access for request in site.proxy.seen for access in accesses(request)]
        place = r"^(?:" + "|".join(map(re.escape, prefixes)) + ")"
        requests[command] = [
            access._replace(
                key=re.sub(place, "", access.key), context={name: re.sub(place, "", text) for name, text in access.context.items()}
            )
            for access in found
        ]
        site.proxy.seen.clear()

    site.proxy.seen.clear()
    with site.open("keeper", create=True):
        pass
    note("init")
    with target.open(create=True):
        pass
    for command, role, act in COMMANDS:
        with site.open(role) as store:
            act(store)
        note(command)
        if command == "fsck":
            with site.open("reader") as store:
                options = target.options("writer")  # the source's requests of a copy are the reader's: a writer may do them all
                site.proxy.plan = _either(
                    enforced(documents("reader", site.prefix), BUCKET), enforced(documents("writer", target.prefix), BUCKET)
                )
                with tsck.open(target.url, storage_options=options, cache_dir=site.caches / "copy") as made:
                    copy(store, made)
            note("copy")
    site.proxy.plan = lambda _: Fault.NONE
    _damage(site)
    with contextlib.closing(open_backend(site.url, role_options(site.proxy.url, ""))) as backend:
        assert salvage(backend).log
    note("salvage")
    return requests


def _either(one: Callable[[Any], Fault], other: Callable[[Any], Fault]) -> Callable[[Any], Fault]:
    return lambda request: Fault.NONE if Fault.NONE in (one(request), other(request)) else Fault.STATUS_403


def _damage(site: Site) -> None:
    client = site.server.client()
    with contextlib.closing(client):
        client.put_object(Bucket=BUCKET, Key=f"{site.prefix}/store.json", Body=b"{}")


@pytest.fixture(scope="module")
def played(moto_site: Site) -> Requests:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes
        return play(moto_site, Site(moto_site.server, moto_site.proxy, moto_site.caches, has_roles=False))


def test_every_command_does_with_its_policy(played: Requests, moto_site: Site) -> None:
    assert list(played) == [
        "init",
        "put",
        "checkout",
        "follow",
        "show",
        "log",
        "fsck",
        "copy",
        "exporter",
        "tag",
        "pin",
        "forget",
        "gc",
        "salvage",
    ]
    with moto_site.open("reader") as store:
        assert len(store.checkout("run")) == 40


def test_every_object_is_created_with_the_condition(played: Requests) -> None:
    made = [(command, access) for command, found in played.items() for access in found if access.creates]
    assert {access.operation for _, access in made} >= {"PutObject if-none-match", "CompleteMultipartUpload if-none-match"}
    without = {(command, access.key) for command, access in made if access.context.get("s3:if-none-match") != "*"}
    assert without == REPLACING


def test_the_table_is_what_was_recorded(played: Requests) -> None:
    """Prints the table that it should be."""
    table = _table({command: found for command, found in played.items() if command != "salvage"})
    print(table)
    assert table in (DOCS / "permissions.md").read_text()


def _table(requests: Requests) -> str:
    lines = ["| command | reads | lists | creates | deletes |", "| --- | --- | --- | --- | --- |"]
    columns = [("GetObject",), ("ListBucket", "ListBucketMultipartUploads"), ("PutObject",), ("DeleteObject",)]
    for command, found in requests.items():
        folders: dict[str, set[str]] = defaultdict(set)
        for access in found:
            name = access.key or access.context.get("s3:prefix", "")
            folders[access.action].add("uploads" if access.action == "ListBucketMultipartUploads" else _folder(name))
        cells = [", ".join(sorted(set().union(*(folders[action] for action in actions)))) for actions in columns]
        lines.append(f"| `{command}` | " + " | ".join(cell or "-" for cell in cells) + " |")
        assert set(folders) <= {action for actions in columns for action in actions}
    return "\n".join(lines)


def _folder(name: str) -> str:
    return f"`{name.partition('/')[0]}/`" if "/" in name else f"`{name}`" if name else "everything"


PACK = "packs/0A/01ARZ3NDEKTSV4RRFFQ69G5F0A"
WRITTEN: dict[str, Access] = {
    "a pack without the condition": Access("PutObject", PACK, {"s3:ObjectCreationOperation": "true"}, ""),
    "store.json": Access("PutObject", "store.json", {"s3:ObjectCreationOperation": "true", "s3:if-none-match": "*"}, ""),
    "another prefix": Access("PutObject", "../packs/x", {"s3:ObjectCreationOperation": "true", "s3:if-none-match": "*"}, ""),
    "deletion": Access("DeleteObject", PACK, {}, ""),
    "deletion of the log": Access("DeleteObject", "log/0/0", {}, ""),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_a_writer_may_not(what: str) -> None:
    access = WRITTEN[what]
    key = access.key.removeprefix("../") if access.key.startswith("../") else f"ckpt/{access.key}"
    assert not allows(documents("writer", "ckpt"), access._replace(key=key), BUCKET)
    assert not allows(documents("reader", "ckpt"), access._replace(key=key), BUCKET)
    assert allows(documents("keeper", "ckpt"), access._replace(key=key), BUCKET) is (what in ("deletion", "store.json"))


@pytest.mark.s3
def test_a_server_that_enforces_identities(seaweedfs_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)
    site = seaweedfs_site
    with site.open("keeper", create=True):
        pass
    for command, role, act in COMMANDS:
        with site.open(role) as store:
            act(store)
            assert command != "gc" or store.fsck(read_data=True).ok
    pack = next(info.name for info in _listed(site, "packs/"))
    refused = [
        ("reader", "put_object", {"Key": "packs/new", "Body": b"x", "IfNoneMatch": "*"}, "AccessDenied"),
        ("reader", "delete_object", {"Key": pack}, "AccessDenied"),
        ("writer", "delete_object", {"Key": pack}, "AccessDenied"),
        ("writer", "put_object", {"Key": "store.json", "Body": b"x", "IfNoneMatch": "*"}, "AccessDenied"),
        ("writer", "put_object", {"Key": pack, "Body": b"x", "IfNoneMatch": "*"}, "PreconditionFailed"),
        ("keeper", "delete_object", {"Key": "store.json"}, "AccessDenied"),
    ]
    for role, method, arguments, code in refused:
        options = role_options("", role)
        keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
        client = botocore.session.Session().create_client("s3", "us-east-1", endpoint_url=site.server.endpoint, **keys)
        with contextlib.closing(client), pytest.raises(botocore.exceptions.ClientError, match=code):
            getattr(client, method)(Bucket=BUCKET, **{**arguments, "Key": f"{site.prefix}/{arguments['Key']}"})


def _listed(site: Site, prefix: str) -> list[Any]:
    with contextlib.closing(open_backend(site.url, site.server.storage_options)) as backend:
        return list(backend.list(prefix))
