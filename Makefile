# `make demo` and `make test` set up everything they need in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two steps: the demonstration needs none of the development tools.
USABLE := $(VENV)/.usable
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0

# Where bytecode is not kept, every process would compile all it imports, for some four seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types unit slow bench docs format clean

demo: $(USABLE)
	$(BIN)/retrodict demo pumps -o out

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(PYTEST)

# What `test` leaves out: more models, whole pages, an installation from nothing.
slow: $(READY)
	$(PYTEST) -m slow

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group docs
	$(BIN)/python -m mkdocs build --strict --site-dir out/docs

bench: $(READY)
	$(BIN)/python -m benchmarks

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out

# Python compiles what it imports; to compile all that is installed takes half as long again.
$(USABLE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable .
	touch $@

# pip before 25.1 does not know dependency groups, so it is renewed first.
$(READY): $(USABLE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev
	touch $@
