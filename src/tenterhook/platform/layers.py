"""The base classes that torch's own layers of one kind have in common.

Relies on: `_BatchNorm` (BatchNorm1d to 3d, SyncBatchNorm), `_DropoutNd` (every Dropout) and `_Loss` (every loss).
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.loss import _Loss as Loss

__all__ = ["BatchNorm", "Dropout", "Loss"]
