"""TRL's GRPOTrainer: completions that the model samples, and a reward function."""

import warnings

from _words import causal, pairs, tokenizer
from datasets import Dataset
from digest import digest
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

warnings.filterwarnings("ignore")


def short(completions, **kwargs):
    return [float(one.split().count("red")) for one in completions]


def main():
    set_seed(0)
    words = tokenizer()
    model = causal(len(words))
    data = Dataset.from_list([{"prompt": prompt} for prompt, _ in pairs(320)])
    args = GRPOConfig(
        output_dir="out",
        max_steps=40,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(model=model, args=args, reward_funcs=short, train_dataset=data, processing_class=words)
    trainer.train()
    print("rewards", [line["reward"] for line in trainer.state.log_history if "reward" in line])
    print("steps", trainer.state.global_step)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
