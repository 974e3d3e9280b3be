# Everything a checkout can do. `make` alone explains the targets.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
export PYTHON

VENV := .venv-sglang
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
VLLM := .venv-vllm
# The newest release, as long as it has no CPU build: its Python code over the compiled parts of the release before.
VLLM_NEXT := .venv-vllm-next
NEXT_RELEASE := 0.33.0
TORCHVISION := $(wildcard environments/torchvision/*.*)
NEXT_FILES := $(addprefix environments/vllm-next/,requirements.lock overlay.py shim/pyproject.toml)
# The release before the newest: its package over those of the newest.
BEFORE := .venv-sglang-before
ENVIRONMENTS := $(VENV) $(BEFORE) $(VLLM) $(VLLM_NEXT)
# The engine of demo, serve, bench, loop and gpu, each in its own environment.
ENGINE ?= sglang
ENGINE_ENV = $(or $(ENV_OF_$(ENGINE)),$(error ENGINE is '$(ENGINE)', wanted sglang or vllm))
ENV_OF_sglang := env
ENV_OF_vllm := env-vllm
LOCKS := environments/sglang/requirements.lock environments/dev/requirements.lock
NATIVE := $(shell find csrc -type f)
COMPAT := compat/sglang-cpu/pyproject.toml compat/sglang-cpu/setup.py
COMPAT_NATIVE := $(wildcard compat/sglang-cpu/src/eagle_sglang_cpu/csrc/*.cc)

# Two cores: one thread per process; the OpenMP threads of a waiting process must not spin on the other's core.
CALM := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ARGS ?=

.PHONY: help env env-vllm env-vllm-next env-sglang-before env-aiperf env-ray wheel package demo serve test test-fast test-matrix lint format bench bench-peagle loop figures acceptance soak mutation gpu head head-eval contract docs lock clean distclean

help: ## this text
	@echo 'eagle-plugin: EAGLE speculative decoding for stock inference engines'
	@echo
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'The engine of demo, serve, bench, loop and gpu: ENGINE=sglang (the default) or ENGINE=vllm'
	@echo 'Options for the command behind demo, serve, bench, loop, gpu and test go in ARGS:'
	@echo "  make demo ARGS='--help'"
	@echo "  make test ARGS='-k catalog'"
	@echo 'make test runs in three processes, test-fast and test-matrix in two; in one: WORKERS=0'
	@echo 'The interpreter: make PYTHON=python3.12 env'

env: $(STAMPS)/plugin $(STAMPS)/compat $(STAMPS)/kernels ## make or refresh .venv-sglang (stock SGLang for a CPU, this plugin, the tools)

$(STAMPS)/packages: $(LOCKS) environments/make.sh
	@environments/make.sh packages $(VENV) $(LOCKS)
	@mkdir -p $(STAMPS) && touch $@

env-sglang-before: $(BEFORE)/.stamps/plugin $(BEFORE)/.stamps/compat $(BEFORE)/.stamps/kernels ## make or refresh .venv-sglang-before (the SGLang release before the newest)

$(BEFORE)/.stamps/packages: $(LOCKS) environments/sglang-before/requirements.lock environments/make.sh
	@environments/make.sh packages $(BEFORE) $(LOCKS)
	@environments/make.sh packages $(BEFORE) environments/sglang-before/requirements.lock
	@mkdir -p $(BEFORE)/.stamps && touch $@

$(addsuffix /.stamps/plugin,$(ENVIRONMENTS)): %/.stamps/plugin: pyproject.toml setup.py %/.stamps/packages
	@environments/make.sh project $* .
	@touch $@

$(addsuffix /.stamps/compat,$(VENV) $(BEFORE)): %/.stamps/compat: $(COMPAT) %/.stamps/packages
	@environments/make.sh project $* compat/sglang-cpu
	@touch $@

# An editable install builds nothing: these are the first-use builds, done now rather than while a server starts.
$(addsuffix /.stamps/kernels,$(ENVIRONMENTS)): %/.stamps/kernels: $(NATIVE) eagle_plugin/kernels/build.py %/.stamps/plugin
	@$*/bin/python -c 'from eagle_plugin.kernels import loader; print("$*: kernels:", loader.backend())' >&2
	@touch $@

$(addsuffix /.stamps/kernels,$(VENV) $(BEFORE)): %/.stamps/kernels: %/.stamps/native

$(addsuffix /.stamps/native,$(VENV) $(BEFORE)): %/.stamps/native: $(COMPAT_NATIVE) %/.stamps/plugin %/.stamps/compat
	@$*/bin/python -c 'from eagle_sglang_cpu import native; print("$*: compat:", native.backend())' >&2
	@touch $@

env-vllm: $(VLLM)/.stamps/kernels ## make or refresh .venv-vllm (stock vLLM for a CPU, this plugin, pytest)

$(VLLM)/.stamps/packages: environments/vllm/requirements.lock environments/vllm/shim/pyproject.toml $(TORCHVISION) environments/make.sh
	@environments/make.sh packages $(VLLM) environments/vllm/requirements.lock
	@environments/make.sh copied $(VLLM) environments/torchvision
	@environments/make.sh project $(VLLM) environments/vllm/shim
	@mkdir -p $(VLLM)/.stamps && touch $@

env-vllm-next: $(VLLM_NEXT)/.stamps/kernels ## make or refresh .venv-vllm-next (the newest vLLM over the compiled parts of the CPU build before)

$(VLLM_NEXT)/.stamps/packages: environments/vllm/requirements.lock $(NEXT_FILES) $(TORCHVISION) environments/make.sh
	@environments/make.sh packages $(VLLM_NEXT) environments/vllm/requirements.lock environments/vllm-next/requirements.lock
	@environments/make.sh copied $(VLLM_NEXT) environments/torchvision
	@environments/make.sh overlay $(VLLM_NEXT) $(NEXT_RELEASE)
	@environments/make.sh project $(VLLM_NEXT) environments/vllm-next/shim
	@mkdir -p $(VLLM_NEXT)/.stamps && touch $@

env-aiperf: .venv-aiperf/.stamps/packages ## make .venv-aiperf, a second load generator for `eagle-plugin benchmark --aiperf`

.venv-aiperf/.stamps/packages: environments/aiperf/requirements.lock environments/make.sh
	@environments/make.sh packages .venv-aiperf environments/aiperf/requirements.lock
	@mkdir -p .venv-aiperf/.stamps && touch $@

env-ray: .venv-ray/.stamps/packages ## make .venv-ray, a Ray cluster for the tests of `eagle-plugin optimize --ray`

.venv-ray/.stamps/packages: environments/ray/requirements.lock environments/make.sh
	@environments/make.sh packages .venv-ray environments/ray/requirements.lock
	@mkdir -p .venv-ray/.stamps && touch $@

mutation: env .venv-mutation/.stamps/packages ## which changes of the sources the tests find, to out/mutation-*.json; see ARGS='--help'
	$(BIN)/python tools/mutation.py $(ARGS)

.venv-mutation/.stamps/packages: environments/mutation/requirements.lock environments/make.sh
	@environments/make.sh packages .venv-mutation environments/mutation/requirements.lock
	@mkdir -p .venv-mutation/.stamps && touch $@

wheel: ## build dist/*.whl: the plugin for both engines, its heads, and compat/sglang-cpu
	@environments/make.sh wheels dist . examples/heads compat/sglang-cpu

package: env ## what is published: sdist, wheel with its true tag, checks, sizes, bills of materials, to dist/
	$(BIN)/python tools/package.py $(ARGS)

demo: $(ENGINE_ENV) ## compare plain decoding, the engine's EAGLE-3 and the plugin on a real model: table and picture
	.venv-$(ENGINE)/bin/eagle-plugin demo --engine $(ENGINE) $(ARGS)

serve: $(ENGINE_ENV) ## run a server with the plugin on 127.0.0.1 until Ctrl-C
	.venv-$(ENGINE)/bin/eagle-plugin serve --engine $(ENGINE) $(ARGS)

# Tests run side by side in WORKERS processes, grouped by the servers that they ask, the longest groups first
# (tests/support/schedule.py); WORKERS=0 runs them in one process and in the order of the files. Servers that start wait
# now and then, so that on two cores three workers take a tenth less time than two; the longest groups have a time limit.
test: WORKERS ?= 3
test-fast test-matrix: WORKERS ?= 2
PYTEST = $(CALM) $(BIN)/python -m pytest -n $(WORKERS)

# Lint and the environments, two at a time.
PREPARE = @$(MAKE) --no-print-directory -j2 lint env-vllm env-sglang-before

test: ## lint, then the tests with real engines: at least one case of everything (about 20 minutes on two cores)
	$(PREPARE)
	$(PYTEST) -m 'not matrix' $(ARGS)

test-fast: env ## the tests that start no engine and compile nothing (about five minutes)
	$(PYTEST) -m 'not server and not slow and not matrix' $(ARGS)

test-matrix: export EAGLE_TEST_EXAMPLES ?= 60
test-matrix: ## every test: make test, and more sizes, settings, builds and releases of the same (hours; ARGS='--part 1/4')
	$(PREPARE)
	@$(MAKE) --no-print-directory env-vllm-next env-ray
	$(PYTEST) $(ARGS)

CODE := $(wildcard *.py eagle_plugin compat tests benchmarks tools)
CXX_CODE := $(filter %.h %.cc %.cu %.cuh,$(NATIVE) $(COMPAT_NATIVE) $(wildcard tests/kernels/cuda/*))

lint: env ## ruff, mypy, clang-format and the terms of the project, changing nothing
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/python tools/lint_terms.py
	$(BIN)/mypy
	$(if $(CXX_CODE),$(BIN)/clang-format --dry-run --Werror $(CXX_CODE))

format: env ## let ruff and clang-format rewrite the files
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(if $(CXX_CODE),$(BIN)/clang-format -i $(CXX_CODE))

bench: $(ENGINE_ENV) ## the serving benchmark under load, to out/serving.json (up to an hour); see ARGS='--help'
	.venv-$(ENGINE)/bin/eagle-plugin bench-serving --engine $(ENGINE) $(ARGS)

bench-peagle: $(ENGINE_ENV) ## EAGLE-3 and P-EAGLE heads with 3, 7 and 11 levels, to out/peagle.json (an hour); see ARGS='--help'
	.venv-$(ENGINE)/bin/python benchmarks/peagle.py --engine $(ENGINE) $(ARGS)

loop: $(ENGINE_ENV) ## serve, record traffic, train the head on it, measure, exchange it: out/loop.json, out/report.html (40 minutes)
	OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 .venv-$(ENGINE)/bin/python benchmarks/loop.py --engine $(ENGINE) $(ARGS)

figures: env ## the figures of the documents, light and dark, from docs/figures/*.json; a new one: ARGS='--record out/demo.json'
	$(BIN)/python benchmarks/figures.py $(ARGS)

acceptance: env ## accept length of trees and chains with the shipped head, to out/acceptance.json
	$(CALM) $(BIN)/python benchmarks/acceptance.py --json out/acceptance.json $(ARGS)

soak: env $(ENGINE_ENV) ## 20,000 requests of all kinds at a server; nothing may be lost: out/soak-ENGINE.json (an hour); see ARGS='--help'
	$(CALM) $(BIN)/python benchmarks/soak.py --engine $(ENGINE) $(ARGS)

# The interpreter of an environment with a CUDA build of torch; .venv-sglang has one for CPUs.
GPU_PYTHON ?= python3

gpu: ## everything that needs an NVIDIA GPU, to out/gpu/*.json (docs/gpu-runs.md); uses GPU_PYTHON, by default python3
	@$(GPU_PYTHON) benchmarks/gpu/run.py --engine $(ENGINE) $(ARGS)

# What `make head` trains: eagle3 or peagle. Both share the prompts, answers and features in out/head.
KIND ?= eagle3
HEAD_OF_eagle3 := smollm2-135m-instruct
HEAD_OF_peagle := smollm2-135m-instruct-peagle
RECIPE ?= $(or $(HEAD_OF_$(KIND)),$(error KIND is '$(KIND)', wanted eagle3 or peagle))
HEAD_OUT := out/head$(if $(filter eagle3,$(KIND)),,-$(KIND))

head: env ## train a head by RECIPE, of KIND=eagle3 or peagle (hours; resumes after an interruption; ARGS='--minutes 10')
	OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/eagle-plugin optimize $(RECIPE) --data out/head --out $(HEAD_OUT) $(ARGS)

HEADS ?= $(sort $(notdir $(patsubst %/config.json,%,$(wildcard examples/heads/*/config.json))))

