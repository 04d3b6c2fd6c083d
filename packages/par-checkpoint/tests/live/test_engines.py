"""vLLM and verl load complete versions.

The stand-ins have the interfaces of vLLM 0.33.0 and verl 0.9.1. Their wheels need an accelerator and many packages.
"""

import abc
import asyncio
import importlib
import sys
import types
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError, Publisher, Rendezvous, State, save
from par_testing import for_each

SHAPES = {"model.embed.weight": (6, 4), "model.norm.weight": (4,)}


def full(version):
    return {name: torch.full(shape, float(version), dtype=torch.bfloat16) for name, shape in SHAPES.items()}


@pytest.fixture
def folder(tmp_path):
    """The checkpoint folder of the engine's model."""
    save(tmp_path / "model", model=full(0))
    return str(tmp_path / "model")


@pytest.fixture
def store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


def modules(monkeypatch, package, contents):
    """Install stand-ins for modules of a package, and import the adapter of that name."""
    for name, content in contents.items():
        parts = name.split(".")
        for stop in range(1, len(parts)):
            parent = types.ModuleType(".".join(parts[:stop]))
            parent.__path__ = []
            monkeypatch.setitem(sys.modules, parent.__name__, sys.modules.get(parent.__name__, parent))
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    adapter = f"par_checkpoint.engines.{package}"
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    found = importlib.import_module(adapter)
    monkeypatch.delitem(sys.modules, adapter)
    return found


class WeightTransferEngine(abc.ABC):
    """The engine of vLLM 0.33."""

    supports_draft_weight_update = True

    def __init__(self, config, vllm_config, device, model):
        self.config, self.device, self.model = config, device, model
        self.model_config = vllm_config.model_config

    @abc.abstractmethod
    def init_transfer_engine(self, init_info): ...
    @abc.abstractmethod
    def start_weight_update(self): ...
    @abc.abstractmethod
    def finish_weight_update(self): ...
    @abc.abstractmethod
    def receive_weights(self, update_info): ...
    @abc.abstractmethod
    def shutdown(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.update_info_cls(**update_info))


class WeightTransferEngineFactory:
    """The registry of vLLM 0.33."""

    names: ClassVar[dict] = {}

    @classmethod
    def register_engine(cls, name, module_path, class_name):
        if name in cls.names:
            raise ValueError("already registered")
        cls.names[name] = module_path, class_name


class Model:
    """A model of vLLM: it records its weights, and whether it can serve."""

    def __init__(self):
        self.weights, self.serves = full(0), True

    def load_weights(self, weights):
        assert not self.serves
        for name, tensor in weights:
            self.weights[name] = tensor.clone()


def is_of(weights, version):
    expected = full(version)
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture
def vllm(monkeypatch):
    base = {"WeightTransferEngine": WeightTransferEngine, "WeightTransferInitInfo": object}
    reload = {
        "initialize_layerwise_reload": lambda model: setattr(model, "serves", False),
        "finalize_layerwise_reload": lambda model, config: setattr(model, "serves", True),
    }
    WeightTransferEngineFactory.names.clear()
    return modules(
        monkeypatch,
        "vllm",
        {
            "vllm.distributed.weight_transfer.base": {**base, "WeightTransferUpdateInfo": object},
            "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": WeightTransferEngineFactory},
            "vllm.model_executor.model_loader.reload": reload,
        },
    )


def engine_of(vllm, folder):
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(model=folder))
    return vllm.PublishedWeights(None, config, torch.device("cpu"), Model())


def test_register_may_be_called_twice(vllm):
    vllm.register()
    vllm.register()
    assert WeightTransferEngineFactory.names == {"par": ("par_checkpoint.engines.vllm", "PublishedWeights")}


def test_vllm_worker_loads_each_version_complete(vllm, folder, store):
    engine = engine_of(vllm, folder)
    trained = full(0)
    with Publisher(Rendezvous(store), State(model=trained), timeout=20) as publisher:
        engine.init_transfer_engine(vllm.InitInfo(address=store, timeout=20))
        for version in (1, 2):
            trained.update(full(version))
            publisher.publish(version)
            engine.start_weight_update()
            engine.update_weights({"version": version})
            engine.finish_weight_update()
            assert engine.model.serves
            assert engine.version == version
            assert is_of(engine.model.weights, version)
        engine.shutdown()


