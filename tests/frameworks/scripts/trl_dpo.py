"""TRL's DPOTrainer: preferences, with a reference model that is not trained."""

import copy
import warnings

from _words import COLOURS, causal, pairs, tokenizer
from datasets import Dataset
from digest import digest
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

warnings.filterwarnings("ignore")


def main():
    set_seed(0)
    words = tokenizer()
    model = causal(len(words))
    rows = []
    for prompt, answer in pairs(320):
        colour = answer.split()[3]
        wrong = COLOURS[(COLOURS.index(colour) + 1) % 4]
        rows.append({"prompt": prompt, "chosen": answer, "rejected": answer.replace(colour, wrong)})
    args = DPOConfig(
        output_dir="out",
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        max_length=32,
    )
    data = Dataset.from_list(rows)
    reference = copy.deepcopy(model)
    trainer = DPOTrainer(model=model, ref_model=reference, args=args, train_dataset=data, processing_class=words)
    trainer.train()
    print("losses", [line["loss"] for line in trainer.state.log_history if "loss" in line])
    print("steps", trainer.state.global_step)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
