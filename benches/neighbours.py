"""What a cold snapshot would take as differences to its neighbour: `python -m benches.neighbours [--after STEPS ...]`.

A GPT is trained here with AdamW (`_traces`). For the fp32 masters and moments of snapshots 1, 10 and 100 steps apart it prints, as shares
of the raw size: the planes that `recode` stores, the differences to the earlier snapshot, and two limits: the empirical entropy of the
bytes of these differences given the exponent of the base, and that of their lengths given the exponent, the bits below the first as noise.
"""

import argparse
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benches._traces import WARM_UP, State, copy_of, pretraining
from tensorstore_ck.common.threads import Scratch
from tensorstore_ck.format.codec import Elements
from tensorstore_ck.format.codec.byte_planes import planes_or_raw
from tensorstore_ck.format.codec.byte_split import words_of, zigzag_differences
from tensorstore_ck.format.codec.delta import encode_all, exponents
from tensorstore_ck.format.codec.encoder import LEVELS
from tensorstore_ck.format.codec.entropy import EntropyCoder

APART: Final = (1, 10, 100)
FP32: Final = Elements(4, is_float=True)
BITS: Final = 32
BLOCK_BYTES: Final = 4 << 20

Counts = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


class Shares(NamedTuple):
    """Stored by raw bytes."""

    planes: float
    difference: float
    byte_entropy: float
    length_entropy: float


def entropy_given(symbols: npt.NDArray[np.uint8], contexts: npt.NDArray[np.uint8]) -> float:
    """The empirical entropy of one symbol in bits, by its context."""
    counts: Counts = np.bincount(contexts.astype(np.intp) << 8 | symbols, minlength=1 << 16).reshape(256, 256)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    bits = -counts * np.log2(shares, out=np.zeros(counts.shape), where=shares > 0)
    return float(bits.sum()) / len(symbols)


def limits(words: Words, base: Words) -> tuple[float, float]:
    """The two entropies of the differences, in bits an element."""
    differences = np.ascontiguousarray(zigzag_differences(words, base, is_float=True))
    contexts = exponents(base)
    planes = differences.view(np.uint8).reshape(-1, 4)
    by_bytes = sum(entropy_given(np.ascontiguousarray(planes[:, number]), contexts) for number in range(4))
    lengths = np.frexp(differences.astype(np.float64))[1].astype(np.uint8)
    below_first = float(np.maximum(lengths.astype(np.int64) - 1, 0).mean())
    return by_bytes, entropy_given(lengths, contexts) + below_first


def tensors_of(state: State, kind: str) -> list[torch.Tensor]:
    if kind == "masters":
        return list(state["masters"].values())
    return [moments[kind] for moments in state["moments"].values()]


def as_bytes(tensors: list[torch.Tensor]) -> memoryview:
    return memoryview(torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy()).cast("B")  # type: ignore[arg-type]


def shares_of(earlier: State, later: State, kind: str) -> Shares:
    base, raw = as_bytes(tensors_of(earlier, kind)), as_bytes(tensors_of(later, kind))
    coder, scratch = EntropyCoder(LEVELS["small"]), Scratch()
    planes = difference = 0
    for start in range(0, len(raw), BLOCK_BYTES):
        block, other = raw[start : start + BLOCK_BYTES], base[start : start + BLOCK_BYTES]
        planes += sum(map(len, planes_or_raw(block, FP32, coder)))
        coded = encode_all(block, other, FP32, coder, scratch=scratch)
        difference += len(block) if coded is None else sum(map(len, coded))
    by_bytes, by_length = limits(words_of(raw, 4), words_of(base, 4))
    return Shares(planes / len(raw), difference / len(raw), by_bytes / BITS, by_length / BITS)


def neighbours(after: int, beta2: float) -> Iterator[tuple[int, State, State]]:
    """(steps between them, the earlier state, the later state)."""
    earlier: State = {}
    for number, state in enumerate(pretraining(1, APART[-1] + 1, warm_up=after, beta2=beta2)):
        if number == 0:
            earlier = copy_of(state)
        if number in APART:
            yield number, earlier, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--after", type=int, nargs="*", default=[WARM_UP], help="steps before the earlier snapshot")
    options = parser.parse_args()
    print("| after | beta2 | apart | tensors | planes | difference | entropy of bytes | of lengths |\n|---|---|---|---|---|---|---|---|")
    for after in options.after:
        for beta2 in (0.95, 0.999):
            for apart, earlier, later in neighbours(after, beta2):
                for kind in ("masters", "exp_avg", "exp_avg_sq"):
                    row = shares_of(earlier, later, kind)
                    print(f"| {after} | {beta2} | {apart} | {kind} | " + " | ".join(f"{share:.3f}" for share in row) + " |", flush=True)


if __name__ == "__main__":
    main()
