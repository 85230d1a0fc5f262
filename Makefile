# On a fresh clone: `make demo` shows what this is, `make test` says whether it works. Needs Python 3.11 or newer; everything else
# goes into .venv. pip's own settings and environment variables hold, for example for an index with CPU-only builds of torch.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTS ?= tests

.PHONY: demo test soak lint clean

demo: $(INSTALLED)
	rm -rf .demo
	$(BIN)/python -m tensorstore_ck.demo --folder .demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

# As far as each test goes before a release: two hours or so.
soak: export SOAK = 1
soak: test

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv .demo

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard tensorstore_ck/codec/*.c)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[s3,safetensors,dask,otel,plot,postgres]' --group dev
	touch $@
