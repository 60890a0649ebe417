"""A manifest for Kubernetes: an Indexed Job, its headless Service and its Secret.

An Indexed Job with a headless Service gives every pod a number and a name that the others can look
up, on every cluster from version 1.26 on. JobSet and the PyTorchJob of Kubeflow offer more and need
an operator that an administrator has installed; `torchmn run` needs nothing of what they add, since
it finds out by itself how the pods are to be joined (`torchmn.launch.starters.pods`). Queues of
Kueue take plain Jobs.

https://kubernetes.io/docs/concepts/workloads/controllers/job/ describes the fields.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import yaml

from torchmn.environment_variables import PODS_VARIABLE, SECRET_VARIABLE, SUPERVISOR_VARIABLE
from torchmn.errors import LaunchError, UsageError
from torchmn.exit_status import SAVED_STATUS
from torchmn.launch.submit.request import JobRequest, default_name
from torchmn.launch.submit.scheduler import Ask, ask
from torchmn.topology.walltime import parse_duration

PORT = 29400
"""At which pod 0 supervises the job: pods have addresses of their own, so one is enough."""
CONTAINER = "ranks"
_DEFAULT_GRACE_S, _GRACE_MARGIN_S = 60, 10
_MAX_NAME = 52
"""Of 63 characters of a host name, which ends with the number of the pod."""
_USED = frozenset(
    [
        *("queue", "walltime", "threads", "gpus", "grace", "image", "namespace", "memory"),
        *("volumes", "exports", "log_dir"),
    ]
)
_CURES = {
    "group": "Kubernetes has no accounts; --queue names a LocalQueue of Kueue",
    "signal": "at its time limit Kubernetes sends SIGTERM, and --grace is how long ranks may save",
    "activate": "the image is the environment",
    "modules": "the image is the environment",
    "directives": "write the manifest with --dry-run and --output, and edit it",
    "join_output": "pod 0 writes the output of all ranks",
}
_PLAIN = re.compile(r"(?![yn]$)[A-Za-z/][A-Za-z0-9_./=-]*(:[A-Za-z0-9_./=-]+)*", re.IGNORECASE)
"""Text that no reader of YAML takes for anything else, where PyYAML writes it without quotes."""
Manifest = dict[str, Any]


def pod_name(script: str) -> str:
    """A name for the job that host names allow, from the name of a script.

    >>> pod_name("jobs/3d_Train.py")
    'job-3d-train'
    """
    name = re.sub(r"[^a-z0-9]+", "-", default_name(script).lower())
    return name[:_MAX_NAME].strip("-")


def manifest(job: JobRequest, *, secret: str) -> str:
    """The whole text, without side effects. Raises UsageError: Kubernetes cannot run such a job.

    ``secret`` is that of the job, by which its processes authenticate to each other.
    """
    _check(job)
    has_service = job.num_nodes > 1
    parts = [_secret(job, secret), *([_service(job)] if has_service else []), _job(job)]
    by_hand = f"kubectl create -f {job.file}"
    heading = [
        "# Written by `torchmn submit` for Kubernetes. Edit it as you like, and submit it with",
        f"#   {by_hand}",
        f"# Its output: {logs_command(job)}",
        f"# Remove all of it: kubectl delete -f {job.file}",
    ]
    return "\n".join(heading) + "\n" + _documents(parts)


class _Dumper(yaml.SafeDumper):
    """Quotes what kubectl may read otherwise than PyYAML: 1e-3 as a number, y as a boolean."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if _PLAIN.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _documents(parts: list[Manifest]) -> str:
    text: str = yaml.dump_all(
        parts, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000
    )
    return text


def logs_command(job: JobRequest) -> str:
    """What shows the output of all ranks: pod 0 writes it. (Its label is of Kubernetes 1.28.)"""
    if job.num_nodes == 1:
        return f"kubectl logs -f job/{job.name}"
    index = "batch.kubernetes.io/job-completion-index=0"
    return f"kubectl logs -f --tail=-1 -l app.kubernetes.io/instance={job.name},{index}"


def create(job: JobRequest, *, ask: Ask = ask) -> str:
    """Create the objects in ``job.file`` with kubectl, and return what it prints.

    Raises LaunchError with the output of kubectl.
    """
    command = ["kubectl", "create", "-f", job.file]
    answer = ask(command)
    if answer.returncode != 0:
        raise LaunchError(
            f"Kubernetes rejected the job: `{' '.join(command)}` exited with status "
            f"{answer.returncode} and this output:\n{answer.text}\nThe manifest is kept in "
            f"{job.file}. If objects of this name exist, another --name, or `kubectl delete -f "
            f"{job.file}` removes them."
        )
    return answer.out.strip()


