#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times `imbrex run MODEL -n 1` from the start of the process to its end, for each model in turn.

What a user waits for the first token: the program, its model and tokenizer, the prompt and one
token. The first, untimed round brings the files into the page cache.
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

PROMPT = "Once upon a time there was a little dog"


def call(command):
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        sys.exit(f"first_token.py: {command[0]} failed with {result.returncode}: {lines[-1]}")
    return result.stdout


def machine_of(program, threads):
    """What imbrex says about the machine; the built-in model is small."""
    report = json.loads(call([program, "bench", "model", "-p", "1", "-n", "0", "-r", "1", "-t",
                              threads, "--no-roofs", "--no-warmup", "--device", "cpu", "-o",
                              "json"]))
    return {**report["machine"], "kernels": report["rows"][0]["kernels"]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", metavar="MODEL", nargs="+",
                        help="a Hugging Face folder or a GGUF file that has a tokenizer")
    parser.add_argument("-i", dest="imbrex", metavar="FILE", default="build/imbrex",
                        help="the program of imbrex (default %(default)s)")
    parser.add_argument("-p", dest="prompt", metavar="TEXT", default=PROMPT,
                        help="the prompt (default: '%(default)s')")
    parser.add_argument("-t", dest="threads", metavar="N", default=str(os.cpu_count() or 1),
                        help="threads (default: all CPUs)")
    parser.add_argument("-r", dest="rounds", metavar="N", type=int, default=20,
                        help="timed starts of each model (default %(default)s)")
    parser.add_argument("-o", dest="output", metavar="FILE", help="write everything as JSON too")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"-r: expected at least 1, found {arguments.rounds}")
    return arguments


def main():
    arguments = parse_arguments()
    seconds = {model: [] for model in arguments.models}
    for round_idx in range(arguments.rounds + 1):
        for model, samples in seconds.items():
            begin = time.monotonic()
            call([arguments.imbrex, "run", model, "-p", arguments.prompt, "-n", "1", "-t",
                  arguments.threads, "--device", "cpu"])
            if round_idx > 0:
                samples.append(time.monotonic() - begin)
    rows = [{"model": os.path.basename(os.path.normpath(model)), "threads": int(arguments.threads),
             "s": {"median": statistics.median(samples), "longest": max(samples),
                   "samples": samples}} for model, samples in seconds.items()]
    for row in rows:
        print(f"{row['model']}: median {row['s']['median']:.3f} s, longest of {arguments.rounds} "
              f"{row['s']['longest']:.3f} s")
    if arguments.output:
        report = {"benchmark": "first_token",
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime(
                      "%Y-%m-%dT%H:%M:%SZ"),
                  "machine": machine_of(arguments.imbrex, arguments.threads),
                  "prompt": arguments.prompt, "rows": rows}
        try:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)
                file.write("\n")
        except OSError as error:
            sys.exit(f"first_token.py: -o {arguments.output}: {error.strerror}")


if __name__ == "__main__":
    main()
