#!/usr/bin/env python3
"""Reads a tensorstore_ck store of format version 1 without tensorstore_ck, and writes safetensors.

    python tsck_read.py STORE list                       branches with their steps, tags, roots
    python tsck_read.py STORE ADDRESS OUT.safetensors    its tensors; everything else goes to OUT.json

STORE is a folder. ADDRESS is a branch, a tag, ref@step, ref~n (n snapshots before it), or the first 8 or more digits of a root.
Needs Python 3.11, numpy and blake3; and lz4 or zstandard if blocks are compressed with it.

This file is self-contained, so that data outlives the project that wrote it: it shares no code with tensorstore_ck, follows its FORMAT.md,
and never writes to the store. It checks every hash: store.json, the chain of the log, record, root, parts, layouts and every block. It
either writes the whole snapshot, or names the damaged object. Memory use stays small: blocks are written one by one to the mapped output.
"""

import base64
import json
import math
import os
import re
import stat
import struct
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from itertools import chain, count, pairwise, product
from typing import NamedTuple

import numpy as np
from blake3 import blake3


class ReadError(Exception):
    """Something is damaged, missing or not supported; the message says what."""


@contextmanager
def well_formed(what):
    """Converts any failure inside to a `ReadError`: stored data is not trusted."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error) as exc:
        raise ReadError(f"{what} is damaged or malformed: {exc!r}") from None


def printable(text):
    """`text` with control, bidi and line-separating characters escaped: a name in a store may contain what a terminal obeys."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


# --- hashes, msgpack, sealed objects ----------------------------------------------------------------------------------

MAX_OBJECT_BYTES, MAX_ITEMS, MAX_DEPTH, MAX_BLOCK_BYTES, MAX_BLOB_BLOCK_BYTES = 256 << 20, 1 << 24, 128, 64 << 20, 4 << 20
NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
SIZED = {0xC4: (1, bytes), 0xC5: (2, bytes), 0xC6: (4, bytes), 0xD9: (1, str), 0xDA: (2, str), 0xDB: (4, str)}
SIZED |= {0xDC: (2, list), 0xDD: (4, list), 0xDE: (2, dict), 0xDF: (4, dict)}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def derived(kind, *pieces):
    """BLAKE3 with the context for one kind of data."""
    return blake3(b"".join(pieces), derive_key_context=f"tensorstore_ck v1 {kind}").digest()


class Budget:
    """Limits the cost of parsing one snapshot, in proportion to its stored bytes: few bytes can be decompressed to gigabytes."""

    def __init__(self):
        self.left_bytes = 64 << 20

    def add_stored(self, size_bytes):
        """Counts a part, or an encoded block of what is parsed."""
        self.left_bytes += 2048 * size_bytes

    def spend(self, size_bytes, name):
        """Raises if the stored bytes do not allow that much more."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise ReadError(f"{name} would take far more memory to parse than the snapshot's stored bytes allow: do not use this snapshot")


ITEM_BYTES = 256
"""The cost of one msgpack item."""


def unpack(data, name, budget=None):
    """Exactly one msgpack value, without extension types; depth and items are checked before anything is allocated."""
    data, at, items = memoryview(data), 0, 0
    if budget:
        budget.spend(len(data), name)

    def take(count):
        nonlocal at
        at += count
        if at > len(data):
            raise ValueError("it is cut short")
        return data[at - count : at]

    def value(depth):
        nonlocal items
        byte = take(1)[0]
        if byte <= 0x7F or byte >= 0xE0:
            return byte if byte <= 0x7F else byte - 256
        if byte in CONSTANTS:
            return CONSTANTS[byte]
        if byte in NUMBERS:
            return struct.unpack(NUMBERS[byte], take(struct.calcsize(NUMBERS[byte])))[0]
        if byte > 0xBF and byte not in SIZED:
            raise ValueError(f"msgpack type {byte:#x} is not in the format")
        width, kind = SIZED.get(byte, (0, dict if byte <= 0x8F else list if byte <= 0x9F else str))
        count = int.from_bytes(take(width), "big") if width else byte & (0x1F if kind is str else 0x0F)
        if kind in (bytes, str):
            return str(take(count), "utf-8") if kind is str else bytes(take(count))
        items += count * (2 if kind is dict else 1)
        if depth >= MAX_DEPTH or count > len(data) - at or items > MAX_ITEMS:
            raise ValueError("it is nested too deep, or claims too many items")
        if budget:
            budget.spend(ITEM_BYTES * count * (2 if kind is dict else 1), name)
        if kind is list:
            return [value(depth + 1) for _ in range(count)]
        pairs = [(value(depth + 1), value(depth + 1)) for _ in range(count)]
        if len({key for key, _ in pairs if type(key) is str}) != count:
            raise ValueError("a map has a duplicate key, or one that is not text")
        return dict(pairs)

    with well_formed(name):
        found = value(0)
        if at != len(data):
            raise ValueError("bytes after its msgpack value")
        return found


def unseal(kind, data, name, budget=None):
    """The map in a sealed object, and its seal."""
    magic = {"snapshot": b"SNAP", "log": b"LOGE", "moved": b"MOVE", "layout": b"LAYO", "part": b"PART"}[kind]
    if data[:8] != b"TSCK" + magic or derived(f"{kind} object", data[:-32]) != data[-32:]:
        raise ReadError(f"{name} is damaged: it does not match its hash")
    body = unpack(data[8:-32], name, budget)
    if type(body) is not dict or body.get("v") != 1:
        raise ReadError(f"{name} is not of format version 1")
    return body, data[-32:]


def split(joined, size=16):
    """Splits concatenated ids."""
    if len(joined) % size:
        raise ValueError("an id is cut short")
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def name_of(folder, ulid):
    """The name of an object in the store."""
    number = int.from_bytes(ulid, "big")
    text = "".join("0123456789ABCDEFGHJKMNPQRSTVWXYZ"[number >> shift & 31] for shift in range(125, -1, -5))
    return f"{folder}/{text[-2:]}/{text}"


# --- the store and its log ----------------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """A snapshot in the log."""

    n: int
    """The entry that published it."""
    time_ns: int
    ulid: bytes
    root: bytes
    parent: bytes | None
    ref: str
    step: int | None
    metrics: dict


def open_object(path, flags):
    """Opens a file of the store: never through a link, and without waiting for the writer of a FIFO."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def numbers_in(folder):
    """The numbers of the log's entries or checkpoints in a folder."""
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            is_group = re.fullmatch("[0-9]{17}", entry.name) and entry.is_dir(follow_symlinks=False)
            yield from (int(name) for name in (os.listdir(entry.path) if is_group else [entry.name]) if re.fullmatch("[0-9]{20}", name))


