"""What the fuzz targets share: the loop, and mutations that reach past hashes.

An input of a target for sealed objects is a *body*: it is decoded as it is, and once more under a right seal. Half of the
mutations change one value inside a body, so that it stays msgpack. Decoders may raise `CorruptObjectError` and
`FormatVersionError`, and nothing else; and what an input may cost, in memory and in time of the processor, is in proportion to its bytes.

New inputs go to a temporary folder unless one is given, the committed seeds are only read:

    python fuzz/fuzz_part.py -runs=100000
    python fuzz/fuzz_part.py -max_total_time=3600 /tmp/found fuzz/corpus/part
"""

import json
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.common.ids import derived_hash
    from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
    from tensorstore_ck.format.sealed import KINDS, MAGIC, unpack_body

sys.path.insert(0, str(Path(__file__).parent.parent))
import msgpack

from tests.format.changed import changed

Target = Callable[[bytes], None]
Mutator = Callable[[bytes, int, int], bytes]

PEAK_BYTES = 32 << 20
PEAK_BYTES_PER_BYTE = 2048
"""As `sealed.BYTES_PER_STORED`."""
SECONDS = 5.0
"""Of the processor, on a busy machine; an input of a few KB takes milliseconds."""


def fuzz(name: str, target: Target, mutate: Mutator | None = None, *, peak_bytes: int = PEAK_BYTES) -> None:
    """Runs `target` on what libFuzzer makes of ``corpus/<name>``; never returns. `peak_bytes`: what any input may take, however short."""
    tracemalloc.start()

    def only_our_errors(data: bytes) -> None:
        tracemalloc.reset_peak()
        before, began = tracemalloc.get_traced_memory()[0], time.process_time()
        with suppress(CorruptObjectError, FormatVersionError):
            target(data)
        taken, seconds = tracemalloc.get_traced_memory()[1] - before, time.process_time() - began
        if taken > peak_bytes + PEAK_BYTES_PER_BYTE * len(data):
            raise MemoryError(f"{len(data)} bytes took {taken:,} bytes of memory")
        if seconds > SECONDS:
            raise TimeoutError(f"{len(data)} bytes took {seconds:.1f} s")

    arguments = list(sys.argv)
    if all(argument.startswith("-") for argument in arguments[1:]):
        arguments += [tempfile.mkdtemp(prefix=f"fuzz-{name}-"), str(Path(__file__).parent / "corpus" / name)]
    options = {"custom_mutator": mutate} if mutate is not None else {}
    atheris.Setup(arguments, only_our_errors, **options)
    atheris.Fuzz()


def fuzz_sealed(kind: str, read: Target, corpus: str = "") -> None:
    """Fuzzes the decoder of a sealed kind; `read` decodes an object and does with it what comes next."""

    def target(data: bytes) -> None:
        with suppress(CorruptObjectError):
            read(data)
        head = MAGIC + KINDS[kind] + data
        read(head + derived_hash(f"{kind} object", head))

    fuzz(corpus or kind, target, mutate_body)


def mutate_body(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes one value inside a msgpack body, or else any bytes."""
    return _mutate(data, max_size, seed, lambda: unpack_body(memoryview(data), "a body"), msgpack.packb)


def mutate_json(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes one value inside a JSON text, or else any bytes."""
    return _mutate(data, max_size, seed, lambda: json.loads(data), lambda body: json.dumps(body, default=repr).encode())


def _mutate(data: bytes, max_size: int, seed: int, decode: Callable[[], Any], encode: Callable[[Any], bytes]) -> bytes:
    chance = random.Random(seed)
    if chance.random() < 0.5:
        try:
            mutated = encode(changed(decode(), chance, change_bytes))
        except (CorruptObjectError, ValueError, OverflowError, RecursionError):
            pass
        else:
            if len(mutated) <= max_size:
                return mutated
    return bytes(atheris.Mutate(data, max_size))


def change_bytes(data: bytes, max_size: int) -> bytes:
    """Other bytes, as libFuzzer would have them."""
    return bytes(atheris.Mutate(data, max_size))
