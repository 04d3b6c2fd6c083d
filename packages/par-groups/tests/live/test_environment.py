import pytest

from par_groups import read_environment
from par_groups.live.environment import first_host, launched_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "41234",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def place(found):
    return found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size


def test_torchrun():
    found = read_environment(TORCHRUN)
    assert place(found) == ("torchrun", 3, 4, 1, 2)
    assert (found.address, found.port) == ("host", 1234)


def test_slurm_meets_on_the_first_host_of_the_step():
    found = read_environment(SLURM)
    assert place(found) == ("slurm", 5, 8, 1, 4)
    assert (found.address, found.port) == ("gpu003", 10_000 + 41234 % 20_000)
    elsewhere = read_environment({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "77"})
    assert (elsewhere.address, elsewhere.port) == ("other", 77)


def test_a_batch_script_that_srun_did_not_start_is_a_world_of_its_own():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).world_size == 1


def test_open_mpi_on_one_machine_needs_no_address():
    found = read_environment(OPENMPI)
    assert place(found) == ("openmpi", 1, 2, 1, 2)
    assert found.address == "127.0.0.1"


def test_no_launcher_is_a_world_of_one():
    assert place(read_environment({"PATH": "/bin"})) == ("single", 0, 1, 0, 1)


def test_arguments_take_the_place_of_variables():
    found = read_environment(TORCHRUN, rank=1, world_size=2, local_rank=0, address="there", port=9)
    assert place(found) == ("explicit", 1, 2, 0, 2)
    assert (found.address, found.port) == ("there", 9)
    assert read_environment({}, rank=0, world_size=1).address == "127.0.0.1"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_torchrun_variable_is_named(missing):
    with pytest.raises(ValueError, match=f"the variable {missing} is missing"):
        read_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"])
def test_a_missing_slurm_variable_is_named(missing):
    with pytest.raises(ValueError, match=f"the variable {missing} is missing"):
        read_environment({name: value for name, value in SLURM.items() if name != missing})


def test_of_several_launchers_the_one_that_started_this_process_counts():
    """srun starts a torchrun on each node; mpirun starts its daemons by srun, whose ranks inherit the daemon's."""
    torchrun = {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    assert place(read_environment(torchrun)) == ("torchrun", 3, 4, 1, 2)
    mpirun = {**SLURM, **OPENMPI}
    assert place(read_environment(mpirun)) == ("openmpi", 1, 2, 1, 2)
    assert launched_rank(mpirun) == 1
    alone = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN}  # ranks started by hand in a shell
    assert place(read_environment(alone)) == ("torchrun", 3, 4, 1, 2)


def test_variables_that_a_job_script_exports_may_repeat_what_srun_says():
    exported = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "there", "MASTER_PORT": "7"}
    for names in (["WORLD_SIZE"], ["RANK", "WORLD_SIZE"], list(exported)):
        found = read_environment({**SLURM, **{name: exported[name] for name in names}})
        assert (found.launcher, found.rank, found.world_size, found.contradiction) == ("slurm", 5, 8, "")
        assert found.local_rank == (0 if "LOCAL_RANK" in names else 1)  # 0 where a task sees one GPU alone


@pytest.mark.parametrize(
    ("started", "exported", "said"),
    [
        (SLURM, {"RANK": "0"}, "RANK is 0, but srun has started this process as rank 5 of 8"),
        (SLURM, {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but srun"),
        (OPENMPI, {"RANK": "0", "WORLD_SIZE": "4"}, "RANK is 0 and WORLD_SIZE is 4, but mpirun has started"),
    ],
)
def test_what_two_launchers_say_of_one_process_is_compared(started, exported, said):
    found = read_environment({**started, **exported})
    assert found.contradiction.startswith(said)
    assert "unset RANK and WORLD_SIZE, or let" in found.contradiction
    assert place(found) == place(read_environment(started))  # where to meet, and to say so


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({**TORCHRUN, "RANK": "three"}, {}, "RANK is 'three'; it must be a whole number"),
        ({**TORCHRUN, "RANK": "4"}, {}, "rank 4 does not lie in a world of 4"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {}, "MASTER_ADDR is missing"),
        ({}, {"rank": 0}, "give both or neither"),
        ({}, {"rank": 0, "world_size": 2}, "MASTER_ADDR is missing"),
    ],
)
def test_a_wrong_environment_is_named(variables, arguments, message):
    with pytest.raises(ValueError, match=message):
        read_environment(variables, **arguments)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[003-007,12],login1", "gpu003"),
        ("node7", "node7"),
        ("a,b", "a"),
        ("n[1,3]", "n1"),
        ("r[2-3]-x", "r2-x"),
        ("rack[1-2]node[03-04],b", "rack1node03"),
    ],
)
def test_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


def test_the_rank_is_known_before_the_world_meets():
    srun = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}
    for variables, rank in (({}, 0), ({"RANK": "2"}, 2), (srun, 3), ({"OMPI_COMM_WORLD_RANK": "1"}, 1)):
        assert launched_rank(variables) == rank
    assert launched_rank({"SLURM_PROCID": "3"}) == 0  # of a job script, which is no task
