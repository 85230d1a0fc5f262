"""Tensors on CUDA devices: copies, and the ids of blocks without a copy. Knows tensors; no state, no store.

side_streams.py          copies from devices that go on while the caller computes
waited_copies.py         copies from and to devices that are complete when the function returns
optimizer_step_gates.py  the next step of an optimizer waits for copies
kept_tensors.py          tensors that need no copy, since the store has their blocks
capture_proofs.py        copies of a capture, and the ids before and after them
device_blocks.py         the ids of a state's blocks on devices
kernel.py                compiles and launches the kernel, and checks what it returns
block_ids.cu             the kernel: BLAKE3 of many blocks, for a GPU

`byte_sources` builds on `waited_copies`, `device_blocks` on `byte_sources`, and `capture_proofs` on all.
"""
