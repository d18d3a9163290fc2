"""Feature distillation: a small student with few labels learns from what a teacher makes of unlabelled images.

python examples/distillation.py        prints a table

capture.once takes the teacher's features; capture with detach=False keeps the student's in the graph, so that a loss on
them reaches its weights.
"""

import torch
import torch.nn.functional as F
from common import TRAINING, accuracy, build_deeper, fit, load, train
from torch import Tensor, nn

from tenterhook import capture
from tenterhook.tables import Table

FEW = (1, 2, 5)  # labels per digit
WEIGHTS = {"labels alone": 0.0, "labels and the teacher's features": 20.0}  # of the loss on features


def build_teacher() -> nn.Sequential:
    return nn.Sequential(*build_deeper()[:-1], nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))


def build_student() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 32), nn.Linear(32, 10))


def study(student: nn.Module, few: tuple[Tensor, Tensor], images: Tensor, targets: Tensor, weight: float) -> None:
    """Train on a few labelled images and, by that weight, on features like the targets for all images."""

    def loss(x: Tensor, target: Tensor) -> Tensor:
        with capture(student, "3", detach=False) as seen:
            student(x)
        return F.cross_entropy(student(few[0]), few[1]) + weight * F.mse_loss(seen["3"], target)

    fit(student, loss, images, targets, epochs=15)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    images, labels = load()
    known, others, answers = images[:TRAINING], images[TRAINING:], labels[TRAINING:]
    teacher = build_teacher()
    train(teacher, known, labels[:TRAINING])
    targets = capture.once(teacher, known, "10")
    targets = (targets - targets.mean()) / targets.std()
    figures, rows = {"teacher": accuracy(teacher, others, answers)}, []
    for name, weight in WEIGHTS.items():
        for few in FEW:
            torch.manual_seed(0)
            student = build_student()
            chosen = torch.cat([(labels == digit).nonzero()[:few, 0] for digit in range(10)])
            study(student, (images[chosen], labels[chosen]), known, targets, weight)
            figures[f"{name}, {few}"] = accuracy(student, others, answers)
        rows.append((name, *(f"{figures[f'{name}, {few}']:.1%}" for few in FEW)))
    header = ("the student learns from", *(f"{few} per digit" for few in FEW))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (teacher, student)]
    print(f"teacher: {sizes[0]:,} parameters, {TRAINING:,} labels, {figures['teacher']:.1%} of the other digits right")
    print(f"student: {sizes[1]:,} parameters, few labels:\n\n{Table(header, rows, right=header[1:])}")
    return figures


if __name__ == "__main__":
    main()
