"""URLs that have become local paths, and stores that answer in their own ways."""

import os
import pathlib

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import par_checkpoint as pc
from par_checkpoint.storage.folder import open_folder


@pytest.mark.parametrize(
    "path",
    [
        pathlib.Path("s3://bucket/run"),
        pathlib.Path("gs://bucket") / "run",
        os.path.normpath("az://bucket/run"),
        pathlib.Path("own+store://bucket/run"),
        pathlib.Path("s3://bucket/run").absolute(),
        os.path.join("/mnt", os.path.normpath("hf://bucket/run")),  # noqa: PTH118 - what strangers write
        os.path.normpath("simplecache::s3://bucket/run"),
    ],
)
def test_save_to_a_url_that_became_a_path_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: pc.save(path, model={"w": torch.ones(2)}),
        lambda: pc.load(path, model={"w": torch.ones(2)}),
        lambda: pc.latest(path),
        lambda: pc.prune(path),
        lambda: pc.verify(path),
        lambda: pc.Checkpoints(path).load(model={"w": torch.ones(2)}),
        lambda: pc.save("step", model={"w": torch.ones(2)}, tiers=pc.Tiers([tmp_path / "near", path])),
    ):
        with pytest.raises(
            ValueError, match=r"this is a local path, made of the URL .*; pass the URL itself, as a str"
        ):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["~/run", "~"])
def test_save_to_a_folder_named_tilde_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a folder named '~' in the working directory; pass os.path.expanduser"):
        pc.save(path, model={"w": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a:b/x", "run/12:30/x", "./odd:/x", "C:/x", "12:/x"])
def test_names_with_colons_are_local_folders(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pc.save(name, model={"w": torch.ones(2)})
    assert pc.read_tensor(name, "w").tolist() == [1, 1]


class Buckets(MemoryFileSystem):
    """A file system that answers as those of buckets do: what is in no bucket cannot even be listed."""

    protocol = "fakebuckets"
    error: Exception = FileNotFoundError("b/missing/o")

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("fakebuckets://"))

    def _check(self, path):
        if self._strip_protocol(path).strip("/").split("/")[0] == "missing":
            raise self.error

    def ls(self, path, **kwargs):
        self._check(path)
        return super().ls(path, **kwargs)

    def find(self, path, **kwargs):
        self._check(path)
        return super().find(path, **kwargs)

    def pipe_file(self, path, *args, **kwargs):
        self._check(path)
        return super().pipe_file(path, *args, **kwargs)

    def makedirs(self, path, exist_ok=False):
        self._check(path)
        super().makedirs(path, exist_ok)


class ResourceNotFoundError(Exception):
    """As azure's client raises it."""


class HttpError(Exception):
    """As clients raise what they cannot name."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("b/missing/o"), "there is no such bucket, container or share"),
        (ResourceNotFoundError("ContainerNotFound"), "there is no such bucket, container or share"),
        (PermissionError("forbidden"), "the store refuses access"),
        (HttpError("418"), "the store fails"),
        (OSError(38, "not implemented"), "the store fails"),
    ],
)
def test_what_a_store_refuses_is_a_store_error(monkeypatch, error, words):
    monkeypatch.setattr(Buckets, "error", error)
    fsspec.register_implementation("fakebuckets", Buckets, clobber=True)
    model = {"w": torch.zeros(1)}
    pc.save("fakebuckets://there/run/step-00000001", model=model, overwrite=True)
    assert pc.latest("fakebuckets://there/run").endswith("step-00000001")
    assert pc.latest("fakebuckets://there/other") is None
    for act in (
        lambda: pc.latest("fakebuckets://missing/run"),
        lambda: pc.Checkpoints("fakebuckets://missing/run").load(model=model),
        lambda: pc.save("fakebuckets://missing/run/x", model=model),
        lambda: pc.load("fakebuckets://missing/run/x", model=model),
    ):
        with pytest.raises(pc.StoreError, match=f"fakebuckets://missing/.*{words}"):
            act()


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path):
    for root in ("memory://not-there-yet/run", f"file://{tmp_path}/not-there-yet/run"):
        assert open_folder(root).folders() == []
        assert pc.latest(root) is None
