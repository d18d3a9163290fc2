import torch

from tenterhook.platform.foreach import foreach_mul, foreach_norm, foreach_sub


def test_lists_go_in_and_come_out():
    some, others = [torch.tensor([3.0, -4.0]), torch.ones(1)], [torch.ones(2), torch.ones(1)]
    what = "torch's _foreach functions no longer do one operation on each tensor of a list"
    assert [one.tolist() for one in foreach_sub(some, others)] == [[2.0, -5.0], [0.0]], what
    assert [one.tolist() for one in foreach_mul(some, 2.0)] == [[6.0, -8.0], [2.0]], what
    assert [float(one) for one in foreach_norm(some, torch.inf)] == [4.0, 1.0], what
    copies = foreach_mul(some, 1.0)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(copies, some, strict=True)), what
