"""The manifest of docs/how-to/kubernetes.md, its pods as processes with the variables of theirs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from tests.marks import ON_TEST_HOSTS
from tests.netlab import netlab

PAGE = next(
    path / "docs" / "how-to" / "kubernetes.md"
    for path in Path(__file__).parents
    if (path / "docs" / "how-to").is_dir()
)
TRAINS = """
import json, os, pathlib, torchmn
from torchmn.cluster.launcher_env import read_launcher_env
comm = torchmn.create_communicator("naive")
place = read_launcher_env(os.environ)
ranks = comm.allgather_obj((place.rank, comm.size))
pathlib.Path(f"rank{comm.rank}.json").write_text(json.dumps(ranks))
"""


def manifest() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_names_and_numbers_of_the_manifest_fit() -> None:
    service, job = manifest()["Service"], manifest()["Job"]
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert all(type(value) is str for value in env.values())  # Kubernetes takes nothing else
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["NUM_PODS"])
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in template["spec"]["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["RANKS_PER_POD"])


class TestPods:
    """A pod is a test host that runs the command of the manifest, with its variables."""

    pytestmark = ON_TEST_HOSTS

    def test_they_are_one_job(self, tmp_path: Path) -> None:
        job = manifest()["Job"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        (tmp_path / "train.py").write_text(TRAINS)
        given = {each["name"]: each["value"] for each in container["env"]}
        with netlab(job["completions"], None) as lab:
            given |= {"MASTER_ADDR": lab.hosts[0].name, "RANKS_PER_POD": "2"}
            pods = []
            for index, host in enumerate(lab.hosts):
                env = {
                    **os.environ,
                    **given,
                    "JOB_COMPLETION_INDEX": str(index),
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                    "PYTHONPATH": PYTHON_PATH,
                    "OMP_NUM_THREADS": "1",
                }
                pods.append(
                    host.popen(container["command"], cwd=tmp_path, env=env, stderr=subprocess.PIPE)
                )
            errors = [pod.communicate(timeout=limit(90))[1] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], errors
        for rank in range(4):
            seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
            assert seen == [[each, 4] for each in range(4)]
