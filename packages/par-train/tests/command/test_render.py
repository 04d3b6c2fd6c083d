"""`par-train render`: what it writes for each scheduler, read back as the scheduler reads it."""

import ast
import re
import shlex
import subprocess

import pytest

from par_train.command.cli import main

CONFIG = """
output = "runs/My notes"
precision = "bf16"
zero = 1

[memory]
device = "80GB"
host = "20GB"

[parallel]
tensor = {size = 4, mode = "1d"}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a config, and a shell that says nothing of the network."""
    monkeypatch.chdir(tmp_path)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path


def rendered(capsys, *words):
    assert main(["render", *words]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def sbatch(text):
    """What sbatch reads: the options above the first command, and the words of srun."""
    head = text[: text.index("\nexport ")]
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", head, re.MULTILINE)), shlex.split(srun.rstrip(" &"))


def test_sbatch_gets_nodes_tasks_memory_and_the_variables_of_the_network(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0,mlx5_1")
    flags = ["--host-memory=1TiB", "--cores=12", "--interface=ib0", "--train.steps", "20", "--no-model.tied"]
    text = rendered(capsys, "slurm", "job.toml", "--world=64", *flags)
    options, srun = sbatch(text)
    sizes = {"nodes": "8", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "12", "mem": "1048576M"}
    assert {name: options[name] for name in sizes} == sizes
    assert {name: options[name] for name in ("time", "signal", "requeue")} == {
        "time": "240",
        "signal": "B:USR1@300",
        "requeue": "",
    }
    assert options["job-name"] == "my-notes"
    run = ["par-train", "run", "job.toml", "--no-model.tied", "--train.steps", "20", "--resume", "auto"]
    assert sorted(srun[2:]) == sorted(run)
    exported = dict(re.findall(r"^export ([A-Z_]+)=(\S+)", text, re.MULTILINE))
    del exported["SRUN_CPUS_PER_TASK"]
    assert exported == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    }


@pytest.mark.parametrize(
    ("asked", "code", "requeued"), [(True, 0, True), (False, 0, False), (False, 3, False), (True, 138, False)]
)
def test_a_job_is_requeued_where_it_was_asked_to_leave_and_has_saved(capsys, folder, asked, code, requeued):
    """The script as bash runs it, with an srun that says what it gets, and a scontrol that says that it was called."""
    (folder / "bin").mkdir()
    waits = "until grep -q 'State:.S' /proc/$PPID/status; do sleep 0.05; done; sleep 0.1"  # the script, for its srun
    told = f"{waits}; kill -USR1 $PPID; while :; do sleep 0.01; done" if asked else ""
    for name, lines in {
        "srun": f"trap 'exit {code}' USR1\n{told}\nexit {code}",
        "scontrol": "echo scontrol $*",
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)
    text = rendered(capsys, "slurm", "job.toml", "--world=8")
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (code, "scontrol requeue 7\n" if requeued else ""), done.stderr


def test_an_array_runs_one_job_at_a_time_and_requeues_none(capsys):
    text = rendered(capsys, "slurm", "--resumes=4", "--world=8", "job.toml")  # the config may come last
    options, srun = sbatch(text)
    assert (options["array"], options["signal"]) == ("1-4%1", "USR1@300")
    assert srun[:2] == ["srun", "--kill-on-bad-exit=1"]
    assert "scontrol" not in text


def test_ranks_on_processors_ask_for_no_gpus_and_say_nothing_of_nccl(capsys):
    text = rendered(capsys, "slurm", "--world=8", "--device=cpu", "--interface=eth0")
    options, srun = sbatch(text)
    assert "gpus-per-node" not in options
    assert "NCCL" not in text
    assert srun[2:] == ["par-train", "run", "--device", "cpu", "--resume", "auto"]


# The parts of batch/v1, v1 and jobset.x-k8s.io/v1alpha2 that a manifest may use, by hand: a mapping lists its keys, a
# "?" behind a key allows it to be missing, a list has one element's schema, "*" stands for any name.
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": str,
            "image": str,
            "workingDir": str,
            "command": [str],
            "env": [{"name": str, "value": str}],
            "resources": {
                "requests": {"cpu": int, "memory?": str, "nvidia.com/gpu?": int},
                "limits": {"cpu?": int, "memory?": str, "nvidia.com/gpu?": int},
            },
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [
        {
            "name": str,
            "persistentVolumeClaim?": {"claimName": str},
            "emptyDir?": {"medium": str},
            "configMap?": {"name": str},
        }
    ],
}
JOB = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "template": {"spec": POD},
}
SCHEMAS = {
    ("v1", "ConfigMap"): {"apiVersion": str, "kind": str, "metadata": {"name": str}, "data": {"*": str}},
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "apiVersion": str,
        "kind": str,
        "metadata": {"name": str},
        "spec": {
            "failurePolicy": {"maxRestarts": int},
            "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
        },
    },
}


