"""What is wrong with a run and what to change: every check, and the findings as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchrex.density import few_threads
from torchrex.errors import MissingDependencyError, RunFolderError, TorchrexError
from torchrex.experiments.config import to_json
from torchrex.experiments.digits import DigitsConfig
from torchrex.experiments.gan import GanConfig
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.experiments.tall import LogisticConfig
from torchrex.report.doctor_average import check_average
from torchrex.report.doctor_checkpoints import are_large, checkpoint_findings, look_at_checkpoints
from torchrex.report.doctor_draws import (
    SLOW_CHECKS,
    check_convergence,
    check_tail,
    check_temperature,
    check_truth,
)
from torchrex.report.doctor_evidence import history_from_remains
from torchrex.report.doctor_generators import check_generators
from torchrex.report.doctor_ladder import check_ladder
from torchrex.report.doctor_warm_start import check_warm_start
from torchrex.report.findings import QUICK, SEVERITIES, Check, Diagnosis, Finding
from torchrex.report.page.command import command_to_repeat
from torchrex.report.runs import LoadedRun, find_empty, find_runs, load_run

CHECKS: dict[Check, str] = {
    check_truth: "whether its answer is right",
    check_ladder: "how it swaps",
    check_convergence: "whether it has converged",
    check_temperature: "whether rung 0 is at its temperature",
    check_tail: "whether its noise is Gaussian",
    check_average: "how its average does",
    check_warm_start: "where its temperatures begin to hold",
    check_generators: "whether its generators have collapsed",
}


def findings_of(run: LoadedRun, *, quick: bool = False) -> list[Finding]:
    """Everything there is to say about a run, the gravest first and what is fine last.

    A check that needs what is not installed, or stumbles over damage, becomes a note. `quick`
    leaves out what may take seconds, which are the temperature of tall data and large checkpoints,
    and says so in a note that is titled QUICK; the rest takes 0.01 to 0.2 s a run on one core.
    """
    findings: list[Finding] = []
    with few_threads(0):
        leave_out = quick and are_large(run)
        saved = [] if leave_out else look_at_checkpoints(run)
        findings += check_state(run, hopeless=any(each.hopeless for each in saved))
        findings += (
            [_left_out("whether its checkpoints are whole")]
            if leave_out
            else checkpoint_findings(run, saved)
        )
        for check, what in CHECKS.items():
            if quick and check in SLOW_CHECKS and SLOW_CHECKS[check](run):
                findings.append(_left_out(what))
                continue
            try:
                findings += check(run)
            except MissingDependencyError as error:
                findings.append(Finding("note", "not told", str(error)))
            except (
                TorchrexError,
                RuntimeError,
                ValueError,
                KeyError,
                IndexError,
                TypeError,
            ) as error:
                if (
                    not run.problems
                ):  # a whole run is read without such errors; do not hide our own mistakes
                    raise
                why = (
                    f" ({error})" if isinstance(error, TorchrexError) else ""
                )  # what others say of our insides helps nobody
                findings.append(
                    Finding(
                        "note", "not told", f"What is left of this run does not tell {what}{why}."
                    )
                )
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _left_out(what: str) -> Finding:
    return Finding(
        "note",
        QUICK,
        f"To tell {what} takes seconds here and was left out; `torchrex doctor` with its folder tells it.",
    )


def diagnose(run: LoadedRun, *, quick: bool = False) -> Diagnosis:
    """The findings about a run, with its name and verdict; `quick` as in `findings_of`."""
    status = f"{run.status}, damaged" if run.damaged and run.status != "damaged" else run.status
    return Diagnosis(run.path, run.name, status, tuple(findings_of(run, quick=quick)))


def diagnose_folder(root: Path) -> list[Diagnosis]:
    """Every run at or below `root`, empty run folders included."""
    found = [diagnose(load_run(path)) for path in find_runs(root)]
    empty = Finding(
        "problem", "empty", "The folder holds nothing of a run. Run it again, or remove the folder."
    )
    found += [
        Diagnosis(path, f"{path.parent.name}/{path.name}", "empty", (empty,))
        for path in find_empty(root)
    ]
    if not found:
        raise RunFolderError(
            f"{root} holds no run; give OUT/RECIPE/seed=S, or a folder above some of them"
        )
    return found


def check_state(run: LoadedRun, *, hopeless: bool = False) -> Iterable[Finding]:
    """Is the run finished, and is everything of it there? `hopeless`: its checkpoints are there,
    but none can be used.
    """
    result = run.result or {}
    total = getattr(run.settings, "n_steps", None)
    done = result.get("steps_done") or (run.draws.n_steps if run.draws is not None else None)
    numbers = {"status": run.status, "steps_done": done, "n_steps": total}
    where = f" after {done:,} of {total:,} steps" if isinstance(done, int) and total else ""
    problems = list(run.problems)
    if run.status == "failed":
        error = result.get("error", "it does not say why")
        yield Finding(
            "problem",
            "the run failed",
            f"It failed{where}: {error}.".replace("..", "."),
            {**numbers, "error": error},
        )
    elif run.status in ("interrupted", "paused", "unfinished"):
        # That there is no result.json says the same as that it is unfinished, and more.
        missing = next(
            (problem for problem in problems if problem.startswith("there is no result.json")), None
        )
        problems = [problem for problem in problems if problem is not missing]
        what = f"T{missing[1:]}" if missing else f"It was {run.status}{where}"
        yield Finding(
            "warning", "the run is not finished", f"{what}. {_go_on(run, hopeless)}", numbers
        )
    remains = history_from_remains(run) is not None
    for problem in problems:
        if remains and problem.startswith("too little of draws.safetensors"):
            problem = "draws.safetensors still has its counts, energies and sigma2, which are used; its draws are not"
        problem = problem.replace("unpack requires a buffer of 8 bytes", "it has less than 8 bytes")
        name = next((name for name in run.damaged if name in problem), None)
        title = (
            "damaged"
            if name
            else "of another version"
            if problem.startswith("config.json")
            else "missing"
        )
        starts_with_a_file = "." in problem.split()[0]
        words = problem if starts_with_a_file else f"{problem[0].upper()}{problem[1:]}"
        yield Finding("warning", title, f"{words}.", {"file": name} if name else {})
    if run.status == "finished" and (name := _lacking(run)):
        yield Finding(
            "note",
            "missing",
            f"There is no {name}: what it would tell is left out.",
            {"file": name},
        )


def _lacking(run: LoadedRun) -> str:
    """The file with the course of a finished run, if it should be there and is not. Results that
    are committed have none: their result.json holds curves.
    """
    network = isinstance(run.settings, DigitsConfig | ImageConfig | GanConfig) and not (
        run.result or {}
    ).get("curves")
    name = (
        "draws.safetensors"
        if isinstance(run.settings, MixtureConfig | LogisticConfig)
        else "trace.safetensors"
    )
    expected = network or name.startswith("draws")
    return name if expected and not (run.path / name).exists() else ""


def _go_on(run: LoadedRun, hopeless: bool) -> str:
    """What to type to have it whole."""
    depth = len(run.recipe.split("/"))
    out = str(run.path.parents[depth]) if len(run.path.parents) > depth else "runs"
    again = command_to_repeat(run, out).line
    saved = (run.path / "checkpoints").is_dir()
    option, does = (
        ("--resume", "goes on")
        if not hopeless and (saved or run.draws is None)
        else ("--overwrite", "begins anew")
    )
    return f"`{again} {option}` {does}." if again else f"Its own command with {option} {does}."


def as_json(diagnoses: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """For machines; numbers that are not finite become null or strings, as everywhere."""
    return [
        {
            "path": str(each.path),
            "run": each.name,
            "status": each.status,
            "verdict": each.verdict,
            "findings": [to_json(finding) for finding in each.findings],
        }
        for each in diagnoses
    ]


def as_text(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Lines for people: a head and its words, as (what stands in front, what follows)."""
    lines = [("", f"{diagnosis.name} ({diagnosis.status}): {diagnosis.verdict}")]
    lines += [
        (finding.severity, f"{finding.title}. {finding.words}") for finding in diagnosis.findings
    ]
    return lines


