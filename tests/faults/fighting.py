"""Commands that want the same run folder at the same time, and what must be there afterwards."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch

from command import set_words
from ranks import CONTEXT
from torchrex.cli.main import main
from torchrex.report.reader import load_run

RECIPE = "figure1/case1-sgld"
LONGEST = 120.0  # seconds in which a command must end


def command(words, out, barrier, delay, errors):
    """In a process of its own: the command, some seconds after all are ready."""
    torch.set_num_threads(1)
    sys.argv = ["torchrex", "run", RECIPE, *words, *set_words(["n_runs=4"]), "--out", str(out)]
    with open(errors, "w") as sys.stderr:
        barrier.wait(60)
        time.sleep(delay)
        main()


def at_once(out, *commands, delays=None, killed_after=None):
    """Exit code and stderr of each; if `killed_after` some seconds, the first is killed."""
    barrier, processes = CONTEXT.Barrier(len(commands) + 1), []
    for k, words in enumerate(commands):
        delay = delays[k] if delays else 0.0
        target = (words.split(), out, barrier, delay, Path(f"{out}-{k}.txt"))
        processes.append(CONTEXT.Process(target=command, args=target))
        processes[-1].start()
    barrier.wait(60)
    if killed_after is not None:
        processes[0].join(killed_after)
        processes[0].kill()
    for each in processes:
        each.join(LONGEST)
    errors = [Path(f"{out}-{k}.txt").read_text() for k in range(len(commands))]
    return [(each.exitcode, words) for each, words in zip(processes, errors, strict=True)]


def only_run(out):
    """The run that is there, finished, with nothing of another one next to it."""
    (folder,) = (out / RECIPE).iterdir()
    run = load_run(folder)
    assert (run.status, run.problems) == ("finished", ())
    assert run.config["n_steps"] == run.draws.n_steps
    return run


class Fights:
    """Two or three commands with different settings, at random moments, one of them killed now and
    then: in the end there is exactly one of the runs that each makes alone.
    """

    KINDS = (
        ("--overwrite", "--overwrite"),
        ("", "--overwrite"),
        ("--resume", "--overwrite"),
        ("--overwrite", "--overwrite", "--overwrite"),
        ("--resume", "--resume", "--overwrite"),
    )

    def __init__(self, folder, random):
        self.folder, self.random = Path(folder), random
        self.settings = [f"--set n_steps={n} --set checkpoint_every=100" for n in (700, 500, 600)]
        self.alone, self.took = [], 0.0
        for k, words in enumerate(self.settings):
            began = time.monotonic()
            self._require_ends(at_once(self.folder / f"alone-{k}", words))
            self.alone.append(self._content(self.folder / f"alone-{k}"))
            self.took = time.monotonic() - began

    def fight(self):
        out, kind = self.folder / "fight", self.random.choice(self.KINDS)
        shutil.rmtree(out, ignore_errors=True)
        if is_there := self.random.random() < 0.5:  # a finished run of the first settings
            shutil.copytree(self.folder / "alone-0", out)
        words = [f"{self.settings[k]} {how}" for k, how in enumerate(kind)]
        delays = [self.random.uniform(0, 0.5 * self.took) for _ in words]
        killed = self.random.uniform(0, self.took) if self.random.random() < 0.5 else None
        ends = at_once(out, *words, delays=delays, killed_after=killed)
        self._require_ends(ends, killed=killed is not None)
        if not any(code == 0 for code, _ in ends) and not is_there:
            at_once(out, f"{self.settings[1]} --overwrite")
        assert self._content(out) in self.alone, (words, ends)
        codes = [code for code, _ in ends]
        return {"kind": kind, "finished": codes.count(0), "refused": codes.count(2)}

    def _require_ends(self, ends, *, killed=False):
        for k, (code, words) in enumerate(ends):
            known = ("is used by", "already holds", "holds a run with other", "an unfinished run")
            refused = code == 2 and any(each in words for each in known)
            assert code == 0 or refused or (killed and k == 0 and code == -9), ends

    def _content(self, out):
        folder = out / RECIPE
        for name in ("seed=0.new", ".seed=0.old"):  # of the one that was killed
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / ".seed=0.lock").unlink(missing_ok=True)
        run = only_run(out)
        return run.config, run.result["metrics"], (run.path / "draws.safetensors").read_bytes()
