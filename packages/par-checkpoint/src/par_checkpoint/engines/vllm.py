"""vLLM workers load the versions that a `Publisher` offers, through vLLM's interface for weight transfer.

`register` is a plugin of vLLM, so vLLM calls it in each worker if par-checkpoint is installed:

llm = LLM(folder, weight_transfer_config=WeightTransferConfig(backend="par"))
llm.init_weight_transfer_engine({"init_info": {"address": "10.0.0.1:29600"}})
llm.start_weight_update()
llm.update_weights({"update_info": {"version": 3}})  # version 3, or a later one
llm.finish_weight_update()

vLLM loads weights in place and cannot undo it. It receives only complete versions, which all workers have verified.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import MISSING
from .weights import EngineWeights, tensors_of

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
except ImportError as error:
    raise ImportError(MISSING.format(name="vllm")) from error

if TYPE_CHECKING:
    from ..live.receiver import Staged

BACKEND = "par"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there in every environment
    """Address of the exchange from which the weights come.

    Args:
        address: Host and port of the store, such as "10.0.0.1:29600".
        name: Name of the exchange.
        folder: Checkpoint folder that names the tensors; None: the folder of vLLM's model.
        timeout: Seconds to wait for a version.
    """

    address: str
    name: str = "weights"
    folder: str | None = None
    timeout: float = 600.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Which version to load.

    Args:
        version: Smallest number.
    """

    version: int = 0


class PublishedWeights(WeightTransferEngine):  # type: ignore[misc]  # as above
    """Weight transfer engine of one vLLM worker.

    Attributes:
        version: Number of the version that was loaded last; None before the first one.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False  # a version has the tensors of the main model's folder
    version: int | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._weights: EngineWeights | None = None
        self._staged: Staged | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Start to receive versions in the background."""
        self.shutdown()  # of an earlier trainer
        folder = init_info.folder or self.model_config.model
        self._weights = EngineWeights(init_info.address, folder, name=init_info.name, timeout=init_info.timeout)

    def start_weight_update(self) -> None:
        """Wait for a complete version, and then prepare the model for tensors of a checkpoint.

        Raises:
            RuntimeError: `init_transfer_engine` was not called.
            CheckpointError: No version has arrived within the timeout. The model is unchanged.
        """
        if self._weights is None:
            raise RuntimeError("no trainer is known; call init_weight_transfer_engine() before start_weight_update()")
        # The model cannot serve after the next line, so the wait for the trainer comes before it.
        self._staged = self._weights.wait()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version into the model.

        Raises:
            RuntimeError: `start_weight_update` was not called.
            CheckpointError: The version is older than the requested one, and no later one arrives within the timeout.
        """
        staged, self._staged = self._staged, None
        if self._weights is None or staged is None:
            raise RuntimeError("no version has arrived; call start_weight_update() before update_weights()")
        if staged.version < update_info.version:
            staged.accept()  # a later one replaces it
            staged = self._weights.wait(update_info.version)
        self.model.load_weights(tensors_of(staged))
        self.version = staged.version

    def finish_weight_update(self) -> None:
        """Finish the load."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Stop receiving. The model keeps its weights."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None


def register() -> None:
    """Register the engine as the backend "par"."""
    # vLLM loads its plugins more than once in some processes, and raises for a name that it has already.
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, PublishedWeights.__name__)
