"""Manifests: what they say, and that Kubernetes' published schema allows it.

``TORCHMN_TEST_KUBERNETES`` is the path of ``api/openapi-spec/swagger.json`` of Kubernetes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.launch.submit.openapi import problems
from torchmn.errors import LaunchError, UsageError
from torchmn.launch.submit import SCHEDULERS, JobRequest, Settings, create, job_script, manifest
from torchmn.launch.submit.kubernetes import pod_name
from torchmn.launch.submit.scheduler import Answer
from torchmn.topology import allocation

SMALL = JobRequest(
    script="train.py",
    name="train",
    file="train.kubernetes.yaml",
    settings=Settings(image="registry.io/team/train:1"),
)
WHOLE = replace(
    SMALL,
    args=("--epochs", "3", "a b"),
    num_nodes=2,
    ranks_per_node=4,
    max_requeues=5,
    settings=Settings(
        image="registry.io/team/train:1",
        namespace="team",
        memory="64Gi",
        volumes=("data:/data", "checkpoints:/checkpoints", "data:/more"),
        walltime="01:30:00",
        queue="gpus",
        threads=2,
        gpus=4,
        grace=100,
        log_dir="/checkpoints/logs",
        exports=(("HF_TOKEN", "hf: #1"),),
    ),
)


def objects(job: JobRequest, secret: str = "0" * 64) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(manifest(job, secret=secret))}


@pytest.mark.parametrize("job", [SMALL, WHOLE], ids=["small", "whole"])
def test_the_published_schema_allows_it(job: JobRequest) -> None:
    path = os.environ.get("TORCHMN_TEST_KUBERNETES")
    if not path:
        pytest.skip(reason="TORCHMN_TEST_KUBERNETES names no OpenAPI document of Kubernetes")
    schema = json.loads(Path(path).read_text())
    for kind, found in objects(job).items():
        assert problems(found, kind, schema) == []
    wrong = objects(job)["Job"]
    wrong["spec"]["completion"] = "2"
    wrong["spec"]["template"]["spec"]["containers"][0].pop("name")
    wrong["spec"]["parallelism"] = "2"
    assert len(problems(wrong, "Job", schema)) == 3


def test_one_pod_needs_no_service() -> None:
    found = objects(SMALL)
    assert found.keys() == {"Secret", "Job"}
    pod = found["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchmn", "run", "-n", "1", "--grace", "60", "train.py"]
    assert "env" not in container
    assert "podFailurePolicy" not in found["Job"]["spec"]
    assert found["Job"]["spec"]["backoffLimit"] == 0


def test_pods_of_one_job() -> None:
    found = objects(WHOLE)
    job, service = found["Job"]["spec"], found["Service"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert job["activeDeadlineSeconds"] == 5400
    assert pod["terminationGracePeriodSeconds"] > 100
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == job["template"]["metadata"]["labels"]
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    assert container["command"][:6] == ["torchmn", "run", "-n", "8", "--grace", "100"]
    assert container["command"][-4:] == ["train.py", "--epochs", "3", "a b"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["TORCHMN_SUPERVISOR"] == "train-0.train:29400"
    hosts = allocation({**variables, "JOB_COMPLETION_INDEX": "1"})
    assert str(hosts) == "Kubernetes job train on train-0.train:4, train-1.train:4"
    assert container["resources"] == {
        "requests": {"cpu": 8, "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 4},
    }
    claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]]
    assert claims == [None, "data", "checkpoints"]
    folders = [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]]
    assert folders == [
        ("shared-memory", "/dev/shm"),
        ("volume-0", "/data"),
        ("volume-1", "/checkpoints"),
        ("volume-0", "/more"),
    ]
    for each in found.values():
        assert each["metadata"]["namespace"] == "team"
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


def test_secrets_are_in_the_secret_alone() -> None:
    text = manifest(WHOLE, secret="very-secret")
    found = objects(WHOLE, "very-secret")
    assert found["Secret"]["stringData"] == {"TORCHMN_SECRET": "very-secret", "HF_TOKEN": "hf: #1"}
    assert (text.count("very-secret"), text.count("hf: #1")) == (1, 1)
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "train"}}]


def test_arguments_stay_text_for_every_reader_of_yaml() -> None:
    """kubectl takes 1e-3 for a number and y for a boolean, PyYAML does not."""
    args = ("--rate", "1e-3", "y", "N", "0o17", "on", "null", "12:30", "", "a b", "a\nb", "-n", "2")
    text = manifest(replace(SMALL, args=args), secret="0" * 64)
    written = [line.strip()[2:] for line in text.splitlines() if line.strip().startswith("- ")]
    for each in args:
        assert any(form in written for form in (json.dumps(each), f"'{each}'")), each
    [container] = objects(replace(SMALL, args=args))["Job"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["command"][-len(args) :] == [*args]


def test_only_jobs_that_saved_are_restarted() -> None:
    job = objects(WHOLE)["Job"]["spec"]
    assert job["backoffLimit"] == 5 * 2
    saved, disrupted, failed = job["podFailurePolicy"]["rules"]
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Count", [85])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == (
        "Count",
        "DisruptionTarget",
    )
    assert (failed["action"], failed["onExitCodes"]["operator"]) == ("FailJob", "NotIn")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "needs --image"),
        (Settings(image="a", group="gt00"), "Kubernetes has no accounts"),
        (Settings(image="a", signal=90), "--grace is how long"),
        (Settings(image="a", modules=("cuda",)), "the image is the environment"),
        (Settings(image="a", directives=("#PBS -q x",)), "--dry-run and --output"),
        (Settings(image="a", chunk="ncpus=2"), "another scheduler"),
    ],
)
def test_what_kubernetes_cannot_do(settings: Settings, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        manifest(replace(SMALL, settings=settings), secret="x")


@pytest.mark.parametrize("name", ["train_cifar", "Train", "a" * 60, "t."])
def test_names_that_hosts_cannot_have(name: str) -> None:
    with pytest.raises(UsageError, match="lower-case letters") as caught:
        manifest(replace(SMALL, name=name), secret="x")
    cure = str(caught.value).rpartition("--name ")[2].rstrip(".")
    manifest(replace(SMALL, name=cure), secret="x")


def test_names_of_scripts() -> None:
    assert pod_name("jobs/Train_CIFAR.v2.py") == "train-cifar-v2"
    assert pod_name(f"{'x' * 80}.py") == "x" * 52


def test_settings_of_kubernetes_for_another_scheduler() -> None:
    with pytest.raises(UsageError, match="image is for Kubernetes, and this job is for Slurm"):
        job_script(SMALL, SCHEDULERS["slurm"])


def test_create() -> None:
    asked: list[Sequence[str]] = []

    def kubectl(argv: Sequence[str]) -> Answer:
        asked.append(argv)
        return Answer(returncode=len(asked) - 1, out="job.batch/train created\n", err="exists")

    assert create(SMALL, ask=kubectl) == "job.batch/train created"
    assert asked == [["kubectl", "create", "-f", "train.kubernetes.yaml"]]
    with pytest.raises(LaunchError, match="(?s)exists.*kubectl delete -f train.kubernetes.yaml"):
        create(SMALL, ask=kubectl)
