#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of arXiv 2607.02521 on one GPU, in one process, through the Python operators.

usage: paper.py run -o FILE [--shapes 0.5B,7B] [--tokens 128,1024] [--parts cells,numerics,...]
       paper.py report FILE... [--table FILE | --into FILE] [--plots PREFIX]

`run` needs a Hopper GPU, PyTorch and Triton, and takes its time in this order, until --budget is
spent: every way of computing D = silu(A gate^T) * (A up^T) on every cell (part cells); mismatches
against fp64 at four input scales (numerics); torch.compile, beside eager and ours again, in mode
max-autotune on --autotune-cells cells, as each takes many seconds (autotune), and as it is by
default on all (compile). What is left out is named.

Protocol: N(0,1) activations, N(0,1/K) weights, both rotated past the L2 cache; each way alone in a
CUDA graph of about 4 ms, the ways of a cell in turns, median of the rounds with p10 and p90.
"plain" is the same without a graph, launched call by call. No time is given for a result that was
not checked against fp64.

`report` turns the JSON into tables and, with matplotlib, plots (PNG and SVG); it needs no GPU.
"""
import argparse
import contextlib
import ctypes
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "bench")]

# Source: config.json of Qwen/Qwen2.5-*: hidden_size, intermediate_size.
SHAPES = {"0.5B": (896, 4864), "1.5B": (1536, 8960), "3B": (2048, 11008), "7B": (3584, 18944),
          "14B": (5120, 13824), "32B": (5120, 27648), "72B": (8192, 29568)}
TOKENS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
PARTS = ["cells", "numerics", "autotune", "compile"]
SCALES = [0.3, 1.0, 3.0, 10.0]
NUMERICS_TOKENS = 512

# torch.compile begins with these, so that a budget that ends early leaves one of each size.
FIRST_COMPILED = [("7B", 4096), ("0.5B", 1024), ("72B", 4096), ("1.5B", 128), ("7B", 1024),
                 ("0.5B", 128), ("32B", 1024), ("3B", 4096), ("14B", 4096), ("0.5B", 4096),
                 ("72B", 128), ("3B", 512)]

PEAK_TFLOPS = 989.5  # dense bf16 of H100 and H200 at the boost clock; the paper's 100 %
SAMPLE_MS = 4.0
ROTATE_BYTES = 160 << 20  # more than twice the L2 cache
MAX_COPIES = 16
MAX_CALLS = 600  # in a sample
CHECK_ROWS, CHECK_COLUMNS = 64, 256
# Of a result that was rounded three times, relative to 1 + |d|; a wrong tile is off by 1.
CHECK_BOUND = 0.05

# name: what it is.
WAYS = {
    "eager": "PyTorch: silu(x @ gate.T) * (x @ up.T), from a CUDA graph",
    "eager plain": "the same, call by call",
    "products": "its two products alone",
    "gemm": "one product with both weights, no activation",
    "act": "cuBLAS product with both weights, then one activation kernel",
    "triton": "a fused Triton kernel with two accumulators, best of its configurations",
    "quack": "QuACK's gated GEMM",
    "ours": "imbrex.ops.swiglu",
    "ours plain": "the same, call by call",
    "gate_first": "imbrex.ops.swiglu by the schedule that ends the gate product first (Kernel-1)",
    "down": "the product behind it, down_proj",
    "compile": "torch.compile, from a CUDA graph",
    "compile plain": "torch.compile, call by call",
    "autotune": "torch.compile in mode max-autotune, from a CUDA graph",
}
# What is no way to the result, and so is not checked against it.
PARTIAL = {"products", "gemm", "down"}


class Skipped(Exception):
    """Why a way is left out of a cell."""


# ---- measuring -----------------------------------------------------------------------------------


class Meter:
    """SM clock and power by NVML, None where it is not to be had."""

    def __init__(self):
        self.nvml = None
        with contextlib.suppress(OSError, AttributeError):
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            device = ctypes.c_void_p()
            if nvml.nvmlInit_v2() == 0 and \
                    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0:
                self.nvml, self.device = nvml, device

    def _read(self, function, *arguments):
        value = ctypes.c_uint()
        if self.nvml is None or function(self.device, *arguments, ctypes.byref(value)) != 0:
            return None
        return value.value

    def read(self):
        """(MHz, W)"""
        if self.nvml is None:
            return None, None
        power = self._read(self.nvml.nvmlDeviceGetPowerUsage)
        return (self._read(self.nvml.nvmlDeviceGetClockInfo, 1),
                None if power is None else round(power / 1000))


class Cell:
    """Operands of one shape and number of tokens, in as many copies as it takes to leave L2."""

    def __init__(self, torch, shape, num_tokens, scale=1.0, num_copies=None):
        self.shape, self.num_tokens = shape, num_tokens
        self.hidden, self.intermediate = SHAPES[shape]
        bytes_each = 2 * (2 * self.hidden * self.intermediate +
                          num_tokens * (self.hidden + self.intermediate))
        copies = num_copies or min(MAX_COPIES, max(2, math.ceil(ROTATE_BYTES / bytes_each)))
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.x = [torch.randn(num_tokens, self.hidden, **options) * scale for _ in range(copies)]
        self.gate_up = [torch.randn(2 * self.intermediate, self.hidden, **options) *
                        self.hidden ** -0.5 for _ in range(copies)]
        self.gate = [both[:self.intermediate] for both in self.gate_up]
        self.up = [both[self.intermediate:] for both in self.gate_up]
        self._down = self._gated = None

    @property
    def flops(self):
        return 4.0 * self.num_tokens * self.hidden * self.intermediate

    def expected_ms(self):
        weight_bytes = 4.0 * self.hidden * self.intermediate
        return 0.003 + max(self.flops / 700e9, weight_bytes / 4.4e9)

    def down(self, torch, copy_idx):
        """down_proj's operands: made when they are first asked for."""
        if self._down is None:
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            self._down = [torch.randn(self.hidden, self.intermediate, **options) *
                          self.intermediate ** -0.5 for _ in self.x]
            self._gated = [torch.randn(self.num_tokens, self.intermediate, **options)
                           for _ in self.x]
        return self._gated[copy_idx] @ self._down[copy_idx].T


