"""A program for a Ray cluster: one worker for each rank; all workers restart if one is lost."""

import json

from ...jobs.options import RenderOptions
from .place import Place

_PROGRAM = '''\
{header}
# Run it on the cluster's head, in a folder that all nodes share, with the Python that has par-train and ray[train].

import os
import socket
import subprocess
import sys

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = os.getcwd()
COMMAND = [sys.executable, "-P", "-m", "par_train"]
COMMAND += {words}
VARIABLES = {variables}


def rank():
    """One rank, as a process of this worker's, which it ends with. Ray has set RANK, WORLD_SIZE and LOCAL_RANK."""
    meeting = [None]
    if dist.get_rank() == 0:
        with socket.create_server(("", 0)) as free:
            meeting = [(ray.util.get_node_ip_address(), free.getsockname()[1])]
    dist.broadcast_object_list(meeting)
    address, port = meeting[0]
    where = {{"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": {name}}}
    subprocess.run(COMMAND, cwd=FOLDER, env={{**os.environ, **VARIABLES, **where}}, check=True)


trainer = TorchTrainer(
    rank,
    torch_config=TorchConfig(backend="gloo"),  # by which workers agree where ranks meet; it needs no GPU memory
    scaling_config=ScalingConfig(num_workers={world}, use_gpu={use_gpu}, resources_per_worker={resources}),
    run_config=RunConfig(name={name}, failure_config=FailureConfig(max_failures={restarts})),
)
trainer.fit()
'''


def ray(place: Place, options: RenderOptions) -> str:
    """Return the text of a Python program.

    Args:
        place: Nodes, ranks and their command.
        options: Number of times that lost workers are replaced.
    """
    # JSON writes strings, numbers, lists and mappings as Python does, with double quotes. Only an emoji, say, would be
    # two halves of a letter in Python, so letters stay as they are.
    return _PROGRAM.format(
        header="\n".join(place.header),
        words=json.dumps(place.run()[1:], ensure_ascii=False),
        variables=json.dumps(dict(place.variables), ensure_ascii=False),
        world=place.world,
        use_gpu=place.gpus > 0,
        resources=json.dumps({"CPU": place.cores, **({"GPU": 1} if place.gpus else {})}),
        name=json.dumps(place.name),
        restarts=options.restarts,
    )
