# make demo: install into .venv and run the main job.   make test: install and run all checks.
# make docs: build the documentation as a site.
# TORCH=torch keeps the torch that VENV has.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/demo
STORE := $(DEMO)/profharness.db

.PHONY: demo test check docs bench clean

$(VENV)/.installed: pyproject.toml setup.py constraints.txt profharness/traces/scanner.c profharness/traces/json.h
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "profharness needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(BIN)/profharness capture 2,8,512,64 --out $(DEMO)/runs --store $(STORE)
	$(BIN)/profharness kernels --store $(STORE)
	$(BIN)/profharness ingest traces --store $(STORE)
	$(BIN)/profharness kernels 2,8,512,64,fp16 --store $(STORE)
	$(BIN)/profharness diff flash cudnn --config 2,8,512,64,fp16 --store $(STORE)
	$(BIN)/profharness layers traces/models/llama_eager.json.gz --store $(STORE)

check: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_install.py '$(TORCH)'

# A worker that crashes ends the run: pytest-xdist 3.8 hangs if it replaces one.
test: check
	$(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0

docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build
	@echo "see site/index.html"

bench: $(VENV)/.test-installed
	$(BIN)/python scripts/bench_startup.py
	$(BIN)/python scripts/bench_ingest.py

clean:
	rm -rf $(VENV) build dist site *.egg-info
