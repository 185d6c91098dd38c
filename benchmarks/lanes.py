"""Run many commands, a few at a time, until a deadline: what trainings on a rented GPU need.

    python benchmarks/lanes.py jobs.json --logs logs

    {"lanes": 3, "deadline": 28, "jobs": [
        {"name": "teacher", "command": "python train.py --out teacher", "minutes": 4, "must": true},
        {"name": "student", "command": "...", "after": ["teacher"], "needs": ["photos.parquet"], "minutes": 3,
         "again": "... --set precision.compile=false"}]}

Jobs, the most important first, begin once all that they are `after` have succeeded and all files that they `needs` are
there, if they can end by the deadline, in minutes from the start: `minutes` is what one takes (0: nobody knows),
corrected by what finished jobs took. One that `must` run begins in any case. A job that fails runs once more, by the
command `again` where there is one; what waits for a job that failed twice, that is left out or that nobody knows is
left out too. The file is read all the time, so that jobs may be added or the deadline moved. At the deadline, or when
it is stopped, what still runs is ended. Output is in NAME.log.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    Lanes(**vars(parser.parse_args())).run()


class Lanes:
    """Jobs on their way."""

    def __init__(self, jobs: Path, logs: Path) -> None:
        self.path, self.logs, self.began = jobs, logs, time.monotonic()
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # and since when
        self.ended: dict[str, bool] = {}  # whether they succeeded
        self.failures = Counter[str]()
        self.ratios: list[float] = []  # of what jobs took, to what they were said to take

    @property
    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.began) / 60

    def run(self, every: float = 1) -> None:
        """Until nothing is left to be done, or the deadline."""
        self.logs.mkdir(parents=True, exist_ok=True)
        content = json.loads(self.path.read_text("utf-8"))
        try:
            while True:
                jobs = {job["name"]: job for job in content["jobs"]}
                self.collect(jobs)
                hopeful = self.find_hopeful(jobs, content["deadline"])
                for job in hopeful:
                    there = all(Path(name).exists() for name in job.get("needs", ()))
                    ready = there and all(map(self.ended.get, job.get("after", ())))
                    if ready and len(self.running) < content["lanes"]:
                        self.start(job)
                if self.minutes >= content["deadline"] or not (hopeful or self.running):
                    break
                time.sleep(every)
                with contextlib.suppress(json.JSONDecodeError):  # somebody is writing it
                    content = json.loads(self.path.read_text("utf-8"))
        finally:
            for name, (process, _) in self.running.items():
                os.killpg(process.pid, signal.SIGKILL)
                self.say(f"{name} was ended, by signal {-process.wait()}")
        left_out = [job["name"] for job in content["jobs"] if job["name"] not in self.ended | self.running]
        self.say(f"done; left out: {', '.join(left_out) or 'none'}")

    def find_hopeful(self, jobs: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """The jobs that may still run, now or later: in time, and after none that never will."""
        ratio = statistics.median(self.ratios) if self.ratios else 1
        begun = self.ended | self.running
        reached = {name for name in begun if self.ended.get(name, True)}
        waiting = [job for job in jobs.values() if job["name"] not in begun]
        waiting = [job for job in waiting if job.get("must") or self.minutes + ratio * job["minutes"] <= deadline]
        while more := {job["name"] for job in waiting if reached.issuperset(job.get("after", ()))} - reached:
            reached |= more
        return [job for job in waiting if job["name"] in reached]

    def start(self, job: dict[str, Any]) -> None:
        """Begin a job, in a process group of its own."""
        name = job["name"]
        command = job.get("again", job["command"]) if self.failures[name] else job["command"]
        with (self.logs / f"{name}.log").open("ab") as log:
            made = subprocess.Popen(command, shell=True, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            self.running[name] = made, self.minutes
        self.say(f"{name} begins")

    def collect(self, jobs: dict[str, Any]) -> None:
        """Note which jobs have ended, and how."""
        for name, (process, since) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            code, took, said = process.returncode, self.minutes - since, jobs.get(name, {}).get("minutes", 0)
            self.say(f"{name} ended with {code} after {took:.2f} minutes")
            if code != 0:
                print((self.logs / f"{name}.log").read_text("utf-8", "replace")[-2000:], flush=True)
            elif said and not self.failures[name]:
                self.ratios.append(took / said)
            self.failures[name] += code != 0
            if code == 0 or self.failures[name] > 1:
                self.ended[name] = code == 0

    def say(self, line: str) -> None:
        """Print a line with its time."""
        print(f"{self.minutes:6.2f} {line}", flush=True)


if __name__ == "__main__":
    main()
