#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers on a GPU, on the rows of `imbrex bench model --device cuda`.

usage: hf_decode.py [--models 0.5b,7b] [--rows decode1,decode32,prefill2048] [-o FILE] ...

Qwen2.5 models with random weights in bf16, made on the GPU from their configurations: nothing is
downloaded. decodeB is B sequences of --context tokens that are decoded together, under
torch.compile(mode="reduce-overhead") with a static cache, greedily and without a look at the ids
on the host; prefillN is a prompt of N tokens, eager. Compiling takes tens of seconds a decode row:
--budget ends the run before that time is over, and the rows left out are named. --side-by-side
makes models and compiles decode rows in processes of their own, all at once, and then times row
after row, each while the others wait: it takes the memory of all rows together.
"""
import argparse
import contextlib
import datetime
import inspect
import json
import os
import statistics
import subprocess
import sys
import time

try:
    import torch
    import transformers
    MISSING = None
except ImportError as error:
    MISSING = str(error)

# Source: config.json of Qwen/Qwen2.5-*: hidden, intermediate, layers, heads, KV heads, vocabulary,
# tied.
MODELS = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
NUM_WARMUP_STEPS = 8
MOST_POSITIONS = 131072


def num_parameters(name):
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = MODELS[name]
    kv_size = hidden // heads * kv_heads
    layer = (2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * intermediate +
             3 * hidden + 2 * kv_size)
    return layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)


def make_model(name):
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = MODELS[name]
    config = transformers.Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=MOST_POSITIONS, rope_theta=1e6,
        rms_norm_eps=1e-6)
    torch.manual_seed(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def read_bytes(model):
    """Of weights in a decode step: all but an embedding table that is no lm_head too."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tie_word_embeddings:
        table = model.get_input_embeddings().weight
        total -= table.numel() * table.element_size()
    return total


def make_step(model, cache):
    """One greedy decode step, whose arguments differ between releases of transformers."""
    has_cache_position = "cache_position" in inspect.signature(model.forward).parameters

    def step(ids, positions):
        more = {"cache_position": positions[0]} if has_cache_position else {}
        logits = model(input_ids=ids, position_ids=positions, past_key_values=cache,
                       use_cache=True, **more).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    return step


def random_ids(model, *shape):
    return torch.randint(0, model.config.vocab_size, shape, device="cuda")


def run_decode(model, batch, options, wait_for_turn):
    torch._dynamo.reset()
    length = options.context + NUM_WARMUP_STEPS + options.repeats * options.steps
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    step = make_step(model, cache)
    positions = torch.arange(options.context, device="cuda").expand(batch, -1).contiguous()
    ids = step(random_ids(model, batch, options.context), positions)
    positions = torch.full((batch, 1), options.context, device="cuda")
    compiled = torch.compile(step, mode="reduce-overhead", dynamic=False)

    def advance(ids):
        torch.compiler.cudagraph_mark_step_begin()
        ids = compiled(ids, positions).clone()
        positions.add_(1)
        return ids

    begin = time.monotonic()
    for _ in range(NUM_WARMUP_STEPS):
        ids = advance(ids)
    torch.cuda.synchronize()
    compile_s = time.monotonic() - begin
    wait_for_turn()
    times = []
    for _ in range(options.repeats):
        begin = time.monotonic()
        for _ in range(options.steps):
            ids = advance(ids)
        torch.cuda.synchronize()
        times.append((time.monotonic() - begin) / options.steps)
    seconds = statistics.median(times)
    return {"step_ms": seconds * 1e3, "tokens_per_s": batch / seconds, "compile_s": compile_s,
            "weight_bytes": read_bytes(model), "step_ms_samples": [t * 1e3 for t in times]}


def run_prefill(model, num_tokens, options, wait_for_turn):
    ids = random_ids(model, 1, num_tokens)
    wait_for_turn()
    times = []
    for i in range(2 + options.repeats):
        torch.cuda.synchronize()
        begin = time.monotonic()
        model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
        if i >= 2:
            times.append(time.monotonic() - begin)
    seconds = statistics.median(times)
    return {"step_ms": seconds * 1e3, "tokens_per_s": num_tokens / seconds,
            "step_ms_samples": [t * 1e3 for t in times]}


def parse_row(text):
    for kind in ("decode", "prefill"):
        if text.startswith(kind) and text[len(kind):].isdigit() and int(text[len(kind):]) > 0:
            return kind, int(text[len(kind):])
    raise argparse.ArgumentTypeError(f"expected decodeN or prefillN, found {text!r}")


def parse_rows(text):
    return [parse_row(word) for word in text.split(",")]