head-eval: env ## accept lengths of the heads in examples/heads (ARGS: and of others) on held-out prompts, to out/heads.json
	OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/eagle-plugin eval --json out/heads.json smollm2-135m-instruct $(HEADS) $(ARGS)

contract: env ## what a release changes of the names that the plugin touches: ENGINE=vllm VERSION=0.34.0 (out/contract-*.json)
	@$(BIN)/python tools/contract.py $(ENGINE) '$(VERSION)' $(ARGS)

docs: env ## the documentation site, to out/site/index.html; a broken link or a page that is not in the navigation fails
	$(BIN)/python tools/build_site.py

lock: ## resolve the locks in environments/ again (a maintainer's step)
	environments/make.sh lock sglang
	environments/make.sh lock vllm
	environments/make.sh lock vllm-next
	environments/make.sh lock aiperf
	environments/make.sh lock mutation

clean: ## remove builds, reports and caches, keep the environments
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis eagle_plugin/lib *.egg-info compat/*/build compat/*/src/*.egg-info
	find eagle_plugin compat tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(foreach env,$(ENVIRONMENTS),$(addprefix $(env)/.stamps/,plugin compat native kernels))

distclean: clean ## clean, and remove the environments too
	rm -rf .venv-sglang .venv-sglang-before .venv-vllm .venv-vllm-next .venv-aiperf .venv-ray .venv-mutation .venv-tools