def roll_up(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, str]]:
    """How many runs have each finding, as lines like those of `as_text`: the gravest first, then
    the most common.

    Checks that were passed are left out: the head counts the runs in which nothing wrong was found.
    """
    n = len(diagnoses)
    bad = sum(bool(each.of("problem")) for each in diagnoses)
    well = sum(each.healthy for each in diagnoses)
    kinds = [
        (bad, "with problems"),
        (n - bad - well, "with warnings alone"),
        (well, "with neither"),
    ]
    found = Counter(
        kind
        for each in diagnoses
        for kind in dict.fromkeys((of.severity, of.title) for of in each.findings)
    )
    order = sorted(found.items(), key=lambda each: (SEVERITIES.index(each[0][0]), -each[1]))
    told = (
        ", ".join(f"{count:,} {words}" for count, words in kinds if count)
        if well < n
        else "nothing wrong was found"
    )
    lines = [("", f"{n:,} runs: {told}")]
    lines += [
        (severity, f"{count:,} of {n:,} runs: {title}")
        for (severity, title), count in order
        if severity != "fine"
    ]
    return lines


__all__ = [
    "Diagnosis",
    "Finding",
    "as_json",
    "as_text",
    "diagnose",
    "diagnose_folder",
    "findings_of",
    "roll_up",
]
