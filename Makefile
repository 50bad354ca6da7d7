# What a newcomer has to know. Everything sets up what it needs and can be repeated.
.PHONY: test lint demo bench env sglang-env format

VENV ?= .venv
PY := $(VENV)/bin/python

test:            ## every test that this machine can run, and why the rest was skipped
	@tools/test.sh

demo: env        ## two real SGLang servers share a prefix: table, demo.json, demo.png
	@tools/demo.sh $(DEMO)

lint: env        ## ruff, formatting, types
	@tools/lint.sh

bench: env       ## copy and metadata benchmarks, as ratios to memcpy and to a bare echo
	@$(VENV)/bin/maru-bench copy $(COPY)
	@$(VENV)/bin/maru-bench metadata $(METADATA)

env:             ## the light environment .venv
	@tools/dev_env.sh

sglang-env:      ## the environment with the real SGLang, .venv-sglang
	@tools/sglang_env.sh

format: env      ## rewrite the code as `make lint` wants it
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .
