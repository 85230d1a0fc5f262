"""The demo: a training job that is killed again and again, and ends with the bits of one that was not.

`train` is the job and the example to copy; `model` and `data` are what it trains on. `story` starts, kills and compares it, and
tells what happens; `supervisor` and `compare` are its hands and eyes. Run it with ``python -m examples.demo``.
"""
