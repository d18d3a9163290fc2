"""Ignite's quick start: a trainer and an evaluator, on digits as pictures."""

import torch
from digest import digest
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, 3, padding=1)
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = nn.functional.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        x = nn.functional.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        x = nn.functional.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), 64, shuffle=True)
    held_out = DataLoader(TensorDataset(x[1500:], y[1500:]), 64)
    model = Net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
    evaluator = create_supervised_evaluator(model, metrics=metrics)

    @trainer.on(Events.ITERATION_COMPLETED(every=10))
    def log_training_loss(engine):
        print(f"epoch {engine.state.epoch}, iteration {engine.state.iteration}: {engine.state.output.hex()}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_validation(engine):
        evaluator.run(held_out)
        print(evaluator.state.metrics)

    trainer.run(train, max_epochs=3)
    print("steps", trainer.state.iteration)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
