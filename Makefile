# Every target installs its requirements. Variables: PORT, MODEL, REVISION, DEVICE=cpu|gpu, PYTHON, SEED.

SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: serve demo demo-agent test test-full test-fast test-processor coverage check bench soak chart docs reference diagrams lock wheels clean help

PORT ?= 8000
MODEL ?=
REVISION ?=
DEVICE ?=
PYTHON ?=
SEED ?= 1
VARIANT ?=

setup := DEVICE='$(DEVICE)' PYTHON='$(PYTHON)' scripts/setup.sh
python := .venv/bin/python
# Statistical tests draw a tenth of their samples by default (CONTRIBUTING.md).
more_samples := COPPICE_DRAWS=0.3
# With two threads each, the processes would block each other. An engine that does not compile its
# sampler starts two seconds faster; servers that tests start do compile it, as in production.
pytest_in := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 $(python) -m pytest \
	--dist loadfile --no-loadscope-reorder --numprocesses
# Without a GPU, what needs none of the GPU tests runs on the CPU.
gpu := $(shell command -v nvidia-smi)
# Tests without an engine wait for almost half of their time.
pytest_in_three := $(pytest_in) 3
# Each process may run an engine; more than two would exceed a laptop's memory.
pytest_in_two := $(pytest_in) 2
# Code that vLLM, oneDNN and this repository select by the instructions of the processor.
processor_tests := tests/kernels/test_cpu_kernel.py tests/engine/attention tests/engine/test_quantization.py \
	tests/engine/kv_transfer/test_export_accuracy.py

serve: ## install if needed, then serve MODEL (default: the bundled small model) on PORT (default: 8000)
	@$(setup) serve
	@exec .venv/bin/coppice serve --port '$(PORT)' \
		$(if $(MODEL),--model '$(MODEL)') $(if $(REVISION),--engine.revision '$(REVISION)')

demo: ## train the small model with GRPO for a few minutes; writes build/demo/demo.png
	@$(setup) dev
	@PYTHONPATH=.:client $(python) -m examples.grpo --seed '$(SEED)' --out build/demo

demo-agent: ## train the small model to call a tool, through agent sessions; writes build/demo-agent/demo-agent.png
	@$(setup) dev
	@PYTHONPATH=.:client $(python) -m examples.agent_training --seed '$(SEED)' --out build/demo-agent

test: check ## the checks and all tests that are not exhaustive and need no GPU
	$(pytest_in_three) -m 'not engine and not alone and not gpu and not exhaustive'
	$(pytest_in_two) -m 'engine and not alone and not gpu and not exhaustive'
	$(python) -m pytest -m 'alone and not gpu and not exhaustive'

test-full: check coverage ## the checks and all tests, with more samples; what CI runs
	$(more_samples) $(pytest_in_two) -m 'engine and not alone and not gpu'
	$(more_samples) $(python) -m pytest -m 'alone and not gpu'
	$(python) -m tests.gpu $(if $(gpu),,--rehearse)
	@$(MAKE) test-processor

test-processor: ## tests that depend on the processor, as on an older one: VARIANT=avx2, avx512, avx512_vnni or avx512_bf16; by default the commit selects one
	@$(setup) dev
	@name=$$($(python) -m tests.processors '$(VARIANT)' "$$(git rev-parse HEAD || echo 0)") && \
	if [ -n "$$name" ]; then set -x; \
		EMULATED_PROCESSOR=$$name PYTHONPATH="$(CURDIR)/tests/processors$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(pytest_in_two) -m 'not gpu and not exhaustive' $(processor_tests); fi

test-fast: ## fast tests without an engine; takes a minute
	@$(setup) dev
	$(pytest_in_three) -m 'not engine and not gpu and not slow and not exhaustive'

coverage: ## tests without an engine; fails below 95 % line coverage of service/
	@$(setup) dev
	$(more_samples) $(pytest_in_three) -m 'not engine and not gpu' \
		--cov=service --cov-report=term-missing:skip-covered --cov-fail-under=95

check: ## check format, lint, types, the OpenAPI document and the size of modules, functions and folders
	@$(setup) dev
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy
	$(python) -m openapi_spec_validator openapi.yaml
	PYTHONPATH=.:client $(python) -m scripts.structure

bench: ## run all benchmarks and write docs/performance; takes hours
	@$(setup) dev
	@scripts/bench.sh '$(python)'

soak: ## long tests: clients with Ray, agent programs, vLLM's wheel and kernels for GPUs, 10,000 groups, malformed requests, cluster faults, drains; writes docs/operate/reliability.md
	@$(setup) dev
	$(python) -m pytest -q tests/compat/with_ray.py
	$(python) -m pytest -q tests/engine/machines/with_ray.py
	$(python) -m pytest -q tests/service/sessions/with_agent_programs.py
	$(python) -m pytest -q tests/soak/cuda_wheel.py tests/soak/compiled_kernels.py
	COPPICE_DRAWS=1 $(pytest_in_three) -m 'not engine and not gpu'
	COPPICE_DRAWS=1 $(python) -m pytest -q tests/engine/speculation tests/engine/drafter
	PYTHONPATH=.:client $(python) -m tests.soak --report docs/operate/reliability.md
	PYTHONPATH=.:client $(python) -m tests.soak.growth
	PYTHONPATH=.:client $(python) -m tests.soak.faults --engine fake --rounds 2 --report docs/operate/reliability.md
	PYTHONPATH=.:client $(python) -m tests.soak.faults --engine real --rounds 1 --report docs/operate/reliability.md
	PYTHONPATH=.:client $(python) -m tests.soak.drains --engine fake --drains 200 --report docs/operate/reliability.md
	PYTHONPATH=.:client $(python) -m tests.soak.drains --engine real --drains 10 --report docs/operate/reliability.md
	PYTHONPATH=.:client $(python) -m examples.grpo --seed 2 --out build/demo-2
	PYTHONPATH=.:client $(python) -m examples.grpo --seed 3 --out build/demo-3

docs: ## build the documentation site into build/site; fails on broken links
	@$(setup) dev
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build

reference: ## generate the tables of docs/reference (settings, HTTP API, errors, metrics, commands, Python types) and README's GPU column
	@$(setup) dev
	PYTHONPATH=.:client $(python) -m scripts.reference
	$(python) scripts/gpu_status.py

diagrams: ## render the Mermaid diagrams of README.md and docs/diagrams
	@$(setup) dev
	$(python) scripts/diagrams.py

chart: ## generate the chart's schema, README, dashboard and golden manifests
	@$(setup) dev
	@set -e; for part in schema readme dashboard golden; do $(python) -m helm.$$part; done

wheels: ## build wheels and source distributions of server and client into dist
	@$(setup) serve
	@$(python) scripts/wheels.py

lock: ## resolve requirements/*.txt again, and write their hashes
	@$(setup) dev
	@scripts/lock.sh $(python)

clean: ## remove the environments and all build outputs
	rm -rf .venv .clients .routers .verl .miles .ray .arctic .verifiers .agent_sdk .codex_cli build dist client/build client/dist *.egg-info client/*.egg-info
	rm -f kernels/shared_prefix_attention/libshared_prefix_attention.so kernels/draft_index/libdraft_index.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
