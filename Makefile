# SPDX-License-Identifier: Apache-2.0
# imbrex: one Makefile, no configure step. `make help` lists the targets.
#
#   CC=clang        compiler (gcc or clang)      BUILD=build        where everything is built
#   CFLAGS='-O2 -g' optimisation and debugging   PREFIX=/usr/local  where `make install` puts it
#   JOBS=n          compilations at once         DESTDIR=           prefix for packagers
#   TESTS='a b'     run only these tests         FUZZ_SECONDS=60    time for each fuzz target
#   CUDA=0          leave the CUDA kernels out   NVCC=nvcc          their compiler
#   V=1             print whole commands

ifeq ($(origin CC),default)
CC := $(firstword $(foreach cc,gcc clang cc,$(if $(shell command -v $(cc) 2>/dev/null),$(cc))) cc)
endif
CFLAGS ?= -O2 -g
BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
LIBDIR ?= $(PREFIX)/lib
OBJCOPY ?= objcopy
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
FUZZ_CC ?= clang
FUZZ_SECONDS ?= 60
TESTS ?=
V ?=

# CUDA kernels are built where there is a toolkit; without one the library has the CPU engine alone.
ifeq ($(origin NVCC),undefined)
NVCC := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
endif
ifeq ($(origin CUDA_INCLUDE),undefined)
CUDA_ROOT := $(if $(NVCC),$(patsubst %/bin/,%,$(dir $(realpath $(shell command -v $(NVCC))))))
CUDA_INCLUDE := $(patsubst %/cuda.h,%,$(firstword $(wildcard $(CUDA_ROOT)/include/cuda.h \
    $(CUDA_ROOT)/targets/*/include/cuda.h)))
endif
ifeq ($(origin CUDA),undefined)
CUDA := $(if $(and $(NVCC),$(CUDA_INCLUDE)),1,0)
endif
# Shared by the builds of one tree that differ in compiler or sanitizer only.
KERNELS ?= $(BUILD)/kernels

# Set by the targets below: -Werror, or the options of a sanitizer (compiler and linker).
WERROR :=
SANITIZE :=

VERSION := $(shell sed -n 's/^.define IMBREX_VERSION "\(.*\)"/\1/p' include/imbrex.h)
SONAME := libimbrex.so.0

# ---- options ----------------------------------------------------------------------------------
# No contraction: a*b+c is rounded the same by every compiler, so results do not depend on it.
# Never -march: the kernels of an instruction set name it themselves, for their file alone.
WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes
C_OPTIONS = -std=c17 -D_GNU_SOURCE $(WARNINGS) $(WERROR) -fPIC -fvisibility=hidden \
    -ffp-contract=off -Iinclude -Isrc -DIMBREX_HAS_ZSTD=$(if $(HAS_ZSTD),1,0) \
    $(CPPFLAGS) $(CFLAGS) $(SANITIZE)
AVX2_OPTIONS := -mavx2 -mfma -mf16c
AVX512_OPTIONS := $(AVX2_OPTIONS) -mavx512f -mavx512bw -mavx512dq -mavx512vl
VNNI_OPTIONS := $(AVX512_OPTIONS) -mavx512vnni
BF16_OPTIONS := $(VNNI_OPTIONS) -mavx512bf16
AMX_OPTIONS := $(VNNI_OPTIONS) -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16
C_OPTIONS += -DIMBREX_CUDA=$(CUDA)
ifeq ($(CUDA),1)
C_OPTIONS += $(if $(filter-out /usr/include,$(CUDA_INCLUDE)),-isystem $(CUDA_INCLUDE)) \
    -DKERNEL_FOLDER='"$(KERNELS)"'
endif
# Machine code for Hopper alone: its matrix instructions exist on no other architecture. For all
# others from compute capability 8.0 on, code that the driver compiles when it is loaded; what has
# 8.x is spared that.
HOPPER_TARGET := -gencode=arch=compute_90a,code=sm_90a
PORTABLE_TARGET := -gencode=arch=compute_80,code=[sm_80,compute_80]
NVCC_OPTIONS := -std=c++17 -O3 -Isrc -Werror all-warnings -Xptxas -v
# Tests write below TEST_BUILD_DIR only, and may do less where a sanitizer slows them down.
# test_main.c declares the suites, not each test file.
TEST_OPTIONS = -I. -Itests -DTEST_BUILD_DIR='"$(BUILD)"' -DTEST_SANITIZED=$(if $(SANITIZE),1,0) \
    -Wno-missing-prototypes
LINK_OPTIONS = $(CFLAGS) $(SANITIZE) $(LDFLAGS)

# Where dlopen is not a part of libc.
DL_LIB := $(if $(filter 1,$(CUDA)),-ldl)

# Programs take these libraries in, so that they start on a machine that has none of them.
static_library = $(filter /%,$(shell $(CC) -print-file-name=lib$(1).a 2>/dev/null))
static_or_shared = $(firstword $(static_library) -l$(1))
STATIC_LIBS := $(foreach l,jansson utf8proc pcre2-8 crypto,$(call static_or_shared,$(l))) \
    -lpthread -lm $(DL_LIB)
SHARED_LIBS := -ljansson -lutf8proc -lpcre2-8 -lcrypto -lpthread -lm $(DL_LIB)

# Compressed traces are read if libzstd is there, else refused by name.
HAS_ZSTD := $(shell echo '\#include <zstd.h>' | $(CC) -E - >/dev/null 2>&1 && echo 1)
ifneq ($(HAS_ZSTD),)
STATIC_LIBS += $(call static_or_shared,zstd)
SHARED_LIBS += -lzstd
PC_ZSTD := , libzstd
endif

# The remote KV tier is there if libhiredis is, else refused by name.
HAS_HIREDIS := $(shell echo '\#include <hiredis/hiredis.h>' | $(CC) -E - >/dev/null 2>&1 && echo 1)
ifneq ($(HAS_HIREDIS),)
STATIC_LIBS += $(call static_or_shared,hiredis)
SHARED_LIBS += -lhiredis
PC_HIREDIS := , hiredis
endif

# Where there is no liburing, threads read the disk tier. The shared library takes it in, so that
# it loads on machines that have none.
HAS_URING := $(shell echo '\#include <liburing.h>' | $(CC) -E - >/dev/null 2>&1 && echo 1)
ifneq ($(HAS_URING),)
STATIC_LIBS += $(call static_or_shared,uring)
SHARED_LIBS += $(call static_or_shared,uring) -Wl,--exclude-libs,liburing.a
PC_URING := , liburing
endif

# ---- sources: found by their folder -----------------------------------------------------------
LIB_SOURCES := $(wildcard src/base/*.c src/base/*.S src/ops/*.c src/ops/ref/*.c src/ops/cpu/*.c \
    src/jinja/*.c src/model/*.c src/kv/*.c src/engine/*.c src/sim/*.c)
ifeq ($(filter x86_64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),)
LIB_SOURCES := $(filter-out %_avx2.c %_avx512.c %_vnni.c %_bf16.c %_amx.c,$(LIB_SOURCES))
endif
LIB_SOURCES := $(filter-out src/kv/kv_remote_link$(if $(HAS_HIREDIS),_absent).c,$(LIB_SOURCES))
CLI_SOURCES := $(wildcard src/cli/*.c)
# imbrex bench measures ops that the public API does not have: linked with the library's objects.
BENCH_CPU_SOURCES := $(wildcard bench/cpu/*.c)
ifeq ($(filter x86_64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),)
BENCH_CPU_SOURCES := $(filter-out %_avx2.c,$(BENCH_CPU_SOURCES))
endif
KERNEL_SOURCES :=
PORTABLE_SOURCES :=
BENCH_KERNEL_SOURCES :=
ifeq ($(CUDA),1)
LIB_SOURCES := $(filter-out src/ops/cuda_absent.c,$(LIB_SOURCES)) $(wildcard src/ops/cuda/*.c)
# imbrex bench measures kernels of other libraries too, which live in bench/peers.
CLI_SOURCES += $(wildcard bench/cuda/*.c bench/peers/*.c)
PORTABLE_SOURCES := $(patsubst %,src/ops/cuda/kernels/%.cu,gemm_mma gemm_mma_general \
    gated_activation row plain tensor_attention small_resident small_stream host_copy sample)
KERNEL_SOURCES := $(filter-out %/gemm_mma.cu %/gemm_mma_general.cu, \
    $(wildcard src/ops/cuda/kernels/*.cu))
BENCH_KERNEL_SOURCES := $(wildcard bench/cuda/*.cu)
endif
fatbins = $(patsubst %.cu,$(KERNELS)/%.fatbin,$(notdir $(1)))
portable_fatbins = $(patsubst %.cu,$(KERNELS)/%_portable.fatbin,$(notdir $(1)))

OBJ := $(BUILD)/obj
LIB := $(BUILD)/libimbrex.a
TEST_LIB := $(OBJ)/libimbrex-inside.a
objects = $(patsubst %,$(OBJ)/%.o,$(basename $(1)))
LIB_OBJECTS := $(call objects,$(LIB_SOURCES))
# What only tests link.
TEST_LIB_OBJECTS := $(LIB_OBJECTS) $(call objects,$(wildcard src/ops/fake/*.c))
CLI_OBJECTS := $(call objects,$(CLI_SOURCES))
BENCH_CPU_OBJECTS := $(call objects,$(BENCH_CPU_SOURCES))

UNIT_SOURCES := $(wildcard tests/test_main.c tests/base/*.c tests/jinja/*.c tests/model/*.c \
    tests/kv/*.c tests/engine/*.c tests/sim/*.c tests/ops/test_*.c \
    $(if $(filter 1,$(CUDA)),tests/cuda/test_*.c tests/cuda/fake_*.c))
CHECK_SOURCES := $(wildcard tests/ops/check_*.c)
CHECK_SHARED := $(filter-out $(CHECK_SOURCES) tests/ops/test_%,$(wildcard tests/ops/*.c))
GPU_SOURCES := $(wildcard tests/gpu/check_*.c)
# What a benchmark and a test both do with a GPU.
GPU_SHARED := tests/gpu/gpu_check.c \
    $(if $(filter 1,$(CUDA)),tests/gpu/gpu_session.c tests/gpu/gpu_matrix.c \
    tests/gpu/attention_bed.c bench/cuda/gpu.c bench/cuda/bench_image.c \
    $(addprefix src/cli/,output.c options.c)) tests/gpu/gating_reference.c
GOLDEN_SOURCES := $(wildcard tests/golden/golden_*.c)
GOLDEN_SHARED := $(filter-out $(GOLDEN_SOURCES),$(wildcard tests/golden/*.c))
FAULT_SOURCES := $(wildcard tests/fault/fault_*.c)
FAULT_SHARED := $(filter-out $(FAULT_SOURCES),$(wildcard tests/fault/*.c)) \
    $(if $(filter 1,$(CUDA)),tests/cuda/fake_driver.c)
SOAK_SOURCES := $(wildcard tests/soak/soak_*.c)
BENCH_SOURCES := $(wildcard bench/bench_*.c)
EXAMPLE_SOURCES := $(wildcard examples/*.c)
FUZZ_SOURCES := $(wildcard fuzz/fuzz_*.c)
FUZZ_SHARED := $(filter-out $(FUZZ_SOURCES),$(wildcard fuzz/*.c))

programs = $(patsubst %,$(BUILD)/tests/%,$(basename $(notdir $(1))))
UNIT := $(if $(UNIT_SOURCES),$(BUILD)/tests/unit)
CHECKS := $(call programs,$(CHECK_SOURCES))
GPU_CHECKS := $(call programs,$(GPU_SOURCES))
GOLDENS := $(call programs,$(GOLDEN_SOURCES))
FAULTS := $(call programs,$(FAULT_SOURCES))
SOAKS := $(call programs,$(SOAK_SOURCES))
BENCHES := $(patsubst bench/%.c,$(BUILD)/bench/%,$(BENCH_SOURCES))
EXAMPLES := $(patsubst examples/%.c,$(BUILD)/examples/%,$(EXAMPLE_SOURCES))
FUZZERS := $(patsubst fuzz/%.c,$(BUILD)/fuzzers/%,$(FUZZ_SOURCES))
SCRIPT_TESTS := $(wildcard tests/cli/test_*.py tests/house/test_*.py tests/tools/test_*.py)
TEST_PROGRAMS := $(UNIT) $(CHECKS) $(GPU_CHECKS) $(GOLDENS) $(FAULTS)

# Test inputs that are made rather than stored.
QWEN_TOKENIZER := $(BUILD)/fixtures/qwen2.5/tokenizer.json
FIXTURES := $(if $(wildcard tests/golden/make_qwen2_5_tokenizer.py),$(QWEN_TOKENIZER))

C_FILES := $(wildcard include/*.h src/*/*.[ch] src/*/*/*.[ch] tests/*.[ch] tests/*/*.[ch] \
    fuzz/*.[ch] examples/*.[ch] bench/*.[ch])

# A recursive make that uses all cores unless the caller chose otherwise.
SUBMAKE = +$(MAKE) KERNELS=$(KERNELS) --no-print-directory \
    $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$(JOBS))
# Two at once where there are two cores: nearly all test programs keep one busy. Not more, as those
# whose engine takes every core would only wait for each other. The suites of the unit tests each
# run by themselves, so that one that crashes takes no other with it.
RUN_TESTS = python3 tools/run_tests --build $(BUILD) $(if $(TESTS),--only "$(TESTS)") \
    --parts unit --jobs $(if $(filter 1,$(JOBS)),1,2) $(if $(SANITIZE),--limit 1200)

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all run test test-built test-programs check check-style check-gcc check-clang build-gcc \
    build-clang bench differential asan asan-built tsan tsan-built fuzz fuzz-built format \
    check-prefix install uninstall dist wheel clean help FORCE

all: $(BUILD)/imbrex $(LIB) $(BUILD)/libimbrex.so

help:
	@echo 'make            build $(BUILD)/imbrex, libimbrex.a and libimbrex.so'
	@echo 'make run        install missing packages, build, write a story with the built-in model'
	@echo 'make test       install missing packages, build, run the tests (TESTS="unit ...": some)'
	@echo 'make check      style, layers, gcc and clang with -Werror, asan, tsan, fuzz 10 s each'
	@echo 'make bench      check and time every kernel; time tokenizers, scheduler and KV cache'
	@echo 'make differential  tokenizers against the Python package `tokenizers`, if it is there'
	@echo 'make soak       thousands of requests on a small real model, ten thousand ends of a'
	@echo '                process that writes the disk tier, a million steps of scheduler and KV'
	@echo '                tiers, for many minutes'
	@echo 'make asan       the tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make tsan       the threaded tests under ThreadSanitizer'
	@echo 'make fuzz       libFuzzer, FUZZ_SECONDS=$(FUZZ_SECONDS) a target, two at a time'
	@echo 'make format     lay out the C files with clang-format'
	@echo 'make install    into DESTDIR and PREFIX ($(PREFIX)); make uninstall takes it back'
	@echo 'make dist       $(BUILD)/imbrex-$(VERSION).tar.gz of the last commit'
	@echo 'make wheel      the Python package with the library in it, in $(BUILD)/wheel'
	@echo 'make clean      remove $(BUILD)'

# ---- objects ----------------------------------------------------------------------------------
# Rewritten only when compiler or options change; objects made with others are then remade.
OPTIONS_FILE := $(OBJ)/options
OPTIONS_TEXT = $(CC) $(C_OPTIONS) $(TEST_OPTIONS) $(LDFLAGS)
$(OPTIONS_FILE): FORCE
	@mkdir -p $(@D)
	@echo '$(subst ','\'',$(OPTIONS_TEXT))' | cmp -s - $@ || \
	    echo '$(subst ','\'',$(OPTIONS_TEXT))' > $@

# What is being made, in two words; V=1 shows the command instead.
QUIET = @mkdir -p $(@D); $(if $(V),set -x,echo '$(1) $@');
COMPILE = $(CC) $(C_OPTIONS) -MMD -MP -c $< -o $@

$(OBJ)/%_avx2.o: %_avx2.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) $(AVX2_OPTIONS)

$(OBJ)/%_avx512.o: %_avx512.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) $(AVX512_OPTIONS)

$(OBJ)/%_vnni.o: %_vnni.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) $(VNNI_OPTIONS)

$(OBJ)/%_bf16.o: %_bf16.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) $(BF16_OPTIONS)

$(OBJ)/%_amx.o: %_amx.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) $(AMX_OPTIONS)

$(OBJ)/bench/cpu/%_avx2.o: bench/cpu/%_avx2.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) -I. $(AVX2_OPTIONS)

$(OBJ)/bench/%.o: bench/%.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) -I.

$(OBJ)/tests/%.o: tests/%.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) $(TEST_OPTIONS)

# What `imbrex bench` says it measured. Rewritten only when it changes; empty outside of a checkout,
# such as in a tree that lies in another one's.
COMMIT_FILE := $(OBJ)/commit
COMMIT_TEXT = $(shell git ls-files --error-unmatch Makefile >/dev/null 2>&1 && \
    git describe --always --dirty 2>/dev/null)
$(COMMIT_FILE): FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT_TEXT)' | cmp -s - $@ || echo '$(COMMIT_TEXT)' > $@

$(OBJ)/src/cli/machine.o: src/cli/machine.c $(OPTIONS_FILE) $(COMMIT_FILE)
	$(call QUIET,cc) $(COMPILE) -DIMBREX_COMMIT='"$(COMMIT_TEXT)"'

$(OBJ)/src/kv/kv_ring.o: src/kv/kv_ring.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE) -DIMBREX_HAS_URING=$(if $(HAS_URING),1,0)

$(OBJ)/%.o: %.c $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE)

$(OBJ)/%.o: %.S $(OPTIONS_FILE)
	$(call QUIET,cc) $(COMPILE)

# asset.c takes these files in with .incbin, which dependency files do not see. The assembler finds
# them because make runs in the root of the tree.
$(OBJ)/src/base/asset.o: $(wildcard models/stories260K/*)

# ---- CUDA kernels ------------------------------------------------------------------------------
# One fatbin a file, taken in by kernel_image.c with .incbin. What ptxas says stays beside it: a
# kernel that spills registers or whose matrix instructions it serialises is a failed build.
KERNEL_OPTIONS_FILE := $(KERNELS)/options
KERNEL_OPTIONS_TEXT = $(NVCC) $(NVCC_OPTIONS) $(HOPPER_TARGET) $(PORTABLE_TARGET)
$(KERNEL_OPTIONS_FILE): FORCE
	@mkdir -p $(@D)
	@echo '$(KERNEL_OPTIONS_TEXT)' | cmp -s - $@ || echo '$(KERNEL_OPTIONS_TEXT)' > $@

COMPILE_KERNELS = $(NVCC) $(NVCC_OPTIONS) $(1) -fatbin -MMD -MP -MT $@ -MF $(@:.fatbin=.d) $< \
    -o $(@:.fatbin=.unchecked) > $(@:.fatbin=.ptxas) 2>&1 || { cat $(@:.fatbin=.ptxas); exit 1; }; \
    tools/check_ptxas $(@:.fatbin=.ptxas) && mv $(@:.fatbin=.unchecked) $@
$(KERNELS)/%.fatbin: src/ops/cuda/kernels/%.cu $(KERNEL_OPTIONS_FILE) tools/check_ptxas
	$(call QUIET,nvcc) $(call COMPILE_KERNELS,$(HOPPER_TARGET))
$(KERNELS)/%_portable.fatbin: src/ops/cuda/kernels/%.cu $(KERNEL_OPTIONS_FILE) tools/check_ptxas
	$(call QUIET,nvcc) $(call COMPILE_KERNELS,$(PORTABLE_TARGET))
$(KERNELS)/%.fatbin: bench/cuda/%.cu $(KERNEL_OPTIONS_FILE) tools/check_ptxas
	$(call QUIET,nvcc) $(call COMPILE_KERNELS,$(HOPPER_TARGET))
$(OBJ)/src/ops/cuda/kernel_image.o: $(call fatbins,$(KERNEL_SOURCES)) \
    $(call portable_fatbins,$(PORTABLE_SOURCES))
$(OBJ)/bench/cuda/bench_image.o: $(call fatbins,$(BENCH_KERNEL_SOURCES)) $(KERNELS)/commit

# Stands beside every measured figure.
$(KERNELS)/commit: FORCE
	@mkdir -p $(@D)
	@(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown) | tr -d '\n' > $@.now
	@cmp -s $@.now $@ && rm $@.now || mv $@.now $@

# ---- library and program ----------------------------------------------------------------------
# The library that is given away is one object in which everything but the public API has become
# local: names such as file_read must not meet those of the program it is linked into. The unit
# tests look inside, so they link the objects as they are.
$(LIB): $(OBJ)/imbrex.o
	$(call QUIET,ar) rm -f $@; $(AR) rcs $@ $^
$(OBJ)/imbrex.o: $(LIB_OBJECTS)
	$(call QUIET,link) $(LD) -r $^ -o $@ && $(OBJCOPY) --localize-hidden $@
$(TEST_LIB): $(TEST_LIB_OBJECTS)
	$(call QUIET,ar) rm -f $@; $(AR) rcs $@ $^

# Only what imbrex.h marks IMBREX_API leaves the library; what jansson or libc must provide has to
# be linked here. The link beside it is what programs look for when they start.
$(BUILD)/libimbrex.so: $(LIB_OBJECTS)
	$(call QUIET,link) $(CC) -shared -Wl,-soname,$(SONAME) -Wl,--no-undefined \
	    -Wl,-rpath,'$$ORIGIN' $(LINK_OPTIONS) $^ -o $@ $(SHARED_LIBS)
	@ln -sf libimbrex.so $(BUILD)/$(SONAME)

# The same library with bench/cpu inside, of which the program sees what is marked IMBREX_API.
$(OBJ)/imbrex-bench.o: $(LIB_OBJECTS) $(BENCH_CPU_OBJECTS)
	$(call QUIET,link) $(LD) -r $^ -o $@ && $(OBJCOPY) --localize-hidden $@

$(BUILD)/imbrex: $(CLI_OBJECTS) $(OBJ)/imbrex-bench.o
	$(call QUIET,link) $(CC) $(LINK_OPTIONS) $^ -o $@ $(STATIC_LIBS)

# ---- tests ------------------------------------------------------------------------------------
LINK_TEST = $(call QUIET,link) $(CC) $(LINK_OPTIONS) $(filter %.o,$^) $(filter %.a,$^) -o $@

# --wrap sees the calls of imbrex, jansson and utf8proc, not those inside cmocka and libc.
WRAP := $(foreach f,malloc calloc realloc free mmap munmap pthread_create read open,-Wl,--wrap=$(f))

# It counts the threads of each suite.
$(UNIT): LINK_OPTIONS += -Wl,--wrap=pthread_create
$(UNIT): $(call objects,$(UNIT_SOURCES) $(if $(filter 1,$(CUDA)),bench/cuda/kernel_trace.c)) \
    $(TEST_LIB)
	$(LINK_TEST) -lcmocka $(STATIC_LIBS)
$(CHECKS): $(BUILD)/tests/%: $(OBJ)/tests/ops/%.o $(call objects,$(CHECK_SHARED)) $(TEST_LIB)
	$(LINK_TEST) $(STATIC_LIBS)
$(GPU_CHECKS): $(BUILD)/tests/%: $(OBJ)/tests/gpu/%.o $(call objects,$(GPU_SHARED)) $(TEST_LIB)
	$(LINK_TEST) $(GPU_CHECK_LIBS) $(STATIC_LIBS)
# Reads golden files.
$(BUILD)/tests/check_gpu_model: $(call objects,$(GOLDEN_SHARED))
$(BUILD)/tests/check_gpu_model: GPU_CHECK_LIBS := -lcmocka
# Reads them too, and counts what is allocated.
$(BUILD)/tests/check_gpu_engine: $(call objects,$(GOLDEN_SHARED) tests/engine/request_cases.c \
    tests/fault/fault.c)
$(BUILD)/tests/check_gpu_engine: GPU_CHECK_LIBS := $(WRAP) -lcmocka
$(GOLDENS): $(BUILD)/tests/%: $(OBJ)/tests/golden/%.o $(call objects,$(GOLDEN_SHARED)) $(TEST_LIB)
	$(LINK_TEST) -lcmocka $(STATIC_LIBS)
$(FAULTS): $(BUILD)/tests/%: $(OBJ)/tests/fault/%.o $(call objects,$(FAULT_SHARED)) $(TEST_LIB)
	$(LINK_TEST) $(WRAP) -lcmocka $(STATIC_LIBS)
$(BUILD)/tests/fault_kv_remote: $(OBJ)/tests/kv/fake_redis.o
$(SOAKS): $(BUILD)/tests/%: $(OBJ)/tests/soak/%.o $(OBJ)/tests/engine/request_cases.o $(TEST_LIB)
	$(LINK_TEST) -lcmocka $(STATIC_LIBS)
$(BUILD)/tests/soak_kv_disk: $(call objects,$(addprefix tests/kv/,disk_blocks.c faulty_files.c))
$(BUILD)/tests/soak_tiers: $(call objects,tests/engine/tiers_walk.c tests/base/fixture.c \
    tests/fault/fault.c $(addprefix tests/kv/,fake_redis.c faulty_files.c tiers_set_up.c))
$(BUILD)/tests/soak_prefix: $(call objects,tests/base/fixture.c tests/kv/redis_server.c \
    src/cli/machine.c)
# Makes allocations fail.
$(BUILD)/tests/soak_tiers: LINK_OPTIONS += $(WRAP)

$(BENCHES): $(BUILD)/bench/%: $(OBJ)/bench/%.o $(TEST_LIB)
	$(LINK_TEST) $(STATIC_LIBS)
# Those whose figures are kept write the head of their reports as the program does.
REPORTING := $(addprefix $(BUILD)/bench/bench_kv_,pin disk pack move layers)
$(REPORTING): $(call objects,$(patsubst %,src/cli/%.c,report_header machine output options \
    replace_file spread))
# They read clock and power.
METERED := $(addprefix $(BUILD)/bench/bench_kv_,move layers)
$(METERED): $(call objects,$(if $(filter 1,$(CUDA)),$(addprefix bench/,\
    cuda/gpu.c cuda/gpu_meter.c cuda/bench_image.c peers/nvml.c)))

# Examples are built as a user would: against the shared library.
$(BUILD)/examples/%: examples/%.c include/imbrex.h $(BUILD)/libimbrex.so
	$(call QUIET,cc) $(CC) -std=c17 $(WARNINGS) $(WERROR) -Iinclude $(CFLAGS) $< -o $@ \
	    -L$(BUILD) -limbrex -Wl,-rpath,'$$ORIGIN/..'

$(QWEN_TOKENIZER): tests/golden/make_qwen2_5_tokenizer.py \
    $(wildcard tests/golden/tokenizers/qwen2.5/*)
	@mkdir -p $(@D)
	python3 tests/golden/make_qwen2_5_tokenizer.py $(@D)

test-programs: $(BUILD)/imbrex $(TEST_PROGRAMS) $(FIXTURES)

# The same in every build: `make test` starts here once the packages are there.
test-built: all test-programs $(EXAMPLES)
	@$(RUN_TESTS) tools/check_style tools/check_layers $(TEST_PROGRAMS) $(EXAMPLES) $(SCRIPT_TESTS)

# Those of a GPU only where there is one: without, they are built to be skipped.
ASAN_PROGRAMS := $(if $(wildcard /dev/nvidiactl),$(TEST_PROGRAMS), \
    $(filter-out $(GPU_CHECKS),$(TEST_PROGRAMS)))
asan-built: $(BUILD)/imbrex $(ASAN_PROGRAMS) $(FIXTURES)
	@$(RUN_TESTS) $(ASAN_PROGRAMS) $(filter tests/cli/%,$(SCRIPT_TESTS))

# Of the programs with threads, those that ThreadSanitizer does not slow down to many minutes; of
# the unit suites those that start threads, as the others have nothing to race with.
TSAN_PROGRAMS := $(UNIT) $(filter %/golden_stories260k,$(GOLDENS))
tsan-built: $(TSAN_PROGRAMS)
	@$(RUN_TESTS) --some threaded $(TSAN_PROGRAMS)

# ---- what people type -------------------------------------------------------------------------
run:
	@tools/deps.sh build
	@$(SUBMAKE) --quiet $(BUILD)/imbrex
	@$(BUILD)/imbrex run -p "Once upon a time"

test:
	@tools/deps.sh test
	@$(SUBMAKE) test-built

check:
	@tools/deps.sh check
	@$(SUBMAKE) check-style
	@$(SUBMAKE) check-gcc
	@$(SUBMAKE) check-clang
	@$(SUBMAKE) asan
	@$(SUBMAKE) tsan
	@$(SUBMAKE) fuzz FUZZ_SECONDS=10

soak:
	@tools/deps.sh test
	@$(SUBMAKE) $(SOAKS)
	@for program in $(SOAKS); do $$program || exit 1; done

check-style:
	tools/check_layers
	tools/check_style --layout

# The tests, and only their building, with each compiler and no warning.
check-gcc check-clang: check-%:
	@$(SUBMAKE) BUILD=$(BUILD)/$* CC=$* WERROR=-Werror test-built
build-gcc build-clang: build-%:
	@$(SUBMAKE) BUILD=$(BUILD)/$* CC=$* WERROR=-Werror all test-programs

ASAN := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
asan:
	@$(SUBMAKE) BUILD=$(BUILD)/asan CFLAGS='-O2 -g1' SANITIZE='$(ASAN)' asan-built

tsan:
	@$(SUBMAKE) BUILD=$(BUILD)/tsan CFLAGS='-O2 -g1' SANITIZE=-fsanitize=thread tsan-built

bench: $(CHECKS) $(BENCHES) $(FIXTURES)
	@for program in $(CHECKS); do $$program --bench || exit 1; done
	@for tokenizer in $(FIXTURES) builtin:stories260K; do \
	    $(BUILD)/bench/bench_tokenizer $$tokenizer tests/golden/tokenizers/qwen2.5/cases.jsonl \
	        ARCHITECTURE.md src/model/tokenizer_parse.c || exit 1; done
	@$(BUILD)/bench/bench_scheduler
	@$(BUILD)/bench/bench_kv_cache

# Against the Python package `tokenizers`, which is not installed by anything here.
differential: $(BUILD)/imbrex $(FIXTURES)
	python3 tests/golden/differential_tokenizers.py --build $(BUILD)

# The library is instrumented for coverage without libFuzzer's main, which only the targets link.
# None of these is about a GPU.
FUZZ := -fno-sanitize-recover=all -fno-omit-frame-pointer -fsanitize=address,undefined
fuzz:
	@$(SUBMAKE) BUILD=$(BUILD)/fuzz CC=$(FUZZ_CC) CFLAGS='-O2 -g1' \
	    SANITIZE='$(FUZZ),fuzzer-no-link' CUDA=0 fuzz-built

$(FUZZERS): $(BUILD)/fuzzers/%: $(OBJ)/fuzz/%.o $(call objects,$(FUZZ_SHARED)) $(TEST_LIB)
	$(LINK_TEST) -fsanitize=fuzzer $(STATIC_LIBS)

fuzz-built: $(FUZZERS)
	@tools/run_fuzz $(BUILD) $(FUZZ_SECONDS) $(FUZZERS)

format:
	clang-format -i $(C_FILES)

# What is installed names its place, so a relative one would be wrong in every other folder.
check-prefix:
	$(if $(filter /%,$(firstword $(PREFIX))),,$(error PREFIX: expected an absolute path, found \
	    '$(PREFIX)'))
	$(if $(filter /%,$(firstword $(LIBDIR))),,$(error LIBDIR: expected an absolute path, found \
	    '$(LIBDIR)'))

BIN_TO := $(DESTDIR)$(PREFIX)/bin
INCLUDE_TO := $(DESTDIR)$(PREFIX)/include
LIB_TO := $(DESTDIR)$(LIBDIR)
install: check-prefix all
	install -d "$(BIN_TO)" "$(INCLUDE_TO)" "$(LIB_TO)/pkgconfig"
	install -m 755 $(BUILD)/imbrex "$(BIN_TO)/"
	install -m 644 include/imbrex.h include/imbrex_kv.h include/imbrex_ops.h "$(INCLUDE_TO)/"
	install -m 644 $(BUILD)/libimbrex.a "$(LIB_TO)/"
	install -m 755 $(BUILD)/libimbrex.so "$(LIB_TO)/libimbrex.so.$(VERSION)"
	ln -sf libimbrex.so.$(VERSION) "$(LIB_TO)/$(SONAME)"
	ln -sf $(SONAME) "$(LIB_TO)/libimbrex.so"
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@VERSION@|$(VERSION)|' \
	    -e 's|@ZSTD@|$(PC_ZSTD)$(PC_HIREDIS)$(PC_URING)|' \
	    imbrex.pc.in > "$(LIB_TO)/pkgconfig/imbrex.pc"

uninstall: check-prefix
	rm -f "$(BIN_TO)/imbrex" "$(INCLUDE_TO)/imbrex.h" "$(INCLUDE_TO)/imbrex_kv.h" \
	    "$(INCLUDE_TO)/imbrex_ops.h" \
	    "$(LIB_TO)/libimbrex.a" \
	    "$(LIB_TO)/libimbrex.so" "$(LIB_TO)/$(SONAME)" "$(LIB_TO)/libimbrex.so.$(VERSION)" \
	    "$(LIB_TO)/pkgconfig/imbrex.pc"

dist:
	@mkdir -p $(BUILD)
	git archive --format=tar.gz --prefix=imbrex-$(VERSION)/ \
	    -o $(BUILD)/imbrex-$(VERSION).tar.gz HEAD

wheel: $(BUILD)/libimbrex.so
	@mkdir -p $(BUILD)/wheel
	@cd python && python3 -c 'import sys, wheel_backend as w; print(w.build_wheel(*sys.argv[1:2], \
	    {"library": sys.argv[2]}))' $(abspath $(BUILD)/wheel) $(abspath $(BUILD)/libimbrex.so)

clean:
	rm -rf $(BUILD)

-include $(shell find $(OBJ) $(KERNELS) -name '*.d' 2>/dev/null)