def test_vllm_worker_skips_versions_before_the_requested_one(vllm, folder, store):
    engine = engine_of(vllm, folder)
    trained = full(1)
    with Publisher(Rendezvous(store), State(model=trained), timeout=20) as publisher:
        engine.init_transfer_engine(vllm.InitInfo(address=store, timeout=20))
        publisher.publish(1)
        engine.start_weight_update()
        trained.update(full(2))
        publisher.publish(2)
        engine.update_weights({"version": 2})
        assert engine.version == 2
        assert is_of(engine.model.weights, 2)
        engine.shutdown()


def test_vllm_worker_without_a_version_keeps_serving(vllm, folder, store):
    engine = engine_of(vllm, folder)
    with pytest.raises(RuntimeError, match=r"call init_weight_transfer_engine\(\) before"):
        engine.start_weight_update()
    with pytest.raises(RuntimeError, match=r"call start_weight_update\(\) before"):
        engine.update_weights({})
    engine.init_transfer_engine(vllm.InitInfo(address=store, timeout=0.1))
    with pytest.raises(CheckpointError, match=r"timeout=0.1: no version 0 or later has arrived"):
        engine.start_weight_update()
    assert engine.model.serves
    assert is_of(engine.model.weights, 0)
    assert not engine.supports_draft_weight_update  # vLLM would load the main model's version into the draft model
    engine.shutdown()


class CheckpointEngineRegistry:
    """The registry of verl 0.9."""

    found: ClassVar[dict] = {}

    def register(backend):
        def wrapper(cls):
            CheckpointEngineRegistry.found[backend] = cls
            return cls

        return wrapper


class CheckpointEngineWithCache(abc.ABC):
    """The engine of verl 0.9."""

    @abc.abstractmethod
    def prepare(self): ...
    @classmethod
    @abc.abstractmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...
    @abc.abstractmethod
    def init_process_group(self, **kwargs): ...
    @abc.abstractmethod
    def finalize(self): ...
    @abc.abstractmethod
    async def send_weights(self, weights, global_steps=None): ...
    @abc.abstractmethod
    async def receive_weights(self, global_steps=None): ...
    @abc.abstractmethod
    async def get_weights(self): ...


@pytest.fixture
def verl(monkeypatch):
    content = {
        "CheckpointEngineRegistry": CheckpointEngineRegistry,
        "CheckpointEngineWithCache": CheckpointEngineWithCache,
    }
    return modules(monkeypatch, "verl", {"verl.checkpoint_engine.base": content})


@for_each(reads=["receive", "get"])
def test_verl_rollout_receives_what_the_trainer_sends(verl, folder, store, reads):
    made = CheckpointEngineRegistry.found["par"]
    trainer, rollout = (made(1 << 20, address=store, folder=folder, name=reads, timeout=20) for _ in range(2))

    async def received(version):
        weights = rollout.receive_weights(global_steps=version) if reads == "receive" else rollout.get_weights()
        return {name: tensor.clone() async for name, tensor in weights}

    async def run():
        # verl repeats a step after it has computed rewards on the GPUs of the rollouts, and may pass no step.
        for version, step in enumerate((0, 1, 1, None)):
            of_trainer, of_rollout = made.build_topology(1, 1, [trainer.prepare(), rollout.prepare()])
            trainer.init_process_group(**{name: values[0] for name, values in of_trainer.items()})
            rollout.init_process_group(**{name: values[0] for name, values in of_rollout.items()})
            await trainer.send_weights(iter(full(version).items()), global_steps=step)
            assert is_of(await received(step), version)
            trainer.finalize()
            rollout.finalize()

    asyncio.run(run())


def test_verl_engine_refuses_what_it_cannot_do(verl, folder, store):
    engine = CheckpointEngineRegistry.found["par"](1 << 20, address=store, folder=folder)
    for move in (engine.send_weights(iter([])), anext(engine.receive_weights())):
        with pytest.raises(RuntimeError, match=r"weights move before init_process_group\(\) was called"):
            asyncio.run(move)
    with pytest.raises(RuntimeError, match=r"before init_process_group\(receives=True\) was called"):
        asyncio.run(anext(engine.get_weights()))