def parse_models(text):
    names = text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(
                f"expected some of {','.join(MODELS)}, found {name!r}")
    return names


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Hugging Face transformers on the rows of imbrex bench model --device cuda")
    parser.add_argument("--models", type=parse_models, default=["0.5b"], metavar="LIST",
                        help=f"some of {','.join(MODELS)} (default: 0.5b)")
    parser.add_argument("--rows", type=parse_rows, metavar="LIST",
                        default="decode1,decode8,decode32,prefill2048,prefill16384",
                        help="decodeN: N sequences together; prefillN: a prompt of N tokens")
    parser.add_argument("--context", type=int, default=512, help="tokens before those decoded")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a sample")
    parser.add_argument("--repeats", type=int, default=5, help="samples of a row")
    parser.add_argument("--budget", type=float, default=110,
                        help="seconds after which no row begins")
    parser.add_argument("--side-by-side", action="store_true",
                        help="compile all rows at the same time, then time one after another")
    parser.add_argument("--serve-row", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", metavar="FILE", help="write JSON too")
    options = parser.parse_args()
    if isinstance(options.rows, str):
        options.rows = parse_rows(options.rows)
    return options


def driver_release():
    with contextlib.suppress(OSError, IndexError):
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().split("  ")[1].strip()
    return None


def head():
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"benchmark": "hf_decode", "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "gpu": torch.cuda.get_device_name(), "driver": driver_release(),
            "torch": torch.__version__, "transformers": transformers.__version__}


def run_row(model, kind, count, options, wait_for_turn=lambda: None):
    try:
        with torch.inference_mode():
            run = run_decode if kind == "decode" else run_prefill
            return run(model, count, options, wait_for_turn)
    # A row that a release of torch or transformers cannot do leaves the others theirs.
    except Exception as error:  # pylint: disable=broad-exception-caught
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def print_row(row):
    result = (f"{row['step_ms']:10.3f} {row['tokens_per_s']:12.1f} {row['wall_s']:8.1f}"
              if "step_ms" in row else f"  {row['error']}")
    print(f"{row['model']:6} {row['test']:24} {result}", flush=True)


def empty_row(name, kind, count, options):
    test = f"decode x{count} @ d{options.context}" if kind == "decode" else f"prefill {count}"
    return {"model": name, "parameters": num_parameters(name), "test": test, "kind": kind,
            "batch": count if kind == "decode" else 1,
            "tokens": count if kind == "prefill" else options.steps,
            "depth": options.context if kind == "decode" else 0}


def run_in_turn(options, begin):
    """Yields row after row, each compiled when its turn has come."""
    for name in options.models:
        model = None
        for kind, count in options.rows:
            row = empty_row(name, kind, count, options)
            if time.monotonic() - begin > options.budget:
                row["error"] = "left out: the budget is spent"
            else:
                row_begin = time.monotonic()
                if model is None:
                    model = make_model(name)
                    print(f"{name}: made after {time.monotonic() - begin:.1f} s", file=sys.stderr,
                          flush=True)
                row.update(run_row(model, kind, count, options))
                row["wall_s"] = time.monotonic() - row_begin
                torch.cuda.empty_cache()
            yield row
        del model
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def serve_one_row(options):
    """The process of a row: says that it is ready, waits for a line, times, writes the row."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no reply

    def wait_for_turn():
        torch.cuda.synchronize()
        print("ready", file=replies, flush=True)
        sys.stdin.readline()

    (name,), ((kind, count),) = options.models, options.rows
    result = run_row(make_model(name), kind, count, options, wait_for_turn)
    print(json.dumps(result), file=replies, flush=True)
    os._exit(0)


def start_row(name, kind, count, options):
    command = [sys.executable, __file__, "--serve-row", "--models", name, "--rows",
               f"{kind}{count}", "--context", str(options.context), "--steps", str(options.steps),
               "--repeats", str(options.repeats)]
    # Each compiler would start a worker for every CPU.
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, **threads})


def run_side_by_side(options, begin):
    """Yields row after row, all of them compiled before the first is timed."""
    running = [(empty_row(name, kind, count, options), start_row(name, kind, count, options))
               for name in options.models for kind, count in options.rows]
    waiting = []
    for row, process in running:
        reply = process.stdout.readline()
        waiting.append((row, process, reply if reply.strip() != "ready" else None))
    print(f"all rows ready after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    for row, process, reply in waiting:
        row_begin = time.monotonic()
        if reply is None and row_begin - begin > options.budget:
            process.kill()
            row["error"] = "left out: the budget is spent"
        else:
            if reply is None:
                process.stdin.write("go\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            row.update(json.loads(reply) if reply.strip()
                       else {"error": f"the process of the row ended, exit {process.wait()}"})
            row["wall_s"] = time.monotonic() - row_begin
        process.wait()
        yield row


def main():
    options = parse_arguments()
    begin = time.monotonic()
    if MISSING:
        sys.exit(f"hf_decode.py: expected the Python packages torch and transformers: {MISSING}")
    if not torch.cuda.is_available():
        sys.exit("hf_decode.py: expected a GPU that torch can use, found none")
    if options.serve_row:
        serve_one_row(options)
    report = {**head(), "context": options.context, "steps": options.steps, "rows": []}
    print(f"{report['gpu']}, torch {report['torch']}, transformers {report['transformers']}")
    print(f"{'model':6} {'test':24} {'ms':>10} {'tokens/s':>12} {'took s':>8}")
    run = run_side_by_side if options.side_by_side else run_in_turn
    for row in run(options, begin):
        report["rows"].append(row)
        print_row(row)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    # Threads of the compiler may outlive the interpreter's patience.
    sys.stdout.flush()
    os._exit(0 if all("step_ms" in row for row in report["rows"]) else 1)


if __name__ == "__main__":
    main()