class Store:
    """A folder with a store, and the content of its log: snapshots, branches, tags and moved packs."""

    def __init__(self, folder):
        self.folder = folder
        data = self.read("store.json", 65536)
        with well_formed("store.json"):
            config = json.loads(data)
            without, whole = ({key: config[key] for key in config if key != left_out} for left_out in ("checksum", ""))
            dumped, expected = (json.dumps(each, sort_keys=True, indent=1).encode() + b"\n" for each in (without, whole))
            if derived("store.json", dumped).hex() != config["checksum"] or data != expected:
                raise ReadError("store.json is damaged: it does not match its checksum")
            self.block_bytes, self.log, uuid = config["block_bytes"], config["log"], bytes.fromhex(config["uuid"].replace("-", ""))
            found = config["format"], config["hash"], config["features"]
        if found != (1, "blake3", []):
            raise ReadError(f"store.json: format, hash and features are {found}; this reader knows (1, 'blake3', [])")
        is_log = type(self.log) is str and re.fullmatch("[A-Za-z0-9][A-Za-z0-9-]{0,63}", self.log)
        if not is_log or type(self.block_bytes) is not int or not 4096 <= self.block_bytes <= MAX_BLOCK_BYTES:
            raise ReadError("store.json is damaged: its log or block_bytes cannot be those of a store")
        self.snapshots, self.roots, self.notes, self.transactions, self.windows = {}, {}, {}, set(), {}
        self.relocations, self.moved = {}, {}
        """Pack -> its current relocations, by moved object; and moved object -> that pack."""
        self.places = {}
        """Pack -> its cold tier, if it is not in the folder: a path or a URL."""
        self.refs, self.numbers = {}, count(1)
        """Name -> {number: snapshot}: the moves of a branch, the last being its head; number 0 is a tag."""
        self.read_log(derived("genesis", uuid))

    def read(self, name, most=MAX_OBJECT_BYTES, offset=0, place=""):
        """An object, or `most` bytes of it from `offset`. A moved object is also found as a copy in the store's own folder."""
        folder = place if os.path.isabs(place) and os.path.isdir(place) else self.folder
        try:
            with open(os.path.join(folder, *name.split("/")), "rb", opener=open_object) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ReadError(f"{name} is not a file")
                file.seek(offset)
                data = file.read(most if offset else most + 1)
        except OSError as exc:
            raise ReadError(f"{name} cannot be read: {exc.strerror}" + (f" (it was moved to {place})" if place else "")) from None
        if len(data) > most:
            raise ReadError(f"{name} is damaged: it is larger than such an object may be")
        return data

    def unseal(self, kind, folder, ulid):
        """The map in a sealed object, its seal and its name."""
        name = name_of(folder, ulid)
        return *unseal(kind, self.read(name), name), name

    def read_log(self, previous):
        """Reads all entries up to the last one that a log file or checkpoint names."""
        folders = [self.log, "checkpoint" if self.log == "log" else f"{self.log}-checkpoint"]
        numbers = [number for folder in folders for number in numbers_in(os.path.join(self.folder, folder))]
        for n in range(1, max(numbers, default=0) + 1):
            name = f"{self.log}/{n // 1000:017d}/{n:020d}"
            body, seal = unseal("log", self.read(name, 1 << 20), name)
            if body.get("n") != n or body.get("prev") != previous:
                raise ReadError(f"{name} is damaged: it does not follow the entry before it")
            previous = seal
            with well_formed(name):
                for op in body["ops"]:
                    self.fold(n, body["time_ns"], op)

    def fold(self, n, time_ns, op):
        """Applies one operation. Ignores one that is unknown or invalid at this point."""
        kind, name = op["op"], op.get("name")
        snapshot = self.by_root(op["root"]) if kind != "put" and "root" in op else None
        ref = self.refs.get(op["ref"] if kind == "put" else name) or {}
        if kind == "put" and op["txn"] not in self.transactions:
            self.transactions.add(op["txn"])
            made_ns = op.get("made_ns")
            made_ns = min(made_ns, time_ns) if type(made_ns) is int and made_ns >= 0 else time_ns
            put = Snapshot(n, made_ns, *(op[key] for key in ("snapshot", "root", "parent", "ref", "step", "metrics")))
            self.snapshots[put.ulid] = self.roots.setdefault(put.root, {})[put.ulid] = put
            self.refs.setdefault(put.ref, {})[next(self.numbers)] = put
        elif kind == "abort":
            self.transactions.add(op["txn"])
        elif snapshot and (kind == "reset" and 0 not in ref if ref else kind in ("branch", "tag")):
            self.refs.setdefault(name, {})[0 if kind == "tag" else next(self.numbers)] = snapshot
        elif kind == "untag" and 0 in ref:
            self.windows[n, name] = self.refs.pop(name)
        elif kind in ("annotate", "mark") and snapshot:
            note = self.notes.setdefault(snapshot.root, {"metrics": {}, "mark": "", "reason": ""})
            note |= {"metrics": note["metrics"] | op["metrics"]} if kind == "annotate" else {"mark": op["mark"], "reason": op["reason"]}
        elif kind == "expire" and ref:  # the head of a branch stays, unless the whole branch is deleted
            whole, gone = op["snapshots"] is None, split(op["snapshots"] or b"")
            taken = {at: each for at, each in ref.items() if whole or (each.ulid in gone and each.ulid != ref[max(ref)].ulid)}
            self.windows[n, name], self.refs[name] = taken, {at: each for at, each in ref.items() if at not in taken}
        elif kind == "undo" and 0 not in ref:
            window, wanted = self.windows.get((op["n"], name), {}), split(op["snapshots"])
            back = [at for at, each in window.items() if each.ulid in wanted and not (at == 0 and ref)]
            self.refs[name] = ref | {at: window.pop(at) for at in back}
        elif kind == "relocate":
            self.relocations.setdefault(op["pack"], {})[op["moved"]] = (n, op["hash"], tuple(split(op["targets"])))
            self.moved[op["moved"]] = op["pack"]
        elif kind == "place":
            self.places.update(dict.fromkeys(split(op["packs"]), op["url"]))
        elif kind == "sweep":
            for swept in filter(None, (self.snapshots.pop(ulid, None) for ulid in split(op["snapshots"]))):
                del self.roots[swept.root][swept.ulid]
            for ulid in filter(self.moved.__contains__, split(op["moved"])):
                del self.relocations[self.moved.pop(ulid)][ulid]

    def in_order(self, packs):
        """The moved packs among `packs` and all their targets, each before its targets."""
        ends_first, way, pending = {}, set(), list(packs)
        while pending:
            pack = pending[-1]
            if pack in way:
                way.remove(pack)
                ends_first[pack] = None
            if pack in ends_first:
                pending.pop()
                continue
            way.add(pack)
            for _, _, targets in self.relocations.get(pack, {}).values():
                if not way.isdisjoint(targets):
                    raise ReadError(f"{name_of('packs', pack)}: its relocations form a cycle")
                pending += targets
        return reversed(ends_first)

    def by_root(self, root):
        """The newest snapshot with a root; snapshots with one root have the same content."""
        return max(self.roots.get(root, {}).values(), default=None)

    def resolve(self, address):
        """The snapshot at an address."""
        match = re.fullmatch(r"([^@~]+)(?:@([0-9]{1,19}))?(?:~([0-9]{1,9}))?", address)
        if not match:
            raise ReadError(f"{address!r} is not an address: use a ref, ref@step, ref~n, or 8 or more digits of a root")
        base, step = match[1], match[2] and int(match[2])
        found = [each for _, each in sorted(self.refs.get(base, {}).items())]
        if re.fullmatch("[0-9a-f]{8,64}", base):
            found = list({each.root: each for each in self.snapshots.values() if each.root.hex().startswith(base)}.values())
            if len(found) > 1:
                raise ReadError(f"{base!r} matches {len(found)} snapshots: use more digits of the root")
        root = next((each.root for each in reversed(found) if step in (None, each.step)), None)
        snapshot = self.by_root(root)
        for _ in range(int(match[3] or 0)):
            snapshot = snapshot and self.by_root(snapshot.parent)
        if snapshot is None:
            raise ReadError(f"there is nothing at {address!r}: see `list`")
        return snapshot


