"""What one of several processes cannot run by itself is refused before it runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tenterhook.birth.alone import alone, rank_of_several, waits_for_others
from tenterhook.birth.replay import RootCall, replay
from tenterhook.birth.trace import CannotRunAgain, Trace


@pytest.fixture
def second_of_two(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)


class FullyShardedDataParallel(nn.Module):
    """Goes by its name, as torch's does."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module


def test_one_process_waits_for_nobody():
    assert rank_of_several() is None
    assert not waits_for_others([nn.SyncBatchNorm(4), nn.Linear(2, 2)])


def test_sync_batch_norm(second_of_two):
    assert rank_of_several() == 1
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    assert "SyncBatchNorm" in waits_for_others([model])
    assert not waits_for_others([model.eval()])


def test_sharded_models():
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4)))
    assert "sharded" in waits_for_others([model])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.SyncBatchNorm(4), 0

    def forward(self, x):
        self.calls += 1
        return x


def test_nothing_of_it_runs(second_of_two):
    model = Counts()
    call = RootCall.now(model, (torch.ones(2, 4),), {}, None)
    told = replay([call], None, [("", model)])
    assert model.calls == 0 and told.birth is None and "SyncBatchNorm" in told.note and told.rank == 1


def test_collectives_are_refused_where_one_process_is_alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), world_size=1, rank=0)
    try:
        with pytest.raises(CannotRunAgain, match="c10d::allreduce waits for other processes"), Trace(alone=True):
            dist.all_reduce(torch.ones(1))
        with Trace():
            dist.all_reduce(torch.ones(1))
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with Trace(alone=True), alone([model]):
            model(torch.ones(1, 2))
        assert "forward" not in vars(model)
    finally:
        dist.destroy_process_group()
