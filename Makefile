# Two commands do everything: `make demo` and `make test`. Both set up first; set-up is a no-op when up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SITE := $(VENV)/.site
WORKERS ?= 2
ROUNDS ?= 5
SECONDS ?= 60
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What torch, oneDNN and MKL take instead of what this processor offers: the sums of an old machine of any maker.
OTHER := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1

BF16 := import torch; torch.randn(64, 64).bfloat16() @ torch.randn(64, 64).bfloat16()

.PHONY: demo test test-portable search fuzz lint docs setup model clean

demo: setup
	$(BIN)/preimage demo

# Some virtual machines announce AMX and do not have it: a bf16 product ends the process. There it is left alone.
test: setup lint model $(SITE)
	$(BIN)/python -c '$(BF16)' || export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; $(PYTEST)

# The same tests on another instruction set, as a background job of a script has them: Ctrl-C ignored, files
# for nobody else, no language, a narrow terminal. The real model computes three times as long. Left out are rooms
# in which no model computes anything that depends on the machine, or that put together what others compute.
test-portable: setup model
	umask 077; trap '' INT; LC_ALL=C COLUMNS=40 FORCE_COLOR=1 TZ=Asia/Kathmandu $(OTHER) $(PYTEST) --color=no \
		--ignore=tests/project --ignore=tests/prompts --ignore=tests/storage \
		--ignore=tests/fuzz --ignore=tests/hardening --ignore=tests/cluster --ignore=tests/report \
		--ignore=tests/leak --ignore=tests/reproduce --ignore=tests/web

# `make test` draws the same examples every time; this looks for others. What fails is kept in .hypothesis, tried
# first by the next search, and belongs into a test as an @example.
search: setup model
	for round in $$(seq $(ROUNDS)); do $(PYTEST) -m hypothesis --hypothesis-profile=search || exit 1; done

# Hostile files for every reader, for SECONDS in all; cases that fail are left in runs/fuzz, and belong into a test.
fuzz: setup
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site: build/docs/index.html. Built without a network, from nothing; a warning is an error.
docs: $(SITE)
	rm -rf build/docs
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --fresh-env --quiet docs build/docs
	@echo "Open build/docs/index.html"

# What builds the site is apart from set-up: who uses preimage need not wait for it.
$(SITE): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $(SITE)

model: setup
	$(BIN)/preimage models --fetch smollm2

setup: $(READY)

$(READY): pyproject.toml constraints.txt tests/support/s3.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "preimage needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# apart, for a few tests: transformers imports torchao wherever it finds it, and every command would warn
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--upgrade --no-deps --target $(VENV)/quant torchao
	# apart as well: what they ask for is older than what was tested
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--upgrade --no-deps --target $(VENV)/s3 -r tests/support/s3.txt
	# apart too: the one file of axe-core in it is wanted, and not the browsers' driver that it asks for
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--upgrade --no-deps --target $(VENV)/axe axe-playwright-python
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
