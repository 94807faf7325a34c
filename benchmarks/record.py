"""What a benchmark writes with its numbers (machine, versions, date, command), and the tables
made from them.

`python benchmarks/record.py` puts the tables of the stored results into benchmarks/README.md,
README.md and docs/reproduction-tables.md.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def surroundings(script: str, *packages: str) -> dict[str, Any]:
    """Hardware, versions, date and command of this process."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]]),
        "hardware": {
            "cpu": models[0],
            "cores": os.cpu_count(),
            "cores_used": len(os.sched_getaffinity(0)),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def number(value: float) -> str:
    """Three digits, without exponents."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def density_loop_table(record: dict[str, Any]) -> str:
    """Microseconds a step of each contestant, and the ratio to torchrex compiled with as many rungs
    and runs.
    """
    results = record["results"]
    ours = {
        (r["rungs"], r["runs"]): r["us_per_step"]
        for r in results
        if r["name"] == "torchrex, compiled"
    }
    lines = [
        "| rungs | runs | sampler | microseconds a step (min to max) | times torchrex compiled | "
        "compilation, s |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (-r["rungs"], r["runs"])):
        us = r["us_per_step"]
        ratio = us["median"] / ours[r["rungs"], r["runs"]]["median"]
        spread = f"**{number(us['median'])}** ({number(us['min'])} to {number(us['max'])})"
        compilation = f"{r['compile_seconds']:.1f}"
        lines.append(
            f"| {r['rungs']} | {r['runs']:,} | {r['name']} | {spread} | {number(ratio)} | "
            f"{compilation} |"
        )
    return "\n".join(lines)


def covariance_step_table(record: dict[str, Any]) -> str:
    """Microseconds of CPU time a step, a column for each way."""
    ways = list(dict.fromkeys(r["way"] for r in record["results"]))
    lines = [f"| density | rungs | runs | numbers | {' | '.join(ways)} |", "|---" * 7 + "|"]
    rows: dict[tuple[Any, ...], list[str]] = {}
    for r in record["results"]:
        key = tuple(r[name] for name in ("density", "rungs", "runs", "dtype"))
        us = {name: number(value) for name, value in r["us_per_step"].items()}
        rows.setdefault(key, []).append(f"{us['median']} ({us['min']} to {us['max']})")
    for (density, *sizes), cells in rows.items():
        words = [f"`{density}`", *map(str, sizes), f"**{cells[0]}**", *cells[1:]]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def module_steps(record: dict[str, Any]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """The results by network and replicas, and in each by contestant."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for r in record["results"]:
        found.setdefault((r["network"], r["replicas"]), {})[r["name"]] = r
    return found


def speed_table(networks: dict[str, Any], densities: dict[str, Any]) -> str:
    """For the front page: networks on a GPU, and a density."""
    heads = {
        "torchrex, captured": "torchrex",
        "PyTorch, eager": "PyTorch, eager",
        "torch.compile": "`torch.compile`",
        "torch.compile, reduce-overhead": "`reduce-overhead`",
        "JAX": "JAX",
    }
    lines = [
        f"| images x replicas / s, {networks['hardware']['gpu']} | {' | '.join(heads.values())} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for (network, replicas), found in module_steps(networks).items():
        rates = [
            f"{found[name]['images_x_replicas_per_second']:,.0f}" if name in found else ""
            for name in heads
        ]
        lines.append(f"| {network}, {replicas} replicas | {' | '.join(rates)} |")
    us = {
        r["name"]: number(r["us_per_step"]["median"])
        for r in densities["results"]
        if (r["rungs"], r["runs"]) == (2, 64)
    }
    lines.append(
        f"\nA density with two rungs and 64 runs, on one CPU core: {us['torchrex, compiled']} "
        f"microseconds a step, and {us['jax, tuned']} in JAX."
    )
    return "\n".join(lines)


def memory_table(record: dict[str, Any]) -> str:
    """Peak resident memory at three moments of the run."""
    lines = ["| peak resident memory | MiB |", "|---|---|"]
    lines += [
        f"| {moment.replace('_', ' ')} | {mib:.0f} |" for moment, mib in record["peak_mib"].items()
    ]
    return "\n".join(
        [*lines, f"| for comparison: the draws that are returned | {record['draws_mib']:.1f} |"]
    )


def way_of(result: dict[str, Any]) -> str:
    return ", ".join(result[name] for name in ("name", "way") if name in result)


def module_step_table(record: dict[str, Any]) -> str:
    """What a step takes on a GPU, and how that compares with ours."""
    lines = [
        "| network | replicas | way | ms a step (min to max) | images x replicas / s | "
        "times torchrex | first call, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for (network, replicas), found in module_steps(record).items():
        own = found.get("torchrex, captured", {}).get("ms_per_step")
        for r in found.values():
            ms = r["ms_per_step"]
            ratio = f"{ms['median'] / own['median']:.2f}" if own else ""
            lines.append(
                f"| {network} | {replicas} | {way_of(r)} | {ms['median']:.3f} ({ms['min']:.3f} to "
                f"{ms['max']:.3f}) | **{r['images_x_replicas_per_second']:,.0f}** | {ratio} | "
                f"{r['first_seconds']:.1f} |"
            )
    lines += [
        f"| {r['network']} | {r['replicas']} | {way_of(r)} | failed | | | |"
        for r in record["failed"]
    ]
    return "\n".join(lines)


def module_profile_table(record: dict[str, Any]) -> str:
    """Where the kernels of a step of two replicas spend their time."""
    profile = record["profile_of_two_replicas"]
    total = sum(profile["microseconds"].values())
    lines = ["| kernels | microseconds a step, both replicas | share |", "|---|---|---|"]
    lines += [
        f"| {kind} | {us:,.0f} | {us / total:.0%} |" for kind, us in profile["microseconds"].items()
    ]
    n_kernels = f"all, {profile['kernels_per_step']:.0f} kernels, overlapping"
    return "\n".join([*lines, f"| {n_kernels} | {total:,.0f} | |"])


def module_cpu_table(record: dict[str, Any]) -> str:
    """Small networks on one core, compared with posteriors."""
    lines = [
        "| network | sampler | rungs | microseconds a step (min to max) | times torchrex, one "
        "rung |",
        "|---|---|---|---|---|",
    ]
    for r in record["results"]:
        us = r["us_per_step"]
        spread = f"**{number(us['median'])}** ({number(us['min'])} to {number(us['max'])})"
        lines.append(
            f"| {r['net']} | {r['name']} | {r['rungs']} | {spread} | "
            f"{r['times_torchrex_one_rung']:.2f} |"
        )
    return "\n".join(lines)


def shared_batch_table(record: dict[str, Any]) -> str:
    """Variance of rung 0 over the posterior's, by learning rate, and in the limit."""
    names = list(record["limits"])
    lrs = sorted({r["lr_times_stiffness"] for r in record["results"]}, reverse=True)
    value = {
        (r["name"], r["lr_times_stiffness"]): f"{r['variance_ratio']:.3f} ± {r['se']:.3f}"
        for r in record["results"]
    }
    lines = [
        "| variance ratio of rung 0 | " + " | ".join(f"lr {lr:g}" for lr in lrs) + " | lr to 0 |"
    ]
    lines.append("|---" * (len(lrs) + 2) + "|")
    for name in names:
        end = record["limits"][name]
        lines.append(
            f"| {name} | "
            + " | ".join(value[name, lr] for lr in lrs)
            + f" | **{end['variance_ratio']:.3f}** ± {end['se']:.3f} |"
        )
    return "\n".join(lines)


def variance_of_rung0_table(record: dict[str, Any]) -> str:
    """Variance of rung 0 over the right one: an estimator and pairing a row, s and rungs in
    columns.
    """
    columns = sorted({(r["s"], r["rungs"]) for r in record["results"]})
    value = {
        (
            r["sigma2"],
            r["dim"],
            r["pairing"],
            r["s"],
            r["rungs"],
        ): f"{r['variance']:.3f} ± {r['se']:.3f}"
        for r in record["results"]
    }
    rows = dict.fromkeys(
        (r["sigma2"], r["dim"], "one pair" if r["rungs"] < 4 else r["pairing"])
        for r in record["results"]
    )
    named = [row for row in rows if row[2] != "one pair"]
    lines = [
        "| sigma2 | parameters | pairing | "
        + " | ".join(f"s = {s:g}, {rungs} rungs" for s, rungs in columns)
        + " |"
    ]
    lines.append("|---" * (len(columns) + 3) + "|")
    for sigma2, dim, pairing in named:
        cells = [
            value.get(
                (
                    sigma2,
                    dim,
                    "EvenOdd" if rungs < 4 and pairing == "RandomPair" else pairing,
                    s,
                    rungs,
                ),
                "",
            )
            for s, rungs in columns
        ]
        lines.append(f"| {sigma2} | {dim} | `{pairing}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| exponential data, s = 1.5 | mean of rung 0, 2 rungs | 4 rungs |",
        "|---|---|---|",
    ]
    off = {
        (r["sigma2"], r["rungs"]): f"{r['bias_of_mean']:+.3f} ± {r['se']:.3f} sd"
        for r in record["exponential"]
    }
    lines += [
        f"| {name} | {off[name, 2]} | {off[name, 4]} |"
        for name in dict.fromkeys(r["sigma2"] for r in record["exponential"])
    ]
    return "\n".join(lines)


def spread(value: dict[str, Any] | None, missing: str = "") -> str:
    """Mean and two standard deviations over seeds."""
    if value is None:
        return missing
    return f"{value['mean']:.2f}" + ("" if value["two_sd"] is None else f"±{value['two_sd']:.2f}")


def swaps_of(row: dict[str, Any]) -> str:
    return "-" if row["swaps"] is None else ", ".join(map(str, row["swaps"]))


def settings_of(row: dict[str, Any]) -> str:
    """Those that are not the recipe's."""
    return ", ".join(f"{name}={value}" for name, value in row["settings"].items())


def difference(effect: dict[str, Any]) -> str:
    """A difference of two methods, paired by seed."""
    error = "" if effect["se"] is None else f" ± {effect['se']:.2f}"
    return f"{effect['mean']:+.2f}{error}, n={effect['n']}"


def images_table(record: dict[str, Any]) -> str:
    """Tables 1 and 2 in short: the paper's number next to ours, and what the swaps did."""
    heads = (
        "data",
        "net",
        "rules",
        "method",
        "paper %",
        "ours %",
        "n",
        "one net %",
        "NLL",
        "swaps",
        "epochs",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in record["rows"]:
        others = settings_of(row)
        net = f"{row['net']} ({others})" if others else row["net"]
        words = [
            row["data"],
            net,
            row["family"],
            row["method"],
            spread(row["paper"]),
            spread(row["ours"]),
            str(row["n"]),
        ]
        words += [
            f"{row['single_accuracy']['mean']:.2f}",
            f"{row['nll']['mean']:.3f}",
            swaps_of(row),
            str(row["epochs"]),
        ]
        lines.append("| " + " | ".join(words) + " |")
    lines += [
        "",
        "± is two standard deviations over n seeds. Differences in points, paired by seed, ± "
        "standard error:",
        "",
    ]
    cells: dict[str, list[str]] = {}
    for effect in record["swaps"]:
        if (
            effect["n"]
            and effect["metric"].endswith("accuracy")
            and effect["metric"] == headline(record, effect)
        ):
            others = settings_of(effect)
            where = (
                f"{effect['family']}, {effect['data']}, {effect['net']}, {effect['epochs']} "
                f"epochs{others and f', {others}'}"
            )
            cells.setdefault(where, []).append(
                f"{effect['of']} minus {effect['minus']} {difference(effect)}"
            )
    return "\n".join(
        [*lines, *(f"- {where}: {'; '.join(words)}" for where, words in cells.items())]
    )


def factors_table(record: dict[str, Any]) -> str:
    """Figure 2 (c, d) in numbers: accuracy against F0."""
    heads = ("data", "epochs", "F0", "rung 0 %", "both rungs %", "n", "swaps")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in record["rows"]:
        for one in row["factors"]:
            others = settings_of(row)
            data = f"{row['data']} ({others})" if others else row["data"]
            words = [
                data,
                str(row["epochs"]),
                f"{one['f0']:,.0f}",
                spread(one["accuracy"]),
                spread(one["both_rungs"]),
            ]
            lines.append("| " + " | ".join([*words, str(one["n"]), swaps_of(one)]) + " |")
    return "\n".join(lines)


def headline(record: dict[str, Any], effect: dict[str, Any]) -> str:
    """The number that a family reports."""
    return next(row["headline"] for row in record["rows"] if row["family"] == effect["family"])


def table3_table(record: dict[str, Any]) -> str:
    """Table 3 in short: the paper's number next to ours, and what swaps and unlabelled images
    contribute.
    """
    heads = (
        "data",
        "labels",
        "method",
        "paper %",
        "ours %",
        "n",
        "both rungs %",
        "one net %",
        "their score %",
        "called fake %",
    )
    heads = (*heads, "NLL", "swaps", "steps", "settings")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in record["rows"]:
        words = [
            row["data"],
            str(row["n_labelled"]),
            row["method"],
            spread(row["paper"], "-"),
            spread(row["ours"]),
            str(row["n"]),
        ]
        words += [spread(row["pooled_accuracy"], "-"), f"{row['single_accuracy']['mean']:.2f}"]
        words += [
            f"{row['paper_accuracy']['mean']:.2f}",
            f"{row['called_fake']['mean']:.1f}",
            f"{row['nll']['mean']:.3f}",
        ]
        settings = ", ".join(filter(None, [row["family"], settings_of(row)]))
        lines.append(
            "| " + " | ".join([*words, swaps_of(row), f"{row['steps']:,}", settings]) + " |"
        )
    lines += [
        "",
        "± is two standard deviations over n seeds. Differences in points, paired by seed, ± "
        "standard error:",
        "",
    ]
    cells: dict[str, list[str]] = {}
    for effect in record["contributions"]:
        if effect["n"] and effect["metric"].endswith("accuracy"):
            others = settings_of(effect)
            where = (
                f"{effect['family']}, {effect['data']}, {effect['n_labelled']} labels, "
                f"{effect['steps']:,} steps"
            )
            where += others and f", {others}"
            claim = "" if effect["paper"] is None else f", the paper {effect['paper']:+.2f}"
            words = (
                f"{effect['contribution']} ({effect['of']} minus {effect['minus']}) "
                f"{difference(effect)}{claim}"
            )
            cells.setdefault(where, []).append(words)
    lines += [f"- {where}: {'; '.join(words)}" for where, words in cells.items()]
    lines += ["", "Every column: [results/gan/table3.md](../results/gan/table3.md)."]
    return "\n".join(lines)


def tuned_exchange_table(record: dict[str, Any]) -> str:
    """Three problems, each with the tuned exchange first."""
    found, lines = record["results"], []

    def setting_of(row: dict[str, Any]) -> str:
        if "swap_batch" not in row:
            return "own batch"
        return f"{row['swap_batch']:,} every {row['swap_interval']:,}"

    for name, score in (("location", "rms"), ("clusters", "at the global mode")):
        part = found[name]
        rows = {method: row for method, row in part.items() if isinstance(row, dict)}
        head = {"rms": "rms error of the weight"}.get(score, f"{score}, of {part['runs']}")
        lines += [f"| {name} | tests on | examples of a run | {head} |", "|---|---|---|---|"]
        for method, row in rows.items():
            value = f"{row['rms']:.3f}" if score == "rms" else f"{row[score][-1]}"
            rungs = f", {row['rungs']} rungs to {row['hot']}" if "rungs" in row else ""
            tests = "" if "chains" in method else setting_of(row)
            examples = row.get("examples", part["examples"])
            lines.append(f"| {method}{rungs} | {tests} | {examples:.2g} | {value} |")
        lines.append("")
    lines += [
        "| logistic | rungs | tests on | new visits | variance of rung 0 / Laplace |",
        "|---|---|---|---|---|",
    ]
    for method, row in found["logistic"].items():
        if not isinstance(row, dict):
            continue
        visits = "{:.1f} ± {:.1f}".format(*row["renewed visits"]) if row["rungs"] > 1 else ""
        law = "{:.2f} ± {:.2f}".format(*row["variance / Laplace"])
        tests = setting_of(row) if row["rungs"] > 1 else ""
        look = {"tuned": "tuned", "one rung": "one rung"}.get(method, "")
        look = "by hand, again" if method.endswith("again") else look or "by hand"
        lines.append(f"| {look} | {row['rungs']} | {tests} | {visits} | {law} |")
    return "\n".join(lines)


def swap_energies_table(record: dict[str, Any]) -> str:
    """The law of windows, then anchors and windows beside swap batches at equal cost."""

    found = record["results"]

    def pm(value: dict[str, float], digits: int) -> str:
        return f"{value['mean']:.{digits}f} ± {value['se']:.{digits}f}"

    def rows(head: str, lines: list[str]) -> list[str]:
        return [head, "|---" * (head.count("|") - 1) + "|", *lines, ""]

    windows = [r for r in found["law"] if r["rests"] and r["interval"] < 100]
    logistic = [
        f"| {r['way']} | {r['batches a step']:.2f} | {sum(r['s']) / len(r['s']):.2f} | "
        f"{r['acceptance']:.2f} | {pm(r['visits'], 1)} | {pm(r['renewed'], 1)} | "
        f"{pm(r['variance_ratio'], 2)} |"
        for part in ("fixed", "again")
        for r in found["logistic"][part]
    ]
    n_fixed = len(found["logistic"]["fixed"])
    head = (
        "| batches a step | mean s | accepted | visits | renewed visits | variance of rung 0 / "
        "Laplace |"
    )
    return "\n".join(
        [
            *rows(
                "| Gaussian, exact energies | rungs to | variance of rung 0 / right | visits |",
                [
                    f"| window {r['window']}, a test every {r['interval']} | {r['rungs']} to "
                    f"{r['hot']:,.0f} | {pm(r['variance_ratio'], 3)} | {pm(r['visits'], 0)} |"
                    for r in windows
                ],
            ),
            *rows(f"| logistic, one ladder at equal cost {head}", logistic[:n_fixed]),
            *rows(f"| logistic, each way at its best {head}", logistic[n_fixed:]),
            *rows(
                "| 8 clusters | runs | examples a step | accepted | at the global mode |",
                [
                    f"| {r['way']} | {r['runs']} | {r['examples a step']:.0f} | "
                    f"{r['acceptance']:.2f} | {pm(r['at the global mode'], 2)} |"
                    for r in found["clusters"]
                ],
            ),
            *rows(
                "| digits | examples a step | s | expected acceptance |",
                [
                    f"| {r['way']} | {r['examples a step']:.0f} | {pm(r['s'], 2)} | "
                    f"{pm(r['acceptance'], 2)} |"
                    for r in found["digits"]
                ],
            ),
        ]
    ).rstrip()


def setting(record: dict[str, Any]) -> str:
    """One line on where and when."""
    hardware = record["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    cores = f"{hardware['cores_used']} of {hardware['cores']} cores"
    gpu = f"{hardware['gpu']}; " if "gpu" in hardware else ""
    return f"{record['date']}, {gpu}{hardware['cpu']}, {cores}; {versions}. `{record['command']}`"


def stored(source: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{source}.json").read_text())


def main() -> None:
    """Put the table of results/NAME.json between `<!-- NAME -->` and `<!-- end -->` in the pages;
    those of runs into the docs.
    """
    tables = {
        "density_loop": (density_loop_table, "density_loop"),
        "covariance_step": (covariance_step_table, "covariance_step"),
        "memory": (memory_table, "memory"),
        "module_step": (module_step_table, "module_step"),
        "module_profile": (module_profile_table, "module_step"),
        "module_cpu": (module_cpu_table, "module_cpu"),
        "shared_batch": (shared_batch_table, "shared_batch"),
        "variance_of_rung0": (variance_of_rung0_table, "variance_of_rung0"),
        "swap_energies": (swap_energies_table, "swap_energies"),
        "tuned_exchange": (tuned_exchange_table, "tuned_exchange"),
    }
    if "network" in stored("module_step")["results"][0]:
        front = speed_table(stored("module_step"), stored("density_loop"))
        into_page(HERE.parent / "README.md", "speed", front)
    else:
        print("module_step.json is of an earlier form: its tables and README's stay as they are")
        del tables["module_step"], tables["module_profile"]
    if "profile_of_two_replicas" not in stored("module_step"):  # the run was cut before it
        tables.pop("module_profile", None)
    page = HERE / "README.md"
    for name, (table, source) in tables.items():
        record = stored(source)
        into_page(page, name, f"{table(record)}\n\n{setting(record)}")
    page = HERE.parent / "docs" / "reproduction-tables.md"
    of_runs = {
        "table1": (images_table, "images/table1.json"),
        "table2": (images_table, "images/table2.json"),
        "figure2": (factors_table, "images/figure2.json"),
        "table3": (table3_table, "gan/table3.json"),
    }
    for name, (table, source) in of_runs.items():
        path = HERE.parent / "results" / source
        if not path.exists():
            print(f"results/{source} is not there; {name} in the docs stays as it is")
            continue
        page.write_text(between(page.read_text(), name, table(json.loads(path.read_text()))))


def between(text: str, name: str, table: str) -> str:
    """The page with the table between `<!-- NAME -->` and `<!-- end -->`; as it was if it has no
    such marks.
    """
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}{table}\n{end}{after}" if mark and end else text


def into_page(page: Path, name: str, text: str) -> None:
    """Put a text between its marks in a page."""
    now = page.read_text()
    if "<!-- end -->" not in now.partition(f"<!-- {name} -->\n")[2]:
        raise SystemExit(f"{page} has no mark <!-- {name} --> with an <!-- end --> after it")
    page.write_text(between(now, name, text))


if __name__ == "__main__":
    main()
