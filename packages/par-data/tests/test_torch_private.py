"""Every API of torch that is not public, called once."""

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from par_data import _torch_private


class Told(IterableDataset):
    def __iter__(self):
        yield get_worker_info() is None
        _torch_private.forget_worker()
        yield get_worker_info() is None


def test_forget_worker_hides_the_worker_from_a_dataset():
    assert list(DataLoader(Told(), batch_size=None, num_workers=1, multiprocessing_context="fork")) == [False, True]


def test_tree_leaves_lists_the_values_of_nested_containers():
    assert _torch_private.tree_leaves({"a": [1, (2, 3.0)]}) == [1, 2, 3.0]
