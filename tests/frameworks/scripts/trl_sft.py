"""TRL's SFTTrainer: supervised fine-tuning on prompts and completions."""

import warnings

from _words import causal, pairs, tokenizer
from datasets import Dataset
from digest import digest
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

warnings.filterwarnings("ignore")


def main():
    set_seed(0)
    words = tokenizer()
    model = causal(len(words))
    data = Dataset.from_list([{"prompt": one, "completion": other} for one, other in pairs(320)])
    args = SFTConfig(
        output_dir="out",
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        max_length=32,
        packing=False,
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=words)
    trainer.train()
    print("losses", [line["loss"] for line in trainer.state.log_history if "loss" in line])
    print("steps", trainer.state.global_step)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
