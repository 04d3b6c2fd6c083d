"""A manifest for kubectl: the config, and a JobSet whose pods each run torchrun on one node."""

import json
import re
from typing import Any

from ..._errors import UserError
from ...jobs.options import RenderOptions
from .place import Place

_WORK = "/work"
"""Mount point of the volume that all pods share: data, models and output."""

_CONFIG = "/config"
_PORT = 29500
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def kubernetes(place: Place, options: RenderOptions) -> str:
    """Return the text of a JobSet manifest.

    Args:
        place: Nodes and resources of the job, and the command of its ranks.
        options: The image, the volume claim, the seconds that an evicted pod has to save, and the number of restarts
            after lost pods.

    Raises:
        UserError: The image is missing, the config file cannot be read, or Kubernetes does not accept a name.
    """
    if not options.image:
        raise UserError(
            f"--image is {options.image!r}; name the container image that has par-train and torch, with its tag"
        )
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", place.name) is None:
        raise UserError(
            f"the job's name is {place.name!r}; Kubernetes takes small letters, digits and hyphens, a letter first, 40 "
            "at most: give --name"
        )
    documents = []
    if place.config is not None:
        try:
            text = place.config.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read the config file {place.config}: {error.strerror}; give its path") from None
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": place.name},
                "data": {place.config.name: text},
            }
        )
    pods = {
        # Each pod receives its index as JOB_COMPLETION_INDEX, which is the rank of its node.
        "completionMode": "Indexed",
        "completions": place.nodes,
        "parallelism": place.nodes,
        "backoffLimit": 0,  # a lost pod ends this try of all, and the JobSet begins the next
        "template": {"spec": _pod(place, options)},
    }
    documents.append(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": place.name},
            "spec": {
                "failurePolicy": {"maxRestarts": options.restarts},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
            },
        }
    )
    header = [
        *place.header,
        "# Untested on a cluster: only its structure is checked. `kubectl apply -f` takes it where there is JobSet.",
        f"# The claim {options.claim} is a volume that all pods may write (ReadWriteMany), the folder {_WORK} to them.",
    ]
    return "\n".join(header) + "\n" + "---\n".join("\n".join(_yaml(each)) + "\n" for each in documents)


def _pod(place: Place, options: RenderOptions) -> dict[str, Any]:
    """Return the pod of a node: its torchrun starts the ranks, and joins the torchrun of the first pod."""
    # A ConfigMap carries the config, since pods do not see the user's disk.
    config = None if place.config is None else f"{_CONFIG}/{place.config.name}"
    taken: dict[str, Any] = {"cpu": place.cores * place.ranks}
    if place.memory:
        taken["memory"] = f"{place.memory / 2**20:.0f}Mi"
    gpus = {"nvidia.com/gpu": place.gpus} if place.gpus else {}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "work": (_WORK, {"persistentVolumeClaim": {"claimName": options.claim}}),
        "shared-memory": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),  # noqa: S108 - through which ranks talk
    }
    if config is not None:
        volumes["config"] = (_CONFIG, {"configMap": {"name": place.name}})
    torchrun = [
        "torchrun",
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={place.ranks}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        # JobSet calls the first pod NAME-node-0-0, in a domain of the set's name.
        f"--master-addr={place.name}-node-0-0.{place.name}",
        f"--master-port={_PORT}",
        "-m",
        "par_train",
    ]
    container = {
        "name": "ranks",
        "image": options.image,
        "workingDir": _WORK,
        # Kubernetes would replace $(NAME) in the words of the user by a variable.
        "command": [*torchrun, *(word.replace("$(", "$$(") for word in place.run(config)[1:])],
        "env": [{"name": name, "value": value} for name, value in place.variables.items()],
        # Kubernetes takes a request of GPUs only with an equal limit.
        "resources": {"requests": taken | gpus, "limits": gpus or taken},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.warning,  # after SIGTERM, on which ranks save
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }


def _yaml(value: Any, indent: int = 0) -> list[str]:
    """Return the lines of a mapping or a list in YAML's block style."""
    space, lines = " " * indent, []
    items = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    for key, inner in items:
        head = f"{space}- " if key is None else f"{space}{_scalar(key)}:"
        if isinstance(inner, dict | list) and inner:
            below = _yaml(inner, indent + 2)
            lines += [head + below[0].lstrip(), *below[1:]] if key is None else [head, *below]
        elif isinstance(inner, str) and "\n" in inner and inner[0] not in " \n" and inner[-1] == "\n":
            lines += [f"{head} |+", *(f"{space}  {line}" if line else "" for line in inner[:-1].split("\n"))]
        else:
            lines.append(f"{head.rstrip()} {_scalar(inner)}")
    return lines


def _scalar(value: Any) -> str:
    """Return a word unchanged if YAML reads it as a string, and any other value as JSON, which is valid YAML."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    # YAML takes the letters themselves, but not the two halves in which JSON may write one, as of an emoji.
    return json.dumps(value, ensure_ascii=False)
