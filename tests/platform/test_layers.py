from torch import nn

from tenterhook.platform.layers import BatchNorm, ConvNd, Dropout, Loss, no_forward


def test_the_base_classes_are_those_of_all_layers_of_their_kind():
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(one, BatchNorm) for one in norms), "torch's _BatchNorm is no base of every batch norm now"
    assert not issubclass(nn.LayerNorm, BatchNorm)
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    assert all(issubclass(one, ConvNd) for one in convolutions), "torch's _ConvNd is no base of convolutions now"
    drops = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(one, Dropout) for one in drops), "torch's _DropoutNd is no base of every dropout now"
    losses = (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.NLLLoss, nn.L1Loss, nn.KLDivLoss)
    assert all(issubclass(one, Loss) for one in losses), "torch's _Loss is no base of every loss now"


def test_a_module_without_a_forward_has_torch_s():
    assert nn.Module.forward is no_forward, "a module without a forward has another one now"
    assert nn.ModuleList.forward is no_forward


def test_they_have_what_is_read_of_them():
    assert nn.BatchNorm1d(2, track_running_stats=False).running_mean is None
    assert nn.BatchNorm1d(2).running_mean is not None
    assert nn.Dropout(0.25).p == 0.25
