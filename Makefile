# Two commands do everything: `make demo` and `make test`. Both set up first; set-up is a no-op when up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo test lint setup model clean

demo: setup
	$(BIN)/preimage demo

test: setup lint model
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

model: setup
	$(BIN)/preimage models --fetch smollm2

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "preimage needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# apart, for one test: transformers imports torchao wherever it finds it, and every command would warn
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--upgrade --no-deps --target $(VENV)/quant torchao
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
