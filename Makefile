PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-hopper test-gpu lint clean

$(VENV)/.stamp: pyproject.toml
	$(PY) -m venv $(VENV)
	@echo "installing torch and the rest, about 3 GB, more with CUDA's torch; this takes some minutes"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(VENV)/.stamp
	$(BIN)/python tools/demo.py $(DEMO)

test: $(VENV)/.stamp
	$(BIN)/python -m pytest

test-slow: $(VENV)/.stamp
	$(BIN)/python -m pytest -m slow

# The Hopper kernels compile for sm_90, without a GPU, with the Triton that they are written for
test-hopper: $(VENV)/.stamp
	test -d build/triton || $(BIN)/python -m pip install -q --no-deps --target build/triton triton==3.6.0
	PYTHONPATH=build/triton:. $(BIN)/python -m pytest -m slow tests/kernels/test_hopper.py

# With the Python whose torch has CUDA: make test-gpu BIN=/path/to/bin
test-gpu:
	PYTHONPATH=. $(BIN)/python -m pytest -m gpu

lint: $(VENV)/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf runs build *.egg-info .pytest_cache .ruff_cache
