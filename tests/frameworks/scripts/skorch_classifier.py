"""skorch's quick start: a module as a scikit-learn classifier."""

import numpy
import torch
from digest import digest
from sklearn.datasets import make_classification
from skorch import NeuralNetClassifier
from torch import nn


class MyModule(nn.Module):
    def __init__(self, num_units=10, nonlin=nn.ReLU):
        super().__init__()
        self.dense0 = nn.Linear(20, num_units)
        self.nonlin = nonlin()
        self.dropout = nn.Dropout(0.5)
        self.dense1 = nn.Linear(num_units, num_units)
        self.output = nn.Linear(num_units, 2)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, X, **kwargs):
        X = self.nonlin(self.dense0(X))
        X = self.dropout(X)
        X = self.nonlin(self.dense1(X))
        return self.softmax(self.output(X))


def main():
    torch.manual_seed(0)
    X, y = make_classification(1000, 20, n_informative=10, random_state=0)
    X, y = X.astype(numpy.float32), y.astype(numpy.int64)
    net = NeuralNetClassifier(
        MyModule,
        max_epochs=10,
        lr=0.1,
        iterator_train__shuffle=True,
        callbacks__print_log__keys_ignored="dur",  # the time that an epoch took
    )
    net.fit(X, y)
    print("told", net.predict_proba(X[:5]).tolist())
    print("steps", sum(len(epoch["batches"]) for epoch in net.history) - 2 * len(net.history))  # 2 of validation
    print("weights", digest(net.module_))


if __name__ == "__main__":
    main()
