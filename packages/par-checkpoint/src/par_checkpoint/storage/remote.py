"""Folders on object stores and other remote file systems, through fsspec, and how a save commits there.

Nothing is renamed or copied here: an object is written once, where it stays. A checkpoint is a **generation**, a prefix
below the target that no other save uses, and the manifest in the target itself, which names it:

    step-100/par_checkpoint.json                                the manifest, which names the files
    step-100/model.safetensors.index.json, config.json, ...     for Transformers; the index names the files
    step-100/generation-0123456789ab/model-00001-of-00002.safetensors, ..., optimizer/...

A save works in this order:

1. All files are written below the new generation, which no reader knows yet.
2. The manifest is put into the target. This one request is the commit.
3. The files that transformers opens (index, config, tokenizer) are put into the target.
4. The objects of the old generation are removed.

Readers use only the manifest. So after any kill they find the complete old checkpoint before step 2, and the complete
new one afterwards. transformers does not read the manifest. It finds the old checkpoint before the last request of step
3, and then the new one. If the path was empty, step 3 precedes step 2, so that the manifest is the last object. The
next save, or `prune`, corrects what a dead saver has left: it removes generations that no manifest names, and repeats
step 3.

To remove a checkpoint, the files that Transformers opens go first, then the manifest, then the data. So after a kill it
is either complete or gone.

There are no locks: if two savers write to one path, one of them fails.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from .._errors import CheckpointError, StoreError
from ..format.manifest import (
    BLOCK,
    GENERATION,
    MANIFEST,
    OPTIMIZER,
    TEMPLATES,
    Manifest,
    beside_in,
    decode_manifest,
    generation_in,
)
from .files import IN_FLIGHT, FileSource, Writer
from .objects.s3 import MOST_PARTS, PART, S3PartsWriter, S3Store, UploadParts, client_options
from .objects.store import FsspecStore, Store, UnderWay, missing
from .owned import BEGUN, SHOWN, check_name, check_replaceable, is_beside_weights, is_data, is_of_tokenizer
from .sharing import Sharing


class RemoteFolder:
    """A folder of a file system that fsspec opens, see `Folder`.

    Args:
        url: The folder's URL.
        at: Function that is called with the name of each step of a commit.
    """

    cached = False
    stages_beside = False
    dangling = ()
    settles = 0.0
    in_flight = IN_FLIGHT

    def __init__(self, url: str, *, at: Callable[[str], None]) -> None:
        scheme, _, rest = url.partition("://")
        self.url, self.at = f"{scheme}://{rest.rstrip('/')}", at
        fs, path = url_to_fs(url, **client_options(scheme))
        self.path = str(path).rstrip("/")
        self.store: Store = (S3Store if hasattr(fs, "call_s3") else FsspecStore)(fs, self.url)
        self.positional = self.store.joins
        self.sharing = Sharing.RANGES if self.positional else Sharing.FILES
        self._seen: _SeenManifest | None = None
        self._manifest = b"", ""  # its bytes and its tag, as they were read the last time

    def block(self, size: int) -> int:
        """Return the block size of a file with `size` bytes of data.

        Blocks of a file that several ranks write are its parts.
        """
        # An upload has at most 10,000 parts, so a larger file has larger blocks.
        return PART * -(-size // (PART * MOST_PARTS)) if self.positional and size else BLOCK

    def recover(self) -> None:
        """Looks anew, at the next access, which generation is the checkpoint."""
        self._seen = None

    def use(self, manifest: Manifest | None) -> None:
        """Read from now on what this manifest names, as another rank has found it, without a look."""
        self._seen = None
        if manifest is not None:
            sizes = {name: record.size for name, record in manifest.files.items()}
            inside, root = ({manifest.generation: sizes}, {}) if manifest.generation else ({}, sizes)
            self._seen = _SeenManifest(manifest=b"", generation=manifest.generation, root=root, generations=inside)

    def repair(self) -> None:
        """Find the old checkpoint again, as `recover` does."""
        self.recover()

    def version(self) -> str | None:
        """Return a text that changes when the manifest is replaced; None without a manifest."""
        try:
            data, _ = self._manifest = self.store.get_tagged(f"{self.path}/{MANIFEST}")
        except FileNotFoundError:
            return None
        return f"{generation_in(data)} {len(data)} {data[:32]!r}"  # it begins with its checksum

    def exists(self) -> bool:
        """Return whether any file exists, except unfinished uploads."""
        return bool(self.look().visible)

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in the folder and in the subfolders that checkpoints have, in bytes."""
        files = self.look().visible
        if not files:
            raise CheckpointError(f"there is no folder {self.url}: check the path")
        return {name: size for name, size in files.items() if name[: name.rfind("/") + 1] in ("", OPTIMIZER, TEMPLATES)}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes begin .. end - 1 of a file, by default all."""
        if name == MANIFEST:
            if not self.look().manifest:
                raise missing(f"{self.url}/{name}")
            return self.look().manifest[begin:end]
        with closing(self.open(name)) as source:
            data = bytearray((source.size if end is None else end) - begin)
            source.read_into(begin, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> FileSource:
        """Open a file to read."""
        seen = self.look()
        where = f"{self.path}/{seen.generation}" if name in seen.inside else self.path
        return self.store.open(f"{where}/{check_name(name)}", seen.visible.get(name))

    def folders(self) -> list[str]:
        """Return the names of the folders in it."""
        return self.store.folders(self.path)

    def child(self, name: str) -> "RemoteFolder":
        """Return a folder in it."""
        return RemoteFolder(f"{self.url}/{check_name(name)}", at=self.at)

    def stage(self, nonce: str, *, by_owner: bool = True) -> "RemoteStaging":
        """Return a handle for the new generation of a save; changes nothing."""
        if "/" not in self.path:
            raise ValueError(f"{self.url!r} is no folder with a name of its own: save to a folder below it")
        return RemoteStaging(self, f"generation-{nonce}", by_owner=by_owner)

    def check_target(self, *, overwrite: bool) -> None:
        """Raise an error if the current content must not be replaced."""
        seen = self.look()
        if seen.visible and not overwrite:
            raise FileExistsError(f"{self.url!r} exists; pass overwrite=True to replace it, or choose another path")
        check_replaceable(self.url, seen.visible, seen.manifest or None)

    def remove(self) -> None:
        """Remove the checkpoint: first the files that transformers opens, then the manifest, then all other objects."""
        self.recover()
        seen = self.look()
        # transformers would otherwise find an index whose files are gone.
        self.store.delete(self.path, sorted(name for name in seen.root if name != MANIFEST and seen.generation))
        self.at("hidden")
        self.store.delete(self.path, [MANIFEST])
        self.at("removed")
        self.store.delete(self.path, seen.root)
        self.recover()
        self.sweep()

    def sweep(self, *, dry_run: bool = False, of: str = "") -> list[str]:
        """Remove generations and uploads that dead savers left, and return the paths of the removed generations.

        A running saver cannot be distinguished from a dead one.

        Args:
            dry_run: Whether to remove nothing.
            of: Generation of the saver that sweeps, which may begin uploads concurrently; "": no saver.
        """
        seen = self.look()
        if not seen.is_sound:  # it may name any of the generations
            return []
        dead = sorted(name for name in seen.generations if name != seen.generation)
        paths = dict.fromkeys(f"{self.path}/{name}" for name in dead)
        if isinstance(self.store, S3Store):
            for path, upload in list(self.store.uploads(f"{self.path}/generation-")):
                generation = "/".join(path.split("/")[: self.path.count("/") + 2])
                # Uploads of the saver that sweeps may begin at the same time, so they are no remnants.
                if generation not in (f"{self.path}/{seen.generation}", f"{self.path}/{of}"):
                    paths[generation] = None
                    if not dry_run:
                        self.store.give_up(path, upload)
        if not dry_run:
            if dead and SHOWN in seen.generations.get(seen.generation, ()):
                self._show_anew(seen)
            # The index goes before the generation that it names, so that transformers never opens an index without
            # files.
            self.store.delete(self.path, seen.orphans)
            for name in dead:
                self.store.delete(f"{self.path}/{name}", seen.generations[name])
            self.store.delete(self.path, ())  # itself, where there are empty folders
            self.recover()
        return list(paths)

    def look(self) -> "_SeenManifest":
        """Return the content below the path, listed by the first call, and again by the first call after `recover`."""
        if self._seen is None:
            listed = self.store.objects(self.path)
            # An equal tag proves that the manifest is unchanged, and saves one request in every load.
            is_known = MANIFEST in listed and listed[MANIFEST].tag and listed[MANIFEST].tag == self._manifest[1]
            if MANIFEST in listed and not is_known:
                try:
                    self._manifest = self.store.get_tagged(f"{self.path}/{MANIFEST}")
                except FileNotFoundError as error:  # it was listed: a link that leads nowhere, or removed right then
                    raise missing(f"{self.url}/{MANIFEST}") from error
            manifest = self._manifest[0] if MANIFEST in listed else b""
            root, generations = {}, dict[str, dict[str, int]]()
            for name, (size, _) in listed.items():
                first, _, rest = name.partition("/")
                if rest and GENERATION.fullmatch(first):
                    generations.setdefault(first, {})[rest] = size
                else:
                    root[name] = size
            orphans: list[str] = []
            for index in (
                [name for name in root if name.endswith(".index.json")] if generations and not manifest else ()
            ):
                shown = GENERATION.search(self.store.get(f"{self.path}/{index}").decode(errors="replace"))
                if shown and shown[0] in generations:  # of a save that died before its manifest came
                    orphans = [*sorted(root.keys() & generations[shown[0]].keys() - {index}), index]
            self._seen = _SeenManifest(
                manifest=manifest,
                generation=generation_in(manifest) or "",
                is_sound=generation_in(manifest) is not None,
                root=root,
                generations=generations,
                orphans=orphans,
            )
        return self._seen

    def _show_anew(self, seen: "_SeenManifest") -> None:
        """Does what a saver that died after its manifest has left to do for transformers, if it has."""
        manifest = decode_manifest(seen.manifest)
        name, inside = f"{manifest.stem}.safetensors.index.json", f"{self.path}/{seen.generation}"
        index = self.store.get(f"{inside}/{SHOWN}")
        if name not in seen.root or self.store.get(f"{self.path}/{name}") != index:
            # The index comes last. Until then transformers opens the files that the old index names.
            for file in manifest.beside:
                self.store.put(f"{self.path}/{file}", self.store.get(f"{inside}/{file}"))
            self.store.put(f"{self.path}/{name}", index)


@dataclass(frozen=True, kw_only=True)
class _SeenManifest:
    """Content of a folder on a store.

    Args:
        manifest: Bytes of the manifest; empty without one. No request is needed if another rank has read it.
        generation: Generation in the manifest; "" if files are in the folder itself.
        root: Size of each file outside of generations, in bytes.
        generations: Size of each file in bytes, by generation.
        is_sound: Whether the manifest, if there is one, can be read.
        orphans: Files of `root` that a save has written for a generation that no manifest names.
    """

    manifest: bytes
    generation: str
    root: Mapping[str, int]
    generations: Mapping[str, Mapping[str, int]]
    is_sound: bool = True
    orphans: list[str] = field(default_factory=list)

    @cached_property
    def inside(self) -> dict[str, int]:
        """The bytes of each file in the generation that is the checkpoint."""
        files = self.generations.get(self.generation, {})
        return {name: size for name, size in files.items() if name not in (BEGUN, SHOWN)}

    @cached_property
    def visible(self) -> dict[str, int]:
        """The bytes of each file of the checkpoint, wherever it lies."""
        root = {name: size for name, size in self.root.items() if name not in self.orphans}
        if self.generation:  # what transformers opens stands for what is in the generation
            root = {name: size for name, size in root.items() if not is_data(name)}
        return {**root, **self.inside}


class RemoteStaging:
    """A save under way, see `Staging`.

    Args:
        folder: The target.
        generation: The name of the new generation.
        by_owner: Whether one rank writes a file from beginning to end, though the store could join parts.
    """

    def __init__(self, folder: RemoteFolder, generation: str, *, by_owner: bool) -> None:
        self._folder, self.generation = folder, generation
        self._path = f"{folder.path}/{generation}"
        self._store = folder.store
        self.positional = self.joins = folder.positional and not by_owner
        self._parts: dict[str, UploadParts] = {}
        self._uploads: dict[str, str] = {}
        self._beside: dict[str, bytes] = {}
        self._manifest = b""
        self._under_way = UnderWay(folder.in_flight if folder.store.joins else 0)  # other stores, one by one

    def create(self, names: Iterable[str], needed: int) -> None:
        """Sweeps, and shows that the save has begun."""
        del names, needed  # there are no folders to make, and nobody tells how much is free
        # In the background, with the store's other requests; `invite` waits for it.
        self._under_way.begin(self._sweep)
        if not self._store.joins:
            self._store.put(f"{self._path}/{BEGUN}", b"begun")

    def _sweep(self) -> None:
        self._folder.sweep(of=self.generation)
        self._folder.at("swept")

    def allocate(self, name: str, size: int, *, head: int = 0, block: int = BLOCK) -> None:
        """Register a file that ranks write together; a file of one part is put in one request."""
        if not self.positional:
            raise TypeError(f"{name} of {size} bytes: {self._folder.url} is written from beginning to end, by one rank")
        self._parts[name] = UploadParts(size=size, head=head, part=block)

    def invite(self) -> dict[str, tuple[UploadParts, str | None]]:
        """Begin the uploads. Returns the parts and the upload id of each file, for `attach` on the other ranks."""
        if isinstance(self._store, S3Store):
            for name in (name for name, parts in self._parts.items() if parts.count > 1):
                self._under_way.begin(partial(self._begin, self._store, name))
        self._under_way.wait()  # for the sweep, too
        self._folder.at("begun")
        return {name: (parts, self._uploads.get(name)) for name, parts in self._parts.items()}

    def attach(self, invitation: dict[str, tuple[UploadParts, str | None]]) -> None:
        """Join the uploads that `invite` of rank 0 began.

        Raises:
            CheckpointError: The store has no uploads in parts, and this rank does not see the files of the save.
        """
        self._parts = {name: parts for name, (parts, _) in invitation.items()}
        self._uploads = {name: upload for name, (_, upload) in invitation.items() if upload is not None}
        if not self._store.joins and BEGUN not in self._store.objects(self._path):
            raise CheckpointError(f"{self._path} is not visible on this rank: use a file system that all ranks share")

    def write(self, name: str, data: bytes) -> None:
        """Begin to write a small file, which `publish` waits for; the manifest waits for `publish` itself."""
        if name == MANIFEST:
            self._manifest = data
            return
        if is_beside_weights(name) or is_of_tokenizer(name):
            self._beside[name] = data
        self._under_way.begin(partial(self._store.put, f"{self._path}/{check_name(name)}", data))

    def writer(self, name: str) -> Writer:
        """Open a file to write: in parts if it was allocated, else from beginning to end."""
        path = f"{self._path}/{check_name(name)}"
        if name in self._parts and isinstance(self._store, S3Store):
            return S3PartsWriter(self._store, path, self._uploads.get(name), self._parts[name])
        return self._store.stream(path)

    def complete(self, share: tuple[int, int]) -> None:
        """Join the parts of this rank's share of the files: of n ranks the i-th joins every n-th file."""
        if isinstance(self._store, S3Store):
            for name in sorted(self._uploads)[share[0] :: share[1]]:
                path, upload, parts = f"{self._path}/{name}", self._uploads[name], self._parts[name]
                self._under_way.begin(partial(self._store.join, path, upload, parts))
            self._under_way.wait()

    def publish(self, *, overwrite: bool, index: tuple[str, bytes] | None = None) -> None:
        """Commits."""
        folder, store = self._folder, self._store
        self._under_way.wait()
        shown = dict(self._beside)
        if index is not None:
            shown[index[0]] = index[1]
            self._under_way.begin(partial(store.put, f"{self._path}/{SHOWN}", index[1]))
        folder.recover()
        seen = folder.look()
        if seen.visible and not overwrite:
            raise CheckpointError(f"another process wrote {folder.url} in the meantime: save to another path")
        folder.check_target(overwrite=overwrite)
        inside = seen.generations.get(self.generation, {})
        for name, record in decode_manifest(self._manifest).files.items():
            # A concurrent save may have swept this generation as dead, and its manifest must not name missing files.
            if inside.get(name) != record.size:
                raise CheckpointError(
                    f"{self._path}/{name} is not there as it was written ({inside.get(name)} of {record.size} bytes): "
                    "another save to the same place has removed it; save to another path, or one after the other"
                )
        self._under_way.wait()
        is_first = index is not None and not seen.visible
        if is_first:  # the index before the others: it tells a sweep that they are of a save
            self._show(shown, list(shown)[-1:])
            self._show(shown, list(shown)[:-1])
        store.replace(f"{folder.path}/{MANIFEST}", self._manifest, self._path)
        folder.at("committed")
        if not is_first:
            self._show(shown, list(shown)[:-1])
            self._show(shown, list(shown)[-1:])
        with contextlib.suppress(StoreError):  # the save has not failed: what cannot be removed is left for a sweep
            old = set() if not seen.manifest else {n for n in beside_in(seen.manifest) if not is_beside_weights(n)}
            store.delete(folder.path, [n for n in seen.root if (is_data(n) or n in old) and n not in shown])
            for name, files in seen.generations.items():
                if name != self.generation:
                    store.delete(f"{folder.path}/{name}", files)
            if not store.joins:
                store.delete(self._path, [BEGUN])
        folder.recover()
        folder.at("removed")

    def discard(self) -> None:
        """Remove the generation, unless it is the checkpoint by now."""
        with contextlib.suppress(Exception):  # what made the caller give up is the error to tell
            self._under_way.wait()
        self._folder.recover()
        seen = self._folder.look()
        # The commit may have succeeded although its answer was lost.
        if seen.generation != self.generation:
            for name, upload in self._uploads.items():
                self._store.give_up(f"{self._path}/{name}", upload)  # type: ignore[attr-defined]
            self._store.delete(self._folder.path, seen.orphans)
            self._store.delete(self._path, seen.generations.get(self.generation, ()))
            self._store.delete(self._folder.path, ())
        self._folder.recover()

    def close(self) -> None:
        """End the threads of its requests."""
        self._under_way.close()

    def _begin(self, store: S3Store, name: str) -> None:
        """Begin the upload of a file."""
        self._uploads[name] = store.begin(f"{self._path}/{check_name(name)}")

    def _show(self, files: Mapping[str, bytes], names: Iterable[str]) -> None:
        """Put some of these files in the target, all at once."""
        for name in names:
            self._under_way.begin(partial(self._store.put, f"{self._folder.path}/{name}", files[name]))
        self._under_way.wait()
        for name in names:
            self._folder.at(f"shown {name}")
