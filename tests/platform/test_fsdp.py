import os

import pytest
import torch
from torch import nn

from tenterhook.platform.fsdp import local_part, sharded_parameters


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(os.name != "posix", reason="gloo")
def test_a_sharded_parameter_is_found_by_its_module_and_name(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found = sharded_parameters(model)
    names = {(id(model[0]), "weight"), (id(model[0]), "bias"), (id(model[1]), "weight")}
    assert found.keys() == names, "FSDP2 no longer says which parameters of which modules it has sharded"
    assert all(one is model.get_parameter(name) for name, one in [("0.weight", found[id(model[0]), "weight"])])
    local = local_part(found[id(model[0]), "weight"])
    assert local is not None and local.shape == (3, 2), "a DTensor no longer has the part of its rank"


def test_what_is_not_sharded_has_neither():
    assert local_part(torch.ones(2)) is None
    assert sharded_parameters(nn.Linear(2, 2)) == {}
