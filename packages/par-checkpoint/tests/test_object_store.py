"""Checkpoints on S3: moto's server in a process of its own, and a proxy before it that counts, breaks and kills."""

import itertools
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import (
    CheckpointError,
    CorruptError,
    Format,
    StoreError,
    Transfer,
    inspect,
    latest,
    load,
    prune,
    read_tensor,
    save,
    verify,
)
from par_checkpoint.storage import remote
from par_checkpoint.storage.files import REACH
from par_checkpoint.storage.folder import open_folder
from par_checkpoint.storage.objects.requests import load_requests, save_requests
from par_checkpoint.storage.steps import read_manifest
from par_checkpoint.transfer.read import window_of
from par_groups import Box, Sharding
from par_testing import storm

from . import stores

pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")

MIB = 1 << 20
SCALE = 64
"""All sizes of these tests are a 64th of what they would be against a real store, whose parts have 8 MiB."""
PART = 8 * MIB // SCALE
UNIT = MIB // SCALE


@pytest.fixture(scope="session")
def server():
    """One server for all tests of this process; each has an empty bucket."""
    running = stores.Server()
    yield running
    running.close()


@pytest.fixture(scope="session")
def proxy(server):
    """One proxy for all tests of this process: a client of another address takes a quarter of a second to make."""
    running = stores.Proxy(server.port)
    forget()
    yield running
    running.close()
    forget()


