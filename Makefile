# whyspan. `make help` lists the targets; V=1 shows the commands; Q= does the same for a sub-make.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
SHELL := /bin/bash

ifeq ($(V),1)
Q :=
msg =
else
Q := @
msg = @printf '  %-8s %s\n' '$(1)' '$(2)';
MAKEFLAGS += --no-print-directory
endif

# Debian keeps bpftool here, which is not in everybody's PATH.
export PATH := $(PATH):/usr/sbin:/sbin

# What is dear to make is shared by all checkouts; named here so that root under sudo finds the user's.
export WHYSPAN_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/whyspan

CLANG ?= clang
LLVM_STRIP ?= llvm-strip
CLANG_FORMAT ?= clang-format
BPFTOOL ?= bpftool
PYTHON ?= /usr/bin/python3
BUILD := build
BIN := .venv/bin
STAMP := .venv/.stamp
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

PACKAGES := clang llvm libbpf-dev bpftool python3-bpfcc libelf-dev clang-format python3-venv python3-dev g++ debootstrap
MISSING = $(shell for p in $(PACKAGES); do \
	dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done)

# The name that the kernel's headers and libbpf give to this machine's architecture.
ARCH := $(shell uname -m | sed -e 's/x86_64/x86/' -e 's/aarch64/arm64/' -e 's/ppc64le/powerpc/' \
	-e 's/riscv64/riscv/' -e 's/s390x/s390/')
