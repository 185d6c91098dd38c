# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-all base check format benchmark torture clean

demo: $(VENV)/installed
	$(RUN) examples/demo.py

# Workers with a thread each: most tests are too small for threads to help.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --maxprocesses 2 --dist loadfile

# What a change can break, in minutes; test-all adds what is marked slow.
test: $(VENV)/installed
	$(PYTEST) -m "not slow"

test-all: $(VENV)/installed
	$(PYTEST)

# Tags without torch, from an environment with nothing but the base install.
base:
	.ci/base

check: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(MAKE) test-all

format: $(VENV)/installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

benchmark: $(VENV)/installed
	$(RUN) benchmarks/metrics.py

# Kills, damaged inputs, faults, a server under load: minutes, or hours with TORTURE=long (benchmarks/README.md).
torture: $(VENV)/installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(RUN) -m torture

# Installed again whenever what it depends on changes.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo
