"""A file for sbatch: the job saves before its time limit, and is requeued until the run is complete."""

import shlex

from ...jobs.options import RenderOptions
from .place import Place

_REQUEUED = """\
# SLURM tells this script before its time is up; the ranks then finish their step, save, and leave with 0.
asked=
trap 'asked=yes; kill -USR1 "$step"' USR1
{srun} &
step=$!
wait "$step"; code=$?
if [ -n "$asked" ]; then wait "$step"; code=$?; fi  # the first wait ended with the signal

# Asked and saved: the job goes into the queue again, and then goes on. Anything else is the end of it.
if [ -n "$asked" ] && [ "$code" -eq 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
_ARRAY = """\
# SLURM tells the ranks before their time is up: they finish their step, save, and leave; the next job goes on there.
# Jobs that find nothing left to do end at once.
{srun}
"""


def slurm(place: Place, options: RenderOptions) -> str:
    """Return the text of a file for sbatch.

    Args:
        place: Nodes, ranks and their command.
        options: Time limit, seconds of warning before it, and number of jobs in an array.
    """
    array = options.resumes > 0
    settings = {
        "job-name": place.name,
        "nodes": place.nodes,
        "ntasks-per-node": place.ranks,
        "cpus-per-task": place.cores,
        **({"gpus-per-node": place.gpus} if place.gpus else {}),
        "mem": f"{place.memory / 2**20:.0f}M" if place.memory else 0,
        "time": options.minutes,
        # "B:" sends the signal to the script alone, which passes it on and then requeues the job. In an array nothing
        # is requeued, so SLURM signals the ranks itself.
        "signal": f"{'' if array else 'B:'}USR1@{options.warning}",
        **({"array": f"1-{options.resumes}%1"} if array else {}),
        "output": "%x-%A_%a.log" if array else "%x-%j.log",
    }
    lines = [
        "#!/bin/bash",
        *place.header,
        "# Give it to sbatch in a folder that all nodes share, from a shell in which par-train is found.",
        *(f"#SBATCH --{name}={value}" for name, value in settings.items()),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it over by itself",
        *(f"export {name}={shlex.quote(value)}" for name, value in place.variables.items()),
        "",
    ]
    srun = f"srun --kill-on-bad-exit=1 {shlex.join(place.run())}"
    return "\n".join(lines) + "\n" + (_ARRAY if array else _REQUEUED).format(srun=srun)
