"""The base classes that torch's own layers of one kind have in common, and the forward of a module that has none.

Relies on: `_BatchNorm` (BatchNorm1d to 3d, SyncBatchNorm), `_ConvNd` (every convolution), `_DropoutNd` (every Dropout)
and `_Loss` (every loss); the forward of a class without one is `nn.modules.module._forward_unimplemented`.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.loss import _Loss as Loss
from torch.nn.modules.module import _forward_unimplemented as no_forward

__all__ = ["BatchNorm", "ConvNd", "Dropout", "Loss", "no_forward"]