PROBES := probes/whyspan_probes
BPF_SOURCES := $(wildcard $(PROBES)/*.bpf.c $(PROBES)/bursts/*.bpf.c)
BPF_HEADERS := $(wildcard $(PROBES)/*.bpf.h $(PROBES)/bursts/*.bpf.h)
BPF_OBJECTS := $(BPF_SOURCES:.bpf.c=.bpf.o)
MARKER := probes/whyspan_inproc/whyspan_inproc/_marker.abi3.so
# The same object wherever the tree lies: its line information names files.
BPF_CFLAGS := -g -O2 -target bpf -D__TARGET_ARCH_$(ARCH) -isystem $(BUILD) -I$(PROBES) -Wall -Werror -Wpadded \
	-ffile-prefix-map=$(CURDIR)=.
VMLINUX_BTF ?= /sys/kernel/btf/vmlinux

.PHONY: help
help: ## Show this help
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  \033[36m%-12s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## Install the system packages that are missing (apt, Debian or Ubuntu)
	$(Q)missing="$(strip $(MISSING))"; if [ -n "$$missing" ]; then \
		command -v apt-get >/dev/null || { echo "no apt-get: these are needed: $$missing" >&2; exit 0; }; \
		echo "  APT      $$missing"; \
		$(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $$missing; \
	fi

.PHONY: venv
venv: $(STAMP) ## Create .venv and install whyspan and its tools into it, editable

# Debian's bcc module belongs to /usr/bin/python3: hence this interpreter, and its site packages.
$(STAMP): pyproject.toml | deps
	$(call msg,VENV,.venv)
	$(Q)test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages .venv
	$(Q)$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[dev]'
	$(Q)touch $@

.PHONY: build
build: $(BPF_OBJECTS) $(MARKER) ## Compile every probes/whyspan_probes/*.bpf.c, and the marker of whyspan_inproc

$(MARKER): $(MARKER:.abi3.so=.c) | $(STAMP)
	$(call msg,CC,$@)
	$(Q)$(BIN)/python -m tests.build_inproc > /dev/null

$(BUILD)/vmlinux.h: | deps
	$(call msg,BTF,$@)
	$(Q)mkdir -p $(BUILD)
	$(Q)$(BPFTOOL) btf dump file $(VMLINUX_BTF) format c > $@.tmp
	$(Q)mv $@.tmp $@

# `bpftool gen object` fixes the offsets of variables in BTF, which clang leaves at 0; the strip drops DWARF, not BTF.
# The rule holds for a probe in any folder, such as those of the bench and of the tests.
%.bpf.o: %.bpf.c $(BPF_HEADERS) $(BUILD)/vmlinux.h | deps
	$(call msg,BPF,$@)
	$(Q)$(CLANG) $(BPF_CFLAGS) -c $< -o $@.clang
	$(Q)$(BPFTOOL) gen object $@.tmp $@.clang
	$(Q)$(LLVM_STRIP) -g $@.tmp
	$(Q)rm -f $@.clang
	$(Q)mv $@.tmp $@

.PHONY: vllm
vllm: venv ## Install vLLM for the CPU into an environment of its own (3.4 GB, once, 2-4 min)
	$(Q)$(BIN)/python -m tests.engine.install

.PHONY: llama
llama: venv ## Build llama-cpp-python for the CPU into an environment of its own (once, 5-8 min)
	$(Q)$(BIN)/python -m tests.engine.llama_install

.PHONY: roots
roots: venv ## Make the root folders of other Debian releases that tests run in (40 s, 0.3 GB, root; cached)
	$(Q)$(if $(SUDO),$(SUDO) env WHYSPAN_CACHE='$(WHYSPAN_CACHE)') $(BIN)/python -m tests.roots

ENGINE ?= demo

.PHONY: demo
demo: venv build $(filter vllm,$(ENGINE)) ## Inject four faults into a server and judge what whyspan says (root, 70 s); ENGINE=vllm: into a real vLLM
	$(Q)$(BIN)/python -m tests.demo --engine $(ENGINE) $(ARGS)

# Root for the tiers `bpf` and `engine`; without sudo it is skipped with its reason, unless WHYSPAN_REQUIRE says otherwise.
TEST_SUDO = $(if $(SUDO),$(shell command -v sudo >/dev/null && echo sudo env WHYSPAN_REQUIRE='$(WHYSPAN_REQUIRE)' WHYSPAN_CACHE='$(WHYSPAN_CACHE)'))

.PHONY: boards
boards: venv ## Get what the boards are checked with: Prometheus, VictoriaMetrics, Node.js, TraceQL (cached, 0.4 GB)
	$(Q)$(BIN)/python -m tests.boards.tools

.PHONY: page
page: venv ## Get what the page is looked at with: Chromium (apt), axe-core and TypeScript (cached, 0.1 GB)
	$(Q)command -v chromium chromium-browser >/dev/null || { $(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; }
	$(Q)$(BIN)/python -m tests.page.tools

.PHONY: generated
generated: venv ## Write what is made from the code: boards, alert rules, provisioning, docs (metrics, configure, doctor.schema)
	$(Q)$(BIN)/python dashboards/generate.py
	$(Q)$(BIN)/python -m whyspan_exporters.metrics.docs > $(BUILD)/metrics.md && mv $(BUILD)/metrics.md docs/metrics.md
	$(Q)$(BIN)/python -m whyspan.config_docs packaging/whyspan.toml > $(BUILD)/configure.md && mv $(BUILD)/configure.md docs/configure.md
	$(Q)$(BIN)/python -m whyspan.doctor.report > $(BUILD)/doctor.json && mv $(BUILD)/doctor.json docs/doctor.schema.json

.PHONY: package
package: venv build ## Build dist/: the Debian package and the wheels (3 min); SUFFIX=+1 for another build of a release
	$(Q)command -v dh >/dev/null || { $(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends debhelper lintian; }
	$(Q)$(PYTHON) packaging/build.py $(if $(SUFFIX),--suffix $(SUFFIX)) $(ARGS)

.PHONY: test
test: venv build vllm llama boards page ## Run the tiers unit, bpf, boards, page, engine (WHYSPAN_REQUIRE=bpf,engine,boards,page: no skips)
	$(Q)$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile tests/unit
	$(Q)$(TEST_SUDO) $(BIN)/python -m pytest $(wildcard tests/bpf tests/boards tests/page tests/engine) $(ARGS)

KERNEL ?=
SMOKE ?=

.PHONY: test-vm
test-vm: venv build ## Stock kernels and the .deb under QEMU (root, hours); SMOKE=1: 6.12 only; KERNEL='6.1 6.12'
	$(Q)command -v qemu-system-x86_64 >/dev/null && command -v busybox >/dev/null || { $(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
		qemu-system-x86 busybox-static kmod; }
	$(Q)$(if $(SUDO),$(SUDO) env WHYSPAN_REQUIRE='$(WHYSPAN_REQUIRE)' WHYSPAN_CACHE='$(WHYSPAN_CACHE)') \
		env WHYSPAN_VM_KERNELS='$(KERNEL)' WHYSPAN_VM_SMOKE='$(SMOKE)' $(BIN)/python -m pytest tests/vm $(ARGS)

.PHONY: check
check: venv ## Lint, format, types, layers, unit tests (< 3 min, no root)
	$(call msg,RUFF,check)
	$(Q)$(BIN)/ruff check --quiet .
	$(call msg,RUFF,format)
	$(Q)$(BIN)/ruff format --quiet --check .
	$(call msg,MYPY,strict)
	$(Q)$(BIN)/mypy --no-error-summary
	$(call msg,IMPORTS,.importlinter)
	$(Q)mkdir -p $(BUILD)
	$(Q)$(BIN)/lint-imports --no-cache > $(BUILD)/lint-imports.log || { cat $(BUILD)/lint-imports.log; exit 1; }
ifneq ($(BPF_SOURCES)$(BPF_HEADERS),)
	$(call msg,CLANGFMT,$(PROBES))
	$(Q)$(CLANG_FORMAT) --dry-run --Werror $(BPF_SOURCES) $(BPF_HEADERS)
endif
	$(Q)$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile tests/unit

.PHONY: bench
bench: venv build vllm ## Measure: stitching, cost on the demo's server and on vLLM, ingest rate (35 min, root)
	$(Q)$(if $(SUDO),$(SUDO) env WHYSPAN_CACHE='$(WHYSPAN_CACHE)') $(BIN)/python -m tests.bench $(ARGS)

.PHONY: bench-faults
bench-faults: venv build vllm ## Inject every host fault into three servers and score the verdicts (root); FAULT=id, QUICK=1 (15 min)
	$(Q)$(if $(SUDO),$(SUDO) env WHYSPAN_CACHE='$(WHYSPAN_CACHE)') $(BIN)/python -m tests.faults.host \
		$(foreach f,$(FAULT),--fault $(f)) $(if $(QUICK),--quick) $(ARGS)

.PHONY: drill
drill: venv build ## Collector away for 10 minutes under load, two kills, a full disk: is anything lost? (root)
	$(Q)$(if $(SUDO),$(SUDO)) $(BIN)/python -m tests.bench.outage $(ARGS)

.PHONY: lifecycle
lifecycle: venv build ## Start and stop the agent 200 times, kill it 100 times: is anything left, is anybody harmed? (root, 20 min)
	$(Q)$(if $(SUDO),$(SUDO)) $(BIN)/python -m tests.bench.lifecycle $(ARGS)

.PHONY: soak
soak: venv build ## An hour at 2,000 requests a minute with faults, outages, kills, reloads: memory, losses, bounds (root)
	$(Q)$(if $(SUDO),$(SUDO)) $(BIN)/python -m tests.bench.soak $(ARGS)

.PHONY: fuzz
fuzz: venv ## A million damaged spools and a million requests to the metrics endpoint (an hour)
	$(Q)$(BIN)/python -m tests.bench.spool_fuzz --inputs 1000000 $(ARGS)
	$(Q)$(BIN)/python -m tests.bench.endpoint_fuzz

.PHONY: clean
clean: ## Remove what was built; keeps .venv and the packages
	$(call msg,CLEAN,$(BUILD))
	$(Q)rm -rf $(BUILD) $(BPF_OBJECTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
