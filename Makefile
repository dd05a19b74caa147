# make demo   create the environment, install, measure the built-in model on the built-in text, print the report's path
# make test   create the environment and run the tests
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# one process per core; more threads in each would only wait for one another on models this small
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: demo test test-all lint bench fuzz clean

demo: $(INSTALLED)
	@mkdir -p demo
	$(BIN)/rheoscope measure builtin:manual --text builtin:manual --window 256 --overwrite \
		--out demo/run.nc --report demo/report.html

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not browser"

# the slow tests too, and those that open the report in Chromium, which must be installed
test-all: $(INSTALLED)
	$(PYTEST)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)
	$(BIN)/python benchmarks

# damaged files for every reader, ten minutes each, and commands killed at random moments
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes 10
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --kills 20

# torch first and alone, so that no other requirement picks another build of it
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo build dist
