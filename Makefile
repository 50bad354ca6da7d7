# What a newcomer has to know. Everything sets up what it needs and can be repeated.
.PHONY: test test-vllm rack rack-shell lint demo bench docs env sglang-env vllm-env peers-env format

VENV ?= .venv
PY := $(VENV)/bin/python

test:            ## every test that this machine can run, and why the rest was skipped
	@tools/test.sh

test-vllm:       ## the tests with the real vLLM alone, in .venv-vllm
	@tools/test.sh vllm

rack: env        ## the tests on virtual machines with real dax devices and RDMA verbs; where their logs are
	@tools/rack.sh

rack-shell: env  ## those machines, and a shell in one of them: GUEST=alpha, beta or gpu
	@tools/rack.sh shell $(or $(GUEST),gpu)

demo: env        ## two real SGLang servers share a prefix: table, demo.json, demo.png
	@tools/demo.sh $(DEMO)

lint: env        ## ruff, formatting, types
	@tools/lint.sh

bench: env       ## copy and metadata benchmarks, as ratios to memcpy, to NIXL alone and to a bare echo
	@$(VENV)/bin/maru-bench copy $(COPY)
	@$(VENV)/bin/maru-bench copy --transport rdma $(RDMA)
	@$(VENV)/bin/maru-bench metadata $(METADATA)

env:             ## the light environment .venv
	@tools/dev_env.sh

sglang-env:      ## the environment with the real SGLang, .venv-sglang
	@tools/sglang_env.sh

vllm-env:        ## the environment with the real vLLM, .venv-vllm
	@tools/vllm_env.sh

peers-env:       ## the environment with Mooncake and NIXL for `maru-bench peers`, .venv-peers
	@tools/peers_env.sh

docs: env        ## the documentation as a site in site/, warnings as errors
	@tools/docs.sh

format: env      ## rewrite the code as `make lint` wants it
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .
