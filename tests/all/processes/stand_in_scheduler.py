"""A stand-in for PBS and for Grid Engine on one machine, for `torchmn submit` end to end.

Neither is packaged where the tests run, so this program takes the place of their commands and does,
from their manuals, what a job script and its follower can notice:

- `qsub` copies the script, reads its directives, refuses a queue that it does not know in the words
  of the real one, prints the job's name and returns before the job has run.
- The job starts with the environment of a login on a compute node and not with that of the
  submission: it gets ``PATH`` and ``HOME`` from ``login.json``, and the variables of its scheduler.
  PBS (qsub(1B)): ``PBS_JOBID PBS_JOBNAME PBS_ENVIRONMENT PBS_QUEUE PBS_O_*``, ``PBS_NODEFILE``
  with a line for each worker, ``OMP_NUM_THREADS`` from ``ompthreads``. Grid Engine (submit(1),
  sge_pe(5)): ``JOB_ID JOB_NAME QUEUE NSLOTS NHOSTS PE PE_HOSTFILE SGE_O_* RESTARTED``.
- PBS starts a job in the home folder, spools its output, and copies it to the place of ``-o`` when
  the job has ended: ``<job>.OU`` in a folder. Grid Engine opens the files before the job starts, in
  the folder of the submission with ``-cwd``, and puts a job back that ends with exit status 99.
- `qstat`, `qacct` and `qdel` speak and end like the real ones.

It is started as ``stand_in_scheduler.py FLAVOUR FOLDER COMMAND ARGS...`` by scripts named like the
commands. ``FOLDER`` holds all it knows. Only the standard library: starting it must be quick.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

QUEUES = ("h-tutorial", "h-regular")
SLOTS_PER_HOST = 2
"""The allocation rule of Grid Engine's parallel environment ``mpi``."""


def fail(words: str, code: int) -> None:
    print(words, file=sys.stderr)
    raise SystemExit(code)


class StandIn:
    def __init__(self, flavour: str, folder: Path) -> None:
        self.flavour, self.folder = flavour, folder
        self.prefix = {"pbs": "#PBS", "grid_engine": "#$"}[flavour]

    # what is known of a job

    def record(self, number: str) -> dict | None:
        path = self.folder / f"{number}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, number: str, **changes: object) -> None:
        record = (self.record(number) or {}) | changes
        new = self.folder / f"{number}.json.new"
        new.write_text(json.dumps(record))
        new.replace(self.folder / f"{number}.json")

    def full_name(self, number: str) -> str:
        return f"{number}.stand-in" if self.flavour == "pbs" else number

    # the commands

    def qsub(self, *args: str) -> None:
        script = Path(args[-1])
        options, resources = self.directives(script.read_text())
        if options["-q"] not in QUEUES:
            if self.flavour == "pbs":
                fail("qsub: Unknown queue", 170)
            fail(
                "Unable to run job: Job was rejected because job requests unknown queue "
                f'"{options["-q"]}".\nExiting.',
                1,
            )
        number = str(1 + len(list(self.folder.glob("*.sh"))))
        shutil.copy(script, self.folder / f"{number}.sh")
        self.save(
            number,
            state="Q",
            options=options,
            resources=resources,
            cwd=os.getcwd(),
            path=os.environ["PATH"],
        )
        runner = subprocess.Popen(
            [sys.executable, __file__, self.flavour, str(self.folder), "run", number],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "trouble").open("a"),
            start_new_session=True,
        )
        self.save(number, runner=runner.pid)
        print(self.full_name(number))

    def qstat(self, *args: str) -> None:
        number = args[-1].partition(".")[0]
        record = self.record(number)
        if self.flavour == "grid_engine":
            if record is None or record["state"] == "F":
                fail(f"Following jobs do not exist: \n{number}", 1)
            print(f"{'=' * 62}\njob_number:                 {number}")
            return
        if record is None:
            fail(f"qstat: Unknown Job Id {args[-1]}", 153)
        elif record["state"] == "F" and "-x" not in args:
            fail(
                f"qstat: {args[-1]} Job has finished, use -x or -H to obtain historical job "
                "information",
                35,
            )
        else:
            print(f"Job Id: {args[-1]}\n    Job_Name = {record['options']['-N']}")
            print(f"    job_state = {record['state']}\n    queue = {record['options']['-q']}")
            if record["state"] == "F":
                print(f"    Exit_status = {record['exit_statuses'][-1]}")

    def qacct(self, *args: str) -> None:
        record = self.record(args[-1])
        if record is None or record["state"] != "F":
            fail(f"error: job id {args[-1]} not found", 1)
        else:
            for status in record["exit_statuses"]:
                print("=" * 62)
                print(f"jobnumber    {args[-1]}\nfailed       0\nexit_status  {status}")

    def qdel(self, *args: str) -> None:
        record = self.record(args[-1].partition(".")[0])
        if record is None:
            fail(f"qdel: Unknown Job Id {args[-1]}", 153)
        else:
            os.killpg(record["runner"], signal.SIGTERM)

    # one job

    def run(self, number: str) -> None:
        statuses: list[int] = []
        self.save(number, state="R")
        while not statuses or (statuses[-1] == 99 and self.flavour == "grid_engine"):
            statuses.append(self.run_once(number, is_restarted=bool(statuses)))
            self.save(number, exit_statuses=statuses)
        self.save(number, state="F")

    def run_once(self, number: str, *, is_restarted: bool) -> int:
        record = self.record(number)
        assert record is not None
        login = json.loads((self.folder / "login.json").read_text())
        submitted_in = Path(record["cwd"])
        if self.flavour == "pbs":
            env = self.pbs_variables(number, record)
            cwd = Path(login["HOME"])
            out, err = self.folder / f"{number}.OU", self.folder / f"{number}.ER"
            joins = record["options"].get("-j") == "oe"
        else:
            env = self.grid_engine_variables(number, record, is_restarted=is_restarted)
            cwd = submitted_in if "-cwd" in record["options"] else Path(login["HOME"])
            out, err = (cwd / self.expanded(record, number, option) for option in ("-o", "-e"))
            joins = record["options"].get("-j") == "y"
        with open(out, "ab") as out_file, open(out if joins else err, "ab") as err_file:
            done = subprocess.run(
                [record["options"]["-S"], str(self.folder / f"{number}.sh")],
                cwd=cwd,
                env=login | env,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                check=False,
            )
        if self.flavour == "pbs":
            for option, spooled in (("-o", out), ("-e", err)):
                target = submitted_in / record["options"].get(option, ".")
                if spooled.exists() and target.is_dir():
                    shutil.copy(spooled, target / f"{self.full_name(number)}{spooled.suffix}")
        return done.returncode if done.returncode >= 0 else 256 - done.returncode

    def expanded(self, record: dict, number: str, option: str) -> str:
        text = record["options"].get(option, f"$JOB_NAME.{option[1]}$JOB_ID")
        return text.replace("$JOB_NAME", record["options"]["-N"]).replace("$JOB_ID", number)

    def pbs_variables(self, number: str, record: dict) -> dict[str, str]:
        words = record["resources"]["select"].split(":")
        chunk = dict(word.split("=") for word in words[1:])
        nodes = self.folder / f"{number}.nodes"
        hosts = self.hosts(int(words[0]))
        nodes.write_text("".join(f"{host}\n" * int(chunk["mpiprocs"]) for host in hosts))
        return {
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBID": self.full_name(number),
            "PBS_JOBNAME": record["options"]["-N"],
            "PBS_QUEUE": record["options"]["-q"],
            "PBS_NODEFILE": str(nodes),
            "PBS_O_WORKDIR": record["cwd"],
            "PBS_O_PATH": record["path"],
            "PBS_O_QUEUE": record["options"]["-q"],
            **({"OMP_NUM_THREADS": chunk["ompthreads"]} if "ompthreads" in chunk else {}),
        }

    def grid_engine_variables(
        self, number: str, record: dict, *, is_restarted: bool
    ) -> dict[str, str]:
        name, num_slots = record["options"].get("-pe", "none 1").split()
        hosts = self.hosts(-(-int(num_slots) // SLOTS_PER_HOST))
        hostfile = self.folder / f"{number}.pe_hostfile"
        slots = min(SLOTS_PER_HOST, int(num_slots))
        queue = record["options"]["-q"]
        hostfile.write_text("".join(f"{h} {slots} {queue}@{h} UNDEFINED\n" for h in hosts))
        return {
            "ENVIRONMENT": "BATCH",
            "JOB_ID": number,
            "JOB_NAME": record["options"]["-N"],
            "QUEUE": queue,
            "NSLOTS": num_slots,
            "NHOSTS": str(len(hosts)),
            "PE": name,
            "PE_HOSTFILE": str(hostfile),
            "RESTARTED": str(int(is_restarted)),
            "SGE_O_WORKDIR": record["cwd"],
            "SGE_O_PATH": record["path"],
            "SGE_ROOT": str(self.folder),
            "SGE_TASK_ID": "undefined",
        }

    def hosts(self, num_hosts: int) -> list[str]:
        """Names that do not exist, or those in ``hosts``, where the job really uses its nodes."""
        real = self.folder / "hosts"
        names = real.read_text().split() if real.exists() else [f"n{i}" for i in range(num_hosts)]
        return names[:num_hosts]

    def directives(self, text: str) -> tuple[dict[str, str], dict[str, str]]:
        """Options and resources. PBS reads up to the first command, Grid Engine the whole file."""
        options: dict[str, str] = {"-q": QUEUES[0], "-S": "/bin/sh", "-N": "STDIN"}
        resources: dict[str, str] = {}
        for line in text.splitlines():
            if self.flavour == "pbs" and line.strip() and not line.startswith("#"):
                break
            prefix, _, rest = line.partition(" ")
            if prefix != self.prefix:
                continue
            words = shlex.split(rest)
            option, value = words[0], " ".join(words[1:])
            if option not in self.known_options():
                fail(f"qsub: invalid option -- '{option}'", 2)
            if option == "-l":
                name, _, amount = value.partition("=")
                resources[name] = amount
            else:
                options[option] = value
        return options, resources

    def known_options(self) -> tuple[str, ...]:
        both = ("-N", "-S", "-e", "-j", "-l", "-o", "-q", "-r")
        own = ("-W",) if self.flavour == "pbs" else ("-P", "-cwd", "-notify", "-pe")
        return (*both, *own)


def wait_for_the_record(stand_in: StandIn, number: str) -> None:
    """`qsub` writes down who runs the job after it has started it."""
    while "runner" not in (stand_in.record(number) or {}):
        time.sleep(0.01)


def main(flavour: str, folder: str, command: str, *args: str) -> None:
    stand_in = StandIn(flavour, Path(folder))
    if command == "run":
        wait_for_the_record(stand_in, args[0])
    getattr(stand_in, command)(*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
