"""The flight recorder sees every way to call a collective, and names the groups."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_groups import FlightRecorder, ProcessGroups, Topology, read_flight_trace, shorten_path

HERE = Path(__file__).name


def by_the_function(group):
    dist.all_reduce(torch.ones(3, 5), group=group)


def by_an_operator(group):
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_reduce(torch.ones(7), "sum", group.group_name))


def by_the_method(group):
    group.allreduce([torch.ones(2)]).wait()


@pytest.mark.ranks(4, backend="gloo")
def test_communicators_return_shapes_sites_and_states():
    rank = dist.get_rank()
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 4)) as groups:
        recorder = FlightRecorder(groups, last=3)
        before = recorder.begun()
        for call in (by_the_function, by_an_operator, by_the_method):
            call(groups["tensor"])
        assert sum(recorder.begun()) == sum(before) + 3
        waits = dist.all_reduce(torch.ones(11), group=groups["data"], async_op=True) if rank < 2 else None
        found = recorder.communicators()
        dist.barrier()  # the first two ranks have looked
        if rank >= 2:
            dist.all_reduce(torch.ones(11), group=groups["data"])
        assert {label: one.ranks for label, one in found.items()} == {
            "world": (0, 1, 2, 3),
            "data": groups.ranks("data"),
            "tensor": groups.ranks("tensor"),
        }
        assert [operation.shapes for operation in found["tensor"].operations] == [((3, 5),), ((7,),), ((2,),)]
        assert [operation.elements for operation in found["tensor"].operations] == [15, 7, 2]
        assert {operation.name for operation in found["tensor"].operations} == {"all_reduce"}
        numbers = [operation.number for operation in found["tensor"].operations]
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        for operation, function in zip(
            found["tensor"].operations, (by_the_function, by_an_operator, by_the_method), strict=True
        ):
            path, line = operation.sites[0].rsplit(":", 1)
            first = function.__code__.co_firstlineno
            assert (path.endswith(HERE), first < int(line) <= first + 2) == (True, True)
        if waits is not None:
            assert not found["data"].operations[-1].ended
            waits.wait()


@pytest.mark.ranks(2, backend="gloo")
def test_given_groups_are_read_by_their_labels():
    recorder = FlightRecorder({"mine": dist.new_group([0, 1]), "everybody": dist.group.WORLD})
    dist.broadcast(torch.ones(4, dtype=torch.float64), 0)
    found = recorder.communicators()
    assert found["everybody"].operations[-1].name == "broadcast"
    assert found["everybody"].operations[-1].dtypes == ("Double",)
    assert found["mine"].ranks == (0, 1)


@pytest.mark.ranks(4, backend="gloo")
def test_recorder_without_groups_reads_all_also_later_ones():
    recorder = FlightRecorder()
    before = recorder.begun()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
    dist.all_reduce(torch.ones(5), group=dist.new_group(range(4)))
    assert len(recorder.begun()) == len(before) + 3
    found = {one.label: one for one in recorder.communicators().values()}
    assert [found[label].operations[-1].elements for label in ("tp", "")] == [3, 5]
    assert {label: one.ranks for label, one in found.items()} == {
        "world": (0, 1, 2, 3),
        "dp": tuple(dist.get_process_group_ranks(mesh.get_group("dp"))),
        "tp": tuple(dist.get_process_group_ranks(mesh.get_group("tp"))),
        "": (0, 1, 2, 3),
    }


@pytest.mark.ranks(1)
def test_recorder_that_torch_has_off_has_a_reason(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    recorder = FlightRecorder({"world": dist.group.WORLD})
    assert "TORCH_FR_BUFFER_SIZE is 0" in recorder.missing
    assert recorder.communicators()["world"].operations == ()
    with pytest.raises(ValueError, match="last=0"):
        FlightRecorder({}, last=0)


def test_read_flight_trace_of_nccl_separates_messages():
    entry = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 4,
        "p2p_seq_id": 9,
        "is_p2p": False,
        "profiling_name": "nccl:_all_gather_base",
        "input_sizes": [[3, 4]],
        "input_dtypes": ["BFloat16"],
        "retired": False,
        "state": "completed",
        "time_created_ns": 5_000_000_000,
        "frames": [
            {"name": "all_gather", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "forward", "filename": "/nowhere/model.py", "line": 7},
        ],
    }
    message = {**entry, "is_p2p": True, "profiling_name": "nccl:send 1->0", "state": "scheduled", "frames": []}
    gathered, sent = read_flight_trace({"entries": [entry, message]}, 10)["0"].operations
    assert (gathered.number, gathered.name, gathered.elements, gathered.ended) == (4, "all_gather", 12, True)
    assert (gathered.began, gathered.sites) == (5.0, ("/nowhere/model.py:7",))
    assert (sent.number, sent.name, sent.ended, sent.is_message) == (9, "send 1->0", False, True)
    assert [one.number for one in read_flight_trace({"entries": [entry] * 3}, 2)["0"].operations] == [4, 4]
    assert read_flight_trace({}, 2) == {}


def test_shorten_path_starts_below_the_longest_sys_path(monkeypatch):
    monkeypatch.setattr("sys.path", ["", "/a", "/a/b"])
    assert shorten_path("/a/b/package/module.py") == "package/module.py"
    assert shorten_path("/elsewhere/module.py") == "/elsewhere/module.py"
