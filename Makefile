# Every target sets up what it needs: a virtual environment in .venv, made anew when the requirements change.

PYTHON ?= python3.11
# Another interpreter gets an environment of its own: `make test PYTHON=python3.13` uses .venv-python3.13.
VENV := $(if $(filter python3.11,$(notdir $(PYTHON))),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/peers
PEERS_READY := $(PEERS)/.ready
# torch is large, and the checks and all other tests need none of it.
TORCH := $(VENV)-torch
TORCH_READY := $(TORCH)/.ready
# What tests import again and again, also where the environment says otherwise, is compiled once.
export PYTHONDONTWRITEBYTECODE :=

SEEDS ?= 0:200
KILLS ?= 2000
DATA_KILLS ?= 200
CHECKPOINT_KILLS ?= 5000
SLOT_KILLS ?= 2000
SLOT_LIVES ?= 50
HOSTILE_S ?= 300
TORCH_EVENTS ?= 50
SMOKE ?= tests/test_init.py tests/test_daemon.py tests/test_errors.py tests/config tests/telemetry tests/kernel/bus tests/net/protocol tests/client
SLOW_PYTEST := $(BIN)/pytest -o faulthandler_timeout=0

.PHONY: demo test test-torch test-frameworks check smoke bench bench-torch soak mutants wheel clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Train with several processes, kill -9 one of them and the daemon, and prove that nothing was lost or done twice.
demo: $(READY)
	$(BIN)/forged demo

# Lint, types, import direction.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# All checks, all tests, and the simulation over many seeds.
test: check
	$(BIN)/pytest -n 3 --dist worksteal
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --check-coverage

$(TORCH_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[torch]' \
		hypothesis pytest pytest-asyncio pytest-xdist safetensors
	touch $@

# The tests of forged.torch, in an environment with torch.
test-torch: $(TORCH_READY)
	$(TORCH)/bin/pytest -n 2 --dist worksteal tests/torch

# The tests of the loops of other frameworks, which are installed for them: the soak runs them too.
test-frameworks: $(TORCH_READY)
	$(TORCH)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt 'transformers>=5.23,<6' 'accelerate>=1.15' \
		'pytorch-lightning>=2.6,<3'
	$(TORCH)/bin/pytest tests/frameworks

# Import, commands and a fast share of the tests: enough to see that another interpreter works.
smoke: $(READY)
	$(BIN)/forged --version
	$(BIN)/forgectl --version
	$(BIN)/pytest -n 2 $(SMOKE)

# Measure, and write benchmarks/RESULTS.md. Peers that are not installed are left out.
bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks

# torch and torchft are large, and only forged.torch needs torch: they have an environment of their own, with forged.
$(PEERS_READY): $(READY) constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . torch==2.13.0 torchft==0.2.0
	touch $@

# Measure elastic training against torchrun and torchft, forged.torch, and checkpoints against torch's. `make bench` does so too once
# this has run.
bench-torch: $(PEERS_READY)
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.join
	for which in save stall load reshard small; do $(BIN)/python -m benchmarks.ckpt_$$which || exit; done
	for which in recovery overhead join state ckpt; do $(BIN)/python -m benchmarks.torch_$$which || exit; done

# Long runs: thousands of kills and seeds, what the tests try a share of, whole, and an attack by one job's token.
soak: $(READY) $(TORCH_READY) test-frameworks
	FORGED_KILLS=$(KILLS) FORGED_DATA_KILLS=$(DATA_KILLS) $(SLOW_PYTEST) tests/processes
	FORGED_KILLS=$(CHECKPOINT_KILLS) $(SLOW_PYTEST) tests/checkpoint/crashes/test_kill.py
	FORGED_SLOT_KILLS=$(SLOT_KILLS) $(SLOW_PYTEST) tests/checkpoint/crashes/test_slot_kill.py
	FORGED_SLOT_LIVES=$(SLOT_LIVES) $(SLOW_PYTEST) tests/processes/test_slots.py
	FORGED_WHOLE=1 $(SLOW_PYTEST) $$(grep -l --include='test_*.py' -r 'tests\.sweeps' tests)
	FORGED_TORCH_EVENTS=$(TORCH_EVENTS) $(TORCH)/bin/pytest -o faulthandler_timeout=0 tests/torch/test_soak.py
	$(BIN)/python -m tests.simulation --seeds 0:5000 --check-coverage
	$(BIN)/python -m tests.hostile_tenant --seconds $(HOSTILE_S)

# Break the code of each row of docs/development/seed-map.md, and see that the row's test fails.
mutants: $(READY)
	$(BIN)/python -m tests.seed_map_mutants

# Build dist/forged_ml-*.whl, which carries the commands, the units, the settings and the plugins.
wheel: $(READY)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
