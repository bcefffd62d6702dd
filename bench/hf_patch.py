#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models before and after imbrex.integrations.hf.patch, on one GPU, in one run.

usage: hf_patch.py [-o FILE] [--models 0.5b,72b-layer] [--tokens 2048,16384] [--no-compile]

Qwen2.5 with random weights: the whole 0.5B and one layer of the 72B. Shown: the error of the logits
against the same weights in fp32, unpatched and patched, also under torch.compile; the time of an
MLP; the time to the first token of a prompt (ttft), and of the same forward pass from a CUDA graph,
which does not wait for the host. Times are medians of --rounds rounds in which both take turns.
"""
import argparse
import json
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "bench")]

# Source: config.json of Qwen/Qwen2.5-*: hidden, intermediate, layers, heads, KV heads, vocabulary,
# tied.
MODELS = {"0.5b": (896, 4864, 24, 14, 2, 151936, True),
          "72b-layer": (8192, 29568, 1, 64, 8, 152064, False)}
LOGITS_TOKENS = 512
MLP_CALLS = 10


def make_model(name):
    import torch
    import transformers
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = MODELS[name]
    config = transformers.Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=32768, rope_theta=1e6,
        rms_norm_eps=1e-6)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def logits_errors(model, hf, with_compile):
    """Against the same model in fp32, in units of a logit."""
    import torch
    ids = torch.randint(0, model.config.vocab_size, (1, LOGITS_TOKENS), device="cuda")
    found = {"unpatched": model(ids).logits}
    hf.patch(model)
    found["patched"] = model(ids).logits
    compile_s = None
    if with_compile:
        begin = time.monotonic()
        found["patched, torch.compile"] = torch.compile(model)(ids).logits
        torch.cuda.synchronize()
        compile_s = time.monotonic() - begin
    hf.unpatch(model)
    found["unpatched again"] = model(ids).logits
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = model.float()(ids).logits
    model.bfloat16()
    errors = {name: {"max": (logits.float() - exact).abs().max().item(),
                     "rms": (logits.float() - exact).square().mean().sqrt().item()}
              for name, logits in found.items()}
    is_same = torch.equal(found["unpatched"], found["unpatched again"])
    return {"errors": errors, "logits_rms": exact.square().mean().sqrt().item(),
            "unpatched_again_is_equal": is_same, "compile_s": compile_s}


def mlp_ms(model, num_tokens):
    import torch
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, num_tokens, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    mlp(x)
    begin.record()
    for _ in range(MLP_CALLS):
        mlp(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / MLP_CALLS


def first_token_ms(model, num_tokens):
    import torch
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), device="cuda")
    # What the first call after a change does once is not what is asked for.
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize()
    begin = time.monotonic()
    model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
    return (time.monotonic() - begin) * 1e3


def prefill_graph_ms(model, num_tokens):
    """The same work without the host: a forward pass captured once and replayed."""
    import torch
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


KINDS = {"mlp": mlp_ms, "ttft": first_token_ms, "prefill from a graph": prefill_graph_ms}


def before_and_after(model, hf, measure, num_tokens, rounds):
    """Medians, and of the ratio of each pair."""
    samples = {"unpatched": [], "patched": []}
    for round_idx in range(rounds + 1):
        for name in samples:
            (hf.patch if name == "patched" else hf.unpatch)(model)
            ms = measure(model, num_tokens)
            if round_idx > 0:
                samples[name].append(ms)
    hf.unpatch(model)
    pairs = [a / b for a, b in zip(samples["unpatched"], samples["patched"])]
    return {**{name + "_ms": statistics.median(found) for name, found in samples.items()},
            "speed_up": statistics.median(pairs), "pairs": pairs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("-o", "--output", metavar="FILE", help="write JSON too")
    parser.add_argument("--models", default=",".join(MODELS), metavar="LIST")
    parser.add_argument("--tokens", default="2048,16384", metavar="LIST")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--library", metavar="FILE", help="libimbrex.so; else that of build/")
    parser.add_argument("--commit", help="what stands as the commit where there is no git")
    options = parser.parse_args()
    names = options.models.split(",")
    for name in names:
        if name not in MODELS:
            parser.error(f"--models: expected some of {','.join(MODELS)}, found {name!r}")
    if not all(word.isdigit() for word in options.tokens.split(",")):
        parser.error(f"--tokens: expected numbers, found {options.tokens!r}")
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(f"hf_patch.py: expected the Python packages torch and transformers: {error}")
    if not torch.cuda.is_available():
        sys.exit("hf_patch.py: expected a GPU that torch can use, found none")
    import imbrex
    if options.library:
        imbrex.load(options.library)
    from imbrex.integrations import hf
    import paper
    report = {**paper.head(torch), "benchmark": "hf_patch",
              "transformers": transformers.__version__, "models": {}}
    del report["ways"], report["peak_tflops"]
    report["commit"] = options.commit or report["commit"]
    print(f"{report['gpu']}, torch {report['torch']}, transformers {report['transformers']}")
    with torch.inference_mode():
        for name in names:
            model = make_model(name)
            row = report["models"][name] = {
                "logits": logits_errors(model, hf, not options.no_compile)}
            for what, error in row["logits"]["errors"].items():
                print(f"{name} logits {what}: max {error['max']:.5f} rms {error['rms']:.6f}",
                      flush=True)
            for word in options.tokens.split(","):
                for kind, measure in KINDS.items():
                    try:
                        found = before_and_after(model, hf, measure, int(word), options.rounds)
                    except RuntimeError as error:  # what a release cannot capture
                        print(f"{name} {kind} {word}: left out: {error}".splitlines()[0][:200])
                        continue
                    row.setdefault(kind, {})[word] = found
                    print(f"{name} {kind} {word}: {found['unpatched_ms']:.3f} -> "
                          f"{found['patched_ms']:.3f} ms, {found['speed_up']:.3f}", flush=True)
            del model
            torch.cuda.empty_cache()
            if options.output:
                with open(options.output, "w", encoding="utf-8") as file:
                    json.dump(report, file, indent=1)
                    file.write("\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
