# Everything a person needs; each verb sets up what it uses.
#   demo        a small Flux pipeline: made, quantized, inspected, loaded, and a picture of the difference
#   test        every test                      test-light  the torch-free half, on each Python 3.10 to 3.13 here
#   test-legacy every config on torch 2.6 and torchao 0.15, the oldest that are tested: needs 12 GB of disk
#   check       format, lint, types; writes nothing        fix  what check would complain about and tools can mend
#   bench       aoquant against the stock path, a Linear in each form, loading: needs 14 GB of disk and 9 GB of memory

PYTHON ?= python3
VENV := .venv
LEGACY := .venv-legacy
BIN := $(VENV)/bin
SOURCES := aoquant tests examples benchmarks

.PHONY: demo test test-light test-legacy check fix bench clean
.DEFAULT_GOAL := test

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev --group demo
	touch $@

demo: $(VENV)/.ready
	rm -rf demo
	$(BIN)/python examples/make_tiny_flux.py demo/tiny-flux
	$(BIN)/aoquant quantize demo/tiny-flux --transformer int8wo --text-encoder-2 fp8wo -o demo/tiny-flux-int8wo-fp8wo
	$(BIN)/aoquant inspect demo/tiny-flux-int8wo-fp8wo
	$(BIN)/aoquant load demo/tiny-flux-int8wo-fp8wo
	$(BIN)/python examples/tiny_flux_image.py demo/tiny-flux -o demo/original.png
	$(BIN)/python examples/tiny_flux_image.py demo/tiny-flux --quantized demo/tiny-flux-int8wo-fp8wo -o demo/quantized.png
	$(BIN)/python examples/tiny_flux_image.py demo/tiny-flux --quantized demo/tiny-flux-int8wo-fp8wo \
	  --compare demo/original.png demo/quantized.png -o demo/side_by_side.png

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist worksteal

test-legacy: $(LEGACY)/.ready
	$(LEGACY)/bin/python -m pytest tests/legacy -p no:cacheprovider -W ignore

$(LEGACY)/.ready: constraints-legacy.txt
	$(PYTHON) -m venv $(LEGACY)
	$(LEGACY)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(LEGACY)/bin/python -m pip install --quiet --constraint constraints-legacy.txt torch torchao pytest hypothesis sentencepiece --editable .
	touch $@

test-light:
	sh tests/light/each_python.sh

check: $(VENV)/.ready
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

fix: $(VENV)/.ready
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/loading.py

clean:
	rm -rf demo $(VENV) $(LEGACY) .venv-light-*
