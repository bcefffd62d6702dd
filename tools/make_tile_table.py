#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes src/ops/cuda/tile_measured.h of measured sweeps.

Each FILE is what `imbrex bench ops --plans all -o FILE` wrote; the last one that has a product says
which plan the cost model chooses for it. A plan is judged by its gain over that one in each file
that has both, in geometric mean with DOUBTS more gains of 1: the best of a hundred plans that were
measured once owes most of its gain to chance.
The best plan of a product gets a row if it gains LEAST_GAIN. Files after --confirm are runs of
`imbrex bench ops` with the table so made, where the cost model's choice runs beside it: rows that
do not gain there are dropped, since a sweep's best owes some of its gain to chance. Prints what was
found.
"""
import argparse
import json
import math
import os

TABLE = os.path.join("src", "ops", "cuda", "tile_measured.h")
LEAST_GAIN = 1.002
DOUBTS = 2
FORMS = {"gemm_swiglu": "PAIR", "gemm": "PLAIN"}
HEAD = """\
/* SPDX-License-Identifier: Apache-2.0 */
/* Choices that were measured, which the cost model gives way to. Made by tools/make_tile_table.py
 * of sweeps: {where}. Not to be edited.
 *
 *   X(num_sms, form, m, columns, k, schedule, block_m, block_n, cluster_m, cluster_n, group_m,
 *     num_tiles_n, gain)
 *
 * gain: time of the cost model's choice / time of this one, less an allowance for chance. */
#ifndef IMBREX_OPS_CUDA_TILE_MEASURED_H
#define IMBREX_OPS_CUDA_TILE_MEASURED_H

/* clang-format off */
#define TILE_MEASURED(X)"""
TAIL = """
/* clang-format on */

#endif
"""
FIELDS = ("schedule", "block_m", "block_n", "cluster_m", "cluster_n", "group_m", "num_tiles_n")


def read_products(paths):
    """{product: [{plan: (measured, expected time)} of each file]}, and where they were measured"""
    products, places = {}, set()
    for path in paths:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        places.add(f"{report['gpu']}, {report['date'][:10]}")
        is_plain = report["op"] == "gemm"
        for row in report["rows"]:
            sides = (row["hidden_size"], row["intermediate_size"])
            columns, k = sides if is_plain else sides[::-1]
            product = (report["num_sms"], FORMS[report["op"]], row["m"], columns, k)
            plans = {}
            for entry in row["contestants"]:
                if entry["kind"] == "imbrex":
                    plan = tuple(entry["plan"][field] for field in FIELDS)
                    # Pair by pair, where there was a bare GEMM: then the clock drops out.
                    speedup = entry["speedup_over_gemm"]["median"]
                    measured = 1.0 / speedup if speedup > 0 else entry["us"]["median"]
                    plans.setdefault(plan, (measured, entry["plan"]["expected_us"]))
            products.setdefault(product, []).append(plans)
    return products, places


def gains_of(plan, model, sweeps):
    """Time of the model's choice / time of the plan, in each sweep that has both."""
    return [plans[model][0] / plans[plan][0] for plans in sweeps
            if plan in plans and model in plans and plan != model]


def choose(sweeps):
    """(the best plan, its gain, number of files that it rests on, the cost model's choice)"""
    expected = {plan: us for plan, (_, us) in sweeps[-1].items() if us > 0}
    model = min(expected, key=lambda plan: (expected[plan], plan))
    best = (1.0, 0, model)
    for plan in sweeps[-1]:
        gains = gains_of(plan, model, sweeps)
        gain = math.exp(sum(map(math.log, gains)) / (len(gains) + DOUBTS))
        best = max(best, (gain, len(gains), plan))
    gain, num_files, plan = best
    return plan, gain, num_files, model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", metavar="FILE", nargs="+",
                        help="what imbrex bench ops --plans all -o FILE wrote")
    parser.add_argument("--confirm", metavar="FILE", nargs="+", default=[],
                        help="runs with the table so made; rows that do not gain are dropped")
    arguments = parser.parse_args()
    products, places = read_products(arguments.sweeps)
    confirmed, _ = read_products(arguments.confirm)
    rows = []
    for product in sorted(products):
        plan, gain, num_files, model = choose(products[product])
        print(*product, f"gain {gain:.4f} in {num_files}:", *plan, "| model:", *model)
        gains = gains_of(plan, model, confirmed.get(product, []))
        if gains and sum(map(math.log, gains)) <= 0:
            print("    dropped, for it gained", *(f"{gain:.4f}" for gain in gains))
        elif gain >= LEAST_GAIN:
            rows.append(f"    X({', '.join(str(field) for field in product + plan)}, {gain:.3f})")
    with open(TABLE, "w", encoding="utf-8") as file:
        head = HEAD.format(where="; ".join(sorted(places)))
        file.write(" \\\n".join([head, *rows]) + TAIL)
    print(f"{len(rows)} rows for {len(products)} products")


if __name__ == "__main__":
    main()
