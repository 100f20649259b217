# Everything runs from .venv, which `make setup` makes from constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
NULL_GPU = .venv-null-gpu
UNDER_NULL_GPU = LD_LIBRARY_PATH=$(CURDIR)/$(NULL_GPU)/null LD_PRELOAD=$(CURDIR)/$(NULL_GPU)/null/libnull_gpu.so NULL_GPU_COUNT=8 OMP_NUM_THREADS=1 \
	TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(NULL_GPU)/cache TRITON_CACHE_DIR=$(CURDIR)/$(NULL_GPU)/cache/triton
# tests start hundreds of processes, so compiled modules are kept whatever the environment says
TEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PACKAGES = packages/common packages/data packages/ckpt packages/trainer packages/eval cli

.PHONY: setup demo test test-long test-null-gpu null-gpu-counts null-gpu-kernels parity parity-fuzz lint docs wheels clean

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

demo: $(VENV)/.done  ## text -> tokens -> trained model -> HuggingFace folder -> score, here, without network. STEPS=40: fewer steps
	$(BIN)/mega demo $(if $(STEPS),--steps $(STEPS))

test: $(VENV)/.done  ## every test that this machine can run, but a few long ones
	$(TEST) -n 3 --dist worksteal

test-long: $(VENV)/.done  ## those: a real pretrained model, Megatron's own checkpoints, planted bugs, machines that restart, the largest sweeps
	$(TEST) -m long -n 2 --dist worksteal --timeout 900

# torch's CUDA build, whichever build pip is configured to prefer here; everything else is that of the usual environment
$(NULL_GPU)/.done: $(VENV)/.done
	$(PYTHON) -m venv $(NULL_GPU)
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(NULL_GPU)/bin/python -m pip install -q torch==2.13.0
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')')" \
		>$$($(NULL_GPU)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/usual.pth
	touch $@

$(NULL_GPU)/null/libnull_gpu.so: $(NULL_GPU)/.done $(wildcard tests/null_gpu/*.c) tests/null_gpu/build.py
	$(NULL_GPU)/bin/python tests/null_gpu/build.py $(NULL_GPU)/null

test-null-gpu: $(NULL_GPU)/null/libnull_gpu.so  ## host code of CUDA runs, on torch's CUDA build and a GPU that computes nothing; downloads 2.6 GB
	$(UNDER_NULL_GPU) $(NULL_GPU)/bin/python -m pytest tests/null_gpu --timeout 900
	for capability in 80 100; do \
		$(UNDER_NULL_GPU) NULL_GPU_CAPABILITY=$$capability $(NULL_GPU)/bin/python -m pytest tests/null_gpu/test_training.py --timeout 900 || exit 1; done

null-gpu-kernels: $(NULL_GPU)/null/libnull_gpu.so  ## registers, spills and shared memory of the kernels that test-null-gpu compiled
	$(NULL_GPU)/bin/python tests/null_gpu/kernel_resources.py $(NULL_GPU)/cache/triton

null-gpu-counts: $(NULL_GPU)/null/libnull_gpu.so  ## record launches and host waits of a training step, which test-null-gpu compares
	PYTHONPATH=tests $(UNDER_NULL_GPU) $(NULL_GPU)/bin/python -m null_gpu.counts

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
	rm -rf $(VENV) $(NULL_GPU) build dist runs demo .mypy_cache .ruff_cache
