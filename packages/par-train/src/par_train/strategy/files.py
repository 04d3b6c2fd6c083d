"""The files of a strategy: single objects, and checkpoints of everything that a run needs to resume."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

from par_checkpoint import Checkpoints, Format, Save, Tiers, Transfer, load, load_torch_file, save, save_torch_file
from par_data import LoaderPosition, ShardedDataLoader, StepRandomness, gather_random_states, restore_random_states
from par_groups import agree, check_alike, packed_weights, together
from par_layers.pretrained import check_all_saved, has_adapters, kind_of
from par_precision import MixedOptimizer

from .bundles import ModelBundle
from .canonical.environment import warn_of_other_bits
from .pretrained.files import PathLike, adapter_parts, load_adapters, save_adapters, save_merged
from .setup import Setup

PLANS = ("huggingface", "torch", "peft", "merged")
"""The formats of `Strategy.save`."""


class RunState:
    """The state of a run besides its models: optimizer steps, positions in the data, and random numbers.

    Args:
        randomness: The random numbers of the steps, which count them.
        replica: The index of this rank's replica, whose ranks draw identical random numbers.
        environment: What the bits of a canonical run depend on; empty for ordinary numerics.
    """

    def __init__(self, randomness: StepRandomness, replica: int, environment: Mapping[str, Any]) -> None:
        self._randomness, self._replica, self._environment = randomness, replica, environment
        # A loader may be dropped before the run ends. Its position is saved all the same: loaders are saved by number.
        self.loaders: list[tuple[ReferenceType[ShardedDataLoader], LoaderPosition]] = []

    def add(self, loader: ShardedDataLoader) -> None:
        """Let checkpoints hold the position of a data loader."""
        self.loaders.append((ref(loader), loader.position))

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Collective."""
        positions = [position.state_dict() for _, position in self.loaders]
        state = {"steps": self._randomness.step, "loaders": positions, "random": gather_random_states(self._replica)}
        return {**state, "numerics": dict(self._environment)} if self._environment else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. The topology may differ from the one of the save."""
        warn_of_other_bits(state.get("numerics", {}), self._environment)
        self._randomness.step = state["steps"]
        for (reference, position), saved in zip(self.loaders, state["loaders"], strict=True):
            loader = reference()
            (position if loader is None else loader).load_state_dict(saved)
        restore_random_states(state["random"], self._replica)


class RunCheckpoints:
    """The checkpoints of a run in one root folder, as `Strategy.checkpoints` returns them.

    Args:
        bundles: The models of the run, each with its optimizer and schedulers; the strategy may add to them.
        state: The state of the run besides its models.
        root: The folder of the checkpoints; with tiers, its name in each of them.
        keep_last: The number of newest checkpoints to keep, or one number for each tier; None keeps all.
        tiers: Storage tiers that each keep the checkpoints; None for the one folder `root`.
        plan: "peft" writes and reads only the adapters of each model; "huggingface" all of it.

    Attributes:
        root: The folder of the checkpoints; with tiers, its name in each of them.
        tiers: The storage tiers; None for the one folder `root`.
        resumed_from: The folder that `resume` has read, in the nearest tier that held it; None before.
    """

    def __init__(
        self,
        bundles: Sequence[ModelBundle],
        state: RunState,
        root: PathLike,
        *,
        keep_last: int | Sequence[int | None] | None = None,
        tiers: Tiers | None = None,
        plan: str = "huggingface",
    ) -> None:
        if plan not in ("huggingface", "peft"):
            raise ValueError(f"plan={plan!r}: a checkpoint has plan 'huggingface' or 'peft'; pass one of these")
        self._bundles, self._state, self.root = bundles, state, os.fspath(root)
        self._keep_last, self.tiers, self._plan = keep_last, tiers, plan
        self._folders: list[Checkpoints] = []
        self.resumed_from: str | None = None

    def folders(self) -> list[tuple[ModelBundle, Checkpoints]]:
        """Return the checkpoints of each bundle: a single one has the root for itself, several have `root/0`, ...

        Raises:
            ValueError: No model was initialized, or the plan does not fit a model.
        """
        number = len(self._bundles)
        if not number:
            raise ValueError("there is no model to save or to resume; call initialize() first")
        # The `Checkpoints` are kept, since each of them knows its newest step and need not ask a slow tier for it.
        # A later initialize() may add a model, and the folders of all models get other names.
        if len(self._folders) != number:
            for bundle in self._bundles:
                _check_plan(bundle, self._plan)
            roots = [self.root] if number == 1 else [f"{self.root}/{index}" for index in range(number)]
            self._folders = [Checkpoints(root, keep_last=self._keep_last, tiers=self.tiers) for root in roots]
        return list(zip(self._bundles, self._folders, strict=True))

    def save(
        self,
        step: int,
        *,
        async_: bool = False,
        format: Format | None = None,  # noqa: A002
        notes: Mapping[str, Any] | None = None,
    ) -> list[Save]:
        """Write everything that training needs to resume, as `root/step-00000100`. Collective.

        Args:
            step: The number of steps done.
            async_: Whether to return at once. The next step of an optimizer then waits until the bytes are copied. If
                you change weights otherwise, call the handle's `wait_for_copy()` first.
            format: The files to write, such as `Format(assets=["Qwen3-8B"])` for those of a tokenizer. Default:
                `Format()`.
            notes: Values to store in the checkpoint, identical on all ranks; `state_of` returns them. Default: none.

        Returns:
            A handle for each bundle of models.
        """
        folders, extra = self.folders(), {**self._state.state_dict(), "notes": dict(notes or {})}
        # A background copy lets the next step begin before the bytes are copied. Its optimizer waits for the copy.
        transfer = Transfer(copy="background")
        handles = []
        for bundle, folder in folders:
            # `force`: the loop has decided to save, whatever interval `Checkpoints` has.
            parts = _parts(bundle, self._plan, format or Format())
            handle = folder.save(step, force=True, extra=extra, async_=async_, transfer=transfer, **parts)
            handles.extend([] if handle is None else [handle])
        return handles

    def latest_step(self) -> int | None:
        """Return the newest step whose checkpoint is complete for every model; None if there is none. Collective.

        A run that was killed may have written its last checkpoint for some of its models only.
        """
        newest = [folder.latest() for _, folder in self.folders()]
        steps = [int(path.rpartition("-")[2]) for path in newest if path is not None]
        return min(steps) if len(steps) == len(newest) else None

    def state_of(self, step: int) -> dict[str, Any]:
        """Return the state of the run in a checkpoint, besides its models: `notes`, positions in data. Collective."""
        # Without objects, `load` reads the small file of the state only.
        first = self.folders()[0][1]
        state: dict[str, Any] = load(first.name(step), strict=False, tiers=first.tiers).extra
        return state

    def resume(self, step: int | None = None) -> int | None:
        """Restore everything from a checkpoint, under the topology that wrote it or another one. Collective.

        Args:
            step: The step of the checkpoint; None for `latest_step()`.

        Returns:
            The step; None if there is no checkpoint.

        Raises:
            ValueError: The checkpoint holds another number of data loaders than this run has.
        """
        folders = self.folders()
        # All models resume from one step, also if the newest checkpoint of one of them is later.
        step = self.latest_step() if step is None else step
        if step is None:
            return None
        # Checked first, so that nothing has changed if it fails.
        saved, loaders = len(self.state_of(step)["loaders"]), len(self._state.loaders)
        if saved != loaders:
            raise ValueError(
                f"step {step} was saved with {saved} data loaders, and this run has {loaders}; initialize as many"
            )
        for bundle, folder in folders:
            report = load(folder.name(step), tiers=folder.tiers, **_parts(bundle, self._plan, Format()))
        self.resumed_from = report.path
        # Each folder holds the state of the whole run, so any of them will do.
        self._state.load_state_dict(report.extra)
        return step

    def check(self) -> None:
        """Try out the tiers: each can be written, and the ranks that must see its files do. Collective.

        Raises:
            TypeError, ValueError: A tier cannot be used; on every rank.
            StoreError: An object store rejects writes; on every rank.
        """
        for _, folder in self.folders():
            folder.check()

    def clear(self) -> None:
        """Remove all checkpoints of the root from all tiers, the parts on other hosts included. Collective."""
        for _, folder in self.folders():
            folder.clear()


class StrategyFiles(Setup):
    """The methods of a strategy that read and write files."""

    _state: RunState
    _checkpoints: dict[str, RunCheckpoints]

    def save(
        self,
        obj: Any,
        path: PathLike,
        plan: str = "huggingface",
        max_file_size_gb: float = 10,
        *,
        tiers: Tiers | None = None,
    ) -> Save | None:
        """Write a model, an optimizer or an lr scheduler as full tensors, independent of the topology. Collective.

        Args:
            obj: A model, an optimizer or an lr scheduler that `initialize` returned.
            path: The folder to write; the optimizer of plan "huggingface" has a folder `optimizer` in it. For plan
                "torch", the file, which `torch.load` opens.
            plan: "huggingface" or "torch". For a model with adapters, "peft" writes only these, as `PeftModel` opens
                them; "merged" adds them to the weights, as transformers opens the model. `obj` does not change.
            max_file_size_gb: The largest size of a safetensors file, in gigabytes (10^9 bytes).
            tiers: The storage tiers that each keep the files, for plan "huggingface". `path` is then a name in each of
                them, and the call waits for the first only.

        Returns:
            For plan "huggingface" a handle, whose `wait()` waits for all tiers; else None.

        Raises:
            ValueError, TypeError: The plan does not fit the object; on every rank.
        """
        self._check_open()
        kind, keywords = self._described(obj, plan, tiered=tiers is not None)
        size = round(max_file_size_gb * 1e9)
        if plan == "huggingface":
            with together("save", None):
                if kind == "model" and has_adapters(obj):
                    raise ValueError(
                        f"plan={plan!r}: this {type(obj).__name__} has adapters, for which transformers' folders have "
                        "no place; use plan='peft' to write only the adapters, plan='merged' to add them to the "
                        "weights, or checkpoint() to resume training"
                    )
            files = Format(max_shard_size=size)
            return save(_folder(path, kind), **keywords, overwrite=True, format=files, tiers=tiers)
        if plan == "peft":
            save_adapters(obj, path)
        elif plan == "merged":
            save_merged(obj, path, size, self.device)
        else:
            save_torch_file(path, **keywords)
        return None

    def load(self, obj: Any, path: PathLike, plan: str = "huggingface", *, tiers: Tiers | None = None) -> None:
        """Fill a model, an optimizer or an lr scheduler from the files of `save` or `checkpoint`. Collective.

        Args:
            obj: A model, an optimizer or an lr scheduler that `initialize` returned.
            path: The folder or the file that was written.
            plan: "huggingface" for a folder, "torch" for a file of `torch.save` or `save`, "peft" for a folder of
                adapters.
            tiers: The tiers that were written, in which `path` is a name. The nearest one that is complete is read.

        Raises:
            ValueError: The object is not from `initialize`, or the plan does not fit it; on every rank.
            par_checkpoint.CheckpointError: The files are damaged, or do not fit the object; on every rank.
        """
        self._check_open()
        kind, keywords = self._described(obj, plan, tiered=tiers is not None)
        if plan == "peft":
            load_adapters(obj, path)
        elif plan == "torch":
            load_torch_file(path, **keywords)
        else:
            own = _folder(path, kind)
            # Files from elsewhere have no folder `optimizer`, so the path itself is then read.
            is_own = tiers is not None or Path(own, "par_checkpoint.json").exists()
            load(own if is_own else path, **keywords, tiers=tiers)

    def checkpoint(self, root: PathLike, *, step: int, async_: bool = False) -> list[Save]:
        """Write everything that training needs to resume, as `root/step-00000100`. Collective.

        It is `checkpoints(root).save(step, async_=async_)`.
        """
        return self.checkpoints(root).save(step, async_=async_)

    def resume(self, root: PathLike, *, step: int | None = None) -> int | None:
        """Restore everything from the newest checkpoint, or from the one of a step; return its step. Collective.

        It is `checkpoints(root).resume(step)`.
        """
        return self.checkpoints(root).resume(step)

    def checkpoints(
        self,
        root: PathLike,
        *,
        keep_last: int | Sequence[int | None] | None = None,
        tiers: Tiers | None = None,
        plan: str = "huggingface",
    ) -> RunCheckpoints:
        """Return the checkpoints of a run in one root folder: to save, to find the latest, to resume.

        Args:
            root: The folder of the checkpoints; with tiers, its name in each of them, such as "gpt". Several models
                have a folder `0`, `1`, ... each.
            keep_last: The number of newest checkpoints to keep; with tiers perhaps a list, one for each. Default: all.
            tiers: The storage tiers that each keep the checkpoints, such as `Tiers(["/dev/shm/run",
                "s3://bucket/run"])`. A step waits only for the first. Default: the one folder `root`.
            plan: "huggingface" for all weights. "peft" for the adapters of each model only, in files that
                `PeftModel` opens; the frozen weights below them are then not saved.
        """
        self._check_open()
        asked = repr((str(root), keep_last, tiers, plan))
        # The object is kept, because it stores the newest step and the handles of its folders.
        if asked not in self._checkpoints:
            made = RunCheckpoints(self._bundles, self._state, root, keep_last=keep_last, tiers=tiers, plan=plan)
            self._checkpoints[asked] = made
        return self._checkpoints[asked]

    def _described(self, obj: Any, plan: str, *, tiered: bool) -> tuple[str, dict[str, Any]]:
        """Return the kind of an object, and the keyword argument of par-checkpoint for it, agreed on by all ranks.

        Args:
            obj: The object.
            plan: The format of the files.
            tiered: Whether the files are in tiers.
        """
        held: dict[str, list[Any]] = {
            "model": [one for bundle in self._bundles for one in bundle.models],
            "optimizer": [bundle.optimizer for bundle in self._bundles],
            "scheduler": [one for bundle in self._bundles for one in bundle.schedulers],
        }
        kinds = [kind for kind, each in held.items() if any(obj is one for one in each)]
        problem = None
        if plan not in PLANS:
            problem = ValueError(f"plan={plan!r}: it must be one of {', '.join(PLANS)}; pass one of these")
        elif tiered and plan != "huggingface":
            problem = ValueError(
                f"plan={plan!r}: one rank writes its files to one folder, so tiers have no meaning; use "
                "plan='huggingface', or remove them"
            )
        elif not kinds or obj is None:
            problem = ValueError(f"this {type(obj).__name__} is not from initialize(); pass an object that it returned")
        elif plan in ("peft", "merged") and not (kinds[0] == "model" and has_adapters(obj)):
            problem = _no_adapters(plan, obj)
        check_alike(agree(problem, f"{kinds} {plan}", None), "objects and plans")
        return kinds[0], {kinds[0]: obj}


def _parts(bundle: ModelBundle, plan: str, form: Format) -> dict[str, Any]:
    """Return the arguments of `par_checkpoint.save` and `load` for a bundle.

    Args:
        bundle: The models, their optimizer and its schedulers.
        plan: "peft" for the adapters only.
        form: The format that the caller has chosen.
    """
    scaling = [bundle.optimizer.scaling] if isinstance(bundle.optimizer, MixedOptimizer) else []
    model, form = adapter_parts(bundle.module, form) if plan == "peft" else (bundle.module, form)
    scheduler = [*scaling, *bundle.schedulers] or None
    return {"model": model, "optimizer": bundle.optimizer, "scheduler": scheduler, "format": form}


def _no_adapters(plan: str, model: Any) -> ValueError:
    """Return the error of a plan for adapters that a model lacks, or has of another kind."""
    who, kind = f"plan={plan!r}: this {type(model).__name__} has", kind_of(model)
    if not kind:
        return ValueError(f"{who} no adapters, which this plan is for; use plan='huggingface'")
    return ValueError(f"{who} an adapter of the kind {kind}; call its save_pretrained within par_zero.summon(model)")


def _check_plan(bundle: ModelBundle, plan: str) -> None:
    """Raise ValueError if a checkpoint of this plan would lack weights of the models."""
    if plan == "peft" and not any(map(has_adapters, bundle.models)):  # the checkpoint would have no weights at all
        raise _no_adapters(plan, bundle.module)
    if plan == "peft":
        check_all_saved(bundle.module)
    packed = next(iter(packed_weights(bundle.module)), None)
    if plan != "peft" and packed is not None:
        raise ValueError(
            f"plan={plan!r}: the elements of {packed!r} are codes of bitsandbytes, whose scales no checkpoint holds; "
            "pass plan='peft' to checkpoints() or CheckpointPolicy"
        )


def _folder(path: PathLike, kind: str) -> str:
    return os.fspath(path) if kind == "model" else f"{os.fspath(path)}/{kind}"
