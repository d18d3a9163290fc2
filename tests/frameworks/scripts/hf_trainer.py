"""transformers.Trainer: a small BERT that classifies sentences, padded by a collator, with evaluation."""

import random
import warnings

from digest import digest
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

warnings.filterwarnings("ignore")


def sentences(count):
    """Of words 5 to 99; those of the second class have more of the upper half."""
    for _ in range(count):
        label = random.randint(0, 1)
        length = random.randint(6, 16)
        words = [
            random.randint(52, 99) if random.random() < (0.8 if label else 0.2) else random.randint(5, 51)
            for _ in range(length)
        ]
        rest = 16 - length
        yield {"input_ids": words + [0] * rest, "attention_mask": [1] * length + [0] * rest, "label": label}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        warmup_steps=5,
        eval_strategy="epoch",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=[*sentences(400)],
        eval_dataset=[*sentences(64)],
        data_collator=default_data_collator,
        compute_metrics=lambda told: {"accuracy": float((told.predictions.argmax(-1) == told.label_ids).mean())},
    )
    trainer.train()
    for line in trainer.state.log_history:
        print({name: value for name, value in line.items() if "runtime" not in name and "per_second" not in name})
    print("steps", trainer.state.global_step)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
