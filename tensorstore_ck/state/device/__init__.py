"""Tensors on CUDA devices: copies, and the ids of blocks without a copy. Knows tensors; no state, no store.

side_streams.py    copies from devices that go on while the caller computes
windows.py         pinned host memory, cut into windows that are reused
window_copies.py   copies from and to devices, on one stream a direction
block_ids.cu       BLAKE3 of many blocks, for a GPU
kernel.py          compiles and launches it, and checks what it returns
device_blocks.py   the ids of a state's blocks on devices
step_gates.py      the next step of an optimizer waits for copies
kept_tensors.py    tensors that need no copy, since the store has their blocks
capture_proofs.py  copies of a capture, and the ids before and after them

`byte_sources` builds on `window_copies`, `device_blocks` on `byte_sources`, and `capture_proofs` on all.
"""