def _check(job: JobRequest) -> None:
    settings = job.settings
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name not in _USED and value not in (None, ()):
            cure = _CURES.get(each.name, "it is for another scheduler")
            raise UsageError(
                f"{each.name} = {value!r} has no meaning for Kubernetes: {cure}. Leave it out, or "
                "move it to the table of its scheduler in the site file."
            )
    if settings.image is None:
        raise UsageError(
            "A job for Kubernetes needs --image: a container image with your script, its folder as "
            "the working folder, and torchmn."
        )
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > _MAX_NAME:
        raise UsageError(
            f"--name must be up to {_MAX_NAME} lower-case letters, digits and -, with a letter "
            f"first, since pods are named after it, got {job.name!r}: use --name "
            f"{pod_name(job.name)}."
        )


def _metadata(job: JobRequest) -> Manifest:
    namespace = job.settings.namespace
    queue = job.settings.queue
    labels: Manifest = {
        **_labels(job),
        **({"kueue.x-k8s.io/queue-name": queue} if queue else {}),
    }
    return {"name": job.name, **({"namespace": namespace} if namespace else {}), "labels": labels}


def _labels(job: JobRequest) -> Manifest:
    return {"app.kubernetes.io/managed-by": "torchmn", "app.kubernetes.io/instance": job.name}


def _secret(job: JobRequest, secret: str) -> Manifest:
    """The job's secret and the exported variables, which may be secrets too."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job),
        "type": "Opaque",
        "stringData": {SECRET_VARIABLE: secret, **dict(job.settings.exports)},
    }


def _service(job: JobRequest) -> Manifest:
    """Names for the pods, also before they are ready: they wait for each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(job),
        },
    }


def _job(job: JobRequest) -> Manifest:
    limit = job.settings.walltime
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": job.max_requeues * job.num_nodes,
        **({"activeDeadlineSeconds": round(parse_duration(limit) or 0)} if limit else {}),
        **({"podFailurePolicy": _restarts()} if job.max_requeues else {}),
        "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def _restarts() -> Manifest:
    """All pods are replaced after ranks saved and exited; any other failure ends the job.

    Every pod exits with `SAVED_STATUS` then, and each counts against ``backoffLimit``.
    """
    saved: Manifest = {"containerName": CONTAINER, "values": [SAVED_STATUS]}
    disrupted: Manifest = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": "Count", "onExitCodes": {**saved, "operator": "In"}},
            {"action": "Count", "onPodConditions": [disrupted]},
            {"action": "FailJob", "onExitCodes": {**saved, "operator": "NotIn"}},
        ]
    }


def _pod(job: JobRequest) -> Manifest:
    settings = job.settings
    claims = list(dict.fromkeys(text.partition(":")[0] for text in settings.volumes))
    mounts: list[Any] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for text in settings.volumes:
        claim, _, folder = text.partition(":")
        mounts.append({"name": f"volume-{claims.index(claim)}", "mountPath": folder})
    volumes: list[Any] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    for number, claim in enumerate(claims):
        source: Manifest = {"claimName": claim}
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": source})
    several: Manifest = {
        "subdomain": job.name,
        "affinity": {
            "podAntiAffinity": {  # --nodes counts nodes
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": _labels(job)},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        },
    }
    container: Manifest = {
        "name": CONTAINER,
        "image": settings.image or "",
        "command": _command(job),
        **({"env": _pods_variables(job)} if job.num_nodes > 1 else {}),
        "envFrom": [{"secretRef": {"name": job.name}}],
        **({"ports": [{"containerPort": PORT}]} if job.num_nodes > 1 else {}),
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    return {
        **(several if job.num_nodes > 1 else {}),
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": (settings.grace or _DEFAULT_GRACE_S) + _GRACE_MARGIN_S,
        "containers": [container],
        "volumes": volumes,
    }


def _pods_variables(job: JobRequest) -> list[Any]:
    """What makes `torchmn run` in every pod one job."""
    pods = f"{job.name}-[0-{job.num_nodes - 1}].{job.name}:{job.ranks_per_node}"
    return [
        {"name": PODS_VARIABLE, "value": pods},
        {"name": SUPERVISOR_VARIABLE, "value": f"{job.name}-0.{job.name}:{PORT}"},
    ]


def _command(job: JobRequest) -> list[Any]:
    settings = job.settings
    grace = settings.grace or _DEFAULT_GRACE_S
    threads = ["--threads", str(settings.threads)] if settings.threads else []
    log_dir = ["--log-dir", settings.log_dir] if settings.log_dir else []
    module = ["-m"] if job.is_module else []
    options = ["-n", str(job.num_ranks), "--grace", str(grace), *threads, *log_dir, *module]
    return ["torchmn", "run", *options, job.script, *job.args]


def _resources(job: JobRequest) -> Manifest:
    """Requests place the pod; limits are set where Kubernetes wants them, and for memory."""
    settings = job.settings
    memory: Manifest = {"memory": settings.memory} if settings.memory else {}
    gpus: Manifest = {"nvidia.com/gpu": settings.gpus} if settings.gpus else {}
    requests: Manifest = {
        **({"cpu": job.cores_per_node} if settings.threads else {}),
        **memory,
    }
    return {"requests": requests, "limits": {**memory, **gpus}}
