"""Run many commands, a few at a time, until a deadline: what trainings on a rented GPU need.

    python benchmarks/lanes.py jobs.json --logs logs

The file says how many at a time, when to be done, and what to run, the most important first:

    {"lanes": 3, "deadline": 28, "jobs": [
        {"name": "teacher", "command": "python train.py --out teacher", "minutes": 4, "must": true},
        {"name": "student", "command": "...", "after": ["teacher"], "needs": ["photos.parquet"], "minutes": 3,
         "again": "... --set precision.compile=false"}]}

Minutes count from the start. A job begins once all jobs that it is `after` have succeeded and all files that it `needs`
are there, if it can end by the deadline: `minutes` is how long it takes (0: nobody knows), corrected by what finished
jobs took. One that `must` run begins in any case. A job that fails runs once more, by the command `again` where there
is one; what waits for a job that failed twice is left out. The file is read again all the time, so that jobs may be
added, or the deadline moved. At the deadline whatever still runs is ended. What a job prints is in NAME.log.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--every", type=float, default=1, help="seconds between two looks")
    args = parser.parse_args()
    Lanes(args.jobs, args.logs).run(args.every)


class Lanes:
    """Jobs on their way."""

    def __init__(self, path: Path, logs: Path) -> None:
        self.path, self.logs, self.began = path, logs, time.monotonic()
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # and since when
        self.ended: dict[str, bool] = {}  # whether they succeeded
        self.failures = Counter[str]()
        self.ratios: list[float] = []  # of what jobs took, to what they were said to take

    @property
    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.began) / 60

    def run(self, every: float) -> None:
        """Until nothing is left to be done, or the deadline."""
        self.logs.mkdir(parents=True, exist_ok=True)
        while True:
            content = json.loads(self.path.read_text("utf-8"))
            jobs, deadline = {job["name"]: job for job in content["jobs"]}, content["deadline"]
            self.collect(jobs)
            hopeful = [job for job in jobs.values() if self.can_run(job, deadline)]
            for job in hopeful:
                if len(self.running) < content["lanes"] and self.is_ready(job):
                    self.start(job)
            if self.minutes >= deadline or not (hopeful or self.running):
                break
            time.sleep(every)
        for name, (process, _) in self.running.items():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.say(f"{name} was ended")
        self.say("done")

    def can_run(self, job: Job, deadline: float) -> bool:
        """Whether a job may still run, now or later."""
        if job["name"] in self.ended | self.running or any(
            self.ended.get(name) is False for name in job.get("after", ())
        ):
            return False
        minutes = job["minutes"] * (statistics.median(self.ratios) if self.ratios else 1)
        return job.get("must", False) or self.minutes + minutes <= deadline

    def is_ready(self, job: Job) -> bool:
        """Whether all is there that a job waits for."""
        there = all(Path(name).exists() for name in job.get("needs", ()))
        return there and all(map(self.ended.get, job.get("after", ())))

    def start(self, job: Job) -> None:
        """Begin a job, in a process group of its own."""
        name = job["name"]
        command = job.get("again", job["command"]) if self.failures[name] else job["command"]
        with (self.logs / f"{name}.log").open("ab") as log:
            made = subprocess.Popen(command, shell=True, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.running[name] = made, self.minutes
        self.say(f"{name} begins")

    def collect(self, jobs: dict[str, Job]) -> None:
        """Note which jobs have ended, and how."""
        for name, (process, since) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            code, took, said = process.returncode, self.minutes - since, jobs.get(name, {}).get("minutes", 0)
            self.say(f"{name} ended with {code} after {took:.2f} minutes")
            self.failures[name] += code != 0
            if code == 0 or self.failures[name] > 1:
                self.ended[name] = code == 0
            if code != 0:
                print((self.logs / f"{name}.log").read_text("utf-8", "replace")[-2000:], flush=True)
            elif said and not self.failures[name]:
                self.ratios.append(took / said)

    def say(self, line: str) -> None:
        """Print a line with its time."""
        print(f"{self.minutes:6.2f} {line}", flush=True)


if __name__ == "__main__":
    main()
