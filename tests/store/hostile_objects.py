"""A small store with every kind of object, and what somebody who may write objects makes of it: garbage, or bodies under right hashes."""

import copy
import json
import random
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, derived_hash
from tensorstore_ck.common.processes import Process
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.codec import decode
from tensorstore_ck.format.pack import ENTRY_DTYPE, HEADER, TRAILER, decode_footer, encode_footer, footer_bytes, pack_name
from tensorstore_ck.format.part import Part, decode_part, decode_values
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import HEADER_BYTES, KINDS, MAGIC, object_hash, seal_of, unpack_body
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.log import RefTable
from tensorstore_ck.log.checkpoint import checkpoint_name, dump
from tensorstore_ck.store import Store
from tests.format.changed import changed, changed_bytes
from tests.format.forged import Forged, publish
from tests.gc.relocated import copy_pack, packs_of
from tests.gc.stores import contents, open_store

REF: Final = "bomb"
"""The branch with the forged snapshots of `publish`, on which the calls are made."""
KIND_OF: Final = {MAGIC + magic: kind for kind, magic in KINDS.items()}
PROCESS: Final = Process(host="h", boot_id="b", pid_namespace="n", pid=1, start_ticks=1)
MASKED: Final = (ValueError, OverflowError, TypeError, KeyError, AttributeError, struct.error, StoreError)
"""What an encoder raises of a value that no object can hold."""
Objects = Mapping[str, bytes]


@cache
def state_at(step: int) -> dict[str, object]:
    """What is saved at a step."""
    weights = torch.randn(3000, generator=torch.Generator().manual_seed(1)) + 0.001 * step
    return {"w": weights, "v": weights[:12].view(3, 4).t(), "x": [1, "a", {"b": (1, 2.0)}], "big": list(range(20_000)), "s": {1, 2}}


def pristine() -> Objects:
    """The objects of a store with two branches, a tag, a policy, a quota, a moved pack, a checkpoint, and the record of a process."""
    backend = MemoryBackend()
    store = open_store(backend, process=PROCESS)
    store.put_snapshot({"w": torch.ones(3000)}, ref="runs/b", step=1)
    for step in (1, 2, 3):
        store.put_snapshot(state_at(step), ref=REF, step=step, codec="small", metrics={"loss": 1.0 / step}, metadata={"a": [1]})
    store.tag("t", f"{REF}@1")
    store.pin(f"{REF}@2", owner="ada")
    store.mark(f"{REF}@1", "bad")
    store.set_policy("runs/*", keep_last=3)
    store.set_quota("runs/*", refuse="1GB")
    copy_pack(store.engine, packs_of(store.engine)[0])
    store.forget(f"{REF}@2")
    table = store.engine.log.table
    with table.batch() as batch:
        head = RefTable(batch).head()
        assert head is not None
        sealed = dump(batch, head.n, head.hash)
        assert sealed is not None
        backend.create(checkpoint_name("log", head.n), sealed)
    return contents(backend)


def kind_of(data: bytes) -> str | None:
    """The kind of a sealed object; None of all others."""
    return KIND_OF.get(data[:HEADER_BYTES])


def sealed_again(kind: str, body: object) -> bytes:
    """A body under a right hash. Raises ValueError or the like where msgpack has no such body."""
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    head = MAGIC + KINDS[kind] + packed
    return head + seal_of(kind, head)


def body_of(data: bytes) -> Any:
    return unpack_body(memoryview(data)[HEADER_BYTES:-DIGEST_BYTES], "an object")


def names_of(data: bytes) -> list[bytes]:
    """The hashes by which other objects name this one: of all its bytes and, of a part or record, of its content."""
    kind = kind_of(data)
    try:
        if kind == "part":
            return [object_hash(data), decode_part(data, "a part").part_id()]
        if kind == "snapshot":
            return [object_hash(data), root_of(body_of(data))]
    except (StoreError, KeyError, TypeError, ValueError, OverflowError):
        pass
    return [object_hash(data)]


def root_of(body: dict[str, Any]) -> Digest:
    """The root of the record with this body, whatever it has."""
    empty = Record("", body["step"], body["parent"], body["metadata"], {}, 0, [], body["part_ids"], 0, 0)
    return empty.root()


def replaced(objects: dict[str, bytes], name: str, data: bytes) -> None:
    """Puts an object in place of another one; all that named that one then names this one by its hashes."""
    hashes = [(before, after) for before, after in zip(names_of(objects[name]), names_of(data), strict=False) if before != after]
    objects[name] = data
    for other in objects.keys() - {name}:
        kind, head = kind_of(objects[other]), objects[other][:-DIGEST_BYTES]
        if kind is None or not any(before in head for before, _ in hashes):
            continue
        for before, after in hashes:
            head = head.replace(before, after)
        new = head + seal_of(kind, head)
        if kind == "snapshot":
            body = body_of(new)
            new = sealed_again(kind, body | {"root": root_of(body)})
        replaced(objects, other, new)


