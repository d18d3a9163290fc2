import torch
from torch._subclasses import FakeTensorMode

from tenterhook.platform.tensors import has_numbers, hook_gradient, is_view, share_storage, viewed_by


def test_a_view_knows_what_it_is_a_view_of():
    base = torch.ones(4)
    view = base[1:]
    assert is_view(view) and viewed_by(view) is base, "torch no longer says of a view which tensor it is one of"
    assert viewed_by(view[1:]) is base, "torch now says of a view of a view that it is one of the first"
    assert not is_view(base) and viewed_by(base) is None, "torch now calls a tensor of its own a view"


def test_two_tensors_with_one_storage_are_known():
    base = torch.ones(4)
    assert share_storage(base, base[2:].detach()), "torch no longer gives a storage its own number"
    assert not share_storage(base, base.clone()), "torch now gives two storages one number"
    assert share_storage(base, base.to_sparse()), "what cannot be told counts as shared"


def test_tensors_without_numbers_are_known():
    with FakeTensorMode():
        fake = torch.ones(2)
    assert has_numbers(torch.ones(2)) and not has_numbers(fake) and not has_numbers(torch.ones(2, device="meta"))


def test_a_hook_put_into_the_table_of_a_tensor_sees_its_gradient():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen = []
    handle = hook_gradient(y, lambda grad: seen.append("ours"))
    y.register_hook(lambda grad: seen.append("another"))
    (y * 3).sum().backward(retain_graph=True)
    assert seen == ["ours", "another"], "torch no longer runs what is put into tensor._backward_hooks"
    handle.remove()
    handle.remove()
    (y * 3).sum().backward()
    assert seen == ["ours", "another", "another"]


def test_a_handle_keeps_nothing_alive():
    y = torch.ones(2, requires_grad=True) * 2
    handle = hook_gradient(y, lambda grad: None)
    assert handle.id in handle.hooks_dict_ref()
    del y
    assert handle.hooks_dict_ref() is None
    handle.remove()


def test_a_hook_put_beside_others_runs_after_them():
    y = torch.ones(2, requires_grad=True) * 2
    seen = []
    handle = y.register_hook(lambda grad: seen.append("another"))
    hook_gradient(y, lambda grad: seen.append("ours"))
    y.sum().backward(retain_graph=True)
    handle.remove()
    y.sum().backward()
    assert seen == ["another", "ours", "ours"], "torch no longer runs the hooks on a tensor in their order"


def test_a_leaf_gets_a_handle():
    x = torch.ones(2, requires_grad=True)
    seen = []
    handle = hook_gradient(x, seen.append)
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    assert len(seen) == 1
