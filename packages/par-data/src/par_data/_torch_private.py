"""Private functions of torch and Python that par-data uses: the first file to open when torch changes."""

from multiprocessing import forkserver
from typing import Any

from torch.utils import _pytree
from torch.utils.data._utils import worker


def tree_leaves(value: Any) -> list[Any]:
    """List the values in nested containers, in order. `torch.utils._pytree.tree_leaves` exists since torch 2.2.

    A batch may nest tensors in containers that their packages have registered with torch, such as the outputs of
    transformers' models. torch.export's public registry has no function that reads them.
    """
    return _pytree.tree_leaves(value)


def forget_worker() -> None:
    """Make `torch.utils.data.get_worker_info()` return None in a worker. `worker._worker_info` exists since torch 1.2.

    Hugging Face's datasets read in another order inside a worker than outside of it, even if there is only one.
    """
    worker._worker_info = None


def preload_forkserver(module: str) -> None:
    """Let the server of multiprocessing's "forkserver" import one more module, if the server does not run yet.

    `ForkServer._preload_modules` exists in Python 3.4 to 3.14. The public `set_forkserver_preload` would replace the
    modules that the program has chosen.
    """
    chosen: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if module not in chosen:
        forkserver.set_forkserver_preload([*chosen, module])