@pytest.fixture
def store(server, proxy, monkeypatch):
    """A proxy before the server, and an environment in which s3:// leads there."""
    for name, value in stores.settings(proxy.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # so that it is our own patience that is tested, and a short one
    monkeypatch.setattr("par_checkpoint.storage.objects.store._FIRST_WAIT", 0.01)
    monkeypatch.setattr("par_checkpoint.storage.remote.PART", PART)
    stores.make_bucket(server.url)
    proxy.start()
    yield proxy
    proxy.start()


def forget():
    """Lets go of clients of other endpoints."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


ROOT = f"s3://{stores.BUCKET}/run"


def size(megabytes):
    """The size of a file's limit, on the scale of these tests."""
    return int(megabytes * 10**6) // SCALE


def weights(seed=0, rows=640):
    """Five tensors in two files of two parts each, if `size(20)` is a file's limit."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(rows, 32, generator=generator) for i in range(5)}


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def objects(address):
    """The bytes of every object, and the uploads that nobody has ended."""
    client = stores.client(address)
    listed = client.list_objects_v2(Bucket=stores.BUCKET).get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=stores.BUCKET).get("Uploads", [])
    return {each["Key"]: each["Size"] for each in listed}, [each["Key"] for each in uploads]


def files_of(url):
    """What the manifest says of each file, and the formulas ask for."""
    return read_manifest(open_folder(url)).files


QUIET = Transfer(progress=False)
SMALL = {"format": Format(max_shard_size=size(5)), "transfer": QUIET}
WITH_CONFIG = Format(max_shard_size=size(20), config={"a": 1})
OPTIONS = {"format": Format(max_shard_size=size(20)), "transfer": QUIET}


def put_by(requests, name):
    """The places in a list of requests of those that put an object of this name."""
    return [n for n, each in enumerate(requests) if each.kind == "PutObject" and each.path.endswith(f"/{name}")]


def test_a_save_and_a_load_make_the_requests_of_the_formula_and_move_its_bytes(store, server):
    url, before = f"{ROOT}/step-00000001", {}
    for overwrite in (False, True):
        model = weights(int(overwrite))
        store.start()
        save(
            url,
            model=model,
            overwrite=overwrite,
            extra={"x": torch.ones(3)},
            format=WITH_CONFIG,
            transfer=QUIET,
        )
        requests = list(store.requests)
        replaced = sum("/generation-" in key for key in before)
        expected = save_requests(files_of(url), beside=1, before=len(before), replaced=replaced)
        assert counts_of(requests) == expected.by_kind
        data = sum(
            each.sent for each in requests if "/generation-" in each.path and each.kind in ("PutObject", "UploadPart")
        )
        assert expected.data <= data < expected.data + 4096, "the index for transformers and config.json are no data"
        [manifest] = put_by(requests, "par_checkpoint.json")
        assert not {each.kind for each in requests} & {"CopyObject", "DeleteObject"}
        assert "DeleteObjects" not in {each.kind for each in requests[:manifest]}
        assert overwrite or manifest == len(requests) - 1, "the manifest is the last of all"
        before, uploads = objects(server.url)
        assert not uploads
        assert len({key.split("/")[2] for key in before if "/generation-" in key}) == 1
    found, objects_there = zeros(model), len(before)
    store.start()
    report = load(url, model=found)
    requests = list(store.requests)
    assert_equal(found, model)
    assert torch.equal(report.extra["x"], torch.ones(3))
    files = files_of(url)
    window = window_of(sum(each.size for each in files.values()), 256 * 10**6, PART, 1, 16)
    expected = load_requests(files, window=window, objects=objects_there)
    assert counts_of(requests) == expected.by_kind
    received = sum(each.received for each in requests if "/generation-" in each.path)
    assert received == expected.data


def counts_of(requests):
    counts = {}
    for each in requests:
        counts[each.kind] = counts.get(each.kind, 0) + 1
    return counts


def test_long_files_are_read_in_long_ranges_and_short_ones_in_sixteen_at_a_time(store, monkeypatch):
    assert REACH == 64 * MIB
    monkeypatch.setattr("par_checkpoint.transfer.read.REACH", 3 * PART)  # so that six parts are many
    model = {"w": torch.arange(6 * PART // 4, dtype=torch.float32)}
    save(f"{ROOT}/c", model=model, **OPTIONS)
    for in_flight, expected in ((16, [PART] * 6), (4, [2 * PART] * 3), (1, [3 * PART] * 2)):
        monkeypatch.setattr("par_checkpoint.storage.remote.RemoteFolder.in_flight", in_flight)
        store.start()
        found = zeros(model)
        load(f"{ROOT}/c", model=found)
        assert_equal(found, model)
        assert sorted(each.received for each in store.requests if each.received >= UNIT) == expected


def test_sixteen_requests_of_a_rank_are_with_the_store_at_a_time(store):
    """The store answers none of them before all are there: neither threads nor connections are fewer."""
    model = {f"w{number}": torch.zeros(250) for number in range(16)}  # each in a file of its own
    transfer = Transfer(budget="512MB", progress=False)  # has room for sixteen parts of 8 MiB
    files = Format(max_shard_size="1KB")
    save(f"{ROOT}/a", model=model, format=files, transfer=transfer)
    for act, kind, before in (
        (
            lambda: save(f"{ROOT}/b", model=model, format=Format(max_shard_size="1KB"), transfer=transfer),
            "PutObject",
            0,
        ),
        (lambda: load(f"{ROOT}/a", model=model, transfer=transfer), "GetObject", 16),  # a load asks for headers first
    ):
        together, asked = threading.Barrier(16, timeout=240), itertools.count()

        def seen(request, kind=kind, before=before, together=together, asked=asked):
            is_data = request.kind == kind and request.path.endswith(".safetensors")
            if is_data and next(asked) >= before:
                together.wait()

        store.start(seen=seen)
        act()
        assert next(asked) == before + 16
        assert not together.broken


def test_latest_looks_at_manifests_and_a_step_without_one_does_not_count(store):
    for step in (1, 2, 3):
        save(f"{ROOT}/step-{step:08}", model=weights(step, 8), step=step, **OPTIONS)
    stores.client(os.environ["AWS_ENDPOINT_URL"]).delete_object(
        Bucket=stores.BUCKET, Key="run/step-00000003/par_checkpoint.json"
    )
    store.start()
    assert latest(ROOT) == f"{ROOT}/step-00000002"
    # Steps, and two folders; a manifest that is not there, twice; the index beside it; the manifest of the other step.
    assert store.count() == {"ListObjectsV2": 3, "GetObject": 4}
    assert inspect(f"{ROOT}/step-00000002").step == 2
    box = Box((2, 3), (4, 5), 0, (5, 1), (0,))
    assert torch.equal(read_tensor(f"{ROOT}/step-00000002", "w1", box), weights(2, 8)["w1"][2:6, 3:8])


@pytest.mark.parametrize(
    "faults",
    [
        {
            "fail": {
                "UploadPart": 2,
                "CreateMultipartUpload": 1,
                "CompleteMultipartUpload": 1,
                "PutObject": 2,
                "ListParts": 1,
            }
        },
        {"fail": {"ListParts": 1, "ListObjectsV2": 1, "ListMultipartUploads": 1, "DeleteObjects": 1, "GetObject": 2}},
        storm({"cut": 3}),
        storm({"short": 3}),
        {"cut": 1, "short": 1, "slow": 0.03},
    ],
)
def test_a_store_in_trouble_for_a_moment_is_asked_again(store, faults):
    url = f"{ROOT}/c"
    save(url, model=weights(1), **OPTIONS)
    store.start(**faults)
    save(url, model=weights(2), overwrite=True, **OPTIONS)
    found = zeros(weights())
    load(url, model=found)
    assert_equal(found, weights(2))
    assert not store.faults.cut
    assert not store.faults.short
    assert not any(store.faults.fail.values())
    store.start()
    assert verify(url) == []


def test_a_store_that_stays_in_trouble_is_a_typed_error_and_the_old_is_there(store, impatient):
    url = f"{ROOT}/c"
    save(url, model=weights(1), **OPTIONS)
    for kind in ("UploadPart", "CompleteMultipartUpload", "PutObject"):
        store.start(fail={kind: 1000})
        with pytest.raises(StoreError, match=r"the store failed .* times"):
            save(url, model=weights(2), overwrite=True, **OPTIONS)
        store.start()
        found = zeros(weights())
        load(url, model=found)
        assert_equal(found, weights(1))
    found = zeros(weights())
    store.start(cut=1000)
    with pytest.raises(StoreError, match=r"the store failed .* times") as caught:
        load(url, model=found)
    assert "undefined" not in str(caught.value), "no header has come"
    assert_equal(found, zeros(weights()))
    for how in ("auto", "full"):
        headers = itertools.count(1)

        def cut_data(request, headers=headers):
            if request.path.endswith(".safetensors") and next(headers) == 2:
                store.faults.cut = 1000

        store.start(seen=cut_data)
        with pytest.raises(StoreError, match=r"the store failed .* times") as caught:
            load(url, model=found, verify=how)
        assert ("is now undefined: load it again, or another" in str(caught.value)) == (how == "auto")
    store.start()
    load(url, model=found)
    assert_equal(found, weights(1))


@pytest.fixture
def impatient(monkeypatch):
    """Nothing is tried for long: what is dropped stays dropped."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr("par_checkpoint.storage.objects.store.TRIES", 1)


def save_and_die(store, url, seed, number, *, passed_on, overwrite):
    """Whether a save whose client dies at a request, as the store sees it, came so far."""
    store.start(**{"die_after" if passed_on else "die_before": number})
    try:
        save(
            url,
            model=weights(seed, 30),
            overwrite=overwrite,
            format=Format(max_shard_size=size(0.5), config={"seed": seed}),
            transfer=Transfer(progress=False),
        )
    except Exception:
        assert store.dead
    died = store.dead
    store.start()
    return died


def seed_at(url):
    """The seed of the checkpoint that is there whole, as par-checkpoint reads it; None if none is."""
    if latest(url.rpartition("/")[0]) is None:
        return None
    assert verify(url) == []
    found = zeros(weights(0, 30))
    load(url, model=found)
    [seed] = [seed for seed in (1, 2) if torch.equal(found["w0"], weights(seed, 30)["w0"])]
    assert_equal(found, weights(seed, 30))
    return seed


def seed_shown(server, url):
    """The seed of what transformers would open: the config's, if every file of the index is there; None without one."""
    client, prefix = stores.client(server.url), url.removeprefix(f"s3://{stores.BUCKET}/")

    def get(name):
        return json.loads(client.get_object(Bucket=stores.BUCKET, Key=f"{prefix}/{name}")["Body"].read())

    there = {key.removeprefix(f"{prefix}/") for key in objects(server.url)[0]}
    if "model.safetensors.index.json" not in there:
        return None
    names = set(get("model.safetensors.index.json")["weight_map"].values())
    if not names <= there or "config.json" not in there:
        return None
    return names


KILLS = range(1, 60)
SAMPLE = {"save": (4, 12), "overwrite": (11, 14)}  # the manifest is the 12th and the 11th; 14 requests are the most


@pytest.mark.parametrize("mode", ["save", storm("overwrite")])
def test_killed_at_some_requests_of_a_save_the_old_or_the_new_is_whole(store, server, impatient, mode):
    assert killed_at(store, server, mode, SAMPLE[mode]) is None, "it makes as many requests as the sample says"


@pytest.mark.storm
@pytest.mark.parametrize("mode", ["save", "overwrite"])
def test_killed_at_every_request_of_a_save_the_old_or_the_new_is_whole(store, server, impatient, mode):
    assert killed_at(store, server, mode, KILLS) == SAMPLE[mode][-1] + 1


def killed_at(store, server, mode, numbers):
    """Saves whose client dies at each of some requests, before or after the store has done what was asked.

    Returns:
        The first of the numbers at which no client died, as a save makes fewer requests; None if there is none.
    """
    seen, last = [], None
    for number in numbers:
        for passed_on in (False, True):
            root = f"{ROOT}/{mode}-{number}-{passed_on}"
            url = f"{root}/step-00000001"
            if mode == "overwrite":
                first = Format(max_shard_size=size(0.5), config={"seed": 1})
                save(url, model=weights(1, 30), format=first, transfer=QUIET)
            if not save_and_die(store, url, 2, number, passed_on=passed_on, overwrite=mode == "overwrite"):
                assert seed_at(url) == 2
                last = number
                break
            old = 1 if mode == "overwrite" else None
            found = seed_at(url)
            assert found in (old, 2), number
            if old is not None or found is not None:
                assert seed_shown(server, url), "transformers finds all files that the index names"
            seen.append(found)
            save(url, model=weights(1, 30), overwrite=found is not None, **SMALL)
            assert seed_at(url) == 1
            there, uploads = objects(server.url)
            assert not [key for key in uploads if key.startswith(root.removeprefix(f"s3://{stores.BUCKET}/"))]
            mine = [key.split("/")[3] for key in there if f"/{mode}-{number}-{passed_on}/" in key]
            assert len({name for name in mine if name.startswith("generation-")}) == 1, (
                "what the dead save left is gone"
            )
        if last is not None:
            break
    assert seen == sorted(seen, key=lambda seed: seed == 2), "the new one never goes again"
    assert {1 if mode == "overwrite" else None, 2} == set(seen)
    return last


def test_killed_at_some_requests_of_a_prune_a_step_is_whole_or_gone(store, server, impatient):
    killed_in_prune_at(store, server, (9, 10))


@pytest.mark.storm
def test_killed_at_every_request_of_a_prune_a_step_is_whole_or_gone(store, server, impatient):
    assert 5 < killed_in_prune_at(store, server, range(1, 40)) < 39


def killed_in_prune_at(store, server, numbers):
    """Prunes whose client dies at each of some requests; the number of requests, if it is among them."""
    for passed_on in (False, True):
        for number in numbers:
            root = f"{ROOT}/prune-{number}-{passed_on}"
            for step in (1, 2):
                save(
                    f"{root}/step-{step:08}",
                    model=weights(step, 8),
                    format=Format(config={}),
                    transfer=Transfer(progress=False),
                )
            store.start(**{"die_after" if passed_on else "die_before": number})
            try:
                prune(root, keep_last=1)
            except Exception:
                assert store.dead
            done = not store.dead
            store.start()
            assert latest(root) == f"{root}/step-00000002"
            assert verify(f"{root}/step-00000002") == []
            if stores.has(server.url, f"{root}/step-00000001/par_checkpoint.json"):
                assert verify(f"{root}/step-00000001") == []
            prune(root, keep_last=1)
            assert not [key for key in objects(server.url)[0] if f"{root.rpartition('/')[2]}/step-00000001" in key]
            if done:
                break
    return number


def test_a_first_save_that_dies_is_swept_by_prune(store, server, impatient):
    save(f"{ROOT}/step-00000002", model=weights(2, 30), **SMALL)
    assert save_and_die(store, f"{ROOT}/step-00000001", 1, 11, passed_on=True, overwrite=False)
    assert prune(ROOT, keep_last=1)
    there, uploads = objects(server.url)
    assert not uploads
    assert not [key for key in there if "/step-00000001/" in key]
    assert seed_at(f"{ROOT}/step-00000002") == 2


def test_what_the_store_refuses_is_said_in_words(store, monkeypatch):
    save(f"{ROOT}/c", model=weights(1, 8), **OPTIONS)
    with pytest.raises(StoreError, match=r"s3://nobody/c: there is no such bucket; create it, or check its name"):
        save("s3://nobody/c", model=weights(1, 8), **OPTIONS)
    with pytest.raises(StoreError, match="no such bucket"):
        latest("s3://nobody/run")
    store.start(refuse=("CreateMultipartUpload",))
    with pytest.raises(
        StoreError, match=r"cannot put files together from parts .* writer='owner' and max_shard_size='40MB'"
    ):
        save(f"{ROOT}/c", model=weights(2), overwrite=True, **OPTIONS)
    save(
        f"{ROOT}/d",
        model=weights(2),
        format=Format(max_shard_size="40MB"),
        transfer=Transfer(progress=False, writer="owner"),
    )
    found = zeros(weights())
    load(f"{ROOT}/d", model=found)
    assert_equal(found, weights(2))
    store.start(forbid=True)
    for act in (lambda: save(f"{ROOT}/c", model=weights(2, 8), overwrite=True, **OPTIONS), lambda: latest(ROOT)):
        with pytest.raises(StoreError, match=r"the store refuses access .*; check the credentials"):
            act()
    store.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    forget()
    with pytest.raises(StoreError, match=r"there are no credentials .*; set AWS_ACCESS_KEY_ID"):
        load(f"{ROOT}/c", model=zeros(weights(1, 8)))
    for name, value in stores.settings(store.url).items():
        monkeypatch.setenv(name, value)
    forget()
    assert verify(f"{ROOT}/c") == []


@pytest.mark.parametrize(
    ("unknown", "writer"),
    [
        ("ListMultipartUploads", "auto"),
        ("DeleteObjects", "owner"),
        storm("ListMultipartUploads", "owner"),
        storm("DeleteObjects", "auto"),
    ],
)
def test_save_needs_no_request_that_some_stores_lack(store, unknown, writer):
    store.start(refuse=(unknown,))
    for seed in range(2):
        state = weights(seed, 300)  # of two parts, so that an upload of several is needed
        save(f"{ROOT}/lacks", model=state, overwrite=True, transfer=Transfer(progress=False, writer=writer))
    found = zeros(weights(0, 300))
    load(f"{ROOT}/lacks", model=found)
    assert_equal(found, weights(1, 300))
    store.start(refuse=("ListObjectsV2",))
    with pytest.raises(StoreError, match="the store does not know the request list_objects_v2"):
        load(f"{ROOT}/lacks", model=found)


def swap(server, url, other):
    """Another checkpoint takes the place of the one at a URL, as the end of a save does it."""
    client, prefix = stores.client(server.url), url.removeprefix(f"s3://{stores.BUCKET}/")
    before = [key for key in objects(server.url)[0] if key.startswith(f"{prefix}/generation-")]
    for key in sorted(objects(server.url)[0]):  # generations before the manifest
        if key.startswith(f"{other}/"):
            source = {"Bucket": stores.BUCKET, "Key": key}
            client.copy_object(Bucket=stores.BUCKET, Key=key.replace(other, prefix, 1), CopySource=source)
    for key in before:
        client.delete_object(Bucket=stores.BUCKET, Key=key)


@pytest.mark.parametrize("kind", ["ListObjectsV2", "GetObject"])
def test_what_is_replaced_while_it_is_read_is_wholly_the_new_one(store, server, kind):
    """Between the manifest and the list of what is there, and between that and the first header."""
    url = f"{ROOT}/c"
    save(url, model=weights(1, 300), **SMALL)
    save(f"s3://{stores.BUCKET}/other", model=weights(2, 300), **SMALL)
    replaced = []

    def replace(request):
        if request.kind == kind and not request.path.endswith("par_checkpoint.json") and not replaced:
            replaced.append(request)
            swap(server, url, "other")

    store.start(seen=replace)
    found = zeros(weights(0, 300))
    load(url, model=found)
    assert replaced
    assert_equal(found, weights(2, 300))


@pytest.mark.parametrize("number", [1, 2])
def test_a_generation_that_disappears_while_it_is_read_is_an_error_that_names_the_file(store, server, number):
    """Before the header has come, when nothing is changed, and before the data."""
    url = f"{ROOT}/step-00000001"
    save(url, model=weights(1, 8), **OPTIONS)
    asked = itertools.count(1)

    def remove(request):
        if request.path.endswith(".safetensors") and next(asked) == number:
            client = stores.client(server.url)
            for key in objects(server.url)[0]:
                if "/generation-" in key:
                    client.delete_object(Bucket=stores.BUCKET, Key=key)

    store.start(seen=remove)
    found = zeros(weights(0, 8))
    with pytest.raises(CorruptError, match=r"model\.safetensors is missing: restore it, or load another") as caught:
        load(url, model=found)
    assert ("is now undefined: load it again, or another" in str(caught.value)) == (number == 2)
    assert_equal(found, zeros(weights(0, 8)))
    with pytest.raises(CorruptError, match=r"model\.safetensors is missing; bring it back, or take another"):
        load(url, model=found)
    assert latest(ROOT) is None


@pytest.mark.storm  # what a load had read by then depends on time
def test_a_save_takes_the_place_of_what_is_being_read(store, server):
    url = f"{ROOT}/c"
    save(url, model=weights(1), **OPTIONS)
    replaced = []

    def replace(request):
        if request.kind == "GetObject" and request.path.endswith("model-00001-of-00002.safetensors") and not replaced:
            replaced.append(1)
            save_elsewhere(server, url, 2)

    store.start(seen=replace)
    found = zeros(weights())
    load(url, model=found)
    assert replaced
    assert_equal(found, weights(1 if torch.equal(found["w0"], weights(1)["w0"]) else 2))  # wholly the old or the new


def save_elsewhere(server, url, seed):
    """A save by another process."""
    code = (
        f"from tests.test_object_store import weights, OPTIONS; from par_checkpoint import save; "
        f"save({url!r}, model=weights({seed}), overwrite=True, **OPTIONS)"
    )
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(here), *sys.path])
    environment = {**os.environ, **stores.settings(server.url), "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def sync(server, key, folder, skip=()):
    """What a tool that knows nothing of checkpoints does: every object becomes a file."""
    client = stores.client(server.url)
    for name in objects(server.url)[0]:
        path = folder / name.removeprefix(f"{key}/")
        if name.startswith(f"{key}/") and path.name not in skip:
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(stores.BUCKET, name, str(path))


def test_a_folder_that_was_synced_is_a_checkpoint(store, server, tmp_path):
    url = f"{ROOT}/step-00000001"
    save(url, model=weights(1), format=WITH_CONFIG, transfer=QUIET)
    sync(server, "run", tmp_path)
    path = tmp_path / "step-00000001"
    assert latest(tmp_path) == str(path)
    assert verify(path) == []
    found = zeros(weights())
    load(path, model=found)
    assert_equal(found, weights(1))
    save(path, model=weights(2), overwrite=True, **OPTIONS)
    load(path, model=found)
    assert_equal(found, weights(2))
    assert not list(path.glob("generation-*"))


def test_what_was_synced_by_half_is_refused_and_changes_nothing(store, server, tmp_path):
    save(f"{ROOT}/c", model=weights(1, 300), **SMALL)
    found, last = zeros(weights(0, 300)), "model-00003-of-00003.safetensors"

    def refused(name, error, text):
        with pytest.raises(error, match=text):
            load(tmp_path / name, model=found)
        assert_equal(found, zeros(weights(0, 300)))
        assert latest(tmp_path) is None

    sync(server, "run/c", tmp_path / "step-1", skip=(last,))
    refused("step-1", CorruptError, r"model-00003-of-00003\.safetensors is missing; bring it back, or take another")
    sync(server, "run/c", tmp_path / "step-2")
    [file] = (tmp_path / "step-2").glob(f"generation-*/{last}")
    os.truncate(file, 1000)
    refused("step-2", CorruptError, r"has 1000 bytes, but .* were written; it is truncated or was replaced")
    sync(server, "run/c", tmp_path / "step-3", skip=("par_checkpoint.json",))
    refused("step-3", CheckpointError, "generation-")
    save(f"{ROOT}/c", model=weights(2, 300), overwrite=True, **SMALL)
    sync(server, "run/c", tmp_path / "step-3", skip=[each.name for each in (tmp_path / "step-2").rglob("model-*")])
    refused("step-3", CorruptError, r"model-00001-of-00003\.safetensors is missing; bring it back, or take another")


def test_transformers_opens_a_synced_folder(store, server, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    for limit in ("1GB", "20KB"):
        torch.manual_seed(len(limit))
        model = transformers.LlamaForCausalLM(config)
        save(
            f"{ROOT}/c",
            model=model,
            optimizer=None,
            overwrite=True,
            format=Format(max_shard_size=limit),
            transfer=Transfer(progress=False),
        )
        folder = tmp_path / limit
        sync(server, "run/c", folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert_equal(again.state_dict(), model.state_dict())
        inside = transformers.AutoModelForCausalLM.from_pretrained(next(folder.glob("generation-*")))
        assert_equal(inside.state_dict(), model.state_dict())


@pytest.fixture(scope="session")
def address(server):
    """Where the server listens, for tests whose body runs in other processes."""
    return server.url


def shared_proxy(address):
    """On every rank an environment that leads to rank 0's proxy before the server; there, the proxy."""
    proxy, told = None, [None]
    if dist.get_rank() == 0:
        stores.make_bucket(address)
        proxy = stores.Proxy(urlsplit(address).port)
        told = [proxy.url]
    dist.broadcast_object_list(told)
    os.environ.update(stores.settings(told[0]))
    remote.PART = PART  # of this process, which ends with the test
    return proxy


@pytest.mark.ranks(2)
def test_two_ranks_write_one_file_in_parts_and_each_error_reaches_both(address):
    proxy = shared_proxy(address)
    rank, whole = dist.get_rank(), weights(3)
    half = 16 * rank
    local = {name: tensor[:, half : half + 16].clone() for name, tensor in whole.items()}
    layout = {name: Sharding((640, 32), (Box((0, half), (640, 16), 0, (16, 1), (rank,)),)) for name in whole}
    url = f"{ROOT}/c"
    for async_ in (False, True):
        if rank == 0:
            proxy.start()
        dist.barrier()
        save(
            url,
            model=local,
            overwrite=async_,
            async_=async_,
            format=Format(layout=layout),
            transfer=Transfer(progress=False),
        ).wait()
        if rank == 0:
            expected = save_requests(files_of(url), before=0 if not async_ else 4, replaced=2 if async_ else 0)
            counts = proxy.count()
            counts["GetObject"] = counts.get("GetObject", 0) - 1  # for the files, here
            counts["ListObjectsV2"] -= 1
            assert {kind: n for kind, n in counts.items() if n} == expected.by_kind
            assert verify(url) == []
        dist.barrier()
    found = zeros(local)
    load(url, model=found, format=Format(layout=layout))
    assert_equal(found, local)
    found = zeros(whole)
    load(url, model=found)
    assert_equal(found, whole)
    if rank == 0:
        proxy.start(refuse=("UploadPart",))
    dist.barrier()
    with pytest.raises(StoreError, match="cannot put files together from parts"):
        save(url, model=local, overwrite=True, format=Format(layout=layout), transfer=QUIET)
    dist.barrier()
    if rank == 0:
        proxy.start(forbid=True)
    dist.barrier()
    for act in (partial(save, overwrite=True), load):
        with pytest.raises(StoreError, match=r"the store refuses access .*; check the credentials"):
            act(url, model=local, format=Format(layout=layout), transfer=QUIET)
    dist.barrier()
    if rank == 0:
        proxy.start()
    dist.barrier()
    for act in (save, load):
        with pytest.raises(StoreError, match="there is no such bucket; create it, or check its name"):
            act("s3://nobody/c", model=local, format=Format(layout=layout), transfer=QUIET)
    load(url, model=found)
    if rank == 0:
        assert not objects(address)[1]


@pytest.mark.ranks(8)
def test_eight_ranks_of_one_host_read_each_byte_once(address):
    proxy = shared_proxy(address)
    whole, url = weights(3, 1024), f"{ROOT}/c"
    if dist.get_rank() == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        save(url, model=whole, group=alone, format=Format(max_shard_size=size(20)), transfer=QUIET)
        proxy.start()
    dist.barrier()
    for budget in (size(64), size(256)):
        found = zeros(whole)
        load(url, model=found, transfer=Transfer(budget=budget))
        assert_equal(found, whole)
        dist.barrier()
        if dist.get_rank() == 0:
            requests, files = list(proxy.requests), files_of(url)
            total = sum(each.size for each in files.values())
            window = window_of(total, budget, PART, 8, 16)
            expected = load_requests(files, window=window)
            assert sum(each.received for each in requests if "/generation-" in each.path) == expected.data
            assert counts_of(requests) == expected.by_kind
            proxy.start()
        dist.barrier()
