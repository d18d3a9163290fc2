"""transformers.Trainer on a tiny model made from its config."""

import warnings

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Counting(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, i):
        ids = torch.arange(i, i + 16) % 50
        return {"input_ids": ids, "labels": ids}


class Say(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print("loss", state.global_step, logs["loss"])


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=14,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
    )
    Trainer(model=model, args=args, train_dataset=Counting(), callbacks=[Say()]).train()


if __name__ == "__main__":
    main()
