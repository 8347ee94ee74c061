# Two commands: `make train` trains a small model to hear; `make test` runs the whole test suite.
# Each creates .venv and installs everything it needs first.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install train check test durations test-nightly test-sglang test-engines .venv-sglang .venv-vllm lint view chaos service-chaos clean

install: $(STAMP)

# torch first and alone: what follows then keeps this build instead of taking a larger one.
$(STAMP): pyproject.toml
	@echo "==> creating $(VENV) and installing (a few minutes, about 2 GB)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> torch"
	@$(BIN)/pip install --progress-bar off -q torch==2.13.0
	@echo "==> relax-gym and what it needs"
	@$(BIN)/pip install --progress-bar off -q -e '.[server,dev]'
	@touch $@
	@echo "==> installed"

train: $(STAMP)
	@$(BIN)/relax train tone-v0

# Before a commit, in under three minutes: lint, types, the tests nearest to what has changed since BASE, the fastest of the rest.
BASE ?= $(shell git merge-base HEAD '@{upstream}' 2>/dev/null || echo HEAD~1)
check: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports
	@$(BIN)/pyright --pythonpath $(BIN)/python & types=$$!; \
	$(BIN)/python -m pytest -n 2 --dist loadgroup --near $(BASE); tests=$$?; wait $$types && exit $$tests

# On two workers, as many tests wait for processes of theirs. The slowest are listed at the end.
test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=25

# What `make check` knows of how long tests take: runs them all, on an idle machine please, and writes tests/durations.json.
durations: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=25 --write-durations

# The tests that `make test` leaves out because they take long, more than an hour in all, one by one: some keep all cores busy.
test-nightly: $(STAMP) .venv-processors
	@RELAX_PROCESSORS_PYTHON=$(CURDIR)/.venv-processors/bin/python \
		$(BIN)/python -m pytest --durations=25 -m nightly

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python && $(BIN)/lint-imports

# The page of `relax view` from its source in viewer/; needs Node 20. Its build is committed.
view:
	@cd viewer && npm ci && npm run build

# Kills every process of runs at random moments, 20 times each, and counts what was lost. It takes long.
chaos: $(STAMP)
	@$(BIN)/python -m benchmarks.chaos

# Kills the rollout service 20 times under load, and counts what was lost. A few minutes.
service-chaos: $(STAMP)
	@$(BIN)/python -m benchmarks.service_chaos

# Other systems, each in an environment of its own, for benchmarks beside them.
.venv-trl: benchmarks/peers/trl.txt
	@echo "==> TRL into $@ (about 2 GB)"
	@$(PYTHON) -m venv $@ && $@/bin/pip install --progress-bar off -q torch==2.13.0
	@$@/bin/pip install --progress-bar off -q -r $< && touch $@

# transformers with torchvision, which its processors of films need and the environment above must not have.
.venv-processors: benchmarks/peers/processors.txt
	@echo "==> transformers' processors with torchvision into $@ (about 1 GB)"
	@$(PYTHON) -m venv $@ && $@/bin/pip install --progress-bar off -q torch==2.13.0
	@$@/bin/pip install --progress-bar off -q -r $< && $@/bin/pip install --progress-bar off -q --no-deps torchvision==0.28.0
	@touch $@

# Real SGLang, as an engine (about 3 GB). Where there is an NVIDIA driver it comes with its CUDA packages.
.venv-sglang: .venv-sglang/.installed

.venv-sglang/.installed: server/relax_server/engines/sglang/requirements.txt | $(STAMP)
	@$(BIN)/relax engine sglang --install --venv .venv-sglang && touch $@

# Real vLLM, as an engine for text models (about 4 GB).
.venv-vllm: .venv-vllm/.installed

.venv-vllm/.installed: server/relax_server/engines/vllm/environment.py | $(STAMP)
	@$(BIN)/relax engine vllm --install --venv .venv-vllm && touch $@

# What an engine promises, over real SGLang. Three minutes.
SGLANG ?= .venv-sglang
test-sglang: $(STAMP) $(SGLANG)
	@RELAX_SGLANG_PYTHON=$(abspath $(SGLANG)) $(BIN)/python -m pytest -k sglang tests/contract/test_engine_*.py

# The contract that all engines keep, over every one of them, and what SGLang and vLLM have of their own. Twenty minutes.
test-engines: $(STAMP) .venv-sglang .venv-vllm
	@RELAX_SGLANG_PYTHON=$(CURDIR)/.venv-sglang RELAX_VLLM_PYTHON=$(CURDIR)/.venv-vllm $(BIN)/python -m pytest \
		tests/contract/test_engine_*.py tests/engines/test_sglang.py tests/engines/test_sglang_families.py tests/engines/test_vllm.py \
		tests/roles/test_sglang_runs.py tests/roles/test_vllm_runs.py \
		tests/api/test_sglang_service.py tests/api/test_vllm_service.py

.venv-peers: benchmarks/peers/gyms.txt benchmarks/peers/verifiers.txt
	@echo "==> OpenEnv, agentlightning and verifiers into $@ (about 1 GB)"
	@$(PYTHON) -m venv $@ && $@/bin/pip install --progress-bar off -q -r $<
	@$@/bin/pip install --progress-bar off -q --no-deps --ignore-requires-python agentlightning==1.0.2
	@$(PYTHON) -m venv $@/verifiers && $@/verifiers/bin/pip install --progress-bar off -q -r benchmarks/peers/verifiers.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist
