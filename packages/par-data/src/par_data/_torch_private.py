"""What par-data uses of torch and Python that these do not call public: the first file to open when torch moves."""

from multiprocessing import forkserver

from torch.utils.data._utils import worker


def forget_worker() -> None:
    """Lets `torch.utils.data.get_worker_info()` give None in a worker. `worker._worker_info` exists since torch 1.2.

    It is needed because datasets of Hugging Face read in another order in a worker than outside, even in the only one.
    """
    worker._worker_info = None


def preload_forkserver(module: str) -> None:
    """Lets the server of multiprocessing's "forkserver" import one more module when it starts, if it does not run yet.

    `ForkServer._preload_modules` exists in Python 3.4 to 3.14. `set_forkserver_preload`, which is public, replaces the
    modules that the program has chosen.
    """
    chosen: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if module not in chosen:
        forkserver.set_forkserver_preload([*chosen, module])