# --- what is changed ---------------------------------------------------------------------------------------------------


def change_body(data: bytes, kind: str, chance: random.Random) -> bytes:
    """A sealed object with one to three values changed."""
    body = body_of(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        body = changed(body, chance, lambda old, _: changed_bytes(old, chance))
    return sealed_again(kind, body)


def change_config(data: bytes, chance: random.Random) -> bytes:
    """store.json with another value, under a right checksum."""
    body = changed(json.loads(data), chance, lambda old, _: changed_bytes(old, chance))
    body.pop("checksum", None)
    return _dump({**body, "checksum": derived_hash("store.json", _dump(body)).hex()})


def _dump(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"


def change_footer(data: bytes, chance: random.Random) -> bytes:
    """A pack with another entry table, under a right hash."""
    size, header = footer_bytes(data[-TRAILER.size :], len(data), "a pack"), data[: HEADER.size]
    footer = decode_footer(header, data[-size:], len(data), "a pack")
    table = footer.entries.tobytes()
    entries = np.frombuffer(changed_bytes(table, chance).ljust(len(table), b"\0")[: len(table)], ENTRY_DTYPE)
    if chance.random() < 0.7:  # otherwise an entry that lies elsewhere is refused at once
        entries = entries.copy()
        entries["offset"], entries["stored"] = footer.entries["offset"], footer.entries["stored"]
    return data[:-size] + encode_footer(header, entries, footer.bases)


def change(objects: dict[str, bytes], name: str, chance: random.Random) -> None:
    """Makes an object garbage, or another object's bytes, or something that all hashes agree with."""
    data = objects[name]
    kind = kind_of(data)
    if chance.random() < 0.2:
        objects[name] = chance.choice([changed_bytes(data, chance), b"", chance.randbytes(100), chance.choice(sorted(objects.values()))])
    elif kind is not None:
        replaced(objects, name, change_body(data, kind, chance))
    elif name == CONFIG_NAME:
        objects[name] = change_config(data, chance)
    elif chance.random() < 0.5:
        objects[name] = change_footer(data, chance)
    else:
        objects[name] = changed_bytes(data, chance)


class Template(NamedTuple):
    """A true snapshot of one part, taken apart."""

    layout: bytes
    part: Part
    values: list[Any]
    blobs: list[list[bytes]]
    tensors: list[bytes]


@cache
def template() -> Template:
    """Of a state with aliases, containers, large values and small tensors; no block has a base."""
    store = open_store(MemoryBackend())
    weights = torch.arange(3000.0)
    more = {"v": weights[:12].view(3, 4).t(), "x": [1, "a", {"b": (1, 2.0)}, np.float32(2)], "big": list(range(20_000)), "s": {1, 2}}
    store.put_snapshot({"w": weights, "n": torch.ones(3), "text": "x" * 10_000, **more}, ref=REF, step=1, codec="fast")
    objects = contents(store.engine.backend)
    (part,) = (decode_part(data, name) for name, data in objects.items() if kind_of(data) == "part")
    packs = [memoryview(objects[pack_name(pack)]) for pack in part.packs]
    stored = [(row, packs[row["pack"]][row["offset"] :][: row["stored"]]) for row in part.extents]
    blocks = [bytes(decode(row["codec"], data, row["raw"], "a block")) for row, data in stored]
    left = iter(blocks)
    layout, *blobs = ([next(left) for _ in range(row["blocks"])] for row in part.blobs)
    return Template(b"".join(layout), part, decode_values(part, "a part"), blobs, list(left))


def forge_snapshot(store: Store, chance: random.Random) -> None:
    """Publishes a snapshot that differs from a true one in its layout or values, under right hashes."""
    true = template()
    layout, values = true.layout, true.values
    if chance.random() < 0.6:
        layout = change_body(layout, "layout", chance)
    else:
        values = changed(copy.deepcopy(values), chance, lambda old, _: changed_bytes(old, chance))
    blobs = [[changed_bytes(block, chance) for block in blob] if chance.random() < 0.2 else blob for blob in true.blobs]
    publish(store, Forged(layout, values, blobs, true.tensors, inline=true.part.inline))


def hostile(chance: random.Random) -> MemoryBackend:
    """A store of which something was forged."""
    while True:
        backend = MemoryBackend()
        for name, data in pristine().items():
            backend.put(name, data)
        if chance.random() < 0.3:
            try:
                forge_snapshot(open_store(backend), chance)
            except MASKED:
                continue
            return backend
        objects = dict(pristine())
        by_folder = sorted({name.partition("/")[0] for name in objects})
        try:
            for _ in range(chance.choice((1, 1, 2))):
                folder = chance.choice(by_folder)  # as often of each kind
                names = sorted((name for name in objects if name.partition("/")[0] == folder), key=lambda name: name[-26:])
                change(objects, names[-1] if chance.random() < 0.5 else chance.choice(names), chance)  # more often what `REF` is
        except MASKED:
            continue  # no object can hold that
        for name, data in objects.items():
            backend.replace(name, data)
        return backend