def check(value, schema, where=""):
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        allowed = {key.rstrip("?"): inner for key, inner in schema.items()}
        missing = {key for key in schema if key not in ("*", *value) and not key.endswith("?")}
        assert not missing, f"{where} lacks {missing}"
        for key, inner in value.items():
            assert key in allowed or "*" in allowed, f"{where} has {key}"
            check(inner, allowed.get(key, allowed.get("*")), f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for each in value:
            check(each, schema[0], where)
    else:
        assert type(value) is schema, f"{where} is {value!r}"


def test_a_manifest_has_the_structure_that_kubernetes_and_jobset_take(capsys):
    yaml = pytest.importorskip("yaml")
    flags = ["--image=registry/par:1", "--host-memory=512GiB", "--restarts=3", "--sample.prompts=$(HOME): no"]
    flags += ["--model.config=tiny", "--data.path=a b.txt"]
    text = rendered(capsys, "kubernetes", "job.toml", "--world=64", *flags)
    assert "Untested on a cluster" in text
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        check(document, SCHEMAS[document["apiVersion"], document["kind"]], document["kind"])
    config, jobset = documents
    assert config["data"] == {"job.toml": CONFIG}
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (8, 8, "Indexed")
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": 64, "memory": "524288Mi", "nvidia.com/gpu": 8},
        "limits": {"nvidia.com/gpu": 8},
    }
    assert container["command"][1:4] == ["--nnodes=8", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    assert "--master-addr=my-notes-node-0-0.my-notes" in container["command"]
    run = container["command"][container["command"].index("run") :]
    assert run[:2] == ["run", "/config/job.toml"]
    assert "$$(HOME): no" in run  # Kubernetes would put a variable's value in its place
    assert "a b.txt" in run
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted == {"work": "/work", "shared-memory": "/dev/shm", "config": "/config"}
    assert {each["name"] for each in pod["volumes"]} == set(mounted)


def test_without_a_config_a_manifest_has_none(capsys):
    yaml = pytest.importorskip("yaml")
    text = rendered(capsys, "kubernetes", "--world=2", "--image=par", "--device=cpu")
    (jobset,) = yaml.safe_load_all(text)
    check(jobset, SCHEMAS["jobset.x-k8s.io/v1alpha2", "JobSet"])
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["volumes"]] == ["work", "shared-memory"]
    assert pod["containers"][0]["command"][-5:] == ["run", "--device", "cpu", "--resume", "auto"]


def test_a_program_for_ray_starts_one_worker_a_rank(capsys):
    tree = ast.parse(rendered(capsys, "ray", "job.toml", "--world=64", "--restarts=7", "--train.steps=20"))
    command = next(node for node in tree.body if isinstance(node, ast.AugAssign))
    words = ["run", "job.toml", "--train.steps", "20", "--resume", "auto"]
    assert ast.literal_eval(command.value) == words
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {word.arg: ast.unparse(word.value) for call in calls for word in call.keywords}
    assert (given["num_workers"], given["use_gpu"], given["max_failures"]) == ("64", "True", "7")
    assert given["resources_per_worker"] == "{'CPU': 8, 'GPU': 1}"


def test_an_argument_may_have_any_characters(capsys):
    yaml = pytest.importorskip("yaml")
    odd = 'C:\\Users\\a \U0001f600 """\nexit 7'
    words = ["--world=2", f"--data.folder={odd}", "--device=cpu"]
    text = rendered(capsys, "slurm", *words)
    assert all(line[:1] in ("", "#") for line in text[: text.index("\nexport ")].splitlines())
    (jobset,) = yaml.safe_load_all(rendered(capsys, "kubernetes", *words, "--image=par"))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert odd in pod["containers"][0]["command"]
    program = ast.parse(rendered(capsys, "ray", *words))
    assert odd in ast.literal_eval(next(node for node in program.body if isinstance(node, ast.AugAssign)).value)


def test_the_file_is_written_where_it_is_told(capsys, folder):
    assert rendered(capsys, "slurm", "--world=8", "--file=train.sbatch") == ""
    header = "par-train render slurm --world=8 --file=train.sbatch"
    assert header in (folder / "train.sbatch").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--world=12"], "--world=12: 8 ranks a node do not divide it"),
        (["slurm", "--world=8", "--ranks=4"], "ranks is 4, but the file will start 8; remove ranks"),
        (["slurm", "--world=8", "--overwrite"], "resume auto goes on, overwrite starts anew; give one"),
        (["slurm", "--world=8", "--train.batch_size=12"], "train.batch_size 12 does not divide by 8 data ranks"),
        (["slurm", "job.toml", "--world=8", "--host-memory=100GB"], "memory.host is 20.0 GB a rank, 160 GB a node"),
        (["slurm", "--world=8", "--minutes=5"], "--warning is 300 seconds, but a job has 5 minutes; give less"),
        (["slurm", "--world=8", "--file=none/x"], "cannot write none/x: No such file or directory"),
        (["slurm"], "--world is missing: number of ranks"),
        (["slurm", "--world=8", "--restart=3"], "unknown flag --restart; did you mean --restarts?"),
        (["nomad", "--world=8"], "invalid choice: 'nomad'"),
        (["kubernetes", "--world=8"], "--image is ''; name the container image"),
        (["kubernetes", "--world=8", "--image=par", "--name=My_job"], "the job's name is 'My_job'"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    assert main(["render", *words]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert said in done.err
    assert done.err.count("\n") == 1, done.err