class Bench:
    """The ways, and how they are timed."""

    def __init__(self, options, torch, kernels):
        from imbrex import ops
        self.torch, self.kernels, self.ops = torch, kernels, ops
        self.options = options
        self.begin = time.monotonic()
        self.meter = Meter()
        self.stream = torch.cuda.Stream()
        silu = torch.nn.functional.silu

        def eager(x, gate, up):
            return silu(x @ gate.T) * (x @ up.T)

        self.eager = eager

    def spent(self):
        return time.monotonic() - self.begin

    def quack(self):
        """QuACK's product with interleaved weights, or the reason why there is none."""
        try:
            from quack.gemm_interface import gemm_gated
        except ImportError as error:
            raise Skipped(f"QuACK is not installed: {error}") from error
        return gemm_gated

    def plan(self, cell, schedule):
        try:
            return self.ops.choose_plan(cell.num_tokens, cell.hidden, cell.intermediate,
                                        schedule=schedule)
        except Exception as error:
            raise Skipped(str(error)) from error

    def best_triton(self, cell):
        """The configuration that is the fastest on this cell."""
        times = {}
        for config in self.kernels.FUSED_CONFIGS:
            def call():
                self.kernels.fused(cell.x[0], cell.gate[0], cell.up[0], config)
            try:
                call()
                times[config] = self.time_calls(call, 3)
            except Exception as error:  # a configuration that this GPU or release cannot do
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if not times:
            raise Skipped(f"no configuration runs: {reason}")
        return min(times, key=times.get)

    def way(self, name, cell):
        """call(copy_idx), and what to tell about it."""
        x, gate, up, both = cell.x, cell.gate, cell.up, cell.gate_up
        base = name.split(" ")[0]
        if base == "eager":
            return lambda i: self.eager(x[i], gate[i], up[i]), {}
        if base == "products":
            return lambda i: (x[i] @ gate[i].T, x[i] @ up[i].T), {}
        if base == "gemm":
            return lambda i: x[i] @ both[i].T, {}
        if base == "down":
            return lambda i: cell.down(self.torch, i), {}
        if base == "act":
            return lambda i: self.kernels.activation(x[i] @ both[i].T), {}
        if base == "triton":
            config = self.best_triton(cell)
            return (lambda i: self.kernels.fused(x[i], gate[i], up[i], config),
                    {"config": list(config)})
        if base == "quack":
            gemm_gated = self.quack()
            pairs = [self.torch.stack([gate[i], up[i]], 1).reshape(both[i].shape).contiguous()
                     for i in range(len(x))]
            return lambda i: gemm_gated(x[i], pairs[i].T, activation="swiglu",
                                        store_preact=False)[-1], {}
        if base in ("ours", "gate_first"):
            plan = self.plan(cell, "gate_first" if base == "gate_first" else None)
            told = {"plan": f"{plan.schedule} {plan.block_m}x{plan.block_n}"}
            given = plan if base == "gate_first" else None
            return (lambda i: self.ops.swiglu(x[i], gate[i], up[i], weights_settled=True,
                                              plan=given), told)
        mode = {} if base == "compile" else {"mode": "max-autotune-no-cudagraphs"}
        with contextlib.suppress(AttributeError, ImportError):  # it prints every choice otherwise
            import torch._inductor.config
            torch._inductor.config.autotune_num_choices_displayed = 0
        compiled = self.torch.compile(self.eager, dynamic=False, fullgraph=True, **mode)
        begin = time.monotonic()
        compiled(x[0], gate[0], up[0])
        self.torch.cuda.synchronize()
        return (lambda i: compiled(x[i], gate[i], up[i])), {"compile_s": time.monotonic() - begin}

    def check(self, name, cell, call):
        """A corner and a spread of rows and columns against fp64."""
        torch = self.torch
        rows = torch.randperm(cell.num_tokens, device="cuda")[:CHECK_ROWS]
        columns = torch.randperm(cell.intermediate, device="cuda")[:CHECK_COLUMNS]
        rows[0], columns[0] = cell.num_tokens - 1, cell.intermediate - 1
        copy_idx = len(cell.x) - 1
        x = cell.x[copy_idx][rows].double()
        gate = x @ cell.gate[copy_idx][columns].double().T
        expected = torch.nn.functional.silu(gate) * (x @ cell.up[copy_idx][columns].double().T)
        found = call(copy_idx)[rows][:, columns].double()
        error = ((found - expected).abs() / (1.0 + expected.abs())).max().item()
        if not error <= CHECK_BOUND:
            raise Skipped(f"wrong result: off by {error:.3g}, expected at most {CHECK_BOUND}")
        return error

    def time_calls(self, call, num_calls):
        """Milliseconds of one call, launched one by one."""
        torch = self.torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / num_calls

    def prepare(self, name, cell, call):
        """A function that runs one sample, and how many calls that is."""
        torch = self.torch
        copies = len(cell.x)
        with torch.cuda.stream(self.stream):
            for i in range(copies):
                call(i)
            # From a graph a call takes about what the roofs allow, launched alone often longer.
            estimate = (self.time_calls(lambda: call(0), 5) if name.endswith("plain")
                        else cell.expected_ms())
            rounds = max(1, min(MAX_CALLS // copies, round(SAMPLE_MS / (estimate * copies))))
            order = [i for _ in range(rounds) for i in range(copies)]
            # One call of the largest cells takes longer than a sample should.
            order = order[:max(1, min(len(order), math.ceil(SAMPLE_MS * 4 / estimate)))]

            def plain():
                for i in order:
                    call(i)

            if name.endswith("plain"):
                return plain, len(order)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                plain()
            return graph.replay, len(order)

    def time_cell(self, cell, names):
        """A row for each way: its samples in microseconds, or why it is left out."""
        torch = self.torch
        rows, samples = {}, {}
        for name in names:
            try:
                call, told = self.way(name, cell)
                if name not in PARTIAL:
                    told["error"] = self.check(name, cell, call)
                samples[name] = (*self.prepare(name, cell, call), [])
                rows[name] = told
            except Skipped as reason:
                rows[name] = {"left_out": str(reason)}
            except Exception as error:  # one way's failure leaves the others theirs
                rows[name] = {"left_out": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        order = list(samples)
        torch.cuda.synchronize()
        for round_idx in range(self.options.rounds + 1):
            shift = round_idx % max(len(order), 1)
            for name in order[shift:] + order[:shift]:
                run, num_calls, found = samples[name]
                with torch.cuda.stream(self.stream):
                    ms = self.time_calls(run, 1) / num_calls
                if round_idx > 0:  # the first one warms up
                    found.append(ms * 1e3)
        mhz, watts = self.meter.read()
        for name, (_, num_calls, found) in samples.items():
            found.sort()
            rows[name].update(us=statistics.median(found), p10=found[len(found) // 10],
                              p90=found[-1 - len(found) // 10], calls=num_calls,
                              tflops=cell.flops / statistics.median(found) * 1e-6)
            if name == "down":
                rows[name]["tflops"] /= 2
        return {"shape": cell.shape, "tokens": cell.num_tokens, "ways": rows, "mhz": mhz,
                "watts": watts}

    # ---- numerics ----

    def ordered(self, values):
        """bf16 as integers whose difference counts the values between."""
        bits = values.view(self.torch.int16).int()
        return self.torch.where(bits < 0, -(bits & 0x7FFF), bits)

    def mismatches(self, found, exact):
        """Shares of outputs that differ from the exact ones rounded once, by three criteria."""
        torch = self.torch
        rounded = exact.to(torch.bfloat16)
        distance = (self.ordered(found) - self.ordered(rounded)).abs()
        tolerance = 1e-5 + 1.6e-2 * exact.abs()
        return {"bitwise": (distance > 0).double().mean().item(),
                "ulp": (distance > 1).double().mean().item(),
                "tolerance": ((found.double() - exact).abs() > tolerance).double().mean().item()}

    def numerics(self, shape, scale):
        torch = self.torch
        cell = Cell(torch, shape, NUMERICS_TOKENS, scale, num_copies=1)
        x, gate, up = cell.x[0], cell.gate[0], cell.up[0]
        exact = torch.empty(cell.num_tokens, cell.intermediate, dtype=torch.float64, device="cuda")
        for begin in range(0, cell.intermediate, 4096):
            part = slice(begin, begin + 4096)
            products = x.double() @ gate[part].double().T, x.double() @ up[part].double().T
            exact[:, part] = torch.nn.functional.silu(products[0]) * products[1]
        ways = {"eager": lambda: self.eager(x, gate, up),
                "act": lambda: self.kernels.activation(x @ cell.gate_up[0].T),
                "triton": lambda: self.kernels.fused(x, gate, up, self.best_triton(cell)),
                "sgemm": lambda: self.eager(x.float(), gate.float(), up.float()).bfloat16(),
                "ours": lambda: self.ops.swiglu(x, gate, up),
                "gate_first": lambda: self.ops.swiglu(x, gate, up,
                                                      plan=self.plan(cell, "gate_first"))}
        rows = {}
        for name, call in ways.items():
            try:
                rows[name] = self.mismatches(call(), exact)
            except Exception as error:
                rows[name] = {"left_out": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        return {"shape": shape, "tokens": cell.num_tokens, "scale": scale, "ways": rows}


def print_cell(row):
    def text(way):
        return f"{way['us']:10.1f}" if "us" in way else f"{'-':>10}"
    print(f"{row['shape']:>5} {row['tokens']:>6}" +
          "".join(text(way) for way in row["ways"].values()) +
          f" {row['mhz'] or '-':>6} {row['watts'] or '-':>4}", flush=True)


def run_part(part, bench, options, report):
    """Rows of one part, appended to the report, in the order of their worth."""
    wanted = [(shape, tokens) for tokens in sorted(options.tokens, key=lambda m: TOKENS.index(m)
                                                   if m in TOKENS else -1)
              for shape in options.shapes]
    if part == "numerics":
        jobs = [(shape, scale) for scale in SCALES for shape in options.shapes]
    elif part in ("compile", "autotune"):
        jobs = [cell for cell in FIRST_COMPILED if cell in wanted]
        jobs += [cell for cell in wanted if cell not in jobs]
        jobs = jobs[:options.autotune_cells] if part == "autotune" else jobs
    else:
        # 4096 and 1024 first: a budget that is too small still leaves a table.
        jobs = sorted(wanted, key=lambda cell: (cell[1] not in (4096, 1024), 0))
    rows = report[part] = []
    columns = {"cells": options.ways, "compile": ["eager", "eager plain", "ours", "ours plain",
                                                  "compile", "compile plain"],
               "autotune": ["eager", "ours", "autotune"]}.get(part)
    if columns:
        print(f"\n{part}, us\nshape tokens" + "".join(f"{name:>10.9}" for name in columns) +
              "    MHz    W")
    for name, number in jobs:
        if bench.spent() > options.budget:
            report["left_out"].append(f"{part} {name} {number}")
            continue
        if part == "numerics":
            row = bench.numerics(name, number)
            print(f"mismatch {name:>5} scale {number:<4}" + "".join(
                f"  {way} {100 * found['bitwise']:.2f}/{100 * found['ulp']:.3f}/"
                f"{100 * found['tolerance']:.3f}" for way, found in row["ways"].items()
                if "ulp" in found) + " %", flush=True)
        else:
            bench.torch._dynamo.reset()
            row = bench.time_cell(Cell(bench.torch, name, number), columns)
            print_cell(row)
        row["after_s"] = bench.spent()
        rows.append(row)
        bench.torch.cuda.empty_cache()


def head(torch):
    def command(*words):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT,
                                  stdin=subprocess.DEVNULL).stdout.strip()
        return None

    import imbrex
    import triton
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"benchmark": "paper", "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "gpu": torch.cuda.get_device_name(), "imbrex": imbrex.__version__,
            "commit": command("git", "describe", "--always", "--dirty", "--abbrev=12"),
            "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "torch": torch.__version__, "cuda": torch.version.cuda,
            "triton": triton.__version__, "peak_tflops": PEAK_TFLOPS, "ways": WAYS}


def command_run(options):
    try:
        import torch
        import paper_kernels
    except ImportError as error:
        sys.exit(f"paper.py: expected the Python packages torch and triton: {error}")
    if not torch.cuda.is_available():
        sys.exit("paper.py: expected a GPU that torch can use, found none")
    if options.library:
        import imbrex
        imbrex.load(options.library)
    torch.manual_seed(1)
    bench = Bench(options, torch, paper_kernels)
    report = {**head(torch), "rounds": options.rounds, "sample_ms": SAMPLE_MS, "left_out": []}
    if options.commit:
        report["commit"] = options.commit
    print(f"{report['gpu']}, driver {report['driver']}, torch {report['torch']}, triton "
          f"{report['triton']}, commit {report['commit']}")

    def write():
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")

    with torch.inference_mode():
        for part in PARTS:
            if part in options.parts:
                run_part(part, bench, options, report)
                write()
    print(f"{len(report['left_out'])} rows left out")
    print(f"{bench.spent():.0f} s", flush=True)
    # Threads of the compiler may outlive the interpreter's patience.
    os._exit(0)


# ---- report --------------------------------------------------------------------------------------


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else None


def merged(paths):
    """One report of several runs: ratios are taken inside a cell, so cells may come from each."""
    reports = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
        except (OSError, ValueError) as error:
            sys.exit(f"paper.py: {path}: {error}")
        if not isinstance(report, dict) or report.get("benchmark") != "paper":
            sys.exit(f"paper.py: {path}: expected the output of `paper.py run`")
        report["file"] = os.path.basename(path)
        reports.append(report)
    return reports


def us(row, name):
    return row["ways"].get(name, {}).get("us")


def ratio(row, slow, fast):
    """How many times faster; None if either is missing."""
    return us(row, slow) / us(row, fast) if us(row, slow) and us(row, fast) else None


def lost_share(row):
    """Of the time of an eager MLP: what its separate activation takes."""
    parts = [us(row, name) for name in ("eager", "products", "down")]
    return None if None in parts else (parts[0] - parts[1]) / (parts[0] + parts[2])


def cell_key(row):
    return list(SHAPES).index(row["shape"]), row["tokens"]


def number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value, digits=1):
    return "-" if value is None else f"{100 * value:.{digits}f}"


def summary_lines(rows):
    lines = []
    for slow, fast, what in (
            ("eager", "ours", "eager from a graph / ours"),
            ("eager plain", "ours plain", "eager call by call / ours call by call"),
            ("eager plain", "ours", "eager call by call / ours from a graph"),
            ("eager", "gate_first", "eager from a graph / gate_first"),
            ("gate_first", "ours", "gate_first / ours"), ("act", "ours", "act / ours"),
            ("gemm", "ours", "gemm / ours"), ("triton", "ours", "triton / ours"),
            ("quack", "ours", "quack / ours"), ("compile", "ours", "torch.compile / ours"),
            ("compile plain", "ours plain", "torch.compile / ours, both call by call"),
            ("autotune", "ours", "torch.compile max-autotune / ours")):
        found = {f"{row['shape']}, {row['tokens']}": ratio(row, slow, fast) for row in rows
                 if ratio(row, slow, fast)}
        if found:
            best, least = max(found, key=found.get), min(found, key=found.get)
            lines.append(f"- {what}: geometric mean {geometric_mean(found.values()):.3f} over "
                         f"{len(found)} cell{'s' if len(found) != 1 else ''}; the most "
                         f"{found[best]:.3f} ({best}), the least {found[least]:.3f} ({least}).")
    shares = [share for share in map(lost_share, rows) if share is not None]
    if shares:
        lines.append(f"- Lost to the intermediate: {percent(min(shares))} to {percent(max(shares))}"
                     " % of the time of an eager MLP.")
    best = max(rows, key=lambda row: row["ways"].get("ours", {}).get("tflops", 0), default=None)
    if best and us(best, "ours"):
        way = best["ways"]["ours"]
        lines.append(f"- Utilisation: at most {way['tflops']:.0f} TFLOP/s "
                     f"({best['shape']}, {best['tokens']}), {100 * way['tflops'] / PEAK_TFLOPS:.1f}"
                     f" % of {PEAK_TFLOPS} TFLOP/s.")
    return lines


def table_lines(report):
    lines = [f"{report['gpu']}, driver {report['driver']}, torch {report['torch']}, Triton "
             f"{report['triton']}, {report['date'][:10]}, commit {report['commit']}; "
             f"{report['rounds']} rounds, replays of {report['sample_ms']:g} ms "
             f"([{report['file']}](../bench/results/{report['file']})):"]
    for part in ("cells", "autotune", "compile"):
        rows = sorted(report.get(part, []), key=cell_key)
        if not rows:
            continue
        names = [name for name in WAYS if any(us(row, name) for row in rows)]
        lines += ["", f"**{part}**, microseconds", "",
                  "| shape | M | " + " | ".join(names) +
                  " | eager / ours | plain | lost % | TFLOP/s | % of peak | MHz | W |",
                  "|---|" + "---:|" * (len(names) + 8)]
        for row in rows:
            tflops = row["ways"].get("ours", {}).get("tflops")
            cells = [row["shape"], str(row["tokens"]),
                     *(number(us(row, name), 1) for name in names),
                     number(ratio(row, "eager", "ours")),
                     number(ratio(row, "eager plain", "ours plain")), percent(lost_share(row)),
                     number(tflops, 0), percent(tflops and tflops / PEAK_TFLOPS),
                     str(row["mhz"] or "-"), str(row["watts"] or "-")]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", *summary_lines(rows)]
        for name in WAYS:
            reasons = {row["ways"][name]["left_out"] for row in rows
                       if "left_out" in row["ways"].get(name, {})}
            lines += [f"- {name}: left out: {reason}" for reason in sorted(reasons)]
    lines += numerics_lines(report)
    if report["left_out"]:
        lines += ["", "Left out, as the time was spent: " + ", ".join(report["left_out"]) + "."]
    return lines


def numerics_lines(report):
    rows = report.get("numerics", [])
    if not rows:
        return []
    names = [name for name in rows[0]["ways"] if any("ulp" in row["ways"].get(name, {})
                                                     for row in rows)]
    lines = ["", f"**mismatches**, M = {NUMERICS_TOKENS}, % of outputs, least and most over the "
             "shapes: different bits / more than one bf16 ulp / outside torch's default tolerance "
             "(1.6e-2, 1e-5), all from fp64 rounded once", "",
             "| input scale | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for scale in sorted({row["scale"] for row in rows}):
        cells = []
        for name in names:
            found = [row["ways"][name] for row in rows
                     if row["scale"] == scale and "ulp" in row["ways"].get(name, {})]
            cells.append(" / ".join(
                f"{100 * min(way[kind] for way in found):.3g}-"
                f"{100 * max(way[kind] for way in found):.3g}"
                for kind in ("bitwise", "ulp", "tolerance")) if found else "-")
        lines.append(f"| {scale:g} | " + " | ".join(cells) + " |")
    return lines


def save_plot(pyplot, figure, prefix, name):
    for ending in ("png", "svg"):
        figure.savefig(f"{prefix}-{name}.{ending}", bbox_inches="tight", dpi=150)
    pyplot.close(figure)


def write_plots(report, prefix):
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        sys.exit(f"paper.py: --plots needs the Python package matplotlib: {error}")
    rows = report.get("cells", [])
    for name, what, value in (
            ("speed-up", "graph-replayed eager / ours", lambda row: ratio(row, "eager", "ours")),
            ("lost", "% of an eager MLP spent on the separate activation",
             lambda row: None if lost_share(row) is None else 100 * lost_share(row)),
            ("utilisation", f"ours, % of {PEAK_TFLOPS} TFLOP/s",
             lambda row: us(row, "ours") and 100 * row["ways"]["ours"]["tflops"] / PEAK_TFLOPS)):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for shape in SHAPES:
            points = sorted((row["tokens"], value(row)) for row in rows
                            if row["shape"] == shape and value(row) is not None)
            if points:
                axes.plot(*zip(*points), marker="o", label=shape)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        if rows:
            axes.legend(title="Qwen2.5")
        save_plot(pyplot, figure, prefix, name)
    found = report.get("numerics", [])
    names = list(found[0]["ways"]) if found else []
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in names:
        points = []
        for scale in sorted({row["scale"] for row in found}):
            shares = [row["ways"][name]["ulp"] for row in found
                      if row["scale"] == scale and "ulp" in row["ways"].get(name, {})]
            if shares:
                points.append((scale, 100 * statistics.fmean(shares)))
        if points:
            axes.plot(*zip(*points), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("input scale")
    axes.set_ylabel("% of outputs more than one bf16 ulp off")
    axes.grid(alpha=0.3)
    if names:
        axes.legend()
    save_plot(pyplot, figure, prefix, "mismatch")


def replace_section(path, text):
    """Puts the tables between the two marks of a document."""
    begin, end = "<!-- paper-tables: begin -->\n", "<!-- paper-tables: end -->"
    try:
        with open(path, encoding="utf-8") as file:
            document = file.read()
    except (OSError, ValueError) as error:
        sys.exit(f"paper.py: {path}: {error}")
    if document.count(begin) != 1 or end not in document.split(begin)[1]:
        sys.exit(f"paper.py: {path}: expected one section between the marks paper-tables")
    before, rest = document.split(begin)
    with open(path, "w", encoding="utf-8") as file:
        file.write(before + begin + "\n" + text + "\n" + rest[rest.index(end):])


def command_report(options):
    reports = merged(options.files)
    text = "\n\n".join("\n".join(table_lines(report)) for report in reports) + "\n"
    if options.into:
        replace_section(options.into, text)
    elif options.table:
        with open(options.table, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text, end="")
    if options.plots:
        write_plots(reports[0], options.plots)


# ---- options -------------------------------------------------------------------------------------


def some_of(allowed):
    def parse(text):
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(
                    f"expected some of {','.join(allowed)}, found {word!r}")
        return words
    return parse


def parse_tokens(text):
    words = text.split(",")
    if not all(word.isdigit() and 0 < int(word) < 2**24 for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers of tokens, found {text!r}")
    return [int(word) for word in words]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True, metavar="run|report")
    run = commands.add_parser("run", help="measure, on a Hopper GPU")
    run.add_argument("-o", "--output", required=True, metavar="FILE", help="JSON to write")
    run.add_argument("--shapes", type=some_of(SHAPES), default=list(SHAPES), metavar="LIST")
    run.add_argument("--tokens", type=parse_tokens, default=TOKENS, metavar="LIST")
    run.add_argument("--parts", type=some_of(PARTS), default=PARTS, metavar="LIST",
                     help=f"some of {','.join(PARTS)}")
    default_ways = [way for way in WAYS if way.split(" ")[0] not in ("compile", "autotune")]
    run.add_argument("--ways", type=some_of(default_ways), default=default_ways, metavar="LIST",
                     help="of part cells; some of " + ",".join(default_ways))
    run.add_argument("--rounds", type=int, default=7, help="samples of each way (7)")
    run.add_argument("--autotune-cells", type=int, default=4, metavar="N",
                     help="cells of part autotune (4)")
    run.add_argument("--budget", type=float, default=600,
                     help="seconds after which no row begins (600)")
    run.add_argument("--library", metavar="FILE", help="libimbrex.so; else that of build/")
    run.add_argument("--commit", help="what stands as the commit where there is no git")
    run.set_defaults(command=command_run)
    report = commands.add_parser("report", help="tables and plots of what was measured")
    report.add_argument("files", nargs="+", metavar="FILE")
    report.add_argument("--table", metavar="FILE", help="Markdown; else standard output")
    report.add_argument("--into", metavar="FILE",
                        help="the document whose section paper-tables becomes these tables")
    report.add_argument("--plots", metavar="PREFIX", help="PREFIX-speed-up.png and so on")
    report.set_defaults(command=command_report)
    options = parser.parse_args()
    if options.command is command_run and options.rounds < 1:
        parser.error("--rounds: expected 1 or more")
    return options


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    ARGUMENTS.command(ARGUMENTS)
