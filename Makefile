# On a fresh clone: `make demo` shows what this is, `make test` installs, then says within 5 minutes whether it works. Needs Python 3.11 or newer; everything else
# goes into .venv, or with `PYTHON=python3.13` into .venv-python3.13. pip's own settings and environment variables hold, for example for an index
# with CPU-only builds of torch.

PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTS ?= tests

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
NEWEST := .venv-newest-torch
APART := .venv-apart
OLDEST := .venv-oldest-trainers
EXTRAS := s3,gcs,azure,safetensors,dask,otel,accelerate,hf,lightning,mlflow,wandb,pandas,plot,postgres,ui,exporter

# Where it is set, each of the hundreds of processes that tests start compiles the package, and each run of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo dev test test-slow test-gpu soak test-newest-torch test-trainers test-apart test-oldest-trainers lint package docs clean

demo: $(INSTALLED)
	rm -rf .demo
	$(BIN)/python -m examples.demo --folder .demo

# What a change of the store needs, in an environment of its own: no trainers, browsers and servers. `make test` has the whole core suite.
DEV := .venv-dev
DEV_TESTS := $(addprefix tests/, backend catalog cli common end_to_end engine format gc log maintenance session state store training)
dev:
	@echo "downloads 310 MB into $(DEV), 1.5 GB on the disk: torch for CPUs (192 MB), and some 100 packages"
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(call known_files,$(DEV)/bin/python)
	$(DEV)/bin/python -m pip install --quiet --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)+cpu
	$(DEV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[s3,safetensors,pandas,plot,catalog,ui,exporter]' --group core
	@echo 'now: $(DEV)/bin/python -m pytest -n 2 -m "not slow and not gpu" $(DEV_TESTS)'

OLDEST_TESTS := $(addprefix $(TESTS)/integrations/, hf accelerate lightning ray/test_example.py importing/test_trainer_folder.py \
    test_mlflow.py test_wandb.py test_examples.py test_adapter_arguments.py)

# What the package needs at run time, but for torch: from files with known hashes, which there are for Linux.
known_files = $(if $(filter Linux,$(shell uname)),$(1) -m pip install --quiet --no-deps --require-hashes --requirement .ci/run-time.txt)

# Makes an environment that has the packages of .venv but for those that are installed into it.
define on_top
$(PYTHON) -m venv $(1)
$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > $(1)/base
cp $(1)/base $$($(1)/bin/python -c "import site; print(site.getsitepackages()[0])")/base.pth
endef

# With one thread each, torch in two processes does not wait for cores that the other one has. torch asks for the name of 127.0.0.1 at each
# connection of a process group, and where a name server does not answer, all ranks wait for the resolver, by default 5 s and more.
ON_TWO_CORES = OMP_NUM_THREADS=1 RES_OPTIONS="timeout:1 attempts:1"
RUN_TESTS = -m tests.run --flaky build/flaky.txt --log build/$@.jsonl -n 2 --dist worksteal
PYTEST = mkdir -p build; $(ON_TWO_CORES) $(BIN)/python $(RUN_TESTS)

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not gpu" $(TESTS)

# Kills, enumerations, real ranks and servers: 13 minutes. CONTRIBUTING.md has a table of the suites. TESTS="FILE ..." runs some of them.
test-slow: $(INSTALLED)
	$(PYTEST) -m slow $(TESTS)

# Every path of CUDA, on a machine with a GPU; `python -m benches.gpu --out FOLDER` has the figures.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(TESTS)/gpu

# Every test as far as it goes, before a release: two hours or so.
soak: $(INSTALLED)
	SOAK=1 $(PYTEST) $(TESTS)

# The tests of DCP, imports and states on the newest torch of the index. Run by hand: it downloads gigabytes of CUDA. pip's own
# settings hold; the project's other packages are the pinned ones.
test-newest-torch:
	$(PYTHON) -m venv $(NEWEST)
	grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch
	$(NEWEST)/bin/python -m pip install --quiet --constraint $(NEWEST)/constraints.txt --editable '.[$(EXTRAS)]' --group dev
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal tests/integrations tests/state

# The trainers' own checkpoint tests, run against the adapters here; docs/trainers has the tables. Downloads their sources at the versions
# that are installed: accelerate's from PyPI, the others from GitHub. One of them, from a folder of sources: TRAINERS="lightning=FOLDER".
# All but these three are in the environment of test-apart.
test-trainers: $(INSTALLED) $(if $(filter-out transformers% accelerate% lightning%,$(or $(TRAINERS),all)),$(APART)/.installed)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group trainers
	$(BIN)/python .ci/judge_trainers.py $(TRAINERS)

# The tests of the adapters with the oldest versions that they support, without kills and ranks. Run by hand: it takes a few minutes.
test-oldest-trainers: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -k "not test_kills and not test_ranks" $(OLDEST_TESTS)

$(OLDEST)/.installed: $(INSTALLED) .ci/oldest-trainers.txt
	$(call on_top,$(OLDEST))
	$(OLDEST)/bin/python -m pip install --quiet --no-deps --requirement .ci/oldest-trainers.txt
	touch $@

# The tests of trainers that are in an environment of their own, on top of .venv. torchtitan needs datasets, whose releases refuse the pinned
# fsspec and huggingface_hub (they work with them), so it is installed without dependencies. DeepSpeed changes what transformers and accelerate
# do where it is installed. Ray takes half a gigabyte; its other tests take seven minutes: .venv-apart/bin/python -m pytest tests/integrations/ray
# Megatron's tests run with the oldest and with the newest Megatron-core. model-signing 1.1.1 imports pyopenssl without depending on it.
APART_TESTS ?= $(addprefix tests/integrations/, titan deepspeed megatron nemo nvrx ray/test_example.py launchers/test_nvrx.py \
    launchers/test_torchft.py test_model_signing.py)
NEWEST_TESTS = $(filter tests/integrations/megatron% tests/integrations/nvrx% %/test_nvrx.py, $(APART_TESTS))
test-apart: $(APART)/.installed
	mkdir -p build
	$(ON_TWO_CORES) $(APART)/bin/python $(RUN_TESTS) --dist loadfile $(APART_TESTS)
	$(if $(NEWEST_TESTS), PYTHONPATH=$(CURDIR)/$(APART)/newest-megatron $(ON_TWO_CORES) $(APART)/bin/python \
	    $(subst $@.jsonl,$@-newest.jsonl,$(RUN_TESTS)) --dist loadfile $(NEWEST_TESTS))

$(APART)/.installed: $(INSTALLED) .ci/torchtitan.txt .ci/nemo.txt .ci/newest-megatron.txt
	$(call on_top,$(APART))
	$(APART)/bin/python -m pip install --quiet --no-deps --requirement .ci/torchtitan.txt --requirement .ci/nemo.txt
	$(APART)/bin/python -m pip install --quiet --constraint constraints.txt 'ray[train]' deepspeed megatron-core nvidia-resiliency-ext \
	    torchft opentelemetry-exporter-otlp-proto-http model-signing pyopenssl
	$(APART)/bin/python -m pip install --quiet --upgrade --target $(APART)/newest-megatron --no-deps --ignore-requires-python --only-binary :all: \
	    --platform manylinux_2_39_$(shell uname -m) --platform manylinux_2_28_$(shell uname -m) --requirement .ci/newest-megatron.txt
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# A wheel and an sdist in dist, each installed and tried out in a fresh environment.
package: $(INSTALLED)
	$(BIN)/python .ci/smoke_package.py

# The pages of docs, for reading from a folder: open site/index.html. A broken link is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf .venv .venv-* .demo dist site

$(INSTALLED): pyproject.toml setup.py constraints.txt .ci/run-time.txt $(wildcard tensorstore_ck/format/codec/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(call known_files,$(BIN)/python)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]' --group dev --group docs
	touch $@