# --- which rank holds what, and the block grid -------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A stored tensor."""

    name: str
    dtype: str
    item_bytes: int
    shape: tuple
    size_bytes: int
    order: list
    """Dims in memory, outermost first; empty: row-major."""


MAX_BOXES, MAX_ALL_BOXES, BOXES_A_TENSOR = 4096, 1 << 16, 64
"""Boxes of one tensor on a rank, and of all tensors, which is `MAX_ALL_BOXES` plus `BOXES_A_TENSOR` for each tensor."""


class Region(NamedTuple):
    """A piece of a tensor on a rank: a box, or an interval of the flattened tensor."""

    tensor: Tensor
    offsets: tuple
    sizes: tuple
    is_flat: bool
    replicas: tuple
    """The ranks that hold it, in order."""


def size_of(region):
    """Its bytes."""
    return math.prod(region.sizes) * region.tensor.item_bytes


def shard(runs, pieces, count, index):
    """The part of `runs` (start, length) along a dim that shard `index` of `count` gets: one shard of each piece."""
    taken, size = [], sum(length for _, length in runs)
    piece = max(1, -(-size // pieces))
    number, position = 0, 0  # run `number` begins at `position`
    for start in range(0, size, piece):
        stop = min(start + piece, size)
        each = -(-(stop - start) // count)
        first, last = start + index * each, min(start + (index + 1) * each, stop)
        while first < last:
            run, length = runs[number]
            if position + length <= first:
                number, position = number + 1, position + length
                continue
            a, b = first - position, min(last - position, length)
            if taken and sum(taken[-1]) == run + a:
                taken[-1] = (taken[-1][0], taken[-1][1] + b - a)
            else:
                taken.append((run + a, b - a))
            first = position + b
    return taken


def regions_of(side, rank, boxes_of):
    """Every region of a rank, in the order of the layout. `boxes_of`: tensor -> boxes that only its part lists."""
    for number, tensor in enumerate(side.tensors):
        kind = side.kinds[side.kind_of[number]] if side.kinds else None
        if 0 in tensor.shape:
            continue
        if kind is None:
            yield Region(tensor, (0,) * len(tensor.shape), tensor.shape, False, side.ranks)
        elif kind in ("boxes", "flat"):
            yield from (Region(tensor, *box, kind == "flat", (rank,)) for box in boxes_of.get(number, ()))
        elif rank in (mesh := side.meshes[kind[0]]):
            position = np.argwhere(mesh == rank)[0].tolist()
            runs = [[(0, extent)] for extent in tensor.shape]
            for extent, index, placement in zip(mesh.shape, position, kind[1], strict=True):
                if placement is not None:
                    dim, pieces = placement
                    runs[dim] = shard(runs[dim], pieces, extent, index)
            same = tuple(slice(None) if placement is None else index for index, placement in zip(position, kind[1], strict=True))
            replicas = tuple(sorted(np.ravel(mesh[same]).tolist()))
            for box in product(*runs):
                yield Region(tensor, tuple(start for start, _ in box), tuple(length for _, length in box), False, replicas)


def lengths_of(region, target):
    """The sizes of a region's blocks, by the block grid; one by one, since a layout can claim more blocks than fit into memory."""
    offsets, sizes, row, dim = region.offsets, region.sizes, region.tensor.item_bytes, 0
    if size_of(region) <= target // 2:
        yield size_of(region)
        return
    if region.is_flat:
        rows = max(target // row, 1)
    else:
        dim = next((dim for dim in range(len(sizes)) if row * math.prod(sizes[dim + 1 :]) <= target), len(sizes) - 1)
        row *= math.prod(sizes[dim + 1 :])
        rows = 1 << max(target // row, 1).bit_length() - 1
    start, stop = offsets[dim], offsets[dim] + sizes[dim]
    for _ in range(math.prod(sizes[:dim])):
        for a, b in pairwise(chain((start,), range(start // rows * rows + rows, stop, rows), (stop,))):
            yield (b - a) * row


def shares_of(regions, rank, target):
    """(region, start and size of a block in it, whether it is inline) for each block in the part of `rank`, in order."""
    totals, begun = Counter(), Counter()
    for region in regions:
        totals[region.replicas] += size_of(region)
    for region in regions:
        replicas, total, start = region.replicas, totals[region.replicas], 0
        runs = max(1, min(len(replicas), total // (64 << 20)))
        is_inline = size_of(region) <= 4096
        for length in [size_of(region)] if is_inline else lengths_of(region, target):
            if replicas[(begun[replicas] + start) * runs // total] == rank:
                yield region, start, length, is_inline
            start += length
        begun[replicas] += start


# --- parts, layouts and blocks ------------------------------------------------------------------------------------------

EXTENT = np.dtype("<u4, <u4, <u8, <u4, <u4, <i4, <u2, <u2")
EXTENT.names = ("pack", "entry", "offset", "stored", "raw", "base", "codec", "flags")
BLOB = np.dtype("<u4, <u4, <u8")  # blocks, zero, size
MOVED = np.dtype("<u4, <u4, <u4, <u4, <u8, <u2, <u2, <u4")  # from, target, entry, stored, offset, codec, flags, zero


class Record:
    """The record of a snapshot, checked against the root in the log."""

    def __init__(self, store, snapshot):
        body, _, name = store.unseal("snapshot", "snapshots", snapshot.ulid)
        with well_formed(name):
            ids, self.metadata, step, parent = (body[key] for key in ("part_ids", "metadata", "step", "parent"))
            head = struct.pack("<QBqBQ", len(ids), step is not None, step or 0, parent is not None, len(self.metadata))
            self.part_ids, self.parts, self.budget = split(ids, 32), split(body["parts"]), Budget()
            if derived("root", head, ids, parent or bytes(32), self.metadata) != snapshot.root or not 0 < len(self.parts) == len(
                self.part_ids
            ):
                raise ReadError(f"{name} is not the snapshot in the log: its root differs")


class Part:
    """One part of a snapshot, checked against its id, and the blocks that it names."""

    def __init__(self, store, record, rank):
        self.store, self.rank = store, rank
        self.name, self.budget = name_of("parts", record.parts[rank]), record.budget
        data = store.read(self.name)
        self.budget.add_stored(len(data))
        body, _ = unseal("part", data, self.name)
        with well_formed(self.name):
            keys = ("layout", "ids", "values", "inline", "world_size", "coordinate")
            self.layout_id, self.ids, self.values, self.inline, self.ranks, self.coordinate = (body[key] for key in keys)
            if type(self.ranks) is not int or not 0 < self.ranks <= len(record.parts):
                raise ValueError("it is one of more ranks than there are parts")
            blobs, regions = body["blobs"], body["regions"] or b""
            sizes = struct.pack("<IIQQQQ", rank, self.ranks, len(blobs), len(self.ids), len(self.values), len(self.inline))
            pieces = [self.layout_id, sizes, blobs, self.ids, self.values, self.inline]
            if self.coordinate is not None:
                pieces += [struct.pack("<QQ", len(self.coordinate), len(regions)), self.coordinate, regions]
            is_named = derived("part", *pieces) == record.part_ids[rank]
            self.blobs, self.regions = np.frombuffer(blobs, BLOB).tolist(), np.frombuffer(regions, "<i8").tolist()
            self.packs, self.extents = split(body["packs"]), np.frombuffer(body["extents"], EXTENT)
            self.layouts = np.frombuffer(self.coordinate or bytes(2 * self.ranks), "<u2")
        if not is_named or len(self.layouts) != self.ranks or 32 * len(self.extents) < len(self.ids):
            raise ReadError(f"{self.name} is not part {rank} of the snapshot: it does not match its part id")
        self.alike = (rank,) if self.coordinate is None else tuple(np.flatnonzero(self.layouts == self.layouts[rank]).tolist())
        """The ranks that have the same layout, in order."""

    def explicit_boxes(self):
        """The regions that only the part lists: tensor -> boxes."""
        found, at = {}, 0
        while at < len(self.regions):
            tensor, dims, count = self.regions[at : at + 3]
            boxes = [self.regions[at + 3 + 2 * dims * i :][: 2 * dims] for i in range(count)]
            found[tensor] = [(tuple(box[:dims]), tuple(box[dims:])) for box in boxes]
            at += 3 + 2 * dims * count
        return found

    def block(self, row, what):
        """The verified bytes of a block."""
        name, offset, data = self.decoded(row, what)
        if blake3(data).digest() != self.ids[32 * row : 32 * row + 32]:
            raise ReadError(f"{name} is damaged: the block at offset {offset}, of {what}, does not match its id")
        return data

    def decoded(self, row, what, depth=0):
        """The pack of a block, its offset there, and its bytes; reads its delta bases first."""
        number, _, offset, stored, raw, base, codec, flags = self.extents[row].item()
        pack, offset, stored, codec = self.places.get(row, (self.packs[number], offset, stored, codec))
        name = name_of("packs", pack)
        count = {3: 1, 4: flags}.get(codec, 0)
        if max(stored, raw) > MAX_BLOCK_BYTES or (count and not row < base <= len(self.extents) - count):
            raise ReadError(f"{self.name}: a block of {what} is too large, or without its bases")
        if count and (depth == 200 or count > (64 if depth < 2 else 1)):
            raise ReadError(f"{self.name}: a block of {what} has more bases than there can be")
        if count and sum(self.extents["raw"][base : base + count].tolist()) > (raw if codec == 3 else 2 * raw):
            raise ReadError(f"{self.name}: a block of {what} has larger bases than there can be")
        data = self.store.read(name, stored, offset, self.store.places.get(pack, ""))
        bases = [self.decoded(each, what, depth + 1)[2] for each in range(base, base + count)]
        try:
            found = decode(codec, data, raw, bases)
        except (ValueError, IndexError, ArithmeticError, TypeError, MemoryError, struct.error) as exc:
            raise ReadError(f"{name} is damaged: the block at offset {offset}, of {what}, does not match its id: {exc}") from exc
        return name, offset, found

    @cached_property
    def places(self):
        """Row -> current (pack, offset, stored, codec) of a moved block; the newest relocation counts.

        Follows all blocks of a pack together, so that each moved object is read once.
        """
        found, left = {}, {}
        with well_formed(self.name):
            for row, (number, entry, *_) in enumerate(self.extents.tolist()):
                left.setdefault(self.packs[number], []).append((row, entry))
        for pack in self.store.in_order(left):
            rows = left.pop(pack, ())
            relocations = sorted(((n, moved, *rest) for moved, (n, *rest) in self.store.relocations.get(pack, {}).items()), reverse=True)
            for _, moved, seal, targets in relocations:
                there = read_moved(self.store, moved, seal, pack, targets) if rows else {}
                for row, entry in rows:
                    if entry in there:
                        target, to, *found_at = there[entry]
                        found[row] = target, *found_at
                        left.setdefault(target, []).append((row, to))
                rows = [(row, entry) for row, entry in rows if entry not in there]
        return found

    def blob(self, index, what):
        """The verified bytes of a blob."""
        first = sum(blocks for blocks, _, _ in self.blobs[:index])
        rows = range(first, first + self.blobs[index][0])
        extents = self.extents[first : rows.stop]
        if len(extents) != len(rows) or max(extents["raw"].tolist(), default=0) > MAX_BLOB_BLOCK_BYTES:
            raise ReadError(f"{self.name}: {what} has missing blocks, or too large ones")
        self.budget.add_stored(sum(extents["stored"].tolist()))
        data = b"".join(self.block(row, what) for row in rows)
        if len(data) != self.blobs[index][2]:
            raise ReadError(f"{self.name}: {what} does not have its size")
        return data


@lru_cache(64)
def read_moved(store, moved, seal, pack, targets):
    """Entry of the pack -> its current (pack, entry, offset, stored, codec)."""
    body, found, name = store.unseal("moved", "moved", moved)
    if found != seal or body.get("pack") != pack or body.get("targets") != b"".join(targets):
        raise ReadError(f"{name} is not the moved object that the log names")
    with well_formed(name):
        rows = np.frombuffer(body["rows"], MOVED).tolist()
        return {entry: (targets[target], to, offset, stored, codec) for entry, target, to, stored, offset, codec, _, _ in rows}


# --- codecs -------------------------------------------------------------------------------------------------------------


def decode(codec, data, raw, bases):
    """The bytes of a block; checks their number."""
    if codec == 1:
        import lz4.block  # noqa: PLC0415 - needed only here

        try:
            data = lz4.block.decompress(data, uncompressed_size=raw)
        except lz4.block.LZ4BlockError as exc:
            raise ValueError("LZ4 cannot decompress it") from exc
    elif codec == 2:
        data = planes(data, raw)
    elif codec == 3:
        data = delta(data, raw, bases[0])
    elif codec == 4:
        data = cast(data, b"".join(bases))
    elif codec == 5:
        data = unzstd(data, raw)
    elif codec != 0:
        raise ReadError(f"codec {codec} is not in format version 1")
    if len(data) != raw:
        raise ValueError(f"it has {len(data)} bytes, not {raw}")
    return data


def unzstd(data, size):
    """One frame that declares its size."""
    import zstandard  # noqa: PLC0415 - needed only here

    try:
        if zstandard.frame_content_size(data) != size:
            raise ValueError("a frame has another size")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as exc:
        raise ValueError("zstd cannot decompress it") from exc


def planes(data, raw):
    """Decodes elements that are stored by byte significance."""
    item, flags, groups, _ = data[:4]
    elements, at, shift = raw // item, 4 + 8 * groups, 8 * item
    words = np.zeros(elements, f"<u{item}")
    for group in range(groups):
        width, how, size = struct.unpack_from("<BBxxI", data, 4 + 8 * group)
        part, at, shift = data[at : at + size], at + size, shift - 8 * width
        if how == 1:
            part = unzstd(part, elements * width)
        elif how == 2:
            if size != width:
                raise ValueError("a repeated element does not have its size")
            part *= elements
        words |= np.frombuffer(part, f"<u{width}", elements).astype(words.dtype) << shift
    if at != len(data) or shift:
        raise ValueError("its planes do not fit")
    if flags & 1:
        words = (words >> 1) | (words << (8 * item - 1))
    return words.tobytes()


def delta(data, raw, base):
    """Decodes elements that are stored as differences to another block."""
    form, is_float, item, changed, first = struct.unpack_from("<BBBxII", data)
    bits, rest = 8 * item, data[12:]
    if changed * item > raw:
        raise ValueError("it changes more elements than it has")
    words = np.frombuffer(base, f"<u{item}").copy()

    def ordered(values):
        return np.where(values >> (bits - 1), values ^ values.dtype.type((1 << (bits - 1)) - 1), values) if is_float else values

    if form == 2:
        gaps = np.frombuffer(planes(rest[:first], 4 * changed), "<u4")
        found, places = planes(rest[first:], item * changed), np.cumsum(gaps, dtype=np.int64) - 1
    else:
        found, places = planes(rest, raw), np.arange(len(words))
        if form == 3:
            places = np.argsort(((words << 1) >> (bits - 8)).astype("u1"), kind="stable")
    found = np.frombuffer(found, words.dtype)
    words[places] = ordered(ordered(words[places]) + ((found >> 1) ^ (0 - (found & 1))))
    return words.tobytes()


def cast(data, masters):
    """16-bit floats, rounded from fp32 ones."""
    if data[0] == 2:
        return np.frombuffer(masters, "<f4").astype("<f2").tobytes()
    words = np.frombuffer(masters, "<u4").astype("<u8")
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return np.where((words & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).astype("<u2").tobytes()


# --- the tree: names of tensors, and values as JSON ---------------------------------------------------------------------


class Leaf(NamedTuple):
    """A tensor of the state: all of a stored one, or a view into its memory."""

    name: str
    tensor: Tensor
    flags: int
    dtype: str
    shape: tuple
    strides: tuple | None
    """In elements; of a view."""
    offset: int


CONTAINERS = {"d": "dict", "o": "OrderedDict", "c": "Counter", "f": "defaultdict", "l": "list", "u": "tuple", "n": "namedtuple"}


class Side:
    """The state of the ranks with one layout, or of one rank alone: that layout, and tensors, values and containers by path."""

    def __init__(self, part, prefix=""):
        self.ranks, self.layout_id, self.coordinate = part.alike, part.layout_id, part.coordinate
        self.tensors, self.leaves, self.values, self.containers, self.names = [], [], {}, {}, Counter(["__metadata__"])
        with well_formed(f"the layout of {part.name}"):
            body, seal = unseal("layout", part.blob(0, "the layout"), f"the layout of {part.name}", part.budget)
        if seal != part.layout_id:
            raise ReadError(f"the layout of {part.name} is not the one that it names")
        with well_formed(f"the layout of {part.name}"):
            of, extents = np.frombuffer(body["dtype_of"], "<u2").tolist(), np.frombuffer(body["shapes"], "<i8").tolist()
            ends = np.cumsum(list(body["dims_of"]), dtype=int).tolist()
            orders = {n: [*order] for order, numbers in body.get("orders", ()) for n in np.frombuffer(numbers, "<u4").tolist()}
            for path, number, dims, end in zip(body["names"], of, body["dims_of"], ends, strict=True):
                (dtype, item_bytes), shape = body["dtypes"][number], tuple(extents[end - dims : end])
                order = orders.get(len(self.tensors), ())
                tensor = Tensor(f"{prefix}.{path}" if prefix else path, dtype, item_bytes, shape, math.prod(shape) * item_bytes, order)
                self.tensors.append(tensor)
                if min(shape, default=0) < 0 or tensor.size_bytes > 1 << 48:
                    raise ValueError("impossible shapes")
            self.meshes = [np.frombuffer(ranks, "<u4").reshape(shape) for shape, ranks in body["mesh"] or ()]
            placements = body["placements"] or {"kinds": [], "of": b""}
            self.kinds, self.kind_of = placements["kinds"], np.frombuffer(placements["of"], "<u2").tolist()
            self.blobs_used = set()
            self.check_boxes()
            self.fill(body["tree"], (prefix,) if prefix else (), unpack(part.values, part.name), part)

    def check_boxes(self):
        """Limits the boxes: they are computed, not stored, so a small layout could ask for any number."""
        every = 0
        for number, tensor in zip(self.kind_of, self.tensors, strict=bool(self.kinds)):
            pieces = dict.fromkeys(range(len(tensor.shape)), 1)
            for dim, several in filter(None, self.kinds[number][1] if type(self.kinds[number]) is list else ()):
                pieces[dim] *= several
            boxes = math.prod(min(several, max(tensor.shape[dim], 1)) for dim, several in pieces.items())
            every += boxes
            if min(pieces.values(), default=1) < 1 or boxes > MAX_BOXES or every > MAX_ALL_BOXES + BOXES_A_TENSOR * len(self.tensors):
                raise ValueError("its tensors are sharded into more boxes than a snapshot may have")

    def fill(self, tree, path, values, part):
        """Walks a tree, and fills its holes with `values`, in order."""
        left = list(reversed(values))
        self.walk(tree, path, left, part)
        if left:
            raise ValueError("it has more values than holes")

    def walk(self, node, path, left, part):
        """Walks one node; `left`: the values of the remaining holes, the next one last."""
        name = ".".join(path) or "."
        part.budget.spend(len(name), part.name)
        if node is None:
            self.value(left.pop(), path, part)
        elif type(node) is int or node[0] in ("t", "w"):
            tag, number, *rest = ["t", node, 0] if type(node) is int else node
            tensor = self.tensors[number]
            form = (rest[0], tuple(rest[1]), tuple(rest[2]), rest[3]) if tag == "w" else (tensor.dtype, tensor.shape, None, 0)
            self.leaves.append(Leaf(self.unique(name), tensor, rest[-1], *form))
        elif node[0] == "r":
            self.containers[name] = f"registered type {node[1]}"
            self.walk(node[2], path, left, part)
        else:
            nodes = node[2] if node[0] in "doc" else node[-1]
            keys = range(len(nodes)) if node[0] in "lu" else node[-2] if node[0] in "fn" else node[1]
            self.containers[name] = f"{CONTAINERS[node[0]]} {node[1]}" if node[0] in "fn" else CONTAINERS[node[0]]
            if not all(type(key) is str for key in keys) and node[0] not in "lu":
                self.containers[name] = {"type": self.containers[name], "keys": [plain(key) for key in keys]}
            for key, child in zip(keys, nodes, strict=True):
                is_spelled_alone = key is None or isinstance(key, (str, int, float))
                self.walk(child, (*path, str(key) if is_spelled_alone else json.dumps(plain(key))), left, part)
            if node[0] == "o" and node[3] is not False:
                self.walk(node[3], (*path, "_metadata"), left, part)

    def value(self, encoded, path, part):
        """Fills a hole."""
        name = ".".join(path) or "."
        if type(encoded) is list and encoded[0] == "b":
            _, kind, index = encoded
            if index in self.blobs_used:
                raise ValueError("two values are in one blob")
            self.blobs_used.add(index)
            data = part.blob(index + 1, f"value {name!r}")  # the layout is blob 0
            encoded = {"bytes": lambda: data, "str": data.decode, "m": lambda: unpack(data, name, part.budget)}.get(
                kind, lambda: [kind, data]
            )()
        if type(encoded) is list and encoded[0] == "tree":  # a subtree without tensors
            self.fill(encoded[1], path, encoded[2], part)
        else:
            self.values[self.unique(name)] = plain(encoded)

    def unique(self, name):
        """`name`, with a suffix such as ``#2`` if it is taken."""
        self.names[name] += 1
        return name if self.names[name] == 1 else self.unique(f"{name}#{self.names[name]}")


TAGS = {
    "i": lambda data: int.from_bytes(data, "little", signed=True),
    "j": lambda real, imaginary: {"complex": [plain(real), plain(imaginary)]},
    "a": lambda data: {"bytearray": base64.b64encode(data).decode()},
    "s": lambda data: data.decode("utf-8", "surrogatepass"),
    "u": lambda items: {"tuple": [plain(item) for item in items]},
    "e": lambda items: {"set": [plain(item) for item in items]},
    "z": lambda items: {"frozenset": [plain(item) for item in items]},
    "li": lambda data: [plain(number) for number in np.frombuffer(data, "<i8").tolist()],
    "lf": lambda data: [plain(number) for number in np.frombuffer(data, "<f8").tolist()],
    "ui": lambda data: {"tuple": TAGS["li"](data)},
    "uf": lambda data: {"tuple": TAGS["lf"](data)},
    "v": lambda dtype, data: {"numpy": dtype, "bytes": base64.b64encode(data).decode()},
    "dtype": lambda name: {"torch.dtype": name},
    "device": lambda name: {"torch.device": name},
    "size": lambda extents: {"torch.Size": extents},
}


def plain(encoded):
    """A value for JSON: unchanged if JSON supports it, else a map with its type."""
    if type(encoded) is float and not math.isfinite(encoded):
        return {"float": repr(encoded)}
    if type(encoded) is bytes:
        return {"bytes": base64.b64encode(encoded).decode()}
    return TAGS[encoded[0]](*encoded[1:]) if type(encoded) is list else encoded


# --- a snapshot as safetensors ------------------------------------------------------------------------------------------

DTYPES = """
    float64 F64 8, float32 F32 4, float16 F16 2, bfloat16 BF16 2, int64 I64 8, int32 I32 4, int16 I16 2, int8 I8 1,
    uint64 U64 8, uint32 U32 4, uint16 U16 2, uint8 U8 1, bool BOOL 1, complex64 C64 8, complex128 - 16, complex32 - 4,
    float8_e4m3fn F8_E4M3 1, float8_e5m2 F8_E5M2 1, float8_e8m0fnu F8_E8M0 1, float8_e4m3fnuz F8_E4M3FNUZ 1, float8_e5m2fnuz F8_E5M2FNUZ 1,
    np:<f8 F64 8, np:<f4 F32 4, np:<f2 F16 2, np:<i8 I64 8, np:<i4 I32 4, np:<i2 I16 2, np:|i1 I8 1,
    np:<u8 U64 8, np:<u4 U32 4, np:<u2 U16 2, np:|u1 U8 1, np:|b1 BOOL 1, np:<c8 C64 8"""
CODES = {name: (code.strip("-"), int(item_bytes)) for name, code, item_bytes in (line.split() for line in DTYPES.split(","))}


def form_of(leaf):
    """(safetensors' name of a leaf's dtype, or empty if it has none; bytes of an element; bytes of the leaf)."""
    code, item_bytes = CODES.get(leaf.dtype, ("", 1))
    if leaf.dtype == leaf.tensor.dtype:
        item_bytes = leaf.tensor.item_bytes
    elif leaf.dtype not in CODES and leaf.dtype.startswith("np:"):
        item_bytes = np.dtype(leaf.dtype[3:].split("#")[0]).itemsize
    return code, item_bytes, item_bytes * math.prod(leaf.shape)


def new_file(path):
    """Makes a file in place of any other with its name, and never writes through a link."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "x+b")


class Output:
    """The output: a header, the bytes of every leaf; temporarily also, at the end, stored tensors that only views use."""

    def __init__(self, file, leaves, tensors, metadata):
        header, self.places, self.bases, self.details, end = {"__metadata__": metadata}, {}, {}, {}, 0
        for leaf in sorted(leaves, key=lambda leaf: -form_of(leaf)[1]):  # so that each is aligned
            code, item_bytes, size = form_of(leaf)
            shape = [*leaf.shape] if code else [*leaf.shape, item_bytes]
            header[leaf.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [end, end + size]}
            self.places[leaf.name] = end
            details = {} if code else {"dtype": leaf.dtype}
            if leaf.flags:
                details |= {"requires_grad": bool(leaf.flags & 1), "parameter": bool(leaf.flags & 2)}
            if leaf.strides is None and leaf.tensor.order:
                details["memory order"] = leaf.tensor.order
            if leaf.strides is not None or self.bases.setdefault(leaf.tensor.name, end) != end:
                details["shares memory with"] = leaf.tensor.name
            self.details |= {leaf.name: details} if details else {}
            end += size
        self.end = end
        for tensor in tensors:
            if tensor.name not in self.bases:
                self.bases[tensor.name] = end
                end += tensor.size_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.start = 8 + len(text)
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        if end and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), self.start, end)  # a full disk is an error here, and a crash in a mapped file
        file.truncate(self.start + end)
        self.data = np.memmap(file, np.uint8, "r+", self.start, (end,)) if end else np.empty(0, np.uint8)

    def stored(self, tensor):
        """The elements of a stored tensor."""
        start = self.bases[tensor.name]
        return self.data[start : start + tensor.size_bytes].view(f"V{tensor.item_bytes}").reshape(tensor.shape)

    def put(self, region, start, data):
        """Writes bytes of a region, from `start` on, to their position."""
        elements = np.frombuffer(data, f"V{region.tensor.item_bytes}")
        first = start // region.tensor.item_bytes
        whole = self.stored(region.tensor).reshape(-1) if region.is_flat else self.stored(region.tensor)
        box = whole[(*(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True)), ...)]
        if min(region.offsets, default=0) < 0 or box.shape != region.sizes:
            raise ValueError("a region lies outside of its tensor")
        flat = box.reshape(-1) if box.flags.c_contiguous else box.flat
        flat[first : first + len(elements)] = elements

    def copy(self, leaf):
        """Fills a leaf that is a view, or a stored tensor under another name."""
        at, (_, item_bytes, size) = self.places[leaf.name], form_of(leaf)
        if not size or (leaf.strides is None and at == self.bases[leaf.tensor.name]):
            return
        base, source = self.stored(leaf.tensor).reshape(-1).view(np.uint8), self.stored(leaf.tensor)
        if leaf.strides is not None:
            with well_formed(f"view {leaf.name!r}"):  # numpy checks that it lies within its base
                source = np.ndarray(leaf.shape, f"V{item_bytes}", base.data, leaf.offset, [stride * item_bytes for stride in leaf.strides])
        self.data[at : at + size].view(f"V{item_bytes}").reshape(leaf.shape)[...] = source


def take_part(part, side, output):
    """Writes one part's blocks to the output; returns the bytes per tensor."""
    if part.layout_id != side.layout_id or part.coordinate != side.coordinate:
        raise ReadError(f"{part.name} does not belong to the other parts")
    row, inline, filled = sum(blocks for blocks, _, _ in part.blobs), 0, Counter()
    with well_formed(f"{part.name}, or its layout,"):
        regions = list(regions_of(side, part.rank, part.explicit_boxes()))
        for region, start, length, is_inline in shares_of(regions, part.rank, part.store.block_bytes):
            if is_inline:
                data, inline = part.inline[inline : inline + length], inline + length
            else:
                data, row = part.block(row, f"tensor {region.tensor.name!r}"), row + 1
            if len(data) != length:
                raise ReadError(f"{part.name}: the blocks of tensor {region.tensor.name!r} do not fit its shape")
            output.put(region, start, data)
            filled[region.tensor.name] += length
    if 32 * row != len(part.ids) or inline != len(part.inline):
        raise ReadError(f"{part.name} does not fit its layout: it has other blocks")
    return filled


def check_stored(store, record, sides):
    """Raises if the parts name too few blocks for the tensors of a layout: nothing is allocated, or searched, for such a layout."""
    parts = (Part(store, record, rank) for rank in range(len(record.parts)))
    most_bytes = sum(store.block_bytes * len(part.extents) + len(part.inline) for part in parts)
    for side in sides:
        if sum(tensor.size_bytes for tensor in side.tensors) > most_bytes:
            raise ReadError("the parts of the snapshot do not have all of its tensors")


def export(store, address, path):
    """Writes the tensors of the snapshot at an address to `path`, and everything else to a JSON file next to it."""
    snapshot = store.resolve(address)
    record = Record(store, snapshot)
    first = Part(store, record, 0)
    if len(record.parts) not in (first.ranks, 2 * first.ranks):
        raise ReadError(f"{first.name} is one of {first.ranks}, but there are {len(record.parts)}")
    sides = [Side(Part(store, record, rank)) for rank in np.unique(first.layouts, return_index=True)[1].tolist()]
    sides += [Side(Part(store, record, rank), f"rank_state[{rank - first.ranks}]") for rank in range(first.ranks, len(record.parts))]
    leaves, values, containers, tensors = {}, {}, {}, {}
    for side in sides:  # a name in several layouts is one tensor or value
        leaves = {leaf.name: leaf for leaf in side.leaves} | leaves
        values, containers = side.values | values, side.containers | containers
        for tensor in side.tensors:
            if tensors.setdefault(tensor.name, tensor) != tensor:
                raise ReadError(f"the layouts of the snapshot contradict each other: see tensor {tensor.name!r}")
    check_stored(store, record, sides)
    temporary, description = f"{path}.partial", os.path.splitext(path)[0] + ".json"
    metadata = {"format": "pt", "root": snapshot.root.hex(), "step": str(snapshot.step)}
    try:
        with new_file(temporary) as file:
            with well_formed("the layout of the snapshot"):
                output = Output(file, list(leaves.values()), tensors.values(), metadata)
            for side in sides:
                filled = sum((take_part(Part(store, record, rank), side, output) for rank in side.ranks), Counter())
                for tensor in side.tensors:
                    if filled[tensor.name] != tensor.size_bytes:
                        raise ReadError(f"the parts of the snapshot do not have all of tensor {tensor.name!r}")
            for leaf in leaves.values():
                output.copy(leaf)
            output.data = None
            file.truncate(output.start + output.end)
            os.fsync(file.fileno())
        note = store.notes.get(snapshot.root, {"metrics": {}, "mark": "", "reason": ""})
        about = {"root": snapshot.root.hex(), "parent": snapshot.parent and snapshot.parent.hex(), "ranks": first.ranks}
        about |= {"step": snapshot.step, "ref": snapshot.ref, "time_ns": snapshot.time_ns, "mark": note["mark"], "reason": note["reason"]}
        about["metrics"] = {key: plain(number) for key, number in (snapshot.metrics | note["metrics"]).items()}
        about["metadata"] = unpack(record.metadata, "the metadata")
        described = {**about, "values": values, "containers": containers, "tensors": output.details}
        with new_file(f"{description}.partial") as file:
            file.write(json.dumps(described, indent=1).encode())
        os.replace(f"{description}.partial", description)
        os.replace(temporary, path)
    finally:
        for unfinished in (temporary, f"{description}.partial"):
            with suppress(FileNotFoundError):
                os.remove(unfinished)
    return f"{snapshot.root.hex()}: {len(leaves)} tensors, {output.end} bytes; {len(values)} other values"


def listing(store):
    """The lines of `list`."""
    for name, moves in sorted(store.refs.items()):
        for at, snapshot in sorted(moves.items(), reverse=True):
            if at == max(moves):
                yield f"branch {name}" if at else f"tag {name}"
            mark = store.notes.get(snapshot.root, {}).get("mark")
            yield f"  {snapshot.root.hex()}  step {snapshot.step}" + (f"  marked {mark}" if mark else "")


def main(args):
    """The command line; returns the exit status."""
    if args[1:] != ["list"] and not (len(args) == 3 and args[2].endswith(".safetensors")):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        store = Store(args[0])
        for line in listing(store) if len(args) == 2 else [export(store, *args[1:])]:
            print(printable(line))
    except (ReadError, OSError, ImportError) as exc:
        print(printable(f"tsck_read: {exc}"), file=sys.stderr)
        return 1
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError) as exc:  # a field of another type
        print(printable(f"tsck_read: the store is damaged: {type(exc).__name__}: {exc}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
