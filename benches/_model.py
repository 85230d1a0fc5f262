"""A Llama-shaped training state spread by FSDP over simulated ranks: 12 bytes for each of 0.4 to 1.6 T parameters, contents faked."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

from benches._simulated import Faked
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest, block_id, derived_hash
from tensorstore_ck.engine.interfaces import ByteTarget, CapturedState, ListedSources, WantedBox
from tensorstore_ck.engine.read import block_reader
from tensorstore_ck.engine.write import pack_writer
from tensorstore_ck.format.block_assignment import overlap, regions_of_rank
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES, Layout, Sharding, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard

LAYERS: Final = 126
KINDS: Final = ("param", "exp_avg", "exp_avg_sq")


def llama_shapes(hidden: int, layers: int, ffn: int, kv: int, words: int = 128256, *, is_tied: bool = False) -> dict[str, tuple[int, ...]]:
    """The parameters of a Llama 3."""
    layer = {
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    shapes = {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    return {"embed": (words, hidden), **shapes, "norm": (hidden,), **({} if is_tied else {"head": (words, hidden)})}


def model_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Of Llama 3.1 405B, or of one `width` times as wide."""
    return llama_shapes(16384 * width, LAYERS, 53248 * width, 1024 * width)


def make_layout(ranks: int, width: int) -> Layout:
    specs = [TensorSpec(f"{kind}.{name}", "float32", 4, shape) for kind in KINDS for name, shape in model_shapes(width).items()]
    mesh = Mesh((ranks,), tuple(range(ranks)))
    return Layout(specs, ["l", list(range(len(specs)))], (), [mesh], [Sharding(0, (Shard(0),))] * len(specs))


class _FakedSource:
    """`ByteSource` of one rank's side of a tensor."""

    size_bytes = 0

    def __init__(self, *what: int) -> None:
        self._what = what

    def read(self, start: int, stop: int) -> memoryview:
        digest = derived_hash("faked block", ".".join(map(str, (*self._what, start))).encode())
        if stop - start <= INLINE_TENSOR_BYTES:  # the part stores such regions inline, and needs their bytes
            text = digest.hex().encode() * ((stop - start) // len(digest) + 1)  # no NaN in it, whatever the dtype
            return memoryview(text[: stop - start])
        return Faked(stop - start, digest)  # type: ignore[return-value]


class _Counter(ByteTarget):
    """`ByteTarget` that only counts."""

    def __init__(self) -> None:
        self.taken = 0

    def memory(self) -> None:
        """None: bytes come through `write`."""

    def write(self, start: int, data: memoryview) -> None:
        self.taken += len(data)


def captured(layout: Layout, step: int, rank: int) -> CapturedState:
    """One rank's side, all of it new at every step."""
    return CapturedState(layout, (), (), ListedSources(_FakedSource(step, rank, tensor) for tensor in range(len(layout.tensors))))


def wanted(target: Layout, rank: int, ranks: int) -> list[WantedBox]:
    """What a rank of another run, or of the same, restores."""
    held = regions_of_rank(target, rank, tuple(range(ranks)))
    return [WantedBox(region.tensor, BoxBounds(region.offsets, region.sizes), _Counter()) for region in held]


def sources_of(stored: Layout, ranks: int, boxes: Iterable[WantedBox]) -> set[int]:
    """The ranks whose parts have something of the boxes, found the plain way."""
    found: set[int] = set()
    for tensor, box, _ in boxes:
        rows = -(-stored.tensors[tensor].shape[0] // ranks)
        first = box.offsets[0] // rows
        found.update(range(first, (box.offsets[0] + box.sizes[0] - 1) // rows + 1))
    return found


def is_complete(boxes: Iterable[WantedBox], layout: Layout) -> bool:
    """Whether every byte came, once."""
    for tensor, box, target in boxes:
        assert isinstance(target, _Counter)
        whole = BoxBounds((0,) * len(box.sizes), layout.tensors[tensor].shape)
        size_bytes = layout.tensors[tensor].item_bytes
        for extent in (overlap(box, whole) or box).sizes:
            size_bytes *= extent
        if target.taken != size_bytes:
            return False
    return True


@contextmanager
def faked_contents() -> Iterator[None]:
    """Replaces the code of a save or a restore that reads the bytes of a block: its id, its stored size, and its verification."""

    def name(raw: Buffer) -> Digest:
        return raw.id if isinstance(raw, Faked) else block_id(raw)

    def stored_bytes(block: pack_writer.EncodedBlock) -> int:
        return sum(len(piece) if isinstance(piece, Faked) else memoryview(piece).nbytes for piece in block.pieces)

    with (
        patch.object(pack_writer, "block_id", name),
        patch.object(pack_writer.EncodedBlock, "stored_bytes", property(stored_bytes)),
        patch.object(block_reader, "_verify", lambda *_: None),
    ):
        yield
