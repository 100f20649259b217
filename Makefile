# Everything runs from .venv, which `make setup` makes from constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PACKAGES = packages/common packages/data packages/ckpt packages/trainer packages/eval cli

.PHONY: setup demo test test-long parity parity-fuzz lint docs wheels clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.done  ## make the environment: torch first and alone, then the rest, all at pinned versions

$(VENV)/.done: constraints.txt constraints-deepspeed.txt published.txt $(addsuffix /pyproject.toml,$(PACKAGES))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --no-deps -r constraints.txt
	$(BIN)/python -m pip install -q --no-deps $(addprefix -e ./,$(PACKAGES))
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/deepspeed -r constraints-deepspeed.txt
	grep -v '^#' published.txt | FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE xargs -n 1 $(BIN)/python -m pip download -q \
		--no-deps --prefer-binary --no-build-isolation --dest $(VENV)/published
	touch $@

demo: $(VENV)/.done  ## text -> tokens -> trained model -> HuggingFace folder -> score, on this machine, without network
	$(BIN)/mega demo

test: $(VENV)/.done  ## every test that this machine can run, but a few long ones
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(VENV)/.done  ## those: a real pretrained model, Megatron's own checkpoints, planted bugs, machines that restart, the largest sweeps
	$(BIN)/python -m pytest -m long -n 2 --dist worksteal --timeout 900

parity: $(VENV)/.done  ## every layout of up to 8 ranks against one process; writes docs/parity.md. N=500: so many of them
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/parity/full.py $(N)

parity-fuzz: $(VENV)/.done  ## random models in random layouts against one process: N=20, SEED=1 to see a case again
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/parity/fuzz.py $(or $(N),20) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.done  ## style, types, how the code reads, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/language_check.py

docs: $(VENV)/.done  ## build the documentation site into build/site; fails on a broken link, needs no network
	$(BIN)/python tools/generate_docs.py
	$(BIN)/zensical build --strict --clean

wheels: $(VENV)/.done  ## a wheel of each package into dist/, which install alone; release/release.py makes a release
	$(BIN)/python release/release.py --wheels

clean:  ## remove the environment and everything made
	rm -rf $(VENV) build dist runs demo .mypy_cache .ruff_cache
