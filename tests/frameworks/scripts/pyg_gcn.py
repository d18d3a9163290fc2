"""PyTorch Geometric's introduction: a GCN that classifies nodes, here of Zachary's karate club."""

import torch
from digest import digest
from torch import nn
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCNConv


class GCN(nn.Module):
    def __init__(self, dataset):
        super().__init__()
        self.conv1 = GCNConv(dataset.num_node_features, 16)
        self.conv2 = GCNConv(16, dataset.num_classes)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = nn.functional.relu(self.conv1(x, edge_index))
        x = nn.functional.dropout(x, training=self.training)
        x = self.conv2(x, edge_index)
        return nn.functional.log_softmax(x, dim=1)


def main():
    torch.manual_seed(0)
    dataset = KarateClub()
    model, data = GCN(dataset), dataset[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.train()
    epochs = 200
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data)
        loss = nn.functional.nll_loss(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
    model.eval()
    pred = model(data).argmax(dim=1)
    print("right", int((pred == data.y).sum()), "loss", loss.item().hex())
    print("steps", epochs)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
